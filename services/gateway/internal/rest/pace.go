package rest

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	// stallTimeout bounds how long a client may send or receive nothing during a file transfer.
	stallTimeout = 30 * time.Second
	// minRate is the lowest average speed of a file transfer, in bytes per second.
	minRate = 16 << 10
)

// transferLimit bounds how long the gateway waits for a client during a file transfer: at most stallTimeout for one
// read or write, and in total its allowance plus the time that the bytes take at minRate.
type transferLimit struct {
	allowance time.Duration
	bytes     int64         // moved so far
	waited    time.Duration // total time of the reads or writes so far
}

// deadline returns the deadline of a wait that begins now.
func (p *transferLimit) deadline(now time.Time) time.Time {
	return now.Add(min(stallTimeout, p.allowance+time.Duration(p.bytes)*time.Second/minRate-p.waited))
}

// add counts the bytes that were moved during a wait.
func (p *transferLimit) add(n int, waited time.Duration) {
	p.bytes += int64(n)
	p.waited += waited
}

// minRateBody is a request body whose Read fails if the client sends more slowly than the minimum rate.
type minRateBody struct {
	transferLimit
	from    io.Reader
	control *http.ResponseController
	err     error // why the body ended early
}

func (b *minRateBody) Read(p []byte) (int, error) {
	began := time.Now()
	_ = b.control.SetReadDeadline(b.deadline(began)) // a test's recorder has no connection
	n, err := b.from.Read(p)
	b.add(n, time.Since(began))
	if err != nil {
		_ = b.control.SetReadDeadline(time.Time{})
		if !errors.Is(err, io.EOF) {
			b.err = err
		}
	}
	return n, err
}

// bodyError returns the error of the body, or else the error with which it was refused. It reads the rest of a refused
// body if that is not too large: the connection of a client that is still sending would be reset, and the client
// would lose the answer. Of a body of unknown length only a part is read. A client that waits for 100 Continue sends
// nothing.
func (b *minRateBody) bodyError(r *http.Request, refused error) error {
	switch {
	case b.err != nil:
		return b.rateProblem()
	case refused == nil:
		return nil
	}
	rest := int64(maxDrain)
	if r.ContentLength < 0 {
		rest = maxBody
	}
	if sends := b.bytes > 0 || r.Header.Get("Expect") == ""; sends && r.ContentLength <= rest {
		_, _ = io.CopyN(io.Discard, b, rest)
	}
	return refused
}

// rateProblem returns the problem for a body that ended early.
func (b *minRateBody) rateProblem() error {
	return problem.Invalid("", "the body is incomplete: it ended early, no data arrived for %s, or it arrived slower than %d bytes per second", stallTimeout, minRate).WithCause(b.err)
}

// pacedResponse is a response that the client must read at a minimum speed.
type pacedResponse struct {
	transferLimit
	*statusRecorder
	control *http.ResponseController
}

// pacedResponse returns a response that fails when the client reads more slowly than the minimum speed.
func (h *Handler) pacedResponse(w *statusRecorder) *pacedResponse {
	return &pacedResponse{transferLimit: transferLimit{allowance: h.cfg.ReadTimeout}, statusRecorder: w, control: http.NewResponseController(w)}
}

func (p *pacedResponse) Write(b []byte) (int, error) {
	began := time.Now()
	_ = p.control.SetWriteDeadline(p.deadline(began)) // a test's recorder has no connection
	n, err := p.statusRecorder.Write(b)
	p.add(n, time.Since(began))
	return n, err
}
