package guest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
)

// Run serves requests of the mockmodal server on the Unix socket SocketPath. Run is the main process of a sandbox's
// container, below the engine's init process, which reaps orphans. It returns when the server closes the connection
// whose request has Lease set.
func Run() error {
	err := acceptConnections()
	if err != nil {
		err = errors.Join(err, os.WriteFile(ErrorFilePath, []byte(err.Error()), 0o600))
	}
	return err
}

// acceptConnections accepts connections of the server until the connection whose request has Lease set ends, or until
// accepting fails.
func acceptConnections() error {
	listener, err := net.Listen("unix", SocketPath)
	if err != nil {
		return fmt.Errorf("listen on the guest's socket: %w", err)
	}
	ended := make(chan error, 1)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				ended <- err
				return
			}
			go func() {
				if serveConnection(conn) {
					ended <- nil
				}
			}()
		}
	}()
	return <-ended
}

// serveConnection reads the request of a connection and carries it out. lease reports whether the request has Lease
// set; in that case serveConnection returns only after the server has closed the connection.
func serveConnection(conn net.Conn) (lease bool) {
	defer conn.Close() //nolint:errcheck // nothing is left to send
	reader := bufio.NewReaderSize(conn, 64<<10)
	line, err := reader.ReadBytes('\n')
	if err != nil {
		return false
	}
	var request Request
	if err := json.Unmarshal(line, &request); err != nil {
		return false
	}
	if request.Lease {
		_, err := reader.ReadByte() // blocks until the server has closed the connection
		return err != nil
	}
	switch {
	case request.Exec != nil:
		runProcess(conn, reader, *request.Exec)
	case request.Pack != "":
		out := bufio.NewWriterSize(DataFrameWriter{conn}, 64<<10)
		sendDone(conn, errors.Join(packFolder(out, request.Pack), out.Flush()))
	case request.Unpack != "":
		sendDone(conn, unpackFolder(&DataFrameReader{R: reader}, request.Unpack))
	}
	return false
}

// sendDone sends a FrameDone with the text of err, which may be nil. It ignores write errors, because they mean that
// the server is gone.
func sendDone(conn net.Conn, err error) {
	message := ""
	if err != nil {
		message = err.Error()
	}
	_ = WriteFrame(conn, FrameDone, []byte(message))
}
