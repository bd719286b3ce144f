package guest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
)

// Run serves requests on Socket. It runs as the container's main process, next to the engine's init process, which
// reaps orphans. It returns when the server closes the connection whose request has Lease set.
func Run() error {
	err := run()
	if err != nil {
		err = errors.Join(err, os.WriteFile(ErrorFile, []byte(err.Error()), 0o600))
	}
	return err
}

// run accepts connections until the one whose request has Lease set ends, or accepting fails.
func run() error {
	listener, err := net.Listen("unix", Socket)
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
				if serve(conn) {
					ended <- nil
				}
			}()
		}
	}()
	return <-ended
}

// serve reads the request of a connection and carries it out. It reports whether the request had Lease set; then serve
// returns when the server has closed the connection.
func serve(conn net.Conn) (lease bool) {
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
		start(conn, reader, *request.Exec)
	case request.Pack != "":
		out := bufio.NewWriterSize(DataWriter{conn}, 64<<10)
		sendEnd(conn, errors.Join(pack(out, request.Pack), out.Flush()))
	case request.Unpack != "":
		sendEnd(conn, unpack(&DataReader{R: reader}, request.Unpack))
	}
	return false
}

// sendEnd sends the frame Done with the text of err, which may be nil. It ignores errors of sending, because then the
// server is gone.
func sendEnd(conn net.Conn, err error) {
	message := ""
	if err != nil {
		message = err.Error()
	}
	_ = WriteFrame(conn, Done, []byte(message))
}
