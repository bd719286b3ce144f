package reads

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// SessionState is the state of a session after one of its events.
type SessionState struct {
	history.State
	Tenant, ID string
	Position   string // position of the event
	Title      string
	Parent     *events.SessionForked // nil if the session is not a fork
	Workspace  *Snapshot             // the snapshot that contains the session's files; nil for none
}

// foldPageEvents is the number of events that are read with one statement to fold a session's state.
const foldPageEvents = 10_000

// StateAfter returns the state of a session after the event with the seq at, or after the last event if at is nil.
// field is the name of the request parameter with the event, for errors.
func (s *Store) StateAfter(ctx context.Context, tenant, session, field string, at *uint32) (SessionState, error) {
	p := SessionState{Tenant: tenant, ID: session}
	var forked string
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() error {
		wanted := int64(0)
		if at != nil {
			if wanted = int64(*at); wanted == 0 {
				return problem.Invalid(field, "there is no event 0: the first event of a session has seq 1")
			}
		}
		r, err := s.queries.SavedState(ctx, queries.SavedStateParams{Tenant: tenant, Session: session, Seq: wanted, Version: history.StateVersion})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return s.missingSessionError(ctx, tenant, session)
		case err != nil:
			return err
		case wanted > r.Tip:
			return s.MissingUnlessFolding(ctx, session, errEventAfterTip(field, wanted, uint32(r.Tip)))
		case wanted == 0:
			wanted = r.Tip
		}
		p.Title, forked, p.State = r.Title, r.Forked, history.State{}
		if r.State != "" {
			if err := json.Unmarshal([]byte(r.State), &p.State); err != nil {
				return errUnreadableEvent(err)
			}
		}
		return s.foldEvents(ctx, &p, field, uint32(wanted))
	})
	if err == nil && forked != "" {
		p.Parent, err = decodeForked(forked)
	}
	if err == nil {
		p.Workspace, err = s.workspaceSnapshot(ctx, p)
	}
	return p, err
}

// foldEvents folds the events after the state p into it, up to the event to. field is the name of the request
// parameter with that event, for errors.
func (s *Store) foldEvents(ctx context.Context, p *SessionState, field string, to uint32) error {
	var last events.WireEvent
	for p.Seq < to || last.Seq == 0 {
		from := p.Seq
		if from == to { // only the position of the event is missing in the state
			from--
		}
		err := s.EachEvent(ctx, p.Tenant, p.ID, from, to, nil, foldPageEvents, func(w events.WireEvent) error {
			last = w
			if w.Seq == p.Seq+1 {
				p.State = history.Evolve(p.State, w.Seq, history.EventFromReadModel(w))
			}
			return nil
		})
		if err != nil {
			return err
		}
		if last.Seq != p.Seq || p.Seq == from && from != to {
			return s.lostEventsError(ctx, *p, field, to)
		}
	}
	p.Position = last.Position
	return nil
}

// lostEventsError returns the error for events that a session had a moment ago and that a read did not find: the
// session was deleted, or its group is being folded again.
func (s *Store) lostEventsError(ctx context.Context, p SessionState, field string, to uint32) error {
	exists, err := s.queries.SessionExists(ctx, p.Tenant, p.ID)
	switch {
	case err != nil:
		return err
	case !exists:
		return s.missingSessionError(ctx, p.Tenant, p.ID)
	}
	return s.MissingUnlessFolding(ctx, p.ID, errCursorExpired(field, to))
}

// EachEvent calls f for the stored events of a session with after < seq <= to, in order, for at most limit events. types
// selects events by type; nil means all. An error of f ends the read and is returned.
func (s *Store) EachEvent(ctx context.Context, tenant, session string, after, to uint32, types []events.Type, limit int, f func(events.WireEvent) error) error {
	return s.queryRows(ctx, func(r pgx.Rows) error {
		var text []byte
		if err := r.Scan(&text); err != nil {
			return err
		}
		var w events.WireEvent
		if err := json.Unmarshal(text, &w); err != nil {
			return errUnreadableEvent(err)
		}
		return f(w)
	}, `SELECT event FROM events WHERE tenant = $1 AND session = $2 AND seq > $3 AND seq <= $4 AND ($5::text[] IS NULL OR type = ANY ($5)) ORDER BY seq LIMIT $6`,
		tenant, session, int64(after), int64(to), eventTypeNames(types), limit)
}

// eventTypeNames returns the names of event types, or nil for nil, which selects all types.
func eventTypeNames(types []events.Type) []string {
	var names []string
	for _, t := range types {
		names = append(names, string(t))
	}
	return names
}

