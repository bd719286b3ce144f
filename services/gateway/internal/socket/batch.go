package socket

import (
	"bufio"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// batchBufferBytes is the number of bytes that a batch collects before it is written to the network.
	batchBufferBytes = 16 << 10
	// frameBufferBytes is the size of the buffer in which the WebSocket library builds one frame. A longer frame is written
	// in parts.
	frameBufferBytes = 2 << 10
	// readBufferBytes is the size of the buffer for frames that the client sends.
	readBufferBytes = 512
)

// batchConn is the network connection of a WebSocket. The WebSocket writes each message to it on its own; between
// beginBatch and endBatch the messages are collected, and written to the network together. It is safe for concurrent
// use.
type batchConn struct {
	net.Conn
	timeout time.Duration // limit of one write to the network

	mu      sync.Mutex
	batches int    // batches that were begun and not ended
	pending []byte // bytes that were not written to the network yet
}

// batchBuffers holds buffers of batchBufferBytes bytes: a connection has one only during a batch.
var batchBuffers = sync.Pool{New: func() any {
	b := make([]byte, 0, batchBufferBytes)
	return &b
}}

// beginBatch makes Write collect bytes until endBatch is called, or batchBufferBytes bytes were collected.
func (c *batchConn) beginBatch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.batches++
}

// endBatch writes all collected bytes to the network, including those of other batches of the connection that have not
// ended.
func (c *batchConn) endBatch() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.batches--
	return c.flush()
}

// Write writes b to the network, or adds b to the collected bytes between beginBatch and endBatch.
func (c *batchConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pending)+len(b) > batchBufferBytes {
		if err := c.flush(); err != nil {
			return 0, err
		}
	}
	if c.batches == 0 || len(b) > batchBufferBytes {
		return c.write(b)
	}
	if c.pending == nil {
		c.pending = *batchBuffers.Get().(*[]byte)
	}
	c.pending = append(c.pending, b...)
	return len(b), nil
}

// flush writes the collected bytes to the network. mu must be held.
func (c *batchConn) flush() error {
	if c.pending == nil {
		return nil
	}
	_, err := c.write(c.pending)
	empty := c.pending[:0]
	c.pending = nil
	batchBuffers.Put(&empty)
	return err
}

// write writes bytes to the network within the write timeout. After an error, the connection cannot be used.
func (c *batchConn) write(b []byte) (int, error) {
	if err := c.Conn.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(b)
	if err != nil {
		return n, err
	}
	// TLS writes on its own to answer a key update, also long after the deadline.
	return n, c.Conn.SetWriteDeadline(time.Time{})
}

// hijacker is a ResponseWriter with which websocket.Accept gets a batchConn instead of the request's connection.
type hijacker struct {
	http.ResponseWriter
	timeout time.Duration
	conn    *batchConn // nil before Hijack
}

// Hijack takes over the request's connection.
func (h *hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	h.conn = &batchConn{Conn: conn, timeout: h.timeout}
	reader := rw.Reader
	if reader.Buffered() == 0 { // clients send little
		reader = bufio.NewReaderSize(h.conn, readBufferBytes)
	}
	return h.conn, bufio.NewReadWriter(reader, bufio.NewWriterSize(h.conn, frameBufferBytes)), nil
}
