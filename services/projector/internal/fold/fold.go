package fold

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/events/history"
)

// folding holds what one call of Model.Fold has changed so far.
type folding struct {
	model   *Model
	bare    bool
	out     Changes
	scratch []byte // reused to encode rows

	used          []*aggregate
	live          map[Key]*Live
	order         []Key
	sessions      []*entry[Session]
	executions    []*entry[Execution]
	blocks        []*entry[Block]
	calls         []*entry[ToolCall]
	conversations []*entry[Conversation]
	approvals     []*entry[Approval]
	sandboxes     []*entry[Sandbox]
	files         []*entry[File]
	usage         []*entry[Usage]
	keys          []*entry[APIKey]
	entries       []*entry[Entry]
	versions      []*entry[Version]
	tenantUsage   []*entry[TenantUsage]
	tenantBudgets []*entry[TenantBudget]
	tenantLimits  []*entry[TenantLimits]
	deleted       []*entry[Deleted]
}

// Fold applies a batch of commits to the model and returns the changed rows, which the caller stores. The caller must have put all rows that
// Missing returns for the batch. A batch that is folded in pieces results in the same rows. After an error, and if the changes cannot be stored,
// the model must be discarded.
func (m *Model) Fold(b Batch) (Changes, error) {
	f := folding{model: m, bare: b.Bare, live: map[Key]*Live{}}
	for _, rec := range b.Records {
		var err error
		f.addAudit(rec)
		switch {
		case rec.Subject.Aspect == events.Key:
			f.foldKey(rec)
		case rec.Subject.Aspect == events.TenantBudget:
			f.foldBudget(rec)
		case rec.Subject.Aspect == events.LimitsAspect:
			err = f.foldLimits(rec)
		case rec.Subject.Aspect.IsCatalogue():
			err = f.foldCatalogue(rec)
		default:
			err = f.foldSessionCommit(rec)
		}
		if err != nil {
			return Changes{}, fmt.Errorf("fold %s: %w", rec.Position, err)
		}
	}
	for i := range b.Poison {
		f.out.Poison = append(f.out.Poison, &b.Poison[i])
	}
	return f.changes()
}

// changes returns the rows that this fold has changed, encoded for Postgres.
func (f *folding) changes() (Changes, error) {
	if err := encodeBlocks(f.blocks); err != nil {
		return Changes{}, err
	}
	if err := encodeStates(f.entries); err != nil {
		return Changes{}, err
	}
	for _, a := range f.used {
		if err := a.encodeShares(); err != nil {
			return Changes{}, err
		}
	}
	c := f.out
	c.Sessions, c.Executions, c.Blocks, c.Calls = splitRows(f.sessions), splitRows(f.executions), splitRows(f.blocks), splitRows(f.calls)
	c.Conversations, c.Approvals, c.Sandboxes, c.Keys = splitRows(f.conversations), splitRows(f.approvals), splitRows(f.sandboxes), splitRows(f.keys)
	c.Files, c.Usage = splitRows(f.files), splitRows(f.usage)
	c.Entries, c.Versions = splitRows(f.entries), splitRows(f.versions)
	c.TenantUsage, c.TenantBudgets, c.TenantLimits = splitRows(f.tenantUsage), splitRows(f.tenantBudgets), splitRows(f.tenantLimits)
	deleted := splitRows(f.deleted)
	c.Deleted = append(deleted.New, deleted.Changed...)
	for _, k := range f.order {
		l := f.live[k]
		if a := f.model.sessions[k]; a.session != nil {
			l.Tip = a.session.row.Tip
		}
		c.Live = append(c.Live, *l)
	}
	f.forgetFinalBlocks()
	for _, a := range f.used {
		a.kept = nil
		if n := a.size(); n != a.counted {
			f.model.rows += n - a.counted
			a.counted = n
		}
	}
	return c, nil
}

// forgetFinalBlocks releases the content of blocks that no further event changes. Only their ids stay in memory, because a long execution
// has many.
func (f *folding) forgetFinalBlocks() {
	for _, e := range f.blocks {
		if a := f.model.sessions[Key{e.row.Tenant, e.row.Session}]; e.row.final() && a.blocks[e.row.ID] == e {
			a.blocks[e.row.ID] = f.model.final
		}
	}
}

// useSession returns a session of the model, and records that this fold uses it.
func (f *folding) useSession(k Key) *aggregate {
	a := f.model.useSession(k)
	f.used = append(f.used, a)
	return a
}

// announcement returns the message that announces this fold's changes of a session to gateways, which the caller may change.
func (f *folding) announcement(k Key) *Live {
	l := f.live[k]
	if l == nil {
		l = &Live{Session: k}
		f.live[k] = l
		f.order = append(f.order, k)
	}
	return l
}