// MissingUnlessFolding returns missing, the error for an event that a session does not have. While the read models
// are being folded from the log's beginning it returns UNAVAILABLE instead, because the session may have the event.
func (s *Store) MissingUnlessFolding(ctx context.Context, session string, missing error) error {
	c, err := s.groupCheckpoint(ctx, session)
	switch {
	case err != nil:
		return err
	case !c.CaughtUp:
		return errReadModelsFolding()
	}
	return missing
}

// errEventAfterTip returns the error for an event after the session's last one.
func errEventAfterTip(field string, at int64, tip uint32) error {
	e := problem.New(problem.CursorAhead, field, fmt.Sprintf("the session has no event %d yet: its last is %d", at, tip))
	e.Tip = &tip
	return e
}

// BlocksAt returns a page of the blocks that a session had in the state p, in display order, and the position of the
// next page, or nil at the end.
func (s *Store) BlocksAt(ctx context.Context, p SessionState, after BlockToken, size uint32) (list []*spoolv1.Block, next *BlockToken, err error) {
	rows, err := s.queries.BlocksAt(ctx, queries.BlocksAtParams{
		Tenant: p.Tenant, Session: p.ID, AfterOrd: after.Ord, AfterSeq: after.FirstSeq, Executions: max(1, int64(p.Count.Executions)), Seq: int64(p.Seq),
		Size: int32(size) + 1, Bytes: maxPageBytes,
	})
	if err != nil {
		return nil, nil, err
	}
	for i, r := range rows {
		if r.Block == "" || i == int(size) {
			last := rows[i-1]
			next = &BlockToken{Seq: p.Seq, Ord: int64(last.ExecutionOrd), FirstSeq: last.FirstSeq}
			break
		}
		b, err := p.blockAtState(r)
		if err != nil {
			return nil, nil, err
		}
		list = append(list, BlockMessage(b))
	}
	return list, next, nil
}

// blockAtState returns a block in the state that it had after the event of p. r is the row of the block in its
// present state; p contains the blocks that were open at that event.
func (p SessionState) blockAtState(r queries.BlocksAtRow) (b events.Block, err error) {
	if err := json.Unmarshal([]byte(r.Block), &b); err != nil {
		return b, errUnreadableEvent(err)
	}
	if r.LastSeq <= int64(p.Seq) {
		return b, nil
	}
	i := slices.IndexFunc(p.Blocks, func(open history.Block) bool { return open.Block.ID == b.ID })
	if i < 0 {
		return b, problem.New(problem.Internal, "", fmt.Sprintf("block %.200s was open at event %d, but the events up to it do not contain the block", b.ID, p.Seq))
	}
	return p.Blocks[i].Block, nil
}

// BlocksSince returns the first blocks that began or changed after an earlier event, in their state at a later one,
// and the number of all of them.
func (s *Store) BlocksSince(ctx context.Context, from, to SessionState, limit uint32) (list []*spoolv1.Block, total uint32, err error) {
	changed := []int64{} // seqs of their first events
	for _, b := range from.Blocks {
		i := slices.IndexFunc(to.Blocks, func(x history.Block) bool { return x.FirstSeq == b.FirstSeq })
		if i < 0 || to.Blocks[i].LastSeq != b.LastSeq {
			changed = append(changed, int64(b.FirstSeq))
		}
	}
	rows, err := s.queries.BlocksSince(ctx, queries.BlocksSinceParams{
		Tenant: to.Tenant, Session: to.ID, Executions: max(1, int64(to.Count.Executions)), Seq: int64(to.Seq), Since: int64(from.Seq), Changed: changed,
		Size: int32(limit), Bytes: maxPageBytes,
	})
	if err != nil {
		return nil, 0, err
	}
	for _, r := range rows {
		if r.Block == "" {
			break
		}
		b, err := to.blockAtState(queries.BlocksAtRow(r))
		if err != nil {
			return nil, 0, err
		}
		list = append(list, BlockMessage(b))
	}
	return list, to.Count.Blocks - from.Count.Blocks + uint32(len(changed)), nil
}

// BlockToken is a position in the list of blocks that a session has after an event. It is the page token of that
// list.
type BlockToken struct {
	Seq      uint32 // seq of the event
	Ord      int64
	FirstSeq int64
}

// BeforeFirstBlock returns the BlockToken before the first block of a session.
func BeforeFirstBlock() BlockToken { return BlockToken{Ord: -1} }

// String returns the page token.
func (t BlockToken) String() string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d/%d/%d", t.Seq, t.Ord, t.FirstSeq))
}

