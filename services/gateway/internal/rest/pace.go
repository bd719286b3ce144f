package rest

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	// transferStallTimeout bounds how long a client may send or receive nothing during a file transfer.
	transferStallTimeout = 30 * time.Second
	// minTransferRate is the lowest average speed of a file transfer, in bytes per second.
	minTransferRate = 16 << 10
)

// transferLimit bounds how long the gateway waits for a client during a file transfer: at most transferStallTimeout for one
// read or write, and in total its allowance plus the time that the bytes take at minTransferRate.
type transferLimit struct {
	allowance time.Duration
	bytes     int64         // moved so far
	waited    time.Duration // total time of the reads or writes so far
}

// waitDeadline returns the deadline of one read or write that begins now.
func (p *transferLimit) waitDeadline(now time.Time) time.Time {
	return now.Add(min(transferStallTimeout, p.allowance+time.Duration(p.bytes)*time.Second/minTransferRate-p.waited))
}

// countTransfer adds the bytes that one read or write transferred, and the time that it took.
func (p *transferLimit) countTransfer(n int, waited time.Duration) {
	p.bytes += int64(n)
	p.waited += waited
}

// minRateBody is a request body whose Read fails if the client sends more slowly than minTransferRate.
type minRateBody struct {
	transferLimit
	from    io.Reader
	control *http.ResponseController
	err     error // why the body ended early
}

func (b *minRateBody) Read(p []byte) (int, error) {
	began := time.Now()
	_ = b.control.SetReadDeadline(b.waitDeadline(began)) // a test's recorder has no connection
	n, err := b.from.Read(p)
	b.countTransfer(n, time.Since(began))
	if err != nil {
		_ = b.control.SetReadDeadline(time.Time{})
		if !errors.Is(err, io.EOF) {
			b.err = err
		}
	}
	return n, err
}

// bodyError returns the error of the request body, or else refused, the error with which the gateway refuses the
// request. It reads the rest of a refused body if that is not too large: the connection of a client that is still
// sending would be reset, and the client would lose the answer. Of a body of unknown length bodyError reads only a
// part. A client that waits for 100 Continue sends nothing.
func (b *minRateBody) bodyError(r *http.Request, refused error) error {
	switch {
	case b.err != nil:
		return b.rateProblem()
	case refused == nil:
		return nil
	}
	rest := int64(maxDrainBytes)
	if r.ContentLength < 0 {
		rest = maxBodyBytes
	}
	if sends := b.bytes > 0 || r.Header.Get("Expect") == ""; sends && r.ContentLength <= rest {
		_, _ = io.CopyN(io.Discard, b, rest)
	}
	return refused
}

// rateProblem returns the problem for a request body that ended early.
func (b *minRateBody) rateProblem() error {
	return problem.Invalid("", "the body is incomplete: it ended early, no data arrived for %s, or it arrived slower than %d bytes per second", transferStallTimeout, minTransferRate).WithCause(b.err)
}

// pacedResponse is a response whose Write fails if the client reads more slowly than minTransferRate.
type pacedResponse struct {
	transferLimit
	*statusRecorder
	control *http.ResponseController
}

// pacedResponse returns a response that fails if the client reads more slowly than minTransferRate.
func (h *Handler) pacedResponse(w *statusRecorder) *pacedResponse {
	return &pacedResponse{transferLimit: transferLimit{allowance: h.cfg.ReadTimeout}, statusRecorder: w, control: http.NewResponseController(w)}
}

func (p *pacedResponse) Write(b []byte) (int, error) {
	began := time.Now()
	_ = p.control.SetWriteDeadline(p.waitDeadline(began)) // a test's recorder has no connection
	n, err := p.statusRecorder.Write(b)
	p.countTransfer(n, time.Since(began))
	return n, err
}