// foldSessionCommit folds a commit of a session.
func (f *folding) foldSessionCommit(rec eventlog.Record) error {
	k := Key{rec.Subject.Tenant, rec.Subject.ID}
	a := f.useSession(k)
	if err := f.countEvents(a, rec); err != nil {
		return err
	}
	position := rec.Position.String()
	for _, e := range rec.Events {
		e.Time = clampTime(e.Time)
		if a.deleted {
			if err := f.foldAfterDeletion(a, rec, e); err != nil {
				return err
			}
			continue
		}
		if err := f.foldEvent(a, position, rec.Commit.Actor, e); err != nil {
			return err
		}
	}
	return nil
}

// foldEvent gives an event the session's next seq, adds its row, and then applies the event to the session's other
// rows. If f.bare is set, it leaves out the last step; see Batch.Bare.
func (f *folding) foldEvent(a *aggregate, position string, actor events.Actor, e events.Event) error {
	s := f.session(a, e)
	s.Tip++
	s.TipPosition, s.UpdatedAt = position, pgTime(e.Time)
	row, err := f.eventRow(a, s, position, e)
	if err != nil {
		return err
	}
	f.out.Events = append(f.out.Events, row)
	if err := f.evolveState(a, s, e); err != nil {
		return err
	}
	l := f.announcement(a.key)
	l.Events = append(l.Events, row)
	l.Tip = s.Tip
	if _, gone := e.Data.(events.SessionDeleted); gone {
		return f.deleteSession(a, e)
	}
	if f.bare {
		return nil
	}
	f.foldSession(s, e)
	ended := false
	if id := rowKey(e.ExecutionID); id != "" {
		x := f.execution(a, s, id, e)
		if err := f.addReportedUsage(a, &x.row, e); err != nil {
			return err
		}
		ended = x.row.ended()
		if !ended {
			f.foldExecution(a, s, x, e)
			f.foldApproval(a, s, x, actor, e)
			if x.row.ended() {
				if err := f.addUsageAtEnd(a, &x.row, e); err != nil {
					return err
				}
			}
		}
	}
	if e.ExecutionID == "" {
		if err := f.addReportedUsage(a, nil, e); err != nil {
			return err
		}
	}
	f.foldBlock(a, s, e)
	if !ended {
		f.foldCall(a, s, e)
		f.foldConversation(a, s, e)
	}
	f.foldSandbox(a, e)
	f.foldFile(a, s, e)
	f.foldModelCall(a, e)
	return nil
}

// eventRow returns the row of an event. Its seq is the session's tip, which counts the event already.
func (f *folding) eventRow(a *aggregate, s *Session, position string, e events.Event) (*Event, error) {
	name := e.Type()
	if f.bare {
		e.Data = events.OpaquePayload{Name: name, Raw: json.RawMessage(history.UnprojectableData)}
	}
	var err error
	if f.scratch, err = e.AppendWire(f.scratch[:0], a.key.ID, uint32(s.Tip), position); err != nil {
		return nil, err
	}
	return &Event{Tenant: a.key.Tenant, Session: a.key.ID, Seq: s.Tip, Type: clean(string(name)), JSON: clean(string(f.scratch))}, nil
}

// session returns the session's row, which counts as changed. The first event of any type creates the row, because the first commit of the
// session may be unreadable.
func (f *folding) session(a *aggregate, e events.Event) *Session {
	if a.session == nil {
		a.session = &entry[Session]{row: Session{
			Tenant: a.key.Tenant, ID: a.key.ID, Group: f.model.group, Status: statusOpen, Options: "{}", Environments: "[]", CreatedAt: pgTime(e.Time),
		}}
	}
	return markChanged(&f.sessions, a.session)
}

// foldAfterDeletion folds an event after session_deleted. Only sandbox_usage, run_retired and content_removed have an effect.
func (f *folding) foldAfterDeletion(a *aggregate, rec eventlog.Record, e events.Event) error {
	switch d := e.Data.(type) {
	case events.SandboxUsage:
		return f.addUsageAfterDeletion(a, e, d)
	case events.RunRetired:
		f.keepAudit(rec, d)
		f.deleteContent(a)
		return f.replaceUsage(a, d)
	case events.ContentRemoved:
		markChanged(&f.deleted, a.tombstone).Removed = true
		return f.subtractStored(a)
	}
	return nil
}

// foldSession folds an event into the session's row.
func (f *folding) foldSession(s *Session, e events.Event) {
	switch d := e.Data.(type) {
	case events.SessionCreated:
		s.Agent, s.AgentVersion, s.Architecture, s.Provider = clean(d.Agent), clean(d.AgentVersion), clean(d.Architecture), clean(d.Provider)
		s.Options, s.Metadata, s.CreatedAt = optionsValue(d.Options), jsonValue(d.Metadata), pgTime(e.Time)
		s.AgentRef, s.Instance, s.Environments = clean(d.AgentRef.String()), clean(d.Instance.String()), referencesValue(d.Environments)
	case events.SessionForked:
		text, _ := marshal(d) // a struct of strings and numbers always encodes
		s.Parent, s.Forked = clean(d.Parent), clean(text)
	case events.SessionOptionsUpdated:
		s.Options = optionsValue(d.Options)
		if len(d.Metadata) > 0 {
			s.Metadata = jsonValue(d.Metadata)
		}
	case events.SessionIdle:
		s.Idle = true
	case events.ExecutionDispatched:
		s.Idle = false
	case events.SessionClosed:
		s.Status = statusClosed
	case events.SandboxUsage:
		s.SandboxMs += clampInt64(d.DurationMs)
		s.SandboxCostUSD = finite(s.SandboxCostUSD + d.CostUSD)
	case events.WorkspaceSynced:
		s.Snapshot, s.SnapshotAt = clean(d.Snapshot), pgTimePointer(e.Time)
		s.WorkspaceFiles, s.WorkspaceBytes = int64(d.Files), clampInt64(d.Bytes)
	}
}