// ParseBlockToken parses a page token that BlockToken.String returned. field is the request field with the token.
func ParseBlockToken(field, token string) (t BlockToken, err error) {
	text, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		_, err = fmt.Sscanf(string(text), "%d/%d/%d", &t.Seq, &t.Ord, &t.FirstSeq)
	}
	if err != nil || t.String() != token {
		return t, problem.Invalid(field, "%s is not the token of a page of this list", fmt.Sprintf("%+q", truncate.Text(token, 64)))
	}
	return t, nil
}

// ExecutionsAt returns the latest executions of a session that had started in the state p, in their state then and in
// order. It leaves out executions that had ended at since, an earlier event of the session; a zero since leaves out
// none.
func (s *Store) ExecutionsAt(ctx context.Context, p, since SessionState, limit uint32) ([]*spoolv1.Execution, error) {
	open := []string{}
	for _, x := range since.Executions {
		open = append(open, x.ID)
	}
	rows, err := s.queries.ExecutionsAt(ctx, queries.ExecutionsAtParams{
		Tenant: p.Tenant, Session: p.ID, Seq: int64(p.Seq), Since: int64(since.Seq), Open: open, Size: int32(limit),
	})
	if err != nil {
		return nil, err
	}
	list, err := executionMessages(rows)
	if err != nil {
		return nil, err
	}
	slices.Reverse(list)
	for _, x := range list {
		// The log may contain metered requests of an execution only after the execution's end.
		x.Metered, x.MeteredCostUsd = nil, 0
		if x.Resolved != nil {
			text, err := withoutVariableValues(x.Resolved.Text)
			if err != nil {
				return nil, errUnreadableEvent(err)
			}
			x.Resolved = wirejson.JSONFromText(text)
		}
		if i := slices.IndexFunc(p.Executions, func(open history.Execution) bool { return open.ID == x.ExecutionId }); i >= 0 {
			p.setUnfinished(x, p.Executions[i])
		}
	}
	return list, nil
}

// withoutVariableValues returns the resolved data of an execution without the values of variables; names and origins are
// kept.
func withoutVariableValues(resolved string) (string, error) {
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(resolved), &all); err != nil || all["variables"] == nil {
		return resolved, err
	}
	var variables []map[string]json.RawMessage
	if err := json.Unmarshal(all["variables"], &variables); err != nil {
		return "", err
	}
	for _, v := range variables {
		delete(v, "value")
		delete(v, "sealed")
	}
	var err error
	if all["variables"], err = json.Marshal(variables); err != nil {
		return "", err
	}
	text, err := json.Marshal(all)
	return string(text), err
}

// setUnfinished sets the fields of an execution that ended after the event of p to their values before its end.
func (p SessionState) setUnfinished(x *spoolv1.Execution, was history.Execution) {
	x.Phase, x.Attempt, x.Executor, x.Model = was.Phase, was.Attempt, nilIfEmpty(was.Executor), nilIfEmpty(was.Model)
	x.Code, x.Message, x.Reason, x.Result, x.DurationMs = nil, nil, nil, nil, 0
	x.Usage = &spoolv1.Usage{
		InputTokens: clampUint32(was.Usage.InputTokens), OutputTokens: clampUint32(was.Usage.OutputTokens),
		CacheReadTokens: clampUint32(was.Usage.CacheReadTokens), CacheWriteTokens: clampUint32(was.Usage.CacheWriteTokens),
	}
	x.CostUsd, x.SandboxMs, x.SandboxCostUsd = was.Usage.CostUSD, float64(was.Sandboxed.Ms), was.Sandboxed.CostUSD
	x.DispatchedAt, x.StartedAt, x.EndedAt = timestampMessage(was.DispatchedAt), timestampMessage(was.StartedAt), nil
	latest := was.QueuedAt
	for _, t := range []*time.Time{was.DispatchedAt, was.StartedAt} {
		if t != nil && t.After(latest) {
			latest = *t
		}
	}
	x.UpdatedAt = timestampMessage(&latest)
	if p.Resolved == nil || p.Resolved.ExecutionID != x.ExecutionId {
		x.Resolved = nil
	}
}

