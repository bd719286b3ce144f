package reads

import (
	"context"
	"encoding/json"
	"math"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
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
	err := s.await(ctx, s.sessionIn(tenant, session), func() error {
		p = Page{Next: q.After}
		found, size := false, 0
		var first int64
		err := s.rows(ctx, func(r row) error {
			var tip int64
			var oldest, seq *int64
			var kind, text *string
			if err := r.Scan(&tip, &oldest, &seq, &kind, &text); err != nil {
				return err
			}
			found, p.Tip = true, uint32(tip)
			if oldest != nil {
				first = *oldest
			}
			if seq == nil {
				return nil
			}
			size += len(*text)
			p.Events = append(p.Events, StoredEvent{Seq: uint32(*seq), Type: events.Type(*kind), JSON: []byte(*text)})
			return nil
		}, `
		SELECT s.tip, o.seq, e.seq, e.type, e.event FROM sessions s
		  LEFT JOIN LATERAL (SELECT seq FROM events WHERE tenant = s.tenant AND session = s.id AND seq > $3 ORDER BY seq LIMIT 1) o ON true
		  LEFT JOIN LATERAL (SELECT seq, type, event FROM (
		      SELECT seq, type, event, sum(octet_length(event)) OVER (ORDER BY seq) - octet_length(event) AS before FROM events
		       WHERE tenant = s.tenant AND session = s.id AND seq > $3 AND ($5::text[] IS NULL OR type = ANY ($5)) ORDER BY seq LIMIT $4) page
		     WHERE before <= $6) e ON true
		 WHERE s.tenant = $1 AND s.id = $2 ORDER BY e.seq`, tenant, session, int64(q.After), q.Limit, q.Types, q.Bytes)
		switch {
		case err != nil:
			return err
		case !found:
			return s.missing(ctx, tenant, session)
		case q.After > p.Tip:
			return s.UnlessFolding(ctx, session, ahead(p.Tip))
		case q.After < p.Tip && first != int64(q.After)+1:
			return s.UnlessFolding(ctx, session, expired("after", p.Tip))
		}
		cut := size > q.Bytes || len(p.Events) == q.Limit
		if q.Metadata {
			if err := s.metadataOf(ctx, tenant, session, p.Events); err != nil {
				return err
			}
			var short bool
			p.Events, short = bounded(p.Events, q.Bytes)
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

// bounded ends a page after the event that exceeds a number of bytes, including metadata. short reports whether
// events were removed.
func bounded(list []StoredEvent, bytes int) (kept []StoredEvent, short bool) {
	size := 0
	for i, e := range list {
		if size += len(e.JSON) + e.Metadata.Len(); size > bytes {
			return list[:i+1], i+1 < len(list)
		}
	}
	return list, false
}

// ahead returns the error for a cursor after the last event.
func ahead(tip uint32) error {
	e := problem.New(problem.CursorAhead, "after", "the cursor is greater than the seq of the session's last event, which tip gives")
	e.Tip = &tip
	return e
}

func expired(field string, tip uint32) error {
	e := problem.New(problem.CursorExpired, field, "the events that follow the cursor are no longer kept; begin again from the blocks at tip")
	e.Tip = &tip
	return e
}

// Event converts a stored event, with its metadata, to an API message.
func (k StoredEvent) Event() (*spoolv1.Event, error) {
	var w events.Wire
	if err := json.Unmarshal(k.JSON, &w); err != nil {
		return nil, unreadable(err)
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
	err = s.rows(ctx, func(r row) error {
		var b OpenBlock
		var stored string
		if err := r.Scan(&b.ID, &stored); err != nil {
			return err
		}
		var block events.Block
		if err := json.Unmarshal([]byte(stored), &block); err != nil {
			return unreadable(err)
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
func (s *Store) OpenTexts(ctx context.Context, p Past, ids []string) (list []OpenText, err error) {
	err = s.rows(ctx, func(r row) error {
		var text, status string
		var inFlight int
		var completed *string
		if err := r.Scan(&text, &status, &inFlight, &completed); err != nil {
			return err
		}
		var b events.Block
		if err := json.Unmarshal([]byte(text), &b); err != nil {
			return unreadable(err)
		}
		open := OpenText{ID: b.ID, Start: b.Time, Bytes: inFlight}
		if events.BlockStatus(status) != events.StatusPending {
			open.Bytes = len(b.Content)
			if completed != nil {
				if open.End, err = time.Parse(time.RFC3339Nano, *completed); err != nil {
					return unreadable(err)
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
	err := s.await(ctx, s.sessionIn(tenant, session), func() error {
		t = Tip{}
		found := false
		err := s.rows(ctx, func(r row) error {
			var seq int64
			var block, execution, conversation, metadata *string
			var offsets []int64
			var texts []string
			var at *time.Time
			if err := r.Scan(&seq, &t.Position, &metadata, &block, &execution, &conversation, &offsets, &texts, &at); err != nil {
				return err
			}
			found, t.Seq = true, uint32(seq)
			if metadata != nil {
				t.Metadata = *metadata
			}
			if block == nil {
				return nil
			}
			open := text(*block, *execution, *conversation, offsets, texts)
			if at != nil {
				open.At = *at
			}
			t.Open = append(t.Open, open)
			return nil
		}, `
		SELECT s.tip, s.tip_position, s.metadata, b.id, b.execution, b.conversation, t.offsets, t.texts, t.at FROM sessions s
		  LEFT JOIN blocks b ON b.tenant = s.tenant AND b.session = s.id AND b.status = 'pending'
		  LEFT JOIN LATERAL (SELECT array_agg("offset" ORDER BY "offset") AS offsets, array_agg(text ORDER BY "offset") AS texts, max(at) AS at
		                       FROM text_in_flight WHERE tenant = s.tenant AND session = s.id AND block = b.id) t ON b.id IS NOT NULL
		 WHERE s.tenant = $1 AND s.id = $2 ORDER BY b.first_seq`, tenant, session)
		if err == nil && !found {
			return s.missing(ctx, tenant, session)
		}
		return err
	})
	return t, err
}

func text(block, execution, conversation string, offsets []int64, texts []string) Text {
	out := Text{BlockID: block, ExecutionID: execution, ConversationID: conversation}
	for i := range offsets {
		out.Pieces = append(out.Pieces, events.Delta{BlockID: block, ExecutionID: execution, ConversationID: conversation,
			Offset: uint32(min(offsets[i], math.MaxUint32)), Text: texts[i]})
	}
	return out
}

// Reach is how far the read models are with a session.
type Reach struct {
	Seq  uint32
	Text map[string]uint32 // by block: end of the last piece of text in flight, in bytes
}

// Reaches returns how far the read models are with sessions of one tenant. Sessions that do not exist have no entry.
func (s *Store) Reaches(ctx context.Context, tenant string, sessions []string) (map[string]Reach, error) {
	out := map[string]Reach{}
	err := s.rows(ctx, func(r row) error {
		var id string
		var tip int64
		var block *string
		var end *int64
		if err := r.Scan(&id, &tip, &block, &end); err != nil {
			return err
		}
		have, ok := out[id]
		if !ok {
			have = Reach{uint32(tip), map[string]uint32{}}
			out[id] = have
		}
		if block != nil && end != nil {
			have.Text[*block] = uint32(min(*end, math.MaxUint32))
		}
		return nil
	}, `
		SELECT s.id, s.tip, t.block, t.end FROM sessions s
		  LEFT JOIN LATERAL (SELECT block, max("offset" + octet_length(text)) AS end FROM text_in_flight
		                      WHERE tenant = s.tenant AND session = s.id GROUP BY block) t ON true
		 WHERE s.tenant = $1 AND s.id = ANY ($2)`, tenant, sessions)
	return out, err
}
