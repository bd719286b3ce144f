// Package sse streams a session's events, and the changes of a tenant's sessions, as server-sent events.
package sse

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/changes"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/replay"
)

// Config configures a Handler. Zero durations mean the defaults.
type Config struct {
	Admission    *admission.Admission
	Live         *live.Hub
	Changes      *changes.Hub
	Player       *replay.Player
	Watch        *auth.KeyWatch
	Comment      time.Duration        // interval of comments that keep the connection open; 0 means 15 s
	WriteTimeout time.Duration        // maximum time that a client may take to read one batch; 0 means 10 s
	Opened       func() (done func()) // called when a stream opens; done is called when it ends
	Sent         func(bytes int)      // called for each frame, with its size
	Cut          func(code string)    // called with the error code when the server ends a stream
}

// Handler serves GET /api/sessions/{id}/events/stream and GET /api/sessions/stream.
type Handler struct{ cfg Config }

// New returns a Handler.
func New(cfg Config) *Handler {
	if cfg.Comment == 0 {
		cfg.Comment = 15 * time.Second
	}
	if cfg.WriteTimeout == 0 {
		cfg.WriteTimeout = 10 * time.Second
	}
	return &Handler{cfg}
}

// Serve streams until the client disconnects, the session ends or the context is cancelled. Errors before the
// beginning of the stream are returned, for problem+json.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request, session string) error {
	p, err := auth.From(r.Context())
	if err != nil {
		return err
	}
	if err := reads.CheckSessionID(session); err != nil {
		return err
	}
	q, err := parseParameters(r)
	if err != nil {
		return err
	}
	open, err := h.streamOpener(r, q)
	if err != nil {
		return err
	}
	metadata, err := wantsMetadata(q)
	if err != nil {
		return err
	}
	end, err := h.cfg.Admission.BeginStream(p.Tenant)
	if err != nil {
		return err
	}
	defer end()
	ctx, release := h.cfg.Watch.AddStream(r.Context(), p)
	defer release()
	from, err := open(ctx, p, session)
	if errors.Is(err, errReplayEnded) {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	if err != nil {
		return err
	}
	defer from.Close()
	h.stream(ctx, w, nil, func() string { return strconv.FormatUint(uint64(from.Cursor()), 10) }, func(ctx context.Context) (b []byte, err error) {
		frames, err := from.Next(ctx)
		for _, f := range frames {
			b = h.appendFrame(b, f, metadata)
		}
		return b, err
	})
	return nil
}

// ServeChanges streams the changes of the tenant's sessions until the client disconnects or the context is cancelled. Errors before the beginning of
// the stream are returned, for problem+json.
func (h *Handler) ServeChanges(w http.ResponseWriter, r *http.Request) error {
	p, err := auth.From(r.Context())
	if err != nil {
		return err
	}
	q := r.URL.Query()
	for name, values := range q {
		if name != "after" || len(values) > 1 {
			return problem.Invalid(name, "the only parameter is after, and it may be given once")
		}
	}
	field, after := "after", q.Get("after")
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		field, after = "Last-Event-ID", last
	}
	end, err := h.cfg.Admission.BeginStream(p.Tenant)
	if err != nil {
		return err
	}
	defer end()
	ctx, release := h.cfg.Watch.AddStream(r.Context(), p)
	defer release()
	reader, err := h.cfg.Changes.Join(ctx, p.Tenant, p.Agents, field, after)
	if err != nil {
		return err
	}
	defer reader.Close()
	began := encodeEvent(reader.Cursor(), "started", []byte(`{"cursor":"`+reader.Cursor()+`"}`))
	h.stream(ctx, w, began, reader.Cursor, func(ctx context.Context) (b []byte, err error) {
		list, err := reader.Next(ctx)
		for _, c := range list {
			name := "session"
			if c.Deleted != nil {
				name = "session_deleted"
			}
			h.cfg.Sent(len(c.JSON))
			b = append(b, encodeEvent(c.Cursor.String(), name, c.JSON)...)
		}
		return b, err
	})
	return nil
}

// stream sends the head of a stream, its first bytes, and what next returns, until an error occurs. cursor returns the position with which the client
// can continue.
func (h *Handler) stream(ctx context.Context, w http.ResponseWriter, first []byte, cursor func() string, next func(context.Context) ([]byte, error)) {
	defer h.cfg.Opened()()
	out := &timedWriter{w: w, control: http.NewResponseController(w), timeout: h.cfg.WriteTimeout}
	head := w.Header()
	head.Set("Content-Type", "text/event-stream")
	head.Set("Cache-Control", "no-store")
	head.Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	if err := out.write(append([]byte("retry: 1000\n\n"), first...)); err != nil {
		return
	}
	if err := h.sendBatches(ctx, out, cursor, next); err != nil {
		refused := problem.From(err)
		h.cfg.Cut(string(refused.Code))
		_ = out.write(encodeEvent("", "problem", refused.JSON())) // the client may be gone
	}
}

