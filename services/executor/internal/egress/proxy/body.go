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

// ending is a request's body whose end stays its end. A transport looks for the
// end once more after the last byte. By then the server may have closed the body,
// because the answer to a fast endpoint's is on its way: read again, that would be
// an error, for which the transport gives up the connection, and the answer with it.
type ending struct {
	io.ReadCloser
	over bool
}

func (e *ending) Read(p []byte) (int, error) {
	if e.over {
		return 0, io.EOF
	}
	n, err := e.ReadCloser.Read(p)
	e.over = errors.Is(err, io.EOF)
	return n, err
}

// Bounds of the bodies of requests to models, which are in memory until the provider has them.
const (
	maxModelBody    = 32 << 20 // of one, as Anthropic's
	maxModelBodies  = 64 << 20 // of a sandbox
	maxAllBodies    = 256 << 20
	modelBodyWithin = 30 * time.Second // from the first byte to the last
	modelBodyFirst  = 16 << 10         // bytes of a buffer at its beginning
)

// memory bounds the bytes that are held for all sandboxes together, and for each. It refuses at once, and nobody waits.
type memory struct {
	mu   sync.Mutex
	all  int
	each map[*registry.Sandbox]int
}

// take adds n bytes to what is held for a sandbox; false when that is too much. A negative n gives bytes back.
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
	errBodiesFull  = errors.New("the requests that are being sent hold all the memory that there is for them: try again")
	errBodyTooLong = fmt.Errorf("the body is not shorter than %d MiB", maxModelBody>>20)
)

// held is a body in memory.
type held struct {
	raw  []byte
	give func() // gives the memory back; it may be called twice
}

// hold reads a request's whole body. The caller must call give unless there is an error.
func (s *Server) hold(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) (held, error) {
	if r.ContentLength > maxModelBody {
		return held{}, errBodyTooLong
	}
	// Who sends a body slowly would hold memory for as long as it likes.
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(modelBodyWithin)); err != nil {
		return held{}, err
	}
	raw, taken, err := s.grow(r.Body, sb)
	give := sync.OnceFunc(func() { s.bodies.take(sb, -taken) })
	if err == nil {
		err = control.SetReadDeadline(time.Time{})
	}
	if err != nil {
		give()
		return held{}, err
	}
	return held{raw, give}, nil
}

// grow reads a body into a buffer that doubles, and returns what it took of the memory, also with an error.
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

// check reads and checks the body of a request to a model. It answers the request itself, and returns false, unless the body may be sent on.
func (s *Server) check(w http.ResponseWriter, r *http.Request, c *call, d events.EgressDenied) (body held, ok bool) {
	for _, line := range r.Header.Values("Content-Encoding") {
		if line != "identity" {
			d.Code, d.Message = UnreadableBody, "the body is in encoding "+egress.Printable(line)+": requests to models are sent without one, so that they can be read"
			s.deny(w, c.sb, http.StatusForbidden, d)
			return held{}, false
		}
	}
	body, err := s.hold(w, r, c.sb)
	switch {
	case errors.Is(err, errBodyTooLong):
		d.Code, d.Message = UnreadableBody, err.Error()
		s.deny(w, c.sb, http.StatusForbidden, d)
		return held{}, false
	case errors.Is(err, errBodiesFull):
		failure{http.StatusServiceUnavailable, codeBodies, err.Error()}.write(w)
		return held{}, false
	case err != nil:
		failure{http.StatusBadRequest, codeMalformed, "the body did not come to its end: " + err.Error()}.write(w)
		return held{}, false
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
	body.give()
	d.Message = err.Error()
	s.deny(w, c.sb, http.StatusForbidden, d)
	return held{}, false
}

// sent is a held body on its way to the provider.
type sent struct {
	*bytes.Reader
	move func()
	give func()
}

func (b *sent) Read(p []byte) (int, error) {
	b.move()
	return b.Reader.Read(p)
}

func (b *sent) Close() error {
	b.give()
	return nil
}
