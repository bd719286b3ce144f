package proxy

import (
	"bytes"
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
	maxModelBodyBytes     = 32 << 20 // of one request; Anthropic has the same limit
	maxSandboxBodiesBytes = 64 << 20 // of a sandbox
	maxAllBodiesBytes     = 256 << 20
	modelBodyTimeout      = 30 * time.Second // from the first byte to the last
	modelBodyBufferBytes  = 16 << 10         // first size of the buffer
)

// bodyMemory limits how many bytes of request bodies the proxy holds in memory, for each sandbox and in total. It never blocks: a
// reservation above a limit fails at once.
type bodyMemory struct {
	mu   sync.Mutex
	all  int
	each map[*registry.Sandbox]int
}

// reserveBytes reserves n bytes of memory for a body of a sandbox's request. It returns false if a limit does not allow that. A
// negative n releases bytes.
func (m *bodyMemory) reserveBytes(sb *registry.Sandbox, n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > 0 && (m.all+n > maxAllBodiesBytes || m.each[sb]+n > maxSandboxBodiesBytes) {
		return false
	}
	m.all += n
	if m.each[sb] += n; m.each[sb] == 0 {
		delete(m.each, sb)
	}
	return true
}

// Errors of reading a body.
var (
	errBodiesFull  = errors.New("the bodies of open requests use all the memory that is reserved for them: try again")
	errBodyTooLong = fmt.Errorf("the body has %d MiB or more", maxModelBodyBytes>>20)
)

// bufferedBody is the body of a request that the proxy has read into memory.
type bufferedBody struct {
	raw     []byte
	release func() // releases the memory; it may be called twice
}

// bufferBody reads the whole body of a request into memory. Without an error, the caller must call release of the result.
func (s *Server) bufferBody(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) (bufferedBody, error) {
	if r.ContentLength > maxModelBodyBytes {
		return bufferedBody{}, errBodyTooLong
	}
	// Without a deadline a client could hold memory by sending slowly.
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(modelBodyTimeout)); err != nil {
		return bufferedBody{}, err
	}
	raw, taken, err := s.readIntoBuffer(r.Body, sb)
	release := sync.OnceFunc(func() { s.bodies.reserveBytes(sb, -taken) })
	if err == nil {
		err = control.SetReadDeadline(time.Time{})
	}
	if err != nil {
		release()
		return bufferedBody{}, err
	}
	return bufferedBody{raw, release}, nil
}

// readIntoBuffer reads a body into a buffer that doubles in size when it is full. taken is the number of bytes that it has reserved,
// which the caller must release, also after an error.
func (s *Server) readIntoBuffer(body io.Reader, sb *registry.Sandbox) (raw []byte, taken int, err error) {
	if body == nil || body == http.NoBody {
		return nil, 0, nil
	}
	for size := modelBodyBufferBytes; size <= maxModelBodyBytes; size *= 2 {
		if !s.bodies.reserveBytes(sb, size-taken) {
			return nil, taken, errBodiesFull
		}
		taken = size
		raw = append(make([]byte, 0, size), raw...)
		for len(raw) < size {
			n, err := body.Read(raw[len(raw):size])
			raw = raw[:len(raw)+n]
			if errors.Is(err, io.EOF) {
				return raw, taken, nil
			}
			if err != nil {
				return nil, taken, err
			}
		}
	}
	return nil, taken, errBodyTooLong
}

// checkModelRequest reads and checks the body of a model request. If the body must not be forwarded, checkModelRequest answers the
// request, records the denial and returns ok as false.
func (s *Server) checkModelRequest(w http.ResponseWriter, r *http.Request, c *routedRequest, d events.EgressDenied) (body bufferedBody, ok bool) {
	for _, line := range r.Header.Values("Content-Encoding") {
		if line != "identity" {
			d.Code, d.Message = CodeUnreadableBody, "the body is in encoding "+egress.QuotePrefix(line)+": requests to models are sent without one, so that they can be read"
			s.deny(w, c.sb, http.StatusForbidden, d)
			return bufferedBody{}, false
		}
	}
	body, err := s.bufferBody(w, r, c.sb)
	switch {
	case errors.Is(err, errBodyTooLong):
		d.Code, d.Message = CodeUnreadableBody, err.Error()
		s.deny(w, c.sb, http.StatusForbidden, d)
		return bufferedBody{}, false
	case errors.Is(err, errBodiesFull):
		failure{http.StatusServiceUnavailable, codeBodiesFull, err.Error()}.write(w)
		return bufferedBody{}, false
	case err != nil:
		failure{http.StatusBadRequest, codeMalformed, "the body could not be read to its end: " + err.Error()}.write(w)
		return bufferedBody{}, false
	}
	if len(body.raw) == 0 {
		return body, true
	}
	c.model, err = modelbody.Check(c.rt.bodyProtocol(), body.raw, c.sb.AllowsProvider)
	var denied *modelbody.DeniedError
	switch {
	case err == nil:
		return body, true
	case errors.As(err, &denied):
		d.Code = CodeProviderSide
	default:
		d.Code = CodeUnreadableBody
	}
	body.release()
	d.Message = err.Error()
	s.deny(w, c.sb, http.StatusForbidden, d)
	return bufferedBody{}, false
}

// bodyReader is the body of a request that the proxy forwards. It calls progress on each read, and release when it is closed.
type bodyReader struct {
	*bytes.Reader
	progress func()
	release  func()
}

func (b *bodyReader) Read(p []byte) (int, error) {
	b.progress()
	return b.Reader.Read(p)
}

func (b *bodyReader) Close() error {
	b.release()
	return nil
}