// ConversationsAt returns the conversations of a session that had started in the state p, main and the first
// sub-agents', in their state then. Like ExecutionsAt, it leaves out those that had ended at since.
func (s *Store) ConversationsAt(ctx context.Context, p, since SessionState, limit int) ([]*spoolv1.Conversation, error) {
	open := []string{}
	for _, c := range since.Conversations {
		open = append(open, c.ID)
	}
	main := &spoolv1.Conversation{ConversationId: events.MainConversation, Status: "completed", StartedAt: timestampMessage(&p.State.Session.CreatedAt)}
	if x := p.ActiveExecution(); x != nil {
		main.Status, main.ExecutionId = "running", nilIfEmpty(x.ID)
	}
	list := []*spoolv1.Conversation{main}
	rows, err := s.queries.ConversationsAt(ctx, queries.ConversationsAtParams{
		Tenant: p.Tenant, Session: p.ID, Seq: int64(p.Seq), Since: int64(since.Seq), Open: open, Size: int32(limit),
	})
	for _, r := range rows {
		c := conversationMessage(queries.ConversationsRow(r))
		if slices.ContainsFunc(p.Conversations, func(open history.Conversation) bool { return open.ID == c.ConversationId }) {
			c.Status, c.EndedAt, c.DurationMs = "running", nil, 0
		}
		list = append(list, c)
	}
	return list, err
}

// FileEvents returns the changes of files after the last snapshot of the state p, up to a limit.
func (s *Store) FileEvents(ctx context.Context, p SessionState, limit int) (list []*spoolv1.FileChange, err error) {
	var after uint32
	if p.Snapshot != nil {
		after = p.Snapshot.Seq
	}
	if p.FileChanges == 0 {
		return nil, nil
	}
	err = s.EachEvent(ctx, p.Tenant, p.ID, after, p.Seq, history.FileChangeTypes(), limit, func(w events.WireEvent) error {
		var data struct {
			Path string `json:"path"`
			Size uint64 `json:"size"`
		}
		if err := json.Unmarshal(w.Data, &data); err != nil {
			return errUnreadableEvent(err)
		}
		list = append(list, &spoolv1.FileChange{
			Seq: w.Seq, Type: string(w.Type), Path: data.Path, Size: float64(data.Size), ExecutionId: nilIfEmpty(w.ExecutionID), Time: timestampMessage(&w.Time),
		})
		return nil
	})
	return list, err
}

// Snapshot is a snapshot of a workspace, and the session that it belongs to.
type Snapshot struct {
	history.Snapshot
	Session string // the session that the snapshot belongs to
}

// workspaceSnapshot returns the snapshot that contains a session's files: its own last one or, for a fork without a
// snapshot of its own, the one that it began with.
func (s *Store) workspaceSnapshot(ctx context.Context, p SessionState) (*Snapshot, error) {
	switch f := p.Parent; {
	case p.Snapshot != nil:
		return &Snapshot{*p.Snapshot, p.ID}, nil
	case f != nil && f.Snapshot != "":
		return s.inheritedSnapshot(ctx, p.Tenant, f)
	}
	return nil, nil
}

// inheritedSnapshot returns the snapshot of an ancestor that a fork began with.
func (s *Store) inheritedSnapshot(ctx context.Context, tenant string, f *events.SessionForked) (*Snapshot, error) {
	out := &Snapshot{Session: f.FilesOwner()}
	err := s.awaitAncestors(ctx, func() error {
		text, err := s.queries.SnapshotEvent(ctx, queries.SnapshotEventParams{
			Tenant: tenant, Session: out.Session, Seq: int64(f.SnapshotSeq), Snapshot: f.Snapshot,
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return ancestorBehindError()
		case err != nil:
			return err
		}
		var w events.WireEvent
		if err := json.Unmarshal([]byte(text), &w); err != nil {
			return errUnreadableEvent(err)
		}
		out.Snapshot = *history.Evolve(history.State{}, w.Seq, history.EventFromReadModel(w)).Snapshot
		return nil
	})
	return out, err
}

// SnapshotEvent is the seq of the event of a snapshot, and the snapshot's name.
type SnapshotEvent struct {
	Seq  uint32
	Name string
}

// maxListedSnapshots is the largest number of snapshots that Snapshots returns.
const maxListedSnapshots = 10_000

// Snapshots returns the snapshots of a session after an event, in order.
func (s *Store) Snapshots(ctx context.Context, p SessionState) (list []SnapshotEvent, err error) {
	err = s.EachEvent(ctx, p.Tenant, p.ID, p.Seq, 1<<32-1, []events.Type{events.WorkspaceSynced{}.EventType()}, maxListedSnapshots, func(w events.WireEvent) error {
		if d, ok := history.EventFromReadModel(w).Data.(events.WorkspaceSynced); ok && d.Snapshot != "" {
			list = append(list, SnapshotEvent{w.Seq, d.Snapshot})
		}
		return nil
	})
	return list, err
}

// timestampMessage converts a time to an API message; it returns nil for nil.
func timestampMessage(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return wirejson.TimestampOf(*t)
}
