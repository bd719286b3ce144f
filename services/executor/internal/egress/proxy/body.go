package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/modelbody"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// stickyEOF is the body of a request to forward. After the first io.EOF it always returns io.EOF. The HTTP transport reads once more
// after the last byte, when the HTTP server may have closed the body already, because a fast upstream has answered. Another error than
// io.EOF would make the transport close the connection and lose the answer.
type stickyEOF struct {
	io.ReadCloser
	ended bool
}

func (e *stickyEOF) Read(p []byte) (int, error) {
	if e.ended {
		return 0, io.EOF
	}
	n, err := e.ReadCloser.Read(p)
	e.ended = errors.Is(err, io.EOF)
	return n, err
}

// Limits of the bodies of model requests, which are in memory until the provider has them.
const (
	maxModelBodyBytes    = 32 << 20         // of one request; Anthropic has the same limit
	modelBodyTimeout     = 30 * time.Second // from the first byte to the last
	modelBodyBufferBytes = 16 << 10         // first size of the buffer
)

// Errors of reading a body.
var (
	errMemoryFull  = errors.New("the open requests of the sandbox, of its tenant or of all use the memory that is reserved for them: try again")
	errBodyTooLong = fmt.Errorf("the body has %d MiB or more", maxModelBodyBytes>>20)
)

// bufferedBody is the body of a request that the proxy has read into memory. As the body of the forwarded request it frees the
// memory when it is closed, or when its last byte was read. It is safe for concurrent use, because the HTTP transport may close a
// body during a read.
type bufferedBody struct {
	size     int
	progress func() // called on each read

	mu       sync.Mutex
	raw      []byte // the whole body; nil when the memory is free
	read     int
	memory   *memoryBudget
	owner    memoryOwner
	reserved int
}

// errBodyClosed is returned by reads of a body that was closed before its end.
var errBodyClosed = errors.New("the body is closed")

func (b *bufferedBody) Read(p []byte) (int, error) {
	if b.progress != nil {
		b.progress()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.read == b.size:
		b.free()
		return 0, io.EOF
	case b.raw == nil:
		return 0, errBodyClosed
	}
	n := copy(p, b.raw[b.read:b.size])
	b.read += n
	return n, nil
}

// Close frees the memory. It may be called several times.
func (b *bufferedBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free()
	return nil
}

// free frees the memory. The caller holds the lock.
func (b *bufferedBody) free() {
	b.raw = nil
	if b.reserved > 0 {
		b.memory.release(b.owner, b.reserved)
		b.reserved = 0
	}
}

// grow replaces the buffer by one of size bytes. While both exist, both are counted.
func (b *bufferedBody) grow(size int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.memory.reserve(b.owner, size) {
		return false
	}
	grown := make([]byte, size)
	copy(grown, b.raw[:b.size])
	b.raw = grown
	b.memory.release(b.owner, b.reserved)
	b.reserved = size
	return true
}

// bufferBody reads the whole body of a request into memory. Without an error, the caller must close the result.
func (s *Server) bufferBody(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) (*bufferedBody, error) {
	if r.ContentLength >= maxModelBodyBytes {
		return nil, errBodyTooLong
	}
	// Without a deadline a client could hold memory by sending slowly.
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(modelBodyTimeout)); err != nil {
		return nil, err
	}
	b := &bufferedBody{memory: s.memory, owner: newMemoryOwner(sb)}
	err := b.fill(r.Body, r.ContentLength)
	if err == nil {
		err = control.SetReadDeadline(time.Time{})
	}
	if err != nil {
		b.Close() //nolint:errcheck // it never fails
		return nil, err
	}
	return b, nil
}

// fill reads a body into a buffer that doubles in size when it is full, up to the length of the body. length is -1 if it is unknown.
func (b *bufferedBody) fill(body io.Reader, length int64) error {
	if body == nil || body == http.NoBody {
		return nil
	}
	largest := maxModelBodyBytes
	if length >= 0 {
		largest = int(length) + 1 // one more, to read the end: then the HTTP server notices when the sandbox goes away
	}
	for size := modelBodyBufferBytes; ; size *= 2 {
		size = min(size, largest)
		if !b.grow(size) {
			return errMemoryFull
		}
		for b.size < size {
			n, err := body.Read(b.raw[b.size:])
			b.size += n
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
		}
		if size == largest {
			return errBodyTooLong
		}
	}
}

// checkModelRequest reads and checks the body of a model request. If the body must not be forwarded, checkModelRequest answers the
// request, records the denial and returns nil. Otherwise the caller must close the body.
func (s *Server) checkModelRequest(w http.ResponseWriter, r *http.Request, c *routedRequest, d events.EgressDenied) *bufferedBody {
	for _, line := range r.Header.Values("Content-Encoding") {
		if line != "identity" {
			d.Code, d.Message = CodeUnreadableBody, "the body is in encoding "+egress.QuotePrefix(line)+": requests to models are sent without one, so that they can be read"
			s.deny(w, c.sb, http.StatusForbidden, d)
			return nil
		}
	}
	body, err := s.bufferBody(w, r, c.sb)
	switch {
	case errors.Is(err, errBodyTooLong):
		d.Code, d.Message = CodeUnreadableBody, err.Error()
		s.deny(w, c.sb, http.StatusForbidden, d)
		return nil
	case errors.Is(err, errMemoryFull):
		failure{http.StatusServiceUnavailable, codeBodiesFull, err.Error()}.write(w)
		return nil
	case err != nil:
		failure{http.StatusBadRequest, codeMalformed, "the body could not be read to its end: " + err.Error()}.write(w)
		return nil
	case body.size == 0:
		return body
	}
	waiting := s.checks.run(r.Context(), body.owner.tenant, func() {
		c.model, err = modelbody.Check(c.rt.bodyProtocol(), body.raw[:body.size], c.sb.AllowsProvider)
	})
	var denied *modelbody.DeniedError
	switch {
	case waiting == nil && err == nil:
		return body
	case errors.As(err, &denied):
		d.Code = CodeProviderSide
	default:
		d.Code = CodeUnreadableBody
	}
	body.Close() //nolint:errcheck // it never fails
	if waiting != nil {
		return nil // the sandbox closed the connection
	}
	d.Message = err.Error()
	s.deny(w, c.sb, http.StatusForbidden, d)
	return nil
}
