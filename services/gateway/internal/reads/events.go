package reads

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// StoredEvent is an event as the read models store it, and the application's metadata of that event.
type StoredEvent struct {
	Seq  uint32
	Type events.Type
	JSON []byte // JSON of events.WireEvent, without metadata

	Metadata *Metadata // metadata of the event; nil for none
}

// maxPageBytes is the size at which a page of events ends if EventQuery.Bytes is 0, and at which a page of blocks ends.
const maxPageBytes = 2 << 20

// EventPage is a page of stored events.
type EventPage struct {
	Events []StoredEvent
	Tip    uint32 // seq of the session's last event
	Next   uint32 // the cursor after this page
}

// EventQuery selects the stored events of a page.
type EventQuery struct {
	After    uint32   // the cursor
	Limit    int      // largest number of events, at least 1
	Bytes    int      // size after which the page ends, including the event that exceeds it; 0 means 2 MiB
	Types    []string // event types; nil means all
	Metadata bool     // also read StoredEvent.Metadata
}

// Events returns the stored events after a cursor, up to the limits of the query, but at least one. It returns
// CURSOR_AHEAD or CURSOR_EXPIRED if the cursor is not valid.
func (s *Store) Events(ctx context.Context, tenant, session string, q EventQuery) (EventPage, error) {
	if q.Bytes == 0 {
		q.Bytes = maxPageBytes
	}
	var p EventPage
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() error {
		p = EventPage{Next: q.After}
		rows, err := s.queries.Events(ctx, queries.EventsParams{
			Tenant: tenant, Session: session, After: int64(q.After), Size: int32(q.Limit), Bytes: int64(q.Bytes), Types: q.Types,
		})
		if err == nil && len(rows) == 0 {
			err = s.missingSessionError(ctx, tenant, session)
		}
		if err != nil {
			return err
		}
		p.Tip = uint32(rows[0].Tip)
		size := 0
		for _, r := range rows {
			if r.Seq > 0 {
				size += len(r.Event)
				p.Events = append(p.Events, StoredEvent{Seq: uint32(r.Seq), Type: events.Type(r.Type), JSON: []byte(r.Event)})
			}
		}
		switch {
		case q.After > p.Tip:
			return s.MissingUnlessFolding(ctx, session, errCursorAhead(p.Tip))
		case q.After < p.Tip && rows[0].Oldest != int64(q.After)+1:
			return s.MissingUnlessFolding(ctx, session, errCursorExpired("after", p.Tip))
		}
		cut := size > q.Bytes || len(p.Events) == q.Limit
		if q.Metadata {
			if err := s.setMetadata(ctx, tenant, session, p.Events); err != nil {
				return err
			}
			var short bool
			p.Events, short = trimToBytes(p.Events, q.Bytes)
			cut = cut || short
		}
		p.Next = p.Tip
		if n := len(p.Events); n > 0 && cut {
			p.Next = p.Events[n-1].Seq
		}
		return nil
	})
	return p, err
}

// trimToBytes ends a page of events after the event that exceeds a number of bytes, including metadata. short reports
// whether trimToBytes removed events.
func trimToBytes(list []StoredEvent, bytes int) (kept []StoredEvent, short bool) {
	size := 0
	for i, e := range list {
		if size += len(e.JSON) + e.Metadata.Len(); size > bytes {
			return list[:i+1], i+1 < len(list)
		}
	}
	return list, false
}

// errCursorAhead returns the error for a cursor after the last event.
func errCursorAhead(tip uint32) error {
	e := problem.New(problem.CursorAhead, "after", "the cursor is greater than the seq of the session's last event, which is tip")
	e.Tip = &tip
	return e
}

// errCursorExpired returns the error for a cursor whose following events are no longer stored.
func errCursorExpired(field string, tip uint32) error {
	e := problem.New(problem.CursorExpired, field, "the events after the cursor are no longer stored; continue from the blocks at tip")
	e.Tip = &tip
	return e
}

// Message converts a stored event, with its metadata, to an API message.
func (k StoredEvent) Message() (*spoolv1.Event, error) {
	var w events.WireEvent
	if err := json.Unmarshal(k.JSON, &w); err != nil {
		return nil, errUnreadableEvent(err)
	}
	out := EventMessage(w)
	if k.Metadata != nil {
		out.Metadata = &spoolv1.EventMetadata{Session: wirejson.JSONFromText(k.Metadata.Session), Message: wirejson.JSONFromText(k.Metadata.Message)}
	}
	return out, nil
}

// EventMessage converts an event to an API message.
func EventMessage(w events.WireEvent) *spoolv1.Event {
	return &spoolv1.Event{
		Seq: w.Seq, Position: w.Position, Id: nilIfEmpty(w.ID), Type: string(w.Type), Time: wirejson.TimestampOf(w.Time), SessionId: w.SessionID,
		ExecutionId: nilIfEmpty(w.ExecutionID), ConversationId: nilIfEmpty(w.ConversationID), Source: string(w.Source), Data: wirejson.JSONFromText(string(w.Data)),
	}
}

