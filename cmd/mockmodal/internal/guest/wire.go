// Package guest is the part of mockmodal that runs inside a sandbox's
// container: it starts processes and carries their standard streams.
//
// The server connects to the guest's Unix socket. Every connection begins with
// one Request as a line of JSON and is then used for that request alone.
package guest

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Paths inside a sandbox. At MountPath a folder of the server's machine is mounted.
const (
	MountPath  = "/__modal/mock"
	BinaryPath = "/__modal/.bin/mockmodal"
	SocketPath = MountPath + "/guest.sock"
	// ErrorFilePath is the file to which the guest writes the error with which it ended.
	ErrorFilePath = MountPath + "/error"
)

// Request is the request of the server to the guest on one connection. The server sends it as the first line of the
// connection. Exactly one field is set.
type Request struct {
	// Lease keeps the guest running: when the connection that carries it ends,
	// the guest exits, and with it the container.
	Lease bool      `json:"lease,omitempty"`
	Exec  *ExecSpec `json:"exec,omitempty"`
	// Pack is the folder whose content the guest sends as a tar archive, in FrameData frames and then FrameDone.
	Pack string `json:"pack,omitempty"`
	// Unpack is the folder into which the guest extracts the tar archive in the FrameData frames that follow, until an
	// empty frame. The guest answers with FrameDone.
	Unpack string `json:"unpack,omitempty"`
}

// ExecSpec describes a process that the guest must start in its container.
type ExecSpec struct {
	Args []string `json:"args"`
	// Env is added to the environment of the image; later entries win.
	Env []string `json:"env"`
	Dir string   `json:"dir"` // working directory; "" for the guest's own
	// DiscardStdout and DiscardStderr connect the stream to /dev/null.
	DiscardStdout bool `json:"discardStdout,omitempty"`
	DiscardStderr bool `json:"discardStderr,omitempty"`
	// StderrToStdout merges the standard error into the standard output.
	StderrToStdout bool `json:"stderrToStdout,omitempty"`
}

// ExitResult states how a process has ended: by its exit code, or by the signal that ended it. Error is set if the
// process did not start.
type ExitResult struct {
	Code   int    `json:"code"`
	Signal int    `json:"signal,omitempty"`
	Error  string `json:"error,omitempty"`
}

// FrameKind is the type of a frame between the server and the guest in a container.
type FrameKind byte

// Kinds of frames that the guest sends to the server. The first frame is FrameStarted. If the process does not start,
// FrameExited is the only frame.
const (
	FrameStarted   FrameKind = 's'
	FrameStdout    FrameKind = 'o' // standard output of the process; without data: end of the output
	FrameStderr    FrameKind = 'e' // standard error of the process; without data: end of the output
	FrameStdinRead FrameKind = 'a' // without data: the oldest FrameStdin has been written to the process
	FrameExited    FrameKind = 'x' // an ExitResult as JSON
)

// Kinds of frames that the server sends to the guest.
const (
	FrameStdin FrameKind = 'i' // standard input of the process; without data: end of the input
	FrameKill  FrameKind = 'k' // kills the process group
)

// MaxUnconfirmedStdin is the maximum number of FrameStdin frames that the server sends before the guest has confirmed
// one with FrameStdinRead. It limits how much input a FrameKill has to wait behind.
const MaxUnconfirmedStdin = 8

// Kinds of frames of requests with Pack or Unpack. FrameDone carries an error, or nothing if the request succeeded.
const (
	FrameData FrameKind = 'd'
	FrameDone FrameKind = 'f'
)

// DataFrameWriter is an io.Writer that sends all written bytes as FrameData frames to W.
type DataFrameWriter struct{ W io.Writer }

// Write sends p in FrameData frames.
func (d DataFrameWriter) Write(p []byte) (int, error) {
	for sent := 0; sent < len(p); {
		n := min(len(p)-sent, maxFrameBytes)
		if err := WriteFrame(d.W, FrameData, p[sent:sent+n]); err != nil {
			return sent, err
		}
		sent += n
	}
	return len(p), nil
}

// DataFrameReader is an io.Reader of the content of FrameData frames. It returns io.EOF at an empty FrameData or at a
// FrameDone without an error, and otherwise the error in the FrameDone.
type DataFrameReader struct {
	R    io.Reader
	rest []byte
}

// Read implements io.Reader.
func (d *DataFrameReader) Read(p []byte) (int, error) {
	if len(d.rest) == 0 {
		kind, data, err := ReadFrame(d.R)
		switch {
		case err != nil:
			return 0, io.ErrUnexpectedEOF
		case len(data) == 0:
			return 0, io.EOF
		case kind == FrameDone:
			return 0, errors.New(string(data))
		}
		d.rest = data
	}
	n := copy(p, d.rest)
	d.rest = d.rest[n:]
	return n, nil
}

// maxFrameBytes is the maximum number of bytes of data in one frame.
const maxFrameBytes = 1 << 20

// WriteFrame writes one frame to w. Concurrent calls for the same w are not allowed.
func WriteFrame(w io.Writer, kind FrameKind, data []byte) error {
	frame := make([]byte, 5+len(data))
	frame[0] = byte(kind)
	binary.BigEndian.PutUint32(frame[1:], uint32(len(data)))
	copy(frame[5:], data)
	_, err := w.Write(frame)
	return err
}

// ReadFrame reads one frame and returns its kind and data. It returns io.EOF if the connection ends between two frames.
func ReadFrame(r io.Reader) (FrameKind, []byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxFrameBytes {
		return 0, nil, fmt.Errorf("frame of %d bytes is longer than %d", n, maxFrameBytes)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, err
	}
	return FrameKind(head[0]), data, nil
}

// WriteRequest writes a request as the first line of a connection to the guest.
func WriteRequest(w io.Writer, request Request) error {
	line, err := json.Marshal(request)
	if err != nil {
		return err
	}
	_, err = w.Write(append(line, '\n'))
	return err
}