// frameSource returns, one batch after another, the frames that a stream sends. It is a live.Reader or a
// replay.Replay.
type frameSource interface {
	Next(ctx context.Context) ([]live.Frame, error)
	Cursor() uint32
	Close()
}

// parseParameters returns the query parameters of a request for a stream. Unknown and repeated parameters are errors.
func parseParameters(r *http.Request) (url.Values, error) {
	q := r.URL.Query()
	for name, values := range q {
		switch {
		case !slices.Contains([]string{"after", "metadata", "replay", "speed", "from", "to", "executionId"}, name):
			return nil, problem.Invalid(name, "unknown parameter; must be one of after, metadata, replay, speed, from, to, executionId")
		case len(values) > 1:
			return nil, problem.Invalid(name, "the parameter is given more than once")
		}
	}
	return q, nil
}

// streamOpener validates the parameters, and returns the function that opens the stream.
func (h *Handler) streamOpener(r *http.Request, q url.Values) (func(context.Context, auth.Principal, string) (frameSource, error), error) {
	again := false
	if q.Has("replay") {
		var err error
		if again, err = wirejson.ParseBool("replay", q.Get("replay")); err != nil {
			return nil, fieldProblem(err)
		}
	}
	if !again {
		for _, name := range []string{"speed", "from", "to", "executionId"} {
			if q.Has(name) {
				return nil, problem.Invalid(name, "the parameter applies to replays only; add replay=1")
			}
		}
		after, err := requestCursor(r, q)
		return func(ctx context.Context, p auth.Principal, session string) (frameSource, error) {
			return h.cfg.Live.Join(ctx, p.Tenant, p.Agents, session, after)
		}, err
	}
	ask, err := replayRequest(r, q)
	return func(ctx context.Context, p auth.Principal, session string) (frameSource, error) {
		ask.Tenant, ask.Agents, ask.Session = p.Tenant, p.Agents, session
		return h.openReplay(ctx, ask, r.Header.Get("Last-Event-ID") != "")
	}, err
}

// replayRequest returns the request for a replay that the parameters of an HTTP request describe. For a browser that
// reconnects, the replay continues after Last-Event-ID.
func replayRequest(r *http.Request, q url.Values) (replay.Request, error) {
	ask := replay.Request{From: 1, Speed: 1}
	if q.Has("after") {
		return ask, problem.Invalid("after", "a replay begins at from, not after an event")
	}
	if q.Has("speed") {
		var err error
		if ask.Speed, err = pace.ParseSpeed(q.Get("speed")); err != nil {
			return ask, problem.Invalid("speed", "%s", err)
		}
	}
	if q.Has("from") {
		from, err := wirejson.ParseSeq("from", q.Get("from"))
		if err != nil {
			return ask, fieldProblem(err)
		}
		ask.From = from
	}
	if q.Has("to") {
		to, err := wirejson.ParseSeq("to", q.Get("to"))
		if err != nil {
			return ask, fieldProblem(err)
		}
		ask.To = &to
	}
	if q.Has("executionId") {
		ask.Execution = q.Get("executionId")
		if err := reads.CheckExecutionID(ask.Execution); err != nil {
			return ask, err
		}
	}
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		n, err := wirejson.ParseCursor("Last-Event-ID", last)
		if err != nil {
			return ask, fieldProblem(err)
		}
		ask.From = max(ask.From, min(n, math.MaxUint32-1)+1)
	}
	return ask, nil
}

// errReplayEnded is returned when a browser reconnects after the end of its replay. The answer 204 makes it stop
// reconnecting.
var errReplayEnded = errors.New("the replay has ended")

// openReplay starts a replay. reconnects is set if the client reconnects: openReplay then returns errReplayEnded if
// no event is left to send.
func (h *Handler) openReplay(ctx context.Context, request replay.Request, reconnects bool) (frameSource, error) {
	if reconnects && request.To != nil && request.From == *request.To+1 {
		return nil, errReplayEnded
	}
	from, err := h.cfg.Player.Open(ctx, request)
	if p := (*problem.Error)(nil); reconnects && errors.As(err, &p) && p.Code == problem.CursorAhead && *p.Tip+1 == request.From {
		return nil, errReplayEnded
	}
	if reconnects && errors.Is(err, replay.ErrExecutionEnded) {
		return nil, errReplayEnded
	}
	if err != nil {
		return nil, err
	}
	return from, nil
}

