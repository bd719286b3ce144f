package reads

import (
	"context"
	"encoding/json"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// StoredEvent is an event as it is stored.
type StoredEvent struct {
	Seq  uint32
	Type events.Type
	JSON []byte // JSON of events.Wire, without metadata

	Metadata *Metadata // metadata of the event; nil for none
}

// maxPageBytes is the size at which a page of events ends if Query.Bytes is 0, and at which a page of blocks ends.
const maxPageBytes = 2 << 20

// Page is a page of stored events.
type Page struct {
	Events []StoredEvent
	Tip    uint32 // seq of the session's last event
	Next   uint32 // the cursor after this page
}

// Query selects stored events.
type Query struct {
	After    uint32   // the cursor
	Limit    int      // largest number of events, at least 1
	Bytes    int      // size after which the page ends, including the event that exceeds it; 0 means 2 MiB
	Types    []string // event types; nil means all
	Metadata bool     // also read StoredEvent.Metadata
}

// Events returns the stored events after a cursor, up to the limits of the query, but at least one. It returns
// CURSOR_AHEAD or CURSOR_EXPIRED if the cursor is not valid.
func (s *Store) Events(ctx context.Context, tenant, session string, q Query) (Page, error) {
	if q.Bytes == 0 {
		q.Bytes = maxPageBytes
	}
	var p Page
	err := s.awaitRead(ctx, s.searchSession(tenant, session), func() error {
		p = Page{Next: q.After}
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
			if err := s.addMetadata(ctx, tenant, session, p.Events); err != nil {
				return err
			}
			var short bool
			p.Events, short = limitBytes(p.Events, q.Bytes)
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

// limitBytes ends a page after the event that exceeds a number of bytes, including metadata. short reports whether
// events were removed.
func limitBytes(list []StoredEvent, bytes int) (kept []StoredEvent, short bool) {
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

// Event converts a stored event, with its metadata, to an API message.
func (k StoredEvent) Event() (*spoolv1.Event, error) {
	var w events.Wire
	if err := json.Unmarshal(k.JSON, &w); err != nil {
		return nil, errUnreadableEvent(err)
	}
	out := Event(w)
	if k.Metadata != nil {
		out.Metadata = &spoolv1.EventMetadata{Session: wirejson.Raw(k.Metadata.Session), Message: wirejson.Raw(k.Metadata.Message)}
	}
	return out, nil
}

// Event converts an event to an API message.
func Event(w events.Wire) *spoolv1.Event {
	return &spoolv1.Event{
		Seq: w.Seq, Position: w.Position, Id: optional(w.ID), Type: string(w.Type), Time: wirejson.Time(w.Time), SessionId: w.SessionID,
		ExecutionId: optional(w.ExecutionID), ConversationId: optional(w.ConversationID), Source: string(w.Source), Data: wirejson.Raw(string(w.Data)),
	}
}

// OpenBlock is a block whose text was in flight at an event.
type OpenBlock struct {
	ID          string
	ExecutionID string
	Start       time.Time // when the block began
}

// OpenBlocks returns the blocks with text that began before an event of a session and ended at or after it.
func (s *Store) OpenBlocks(ctx context.Context, tenant, session string, seq uint32) (list []OpenBlock, err error) {
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		var b OpenBlock
		var stored string
		if err := r.Scan(&b.ID, &stored); err != nil {
			return err
		}
		var block events.Block
		if err := json.Unmarshal([]byte(stored), &block); err != nil {
			return errUnreadableEvent(err)
		}
		b.ExecutionID, b.Start = block.ExecutionID, block.Time
		list = append(list, b)
		return nil
	}, `
		SELECT id, block FROM blocks WHERE tenant = $1 AND session = $2 AND first_seq < $3 AND (last_seq >= $3 OR status = 'pending')
		   AND kind IN ('assistant_text', 'thinking')`, tenant, session, int64(seq))
	return list, err
}

// OpenText is a block with text that was open at an event, and the present state of its text.
type OpenText struct {
	ID    string
	Start time.Time // when the block began
	End   time.Time // when the block was completed; zero for an open block
	Bytes int       // bytes of its text
}

// OpenTexts returns the blocks with the given ids that have text and were open at an event.
func (s *Store) OpenTexts(ctx context.Context, p SessionState, ids []string) (list []OpenText, err error) {
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		var text, status string
		var inFlight int
		var completed *string
		if err := r.Scan(&text, &status, &inFlight, &completed); err != nil {
			return err
		}
		var b events.Block
		if err := json.Unmarshal([]byte(text), &b); err != nil {
			return errUnreadableEvent(err)
		}
		open := OpenText{ID: b.ID, Start: b.Time, Bytes: inFlight}
		if events.BlockStatus(status) != events.StatusPending {
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
		SELECT b.block, b.status, coalesce((SELECT max("offset" + octet_length(text)) FROM text_in_flight WHERE tenant = b.tenant AND session = b.session AND block = b.id), 0),
		       (SELECT event::json->>'time' FROM events WHERE tenant = b.tenant AND session = b.session AND seq = b.last_seq)
		  FROM blocks b WHERE b.tenant = $1 AND b.session = $2 AND b.id = ANY ($3) AND b.kind IN ('assistant_text', 'thinking') AND (b.last_seq > $4 OR b.status = 'pending')`,
		p.Tenant, p.ID, ids, int64(p.Seq))
	return list, err
}

// Tip is the end of a session, and the text in flight of its open blocks.
type Tip struct {
	Seq      uint32
	Position string
	Metadata string // JSON of the session's metadata; "" for none
	Open     []Text
}

// Text is the text in flight of one open block, in the stored pieces.
type Text struct {
	BlockID        string
	ExecutionID    string
	ConversationID string
	At             time.Time      // time of the last piece
	Pieces         []events.Delta // sorted by offset; they may overlap or have gaps
}

// Tip returns a session's end.
func (s *Store) Tip(ctx context.Context, tenant, session string) (Tip, error) {
	var t Tip
	err := s.awaitRead(ctx, s.searchSession(tenant, session), func() error {
		rows, err := s.queries.Tip(ctx, tenant, session)
		if err == nil && len(rows) == 0 {
			err = s.missingSessionError(ctx, tenant, session)
		}
		if err != nil {
			return err
		}
		t = Tip{Seq: uint32(rows[0].Tip), Position: rows[0].TipPosition}
		if rows[0].Metadata != nil {
			t.Metadata = *rows[0].Metadata
		}
		for _, r := range rows {
			if r.Block == nil {
				continue
			}
			open := newText(*r.Block, *r.Execution, *r.Conversation, r.Offsets, r.Texts)
			if len(open.Pieces) > 0 {
				open.At = r.At
			}
			t.Open = append(t.Open, open)
		}
		return nil
	})
	return t, err
}

func newText(block, execution, conversation string, offsets []int64, texts []string) Text {
	out := Text{BlockID: block, ExecutionID: execution, ConversationID: conversation}
	for i := range offsets {
		out.Pieces = append(out.Pieces, events.Delta{BlockID: block, ExecutionID: execution, ConversationID: conversation,
			Offset: uint32(min(offsets[i], math.MaxUint32)), Text: texts[i]})
	}
	return out
}

// SessionProgress is the last event of a session in the read models, and the length of each open block's text.
type SessionProgress struct {
	Seq  uint32
	Text map[string]uint32 // by block: end of the last piece of text in flight, in bytes
}

// SessionProgress returns the progress of sessions of one tenant. Sessions that do not exist have no entry.
func (s *Store) SessionProgress(ctx context.Context, tenant string, sessions []string) (map[string]SessionProgress, error) {
	rows, err := s.queries.Reaches(ctx, tenant, sessions)
	out := map[string]SessionProgress{}
	for _, r := range rows {
		reach, ok := out[r.ID]
		if !ok {
			reach = SessionProgress{uint32(r.Tip), map[string]uint32{}}
			out[r.ID] = reach
		}
		if r.Block != "" {
			reach.Text[r.Block] = uint32(min(r.TextEnd, math.MaxUint32))
		}
	}
	return out, err
}
