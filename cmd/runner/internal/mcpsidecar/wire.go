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

// hello is the first line of a connection, in JSON. The program's stdin follows it.
type hello struct {
	Args []string          `json:"args,omitempty"` // in place of the image's own
	Env  map[string]string `json:"env,omitempty"`
}

// maxHello is the largest size in bytes of the first line of a connection, which is a hello.
const maxHello = 4 << 20

// stream is the first byte of a frame: the stream to which the frame's data belongs.
type stream byte

// The frames from the server: a byte for the stream, four for the length, and the data.
const (
	toStdout stream = iota + 1
	toStderr
	toEnd // the last one: JSON of ended
)

const (
	frameHead = 5
	// maxFrame is the largest number of bytes of data in one frame.
	maxFrame = 64 << 10
)

// endFrame is the last frame of a connection. It holds the program's exit code, or the reason why the program was not started.
type endFrame struct {
	Code  int    `json:"code"`            // 128 + signal if a signal ended it
	Error string `json:"error,omitempty"` // why it was not started
}

// frames writes frames to a connection. It is safe for concurrent use.
type frames struct {
	mu sync.Mutex
	to io.Writer
}

// write writes data as one frame or several.
func (f *frames) write(s stream, data []byte) error {
	for {
		part := data[:min(len(data), maxFrame)]
		raw := make([]byte, frameHead, frameHead+len(part))
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

// errMalformed is returned when the server does not speak the protocol.
var errMalformed = errors.New("the server's container sent a malformed frame")

// readFrame reads a frame into buf, which has room for maxFrame.
func readFrame(in *bufio.Reader, buf []byte) (stream, []byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxFrame {
		return 0, nil, fmt.Errorf("%w: a frame of %d bytes", errMalformed, n)
	}
	_, err := io.ReadFull(in, buf[:n])
	return stream(head[0]), buf[:n], err
}

// readHello reads the first line of a connection, which is a hello.
func readHello(in *bufio.Reader) (hello, error) {
	var h hello
	var line []byte
	for {
		piece, err := in.ReadSlice('\n')
		if line = append(line, piece...); len(line) > maxHello {
			return h, fmt.Errorf("first line is longer than %d bytes", maxHello)
		}
		if err == nil {
			return h, json.Unmarshal(line, &h)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return h, err
		}
	}
}
