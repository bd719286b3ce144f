// Package mcpsidecar connects agents to MCP servers that run in containers of their own. In the container, Server starts
// the image's program for each connection to a Unix socket. In the sandbox, the agent starts Join in place of that
// program.
package mcpsidecar

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// helloLine is the first line of a connection to an MCP sidecar, in JSON. The program's stdin follows it.
type helloLine struct {
	Args []string          `json:"args,omitempty"` // in place of the image's own
	Env  map[string]string `json:"env,omitempty"`
}

// maxHelloBytes is the maximum size in bytes of the first line of a connection.
const maxHelloBytes = 4 << 20

// streamID is the first byte of a frame: it identifies the stream to which the frame's data belongs.
type streamID byte

// The frames from the server: a byte for the stream, four for the length, and the data.
const (
	streamStdout streamID = iota + 1
	streamStderr
	streamEnd // the last one: JSON of ended
)

const (
	// frameHeaderSize is the size in bytes of a frame's header: the stream and the length of the data.
	frameHeaderSize = 5
	// maxFrameData is the maximum number of bytes of data in one frame.
	maxFrameData = 64 << 10
)

// endFrame is the content of the last frame of a connection, in JSON: the program's exit code, or the reason why the
// program was not started.
type endFrame struct {
	Code  int    `json:"code"`            // 128 + signal if a signal ended it
	Error string `json:"error,omitempty"` // why it was not started
}

// frameWriter writes the output of a program as frames to a connection. It is safe for concurrent use.
type frameWriter struct {
	mu sync.Mutex
	to io.Writer
}

// writeFrames writes data of the stream s as one frame or several.
func (f *frameWriter) writeFrames(s streamID, data []byte) error {
	for {
		part := data[:min(len(data), maxFrameData)]
		raw := make([]byte, frameHeaderSize, frameHeaderSize+len(part))
		raw[0] = byte(s)
		binary.BigEndian.PutUint32(raw[1:], uint32(len(part))) //nolint:gosec // bounded
		f.mu.Lock()
		_, err := f.to.Write(append(raw, part...))
		f.mu.Unlock()
		if data = data[len(part):]; err != nil || len(data) == 0 {
			return err
		}
	}
}

// errMalformedFrame is returned when the other side of a connection sends data that is not a frame.
var errMalformedFrame = errors.New("the server's container sent a malformed frame")

// readFrame reads a frame into buf, which must have room for maxFrameData bytes. It returns the stream and the data.
func readFrame(in *bufio.Reader, buf []byte) (streamID, []byte, error) {
	var head [frameHeaderSize]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxFrameData {
		return 0, nil, fmt.Errorf("%w: a frame of %d bytes", errMalformedFrame, n)
	}
	_, err := io.ReadFull(in, buf[:n])
	return streamID(head[0]), buf[:n], err
}

// readHello reads and decodes the first line of a connection.
func readHello(in *bufio.Reader) (helloLine, error) {
	var h helloLine
	var line []byte
	for {
		piece, err := in.ReadSlice('\n')
		if line = append(line, piece...); len(line) > maxHelloBytes {
			return h, fmt.Errorf("first line is longer than %d bytes", maxHelloBytes)
		}
		if err == nil {
			return h, json.Unmarshal(line, &h)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return h, err
		}
	}
}
