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

// Paths inside a sandbox. Folder is mounted from the server's machine.
const (
	Folder = "/__modal/mock"
	Binary = "/__modal/.bin/mockmodal"
	Socket = Folder + "/guest.sock"
	// ErrorFile is the path of the file in which the guest stores the error with which it ended.
	ErrorFile = Folder + "/error"
)

// Request is the first line of a connection. Exactly one field is set.
type Request struct {
	// Lease keeps the guest running: when the connection that carries it ends,
	// the guest exits, and with it the container.
	Lease bool  `json:"lease,omitempty"`
	Exec  *Exec `json:"exec,omitempty"`
	// Pack sends the content of the named folder: Data frames, then Done.
	Pack string `json:"pack,omitempty"`
	// Unpack writes the Data frames that follow into the named folder, until an
	// empty one, and answers with Done.
	Unpack string `json:"unpack,omitempty"`
}

// Exec describes a process that the guest is to start in its container.
type Exec struct {
	Args []string `json:"args"`
	// Env is added to the environment of the image; later entries win.
	Env []string `json:"env"`
	Dir string   `json:"dir"` // "" for the guest's own
	// DiscardStdout and DiscardStderr connect the stream to /dev/null.
	DiscardStdout bool `json:"discardStdout,omitempty"`
	DiscardStderr bool `json:"discardStderr,omitempty"`
	// StderrToStdout merges the standard error into the standard output.
	StderrToStdout bool `json:"stderrToStdout,omitempty"`
}

// Exit is the result of a process that has ended: its exit code, or the signal that ended it. Error is set if the
// process did not start.
type Exit struct {
	Code   int    `json:"code"`
	Signal int    `json:"signal,omitempty"`
	Error  string `json:"error,omitempty"`
}

// Kind is the type of a frame between the server and the guest in a container.
type Kind byte

// Frames from the guest to the server. Started comes first, unless the process
// does not start: then Exited is the only frame.
const (
	Started   Kind = 's'
	Stdout    Kind = 'o' // data; without data: end of the stream
	Stderr    Kind = 'e' // likewise
	StdinRead Kind = 'a' // no data: the oldest Stdin frame has been written to the process
	Exited    Kind = 'x' // an Exit as JSON
)

// Frames from the server to the guest.
const (
	Stdin Kind = 'i' // data; without data: end of the input
	Kill  Kind = 'k' // kills the process group
)

// StdinWindow is the maximum number of Stdin frames that the server may have sent without a StdinRead frame from the
// guest. It keeps a Kill frame from waiting behind much input.
const StdinWindow = 8

// Frames of Pack and Unpack. Done carries an error, or nothing.
const (
	Data Kind = 'd'
	Done Kind = 'f'
)

// DataWriter is a writer that writes Data frames.
type DataWriter struct{ W io.Writer }

// Write implements io.Writer.
func (d DataWriter) Write(p []byte) (int, error) {
	for sent := 0; sent < len(p); {
		n := min(len(p)-sent, maxFrame)
		if err := WriteFrame(d.W, Data, p[sent:sent+n]); err != nil {
			return sent, err
		}
		sent += n
	}
	return len(p), nil
}

// DataReader reads the content of Data frames. It returns io.EOF at an empty Data frame or a Done frame without an
// error, and otherwise the error in the Done frame.
type DataReader struct {
	R    io.Reader
	rest []byte
}

// Read implements io.Reader.
func (d *DataReader) Read(p []byte) (int, error) {
	if len(d.rest) == 0 {
		kind, data, err := ReadFrame(d.R)
		switch {
		case err != nil:
			return 0, io.ErrUnexpectedEOF
		case len(data) == 0:
			return 0, io.EOF
		case kind == Done:
			return 0, errors.New(string(data))
		}
		d.rest = data
	}
	n := copy(p, d.rest)
	d.rest = d.rest[n:]
	return n, nil
}

const maxFrame = 1 << 20

// WriteFrame writes one frame. Callers serialise their calls.
func WriteFrame(w io.Writer, kind Kind, data []byte) error {
	frame := make([]byte, 5+len(data))
	frame[0] = byte(kind)
	binary.BigEndian.PutUint32(frame[1:], uint32(len(data)))
	copy(frame[5:], data)
	_, err := w.Write(frame)
	return err
}

// ReadFrame reads one frame. It returns io.EOF when the connection ended
// between two frames.
func ReadFrame(r io.Reader) (Kind, []byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxFrame {
		return 0, nil, fmt.Errorf("frame of %d bytes is longer than %d", n, maxFrame)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, err
	}
	return Kind(head[0]), data, nil
}

// WriteRequest writes the first line of a connection.
func WriteRequest(w io.Writer, request Request) error {
	line, err := json.Marshal(request)
	if err != nil {
		return err
	}
	_, err = w.Write(append(line, '\n'))
	return err
}
