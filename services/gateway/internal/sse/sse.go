// Package sse streams a session's events as server-sent events.
package sse

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/wirejson"
)

// Config of a Handler. Zero times mean the defaults.
type Config struct {
	Admission    *admission.Admission
	Live         *live.Hub
	Watch        *auth.Watch
	Comment      time.Duration // between comments that keep the connection open; 0 means 15 s
	WriteTimeout time.Duration // how long a client may take for what is sent at once; 0 means 10 s
	Opened       func() (done func())
	Sent         func(bytes int)
	Cut          func(code string)
}

// Handler answers GET /api/sessions/{id}/events/stream.
type Handler struct{ cfg Config }

// New makes a Handler.
func New(cfg Config) *Handler {
	if cfg.Comment == 0 {
		cfg.Comment = 15 * time.Second
	}
	if cfg.WriteTimeout == 0 {
		cfg.WriteTimeout = 10 * time.Second
	}
	return &Handler{cfg}
}

// Serve streams until the client, the session or the context's time is over. What is wrong
// before the stream begins is returned, for problem+json.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request, session string) error {
	p, err := auth.From(r.Context())
	if err != nil {
		return err
	}
	if err := reads.CheckSession(session); err != nil {
		return err
	}
	q, err := parameters(r)
	if err != nil {
		return err
	}
	after, err := cursor(r, q)
	if err != nil {
		return err
	}
	metadata, err := withMetadata(q)
	if err != nil {
		return err
	}
	end, err := h.cfg.Admission.Stream(p.Tenant)
	if err != nil {
		return err
	}
	defer end()
	ctx, release := h.cfg.Watch.Add(r.Context(), p)
	defer release()
	reader, err := h.cfg.Live.Join(ctx, p.Tenant, p.Agents, session, after)
	if err != nil {
		return err
	}
	defer reader.Close()
	defer h.cfg.Opened()()
	out := &writer{w: w, control: http.NewResponseController(w), timeout: h.cfg.WriteTimeout}
	head := w.Header()
	head.Set("Content-Type", "text/event-stream")
	head.Set("Cache-Control", "no-store")
	head.Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	if err := out.write([]byte("retry: 1000\n\n")); err != nil {
		return nil
	}
	if err := h.stream(ctx, out, reader, metadata); err != nil {
		refused := problem.From(err)
		h.cfg.Cut(string(refused.Code))
		_ = out.write(message("", "problem", refused.JSON())) // the last word; the client may be gone
	}
	return nil
}

// parameters returns the query's, each of which is known and given once.
func parameters(r *http.Request) (url.Values, error) {
	q := r.URL.Query()
	for name, values := range q {
		switch {
		case name != "after" && name != "metadata":
			return nil, problem.Invalid(name, "there is no such parameter; there are after and metadata")
		case len(values) > 1:
			return nil, problem.Invalid(name, "the parameter is given more than once")
		}
	}
	return q, nil
}

// withMetadata reports whether the client wants events with their metadata: yes, unless it says no.
func withMetadata(q url.Values) (bool, error) {
	if !q.Has("metadata") {
		return true, nil
	}
	yes, err := wirejson.ParseBool("metadata", q.Get("metadata"))
	return yes, invalid(err)
}

// invalid makes the error of a field a problem.
func invalid(err error) error {
	var bad *wirejson.FieldError
	if errors.As(err, &bad) {
		return problem.Invalid(bad.Field, "%s", bad.Detail)
	}
	return err
}

// cursor is where the client is: Last-Event-ID, which a browser sends when it comes back, else after.
func cursor(r *http.Request, q url.Values) (uint32, error) {
	name, text := "after", q.Get("after")
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		name, text = "Last-Event-ID", last
	} else if !q.Has("after") {
		return 0, nil
	}
	n, err := wirejson.ParseCursor(name, text)
	return n, invalid(err)
}

// errQuiet ends a wait so that a comment can be sent.
var errQuiet = errors.New("nothing to send")

// stream sends until it cannot; a client that is gone is no error.
func (h *Handler) stream(ctx context.Context, out *writer, reader *live.Reader, metadata bool) error {
	for {
		wait, cancel := context.WithTimeoutCause(ctx, h.cfg.Comment, errQuiet)
		frames, err := reader.Next(wait)
		cancel()
		if errors.Is(err, errQuiet) {
			if err := out.write([]byte(": \n\n")); err != nil {
				return nil
			}
			continue
		}
		if errors.Is(err, context.Canceled) {
			return nil
		}
		if err != nil {
			return err
		}
		var b []byte
		for _, f := range frames {
			b = h.render(b, f, metadata)
		}
		began := time.Now()
		if err := out.write(b); err != nil {
			if time.Since(began) >= h.cfg.WriteTimeout {
				h.cfg.Cut(string(problem.SlowClient))
			}
			return nil
		}
		if time.Since(began) >= h.cfg.WriteTimeout {
			return problem.New(problem.SlowClient, "", "the client took too long to read; connect again with cursor "+strconv.FormatUint(uint64(reader.Cursor()), 10))
		}
	}
}

// render appends a frame as one server-sent event.
func (h *Handler) render(b []byte, f live.Frame, metadata bool) []byte {
	if f.Lag != nil {
		lag, err := json.Marshal(f.Lag)
		if err != nil { // two plain fields always encode
			panic(err)
		}
		return append(b, message("", "lag", lag)...)
	}
	h.cfg.Sent(f.Len(metadata))
	b = head(b, strconv.FormatUint(uint64(f.Seq), 10), string(f.Type))
	begins := len(b)
	b = f.Append(append(b, dataField...), metadata)
	if bytes.IndexByte(b[begins:], '\n') >= 0 {
		return lines(b[:begins], f.Append(nil, metadata))
	}
	return append(b, "\n\n"...)
}

const dataField = "data: "

// message is one event.
func message(id, event string, data []byte) []byte { return lines(head(nil, id, event), data) }

func head(b []byte, id, event string) []byte {
	if id != "" {
		b = append(append(append(b, "id: "...), id...), '\n')
	}
	b = append(b, "event: "...)
	for i := range len(event) {
		if event[i] != '\r' && event[i] != '\n' { // a type may come from a newer version, unchecked
			b = append(b, event[i])
		}
	}
	return append(b, '\n')
}

// lines appends data. With line breaks, which JSON allows between its tokens, it stays one event.
func lines(b, data []byte) []byte {
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		b = append(append(append(b, dataField...), line...), '\n')
	}
	return append(b, '\n')
}

// writer writes and flushes within a time. A client that reads again before twice
// the time is over is still told why it is cut.
type writer struct {
	w       http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration
}

func (w *writer) write(b []byte) error {
	if err := w.control.SetWriteDeadline(time.Now().Add(2 * w.timeout)); err != nil {
		return err
	}
	if _, err := w.w.Write(b); err != nil {
		return err
	}
	return w.control.Flush()
}