// deleteSession deletes the rows of a session, except its events and blocks: forks read them until the session is retired. Rows that this fold has
// changed are not written.
func (f *folding) deleteSession(a *aggregate, e events.Event) error {
	if err := a.encodeShares(); err != nil {
		return err
	}
	stored := a.session.stored
	// Changes of this fold are not written.
	a.session.dirty = false
	discardChanges(a.executions)
	discardChanges(a.calls)
	discardChanges(a.conversations)
	discardChanges(a.approvals)
	discardChanges(a.sandboxes)
	discardChanges(a.files)
	discardChanges(a.usage)
	f.out.States = remove(f.out.States, func(r *SavedState) bool { return r.Tenant == a.key.Tenant && r.Session == a.key.ID })
	f.out.Ended = remove(f.out.Ended, func(r Ended) bool { return r.Session == a.key })
	if stored {
		f.out.Gone = append(f.out.Gone, a.key)
	}
	a.tombstone = &entry[Deleted]{row: Deleted{Tenant: a.key.Tenant, ID: a.key.ID, Group: f.model.group, At: pgTime(e.Time), Spent: a.session.row.Spent, Parent: a.session.row.Parent, Forked: a.session.row.Forked}}
	markChanged(&f.deleted, a.tombstone)
	fresh := newAggregate(a.key)
	a.session, a.deleted, a.complete, a.kept, a.history = nil, true, false, a.blocks, nil
	a.executions, a.blocks, a.calls = fresh.executions, fresh.blocks, fresh.calls
	a.conversations, a.approvals, a.sandboxes = fresh.conversations, fresh.approvals, fresh.sandboxes
	a.files, a.usage, a.shares = fresh.files, fresh.usage, nil
	return nil
}

// deleteContent deletes the events and blocks of a session that was deleted before, when it is retired.
func (f *folding) deleteContent(a *aggregate) {
	discardChanges(a.kept)
	f.out.Events = remove(f.out.Events, func(r *Event) bool { return r.Tenant == a.key.Tenant && r.Session == a.key.ID })
	f.out.Retired = append(f.out.Retired, a.key)
}

// discardChanges marks rows as unchanged, so that they are not written.
func discardChanges[R any](rows map[string]*entry[R]) {
	for _, e := range rows {
		if e != nil {
			e.dirty = false
		}
	}
}

// remove returns the list without the elements for which gone returns true. It reuses the array of the list.
func remove[R any](list []R, gone func(R) bool) []R {
	kept := list[:0]
	for _, r := range list {
		if !gone(r) {
			kept = append(kept, r)
		}
	}
	return kept
}

// foldBlock folds an event into the block that it is about.
func (f *folding) foldBlock(a *aggregate, s *Session, e events.Event) {
	id := rowKey(blocks.ChangedBlockID(e))
	if id == "" {
		return
	}
	was := a.blocks[id]
	if was != nil && was.row.final() {
		return
	}
	var prev *events.Block
	if was != nil {
		prev = &was.row.block
	}
	next := blocks.Reduce(prev, e)
	if next == nil {
		return
	}
	next.Time = clampTime(next.Time)
	if was == nil {
		was = &entry[Block]{row: Block{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, FirstSeq: s.Tip, ExecutionOrd: f.executionOrd(a, e),
		}}
		a.blocks[id] = was
	}
	b := markChanged(&f.blocks, was)
	b.block, b.LastSeq = *next, s.Tip
	b.Execution, b.Conversation = rowKey(next.ExecutionID), rowKey(next.ConversationID)
	b.Kind, b.Status = clean(string(next.Kind)), clean(string(next.Status))
}

// executionOrd returns the order of a block's execution. A block without an execution is ordered with the first one, as in
// blocks.BlockView.
func (f *folding) executionOrd(a *aggregate, e events.Event) int32 {
	if x := a.executions[rowKey(e.ExecutionID)]; x != nil {
		return x.row.Ord
	}
	return 0
}

// optionsValue returns the row value of session options: JSON.
func optionsValue(o events.Options) string {
	// A struct of strings and numbers: it always encodes.
	text, _ := marshal(o)
	return clean(text)
}

// marshal encodes JSON without HTML escapes, like stored events.
func marshal(v any) (string, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return "", err
	}
	return string(bytes.TrimSuffix(b.Bytes(), []byte("\n"))), nil
}
