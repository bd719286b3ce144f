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

// stickyEOF is a request's body that returns io.EOF after the first io.EOF. A transport reads once more after the last byte. By
// then the server may have closed the body, because a fast endpoint has answered already. A read error would then make the
// transport close the connection, and lose the answer.
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
	maxModelBody    = 32 << 20 // of one request; Anthropic has the same limit
	maxModelBodies  = 64 << 20 // of a sandbox
	maxAllBodies    = 256 << 20
	modelBodyWithin = 30 * time.Second // from the first byte to the last
	modelBodyFirst  = 16 << 10         // first size of the buffer
)

// memory limits the bytes of request bodies in memory, for each sandbox and for all together. It refuses at once and
// never blocks.
type memory struct {
	mu   sync.Mutex
	all  int
	each map[*registry.Sandbox]int
}

// take reserves n bytes for a sandbox. It returns false if that is above a limit. A negative n releases bytes.
func (m *memory) take(sb *registry.Sandbox, n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > 0 && (m.all+n > maxAllBodies || m.each[sb]+n > maxModelBodies) {
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
	errBodyTooLong = fmt.Errorf("the body has %d MiB or more", maxModelBody>>20)
)

// bufferedBody is the body of a request that was read into memory.
type bufferedBody struct {
	raw     []byte
	release func() // releases the memory; it may be called twice
}

// buffer reads a request's whole body. The caller must call release unless there is an error.
func (s *Server) buffer(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) (bufferedBody, error) {
	if r.ContentLength > maxModelBody {
		return bufferedBody{}, errBodyTooLong
	}
	// Without a deadline a client could hold memory by sending slowly.
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(modelBodyWithin)); err != nil {
		return bufferedBody{}, err
	}
	raw, taken, err := s.grow(r.Body, sb)
	release := sync.OnceFunc(func() { s.bodies.take(sb, -taken) })
	if err == nil {
		err = control.SetReadDeadline(time.Time{})
	}
	if err != nil {
		release()
		return bufferedBody{}, err
	}
	return bufferedBody{raw, release}, nil
}

// grow reads a body into a buffer that doubles in size. It returns the number of bytes that it reserved, also with an error.
func (s *Server) grow(body io.Reader, sb *registry.Sandbox) (raw []byte, taken int, err error) {
	if body == nil || body == http.NoBody {
		return nil, 0, nil
	}
	for size := modelBodyFirst; size <= maxModelBody; size *= 2 {
		if !s.bodies.take(sb, size-taken) {
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

// checkModelRequest reads and checks the body of a model request. If the body may not be forwarded, checkModelRequest
// answers the request and returns false.
func (s *Server) checkModelRequest(w http.ResponseWriter, r *http.Request, c *routedRequest, d events.EgressDenied) (body bufferedBody, ok bool) {
	for _, line := range r.Header.Values("Content-Encoding") {
		if line != "identity" {
			d.Code, d.Message = UnreadableBody, "the body is in encoding "+egress.QuotePrefix(line)+": requests to models are sent without one, so that they can be read"
			s.deny(w, c.sb, http.StatusForbidden, d)
			return bufferedBody{}, false
		}
	}
	body, err := s.buffer(w, r, c.sb)
	switch {
	case errors.Is(err, errBodyTooLong):
		d.Code, d.Message = UnreadableBody, err.Error()
		s.deny(w, c.sb, http.StatusForbidden, d)
		return bufferedBody{}, false
	case errors.Is(err, errBodiesFull):
		failure{http.StatusServiceUnavailable, codeBodies, err.Error()}.write(w)
		return bufferedBody{}, false
	case err != nil:
		failure{http.StatusBadRequest, codeMalformed, "the body could not be read to its end: " + err.Error()}.write(w)
		return bufferedBody{}, false
	}
	if len(body.raw) == 0 {
		return body, true
	}
	c.model, err = modelbody.Check(c.rt.protocol(), body.raw, c.sb.AllowsProvider)
	var denied *modelbody.DeniedError
	switch {
	case err == nil:
		return body, true
	case errors.As(err, &denied):
		d.Code = ProviderSide
	default:
		d.Code = UnreadableBody
	}
	body.release()
	d.Message = err.Error()
	s.deny(w, c.sb, http.StatusForbidden, d)
	return bufferedBody{}, false
}

// bodyReader is the body of a forwarded request. It calls progress on each read, and release when it is closed.
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