// wantsMetadata returns the query parameter metadata, which is true by default: whether events include their
// metadata.
func wantsMetadata(q url.Values) (bool, error) {
	if !q.Has("metadata") {
		return true, nil
	}
	yes, err := wirejson.ParseBool("metadata", q.Get("metadata"))
	return yes, fieldProblem(err)
}

// fieldProblem converts an error about a query parameter to a problem that names the parameter.
func fieldProblem(err error) error {
	var bad *wirejson.FieldError
	if errors.As(err, &bad) {
		return problem.Invalid(bad.Field, "%s", bad.Detail)
	}
	return err
}

// requestCursor returns the cursor of a client: the header Last-Event-ID, which a browser sends when it reconnects,
// or else the parameter after.
func requestCursor(r *http.Request, q url.Values) (uint32, error) {
	name, text := "after", q.Get("after")
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		name, text = "Last-Event-ID", last
	} else if !q.Has("after") {
		return 0, nil
	}
	n, err := wirejson.ParseCursor(name, text)
	return n, fieldProblem(err)
}

// errNothingToSend is the cause with which sendBatches ends its wait for frames after a pause, to send a comment that
// keeps the connection alive.
var errNothingToSend = errors.New("nothing to send")

// sendBatches sends what next returns to the client until an error occurs. A client that disconnects is not an error.
func (h *Handler) sendBatches(ctx context.Context, out *timedWriter, cursor func() string, next func(context.Context) ([]byte, error)) error {
	for {
		wait, cancel := context.WithTimeoutCause(ctx, h.cfg.Comment, errNothingToSend)
		b, err := next(wait)
		cancel()
		if errors.Is(err, errNothingToSend) {
			if err := out.write([]byte(": \n\n")); err != nil {
				return nil
			}
			continue
		}
		if errors.Is(err, context.Canceled) || errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		began := time.Now()
		if err := out.write(b); err != nil {
			if time.Since(began) >= h.cfg.WriteTimeout {
				h.cfg.Cut(string(problem.SlowClient))
			}
			return nil
		}
		if time.Since(began) >= h.cfg.WriteTimeout {
			return problem.New(problem.SlowClient, "", "the client took too long to read; connect again with cursor "+cursor())
		}
	}
}

// appendFrame appends a frame to b as one server-sent event.
func (h *Handler) appendFrame(b []byte, f live.Frame, metadata bool) []byte {
	if f.Lag != nil {
		return append(b, encodeStructEvent("lag", f.Lag)...)
	}
	if f.Notice != nil {
		return append(b, encodeStructEvent(string(f.Notice.Kind), f.Notice.Data)...)
	}
	h.cfg.Sent(f.Len(metadata))
	b = appendEventHead(b, strconv.FormatUint(uint64(f.Seq), 10), string(f.Type))
	begins := len(b)
	b = f.Append(append(b, dataFieldPrefix...), metadata)
	if bytes.IndexByte(b[begins:], '\n') >= 0 {
		return appendEventData(b[:begins], f.Append(nil, metadata))
	}
	return append(b, "\n\n"...)
}

// encodeStructEvent returns a server-sent event whose data is a struct of strings and numbers, which always encodes.
func encodeStructEvent(event string, data any) []byte {
	b, err := json.Marshal(data)
	if err != nil {
		panic(err)
	}
	return encodeEvent("", event, b)
}

// dataFieldPrefix is the beginning of a line with data of a server-sent event.
const dataFieldPrefix = "data: "

// encodeEvent returns one server-sent event; it leaves out an id of "".
func encodeEvent(id, event string, data []byte) []byte {
	return appendEventData(appendEventHead(nil, id, event), data)
}

// appendEventHead appends the lines id, unless id is "", and event of a server-sent event.
func appendEventHead(b []byte, id, event string) []byte {
	if id != "" {
		b = append(append(append(b, "id: "...), id...), '\n')
	}
	b = append(b, "event: "...)
	for i := range len(event) {
		if event[i] != '\r' && event[i] != '\n' { // the type may come from a newer version and was not validated
			b = append(b, event[i])
		}
	}
	return append(b, '\n')
}

// appendEventData appends the data of a server-sent event. JSON may contain line breaks between tokens; each line
// then gets its own data field of the same event.
func appendEventData(b, data []byte) []byte {
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		b = append(append(append(b, dataFieldPrefix...), line...), '\n')
	}
	return append(b, '\n')
}

// timedWriter writes to the client of a stream with a timeout, and flushes after each write. A client that reads
// again before twice the timeout still receives the reason why its stream ends.
type timedWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration
}

// write writes and flushes b. It fails if the client does not read for twice the write timeout.
func (w *timedWriter) write(b []byte) error {
	if err := w.control.SetWriteDeadline(time.Now().Add(2 * w.timeout)); err != nil {
		return err
	}
	if _, err := w.w.Write(b); err != nil {
		return err
	}
	return w.control.Flush()
}
