package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	textMessages = 256       // messages in one read of DELTAS
	textBytes    = 128 << 10 // bytes after which a read ends
	textTimeout  = 5 * time.Second
	// clockMargin is the time before the first event of a replay at which the search for its text begins. The timestamps of
	// NATS messages come from another clock.
	clockMargin = time.Minute
)

// deltaReader reads the text in flight of one session from DELTAS, in the order of publication and without a consumer.
type deltaReader struct {
	nc      *nats.Conn
	subject string
	remedy  string    // advice for the client if a read fails
	since   time.Time // start of the first read; the zero time means the beginning of the stream
	next    uint64    // stream sequence of the next read; 0 before the first
	page    []events.Delta
	done    bool // whether the stream has no more messages
	bytes   int  // bytes of the messages read so far
}

// getRequest requests the first messages of a subject, starting at a sequence or a time.
type getRequest struct {
	Seq       uint64     `json:"seq,omitempty"`
	StartTime *time.Time `json:"start_time,omitempty"`
	NextFor   string     `json:"next_by_subj"`
	Batch     int        `json:"batch"`
	MaxBytes  int        `json:"max_bytes"`
}

// peek returns the next piece of text without removing it; ok is false if there is none.
func (t *deltaReader) peek(ctx context.Context) (d events.Delta, ok bool, err error) {
	for len(t.page) == 0 && !t.done {
		if err := t.read(ctx); err != nil {
			if ctx.Err() != nil {
				return d, false, context.Cause(ctx)
			}
			return d, false, problem.New(problem.Unavailable, "", "the text in flight cannot be read from NATS; "+t.remedy).WithCause(err)
		}
	}
	if len(t.page) == 0 {
		return d, false, nil
	}
	return t.page[0], true, nil
}

// drop removes the piece that peek returned.
func (t *deltaReader) drop() { t.page = t.page[1:] }

// read reads the next messages.
func (t *deltaReader) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, textTimeout)
	defer cancel()
	request := getRequest{Seq: max(t.next, 1), NextFor: t.subject, Batch: textMessages, MaxBytes: textBytes}
	if t.next == 0 && !t.since.IsZero() {
		request.Seq, request.StartTime = 0, &t.since
	}
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	inbox := t.nc.NewRespInbox()
	sub, err := t.nc.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only if the connection is closed, and then the read fails too
	if err := t.nc.PublishRequest("$JS.API.DIRECT.GET."+topology.StreamDeltas, inbox, body); err != nil {
		return err
	}
	for {
		m, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return fmt.Errorf("read %s: %w", t.subject, err)
		}
		if end, err := t.addMessage(m); end || err != nil {
			return err
		}
	}
}

// Status values of responses that are not messages.
const (
	statusEnd  = "204" // end of the batch
	statusNone = "404" // no messages
)

// addMessage adds a message to the page. end reports whether it was the last response to the request.
func (t *deltaReader) addMessage(m *nats.Msg) (end bool, err error) {
	switch status := m.Header.Get("Status"); status {
	case statusEnd:
		t.done = m.Header.Get("Nats-Num-Pending") == "0"
		return true, nil
	case statusNone:
		t.done = true
		return true, nil
	case "":
	default:
		return true, fmt.Errorf("read %s: the server returned %s %s", t.subject, status, m.Header.Get("Description"))
	}
	seq, err := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return true, fmt.Errorf("read %s: the response has no sequence: %w", t.subject, err)
	}
	t.next = seq + 1
	t.bytes += len(m.Data)
	var d events.Delta
	if json.Unmarshal(m.Data, &d) == nil { // an invalid delta is skipped; the completed block then shows that text is missing
		t.page = append(t.page, d)
	}
	return false, nil
}