// OpenText is a block that is open after an event of a session, and that has text in flight.
type OpenText struct {
	ID             string
	ExecutionID    string
	ConversationID string
	From           deltas.StartPosition // where its text in flight begins
	End            time.Time            // when the block was completed; zero for an open block
	Bytes          int                  // bytes of the text of a completed block
}

// newOpenText returns an OpenText for a block, from the ids of the block, its execution and its conversation, and the
// JSON of the block_start with which the block began.
func newOpenText(block, execution, conversation, start string) (OpenText, error) {
	w, err := events.DecodeWireEvent([]byte(start))
	if err != nil {
		return OpenText{}, errUnreadableEvent(err)
	}
	o := OpenText{ID: block, ExecutionID: execution, ConversationID: conversation, From: deltas.StartPosition{Time: w.Time}}
	if d, ok := w.Event().Data.(events.BlockStart); ok {
		o.From = deltas.BlockStartPosition(d)
	}
	return o, nil
}

// OpenBlocksAt returns the blocks with text that began before the event with a seq and ended at or after it.
func (s *Store) OpenBlocksAt(ctx context.Context, tenant, session string, seq uint32) (list []OpenText, err error) {
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		var block, execution, conversation, start string
		if err := r.Scan(&block, &execution, &conversation, &start); err != nil {
			return err
		}
		o, err := newOpenText(block, execution, conversation, start)
		list = append(list, o)
		return err
	}, `
		SELECT b.id, b.execution, b.conversation, e.event FROM blocks b JOIN events e ON e.tenant = b.tenant AND e.session = b.session AND e.seq = b.first_seq
		 WHERE b.tenant = $1 AND b.session = $2 AND b.first_seq < $3 AND (b.last_seq >= $3 OR b.status = 'pending')
		   AND b.kind IN ('assistant_text', 'thinking')`, tenant, session, int64(seq))
	return list, err
}

// OpenTextsOf returns those of the blocks with the given ids that have text and were open in the state p of their
// session.
func (s *Store) OpenTextsOf(ctx context.Context, p SessionState, ids []string) (list []OpenText, err error) {
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		var id, execution, conversation, text, status, start string
		var completed *string
		if err := r.Scan(&id, &execution, &conversation, &text, &status, &start, &completed); err != nil {
			return err
		}
		open, err := newOpenText(id, execution, conversation, start)
		if err != nil {
			return err
		}
		if events.BlockStatus(status) != events.StatusPending {
			var b events.Block
			if err := json.Unmarshal([]byte(text), &b); err != nil {
				return errUnreadableEvent(err)
			}
			open.Bytes = len(b.Content)
			if completed != nil {
				if open.End, err = time.Parse(time.RFC3339Nano, *completed); err != nil {
					return errUnreadableEvent(err)
				}
			}
		}
		list = append(list, open)
		return nil
	}, `
		SELECT b.id, b.execution, b.conversation, b.block, b.status, s.event,
		       (SELECT event::json->>'time' FROM events WHERE tenant = b.tenant AND session = b.session AND seq = b.last_seq)
		  FROM blocks b JOIN events s ON s.tenant = b.tenant AND s.session = b.session AND s.seq = b.first_seq
		 WHERE b.tenant = $1 AND b.session = $2 AND b.id = ANY ($3) AND b.kind IN ('assistant_text', 'thinking') AND (b.last_seq > $4 OR b.status = 'pending')`,
		p.Tenant, p.ID, ids, int64(p.Seq))
	return list, err
}

// SessionTip is the end of a session: its last event, its metadata and its open blocks.
type SessionTip struct {
	Seq      uint32
	Position string
	Metadata string // JSON of the session's metadata; "" for none
	Open     []OpenText
}

// Tip returns the seq and the position of a session's last event, the session's metadata, and its open blocks.
func (s *Store) Tip(ctx context.Context, tenant, session string) (SessionTip, error) {
	var t SessionTip
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() error {
		rows, err := s.queries.Tip(ctx, tenant, session)
		if err == nil && len(rows) == 0 {
			err = s.missingSessionError(ctx, tenant, session)
		}
		if err != nil {
			return err
		}
		t = SessionTip{Seq: uint32(rows[0].Tip), Position: rows[0].TipPosition}
		if rows[0].Metadata != nil {
			t.Metadata = *rows[0].Metadata
		}
		for _, r := range rows {
			if r.Block == nil || r.Start == "" {
				continue
			}
			open, err := newOpenText(*r.Block, *r.Execution, *r.Conversation, r.Start)
			if err != nil {
				return err
			}
			t.Open = append(t.Open, open)
		}
		return nil
	})
	return t, err
}

// Tips returns the seq of the last event of sessions of one tenant. Sessions that do not exist have no entry.
func (s *Store) Tips(ctx context.Context, tenant string, sessions []string) (map[string]uint32, error) {
	rows, err := s.queries.Tips(ctx, tenant, sessions)
	out := make(map[string]uint32, len(rows))
	for _, r := range rows {
		out[r.ID] = uint32(r.Tip)
	}
	return out, err
}
