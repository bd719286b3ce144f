package reads

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Ancestor is a session from which another session was forked, directly or indirectly.
type Ancestor struct {
	Session   string
	Effective uint32 // seq of the last event that is inherited
}

// HistoryPage is a page of the events that a fork inherits from its ancestors.
type HistoryPage struct {
	Events    []StoredEvent
	Total     uint32 // number of all inherited events
	Next      uint32 // the cursor after this page
	Ancestors []Ancestor
}

// errAncestorBehind is returned if the projector group of a fork's ancestor is behind the group of the fork, so that
// inherited events are missing.
type errAncestorBehind struct{ error }

func (e errAncestorBehind) Unwrap() error { return e.error }

// ancestorBehindError returns the error for a read that misses events of an ancestor: an errAncestorBehind with the
// code UNAVAILABLE.
func ancestorBehindError() error { return errAncestorBehind{errReadModelsFolding()} }

// awaitAncestors runs a read, and repeats it for a limited time while the read returns an errAncestorBehind.
func (s *Store) awaitAncestors(ctx context.Context, read func() error) error {
	deadline := time.Now().Add(s.cfg.FreshWait)
	pauses := retry.NewDoubling(10*time.Millisecond, 100*time.Millisecond)
	for {
		err := read()
		var behind errAncestorBehind
		if !errors.As(err, &behind) || time.Now().After(deadline) {
			return err
		}
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return problem.From(ctx.Err())
		}
	}
}

// ancestors returns a session's ancestors, oldest first, including deleted ones: their events and blocks are kept as
// long as a fork inherits them.
func (s *Store) ancestors(ctx context.Context, tenant, session string) ([]Ancestor, error) {
	var list []Ancestor
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() (err error) {
		list, err = s.readAncestors(ctx, tenant, session)
		return err
	})
	return list, err
}

// readAncestors implements ancestors, without waiting until the read models contain the session.
func (s *Store) readAncestors(ctx context.Context, tenant, session string) ([]Ancestor, error) {
	rows, err := s.queries.Ancestors(ctx, tenant, session)
	switch {
	case err != nil:
		return nil, err
	case len(rows) == 0:
		return nil, s.missingSessionError(ctx, tenant, session)
	case rows[len(rows)-1].Parent != "": // the last session found is a fork whose parent the projector has not folded yet
		return nil, ancestorBehindError()
	}
	var list []Ancestor
	for _, r := range slices.Backward(rows[:len(rows)-1]) {
		list = append(list, Ancestor{r.Parent, uint32(r.Effective)})
	}
	return list, nil
}

// History returns the events after a cursor that a fork inherits from its ancestors, up to the limit or 2 MiB, but at
// least one.
func (s *Store) History(ctx context.Context, tenant, session string, after uint32, limit int) (h HistoryPage, err error) {
	err = s.awaitAncestors(ctx, func() (err error) {
		h, err = s.readHistory(ctx, tenant, session, after, limit)
		return err
	})
	return h, err
}

// readHistory implements History. If the projector group of an ancestor is behind, readHistory returns an
// errAncestorBehind instead of waiting.
func (s *Store) readHistory(ctx context.Context, tenant, session string, after uint32, limit int) (h HistoryPage, err error) {
	if h.Ancestors, err = s.ancestors(ctx, tenant, session); err != nil {
		return h, err
	}
	for _, a := range h.Ancestors {
		h.Total += a.Effective
	}
	if after > h.Total {
		return h, errCursorAhead(h.Total)
	}
	h.Next = after
	size, skip := 0, after
	for _, a := range h.Ancestors {
		if skip >= a.Effective {
			skip -= a.Effective
			continue
		}
		if len(h.Events) == limit || size > maxPageBytes {
			break
		}
		list, err := s.inheritedEvents(ctx, tenant, a, skip, limit-len(h.Events), maxPageBytes-size)
		if err != nil {
			return h, err
		}
		for _, e := range list {
			size += len(e.JSON)
		}
		h.Events = append(h.Events, list...)
		h.Next += uint32(len(list))
		if last := list[len(list)-1].Seq; last < a.Effective {
			break
		}
		skip = 0
	}
	return h, nil
}

// inheritedEvents returns the events that a fork inherits from one ancestor, after a cursor, up to the limit and room
// bytes, but at least one.
func (s *Store) inheritedEvents(ctx context.Context, tenant string, a Ancestor, after uint32, limit, room int) ([]StoredEvent, error) {
	var list []StoredEvent
	next, size := after+1, 0
	err := s.queryRows(ctx, func(r pgx.Rows) error {
		var seq int64
		var kind, text string
		if err := r.Scan(&seq, &kind, &text); err != nil {
			return err
		}
		if seq != int64(next) || size > room {
			return nil
		}
		size += len(text)
		list = append(list, StoredEvent{Seq: next, Type: events.Type(kind), JSON: []byte(text)})
		next++
		return nil
	}, "SELECT seq, type, event FROM events WHERE tenant = $1 AND session = $2 AND seq > $3 AND seq <= $4 ORDER BY seq LIMIT $5",
		tenant, a.Session, int64(after), int64(a.Effective), limit)
	if err == nil && len(list) == 0 {
		err = ancestorBehindError()
	}
	return list, err
}

// HistoryBlocks returns a page of the blocks that a fork inherits from its ancestors, each in its state at the
// ancestor's last inherited event, and the token of the next page. In a page token, Seq is the number of ancestors to
// skip.
func (s *Store) HistoryBlocks(ctx context.Context, tenant, session, token string, size uint32) (out []*spoolv1.InheritedBlocks, next string, err error) {
	after := BeforeFirstBlock()
	if token != "" {
		if after, err = ParseBlockToken("pageToken", token); err != nil {
			return nil, "", err
		}
	}
	if size, err = ParsePageSize(size); err != nil {
		return nil, "", err
	}
	err = s.awaitAncestors(ctx, func() (err error) {
		out, next, err = s.readHistoryBlocks(ctx, tenant, session, after, int(size))
		return err
	})
	return out, next, err
}

// readHistoryBlocks implements HistoryBlocks. If the projector group of an ancestor is behind, readHistoryBlocks
// returns an errAncestorBehind instead of waiting.
func (s *Store) readHistoryBlocks(ctx context.Context, tenant, session string, after BlockToken, size int) (out []*spoolv1.InheritedBlocks, next string, err error) {
	ancestors, err := s.ancestors(ctx, tenant, session)
	if err != nil {
		return nil, "", err
	}
	for int(after.Seq) < len(ancestors) {
		a := ancestors[after.Seq]
		list, last, err := s.ancestorBlocks(ctx, tenant, a, after, size)
		if err != nil {
			return nil, "", err
		}
		out = append(out, &spoolv1.InheritedBlocks{SessionId: a.Session, Effective: a.Effective, Blocks: list})
		if last != nil {
			return out, last.String(), nil
		}
		left := after.Seq + 1
		after = BeforeFirstBlock()
		after.Seq = left
		size -= len(list)
	}
	return out, "", nil
}

// ancestorBlocks returns a page of the blocks that a fork inherits from an ancestor. last is the position at which
// the page ends, or nil if there are no more blocks. A block that changed after the last inherited event is folded
// from its events up to that event.
func (s *Store) ancestorBlocks(ctx context.Context, tenant string, a Ancestor, after BlockToken, size int) (_ []*spoolv1.Block, last *BlockToken, err error) {
	var list []*events.Block
	at := after
	changed := map[string]int{} // index in list
	first := int64(a.Effective) + 1
	var tip int64
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		var have int64
		var ord, begins, ends *int64
		var text *string
		if err := r.Scan(&have, &ord, &begins, &ends, &text); err != nil {
			return err
		}
		if tip = have; text == nil {
			return nil
		}
		if len(list) == size {
			last = &at
			return nil
		}
		at.Ord, at.FirstSeq = *ord, *begins
		var b events.Block
		if err := json.Unmarshal([]byte(*text), &b); err != nil {
			return problem.New(problem.Internal, "", "a block in the read models is not valid").WithCause(err)
		}
		if *ends <= int64(a.Effective) {
			list = append(list, &b)
			return nil
		}
		changed[b.ID], first = len(list), min(first, *begins)
		list = append(list, nil)
		return nil
	}, `
		SELECT t.tip, b.execution_ord, b.first_seq, b.last_seq, b.block
		  FROM (SELECT coalesce(max(seq), 0) AS tip FROM events WHERE tenant = $1 AND session = $2 AND seq <= $3) t
		  LEFT JOIN blocks b ON b.tenant = $1 AND b.session = $2 AND b.first_seq <= $3 AND (b.execution_ord, b.first_seq) > ($4, $5)
		 ORDER BY b.execution_ord, b.first_seq LIMIT $6`,
		tenant, a.Session, int64(a.Effective), after.Ord, after.FirstSeq, size+1)
	if err == nil && tip != int64(a.Effective) {
		err = ancestorBehindError()
	}
	if err == nil && len(changed) > 0 {
		err = s.foldBlocks(ctx, tenant, a, first, changed, list)
	}
	if err != nil {
		return nil, nil, err
	}
	out := make([]*spoolv1.Block, 0, len(list))
	for _, b := range list {
		if b != nil {
			out = append(out, BlockMessage(*b))
		}
	}
	return out, last, nil
}

// foldBlocks folds blocks of an ancestor from its events from the seq from on. wanted has the index in list of each
// block to fold, by the block's id.
func (s *Store) foldBlocks(ctx context.Context, tenant string, a Ancestor, from int64, wanted map[string]int, list []*events.Block) error {
	return s.queryRows(ctx, func(r pgx.Rows) error {
		var text string
		if err := r.Scan(&text); err != nil {
			return err
		}
		var w events.WireEvent
		if err := json.Unmarshal([]byte(text), &w); err != nil {
			return errUnreadableEvent(err)
		}
		e := w.Event()
		if i, ok := wanted[blocks.ChangedBlockID(e)]; ok {
			list[i] = blocks.Reduce(list[i], e)
		}
		return nil
	}, "SELECT event FROM events WHERE tenant = $1 AND session = $2 AND seq BETWEEN $3 AND $4 ORDER BY seq", tenant, a.Session, from, int64(a.Effective))
}
