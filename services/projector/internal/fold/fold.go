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

// batchFold holds the state of one call of Model.Fold: the rows and announcements that it has changed so far.
type batchFold struct {
	model   *Model
	bare    bool
	out     Changes
	scratch []byte // reused to encode rows

	used          []*sessionRows
	live          map[RowKey]*Announcement
	order         []RowKey
	sessions      []*cachedRow[Session]
	executions    []*cachedRow[Execution]
	blocks        []*cachedRow[Block]
	calls         []*cachedRow[ToolCall]
	conversations []*cachedRow[Conversation]
	approvals     []*cachedRow[Approval]
	sandboxes     []*cachedRow[Sandbox]
	files         []*cachedRow[File]
	usage         []*cachedRow[ModelUsage]
	keys          []*cachedRow[APIKey]
	entries       []*cachedRow[CatalogueEntry]
	versions      []*cachedRow[CatalogueVersion]
	tenantUsage   []*cachedRow[TenantUsage]
	tenantBudgets []*cachedRow[TenantBudget]
	tenantLimits  []*cachedRow[TenantLimits]
	deleted       []*cachedRow[DeletedSession]
}

// Fold applies a batch of commits to the model and returns the changed rows, which the caller must write to Postgres.
// Before that, the caller must have called PutRows until MissingRows returns no rows for the batch. Folding a batch in
// pieces results in the same rows. After an error, and if the changes cannot be written, the caller must discard the
// model.
func (m *Model) Fold(b CommitBatch) (Changes, error) {
	f := batchFold{model: m, bare: b.Bare, live: map[RowKey]*Announcement{}}
	for _, rec := range b.Records {
		var err error
		f.addAuditRow(rec)
		switch {
		case rec.Subject.Aspect == events.Key:
			f.foldAPIKey(rec)
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
	return f.collectChanges()
}

// collectChanges returns the rows that this fold has changed, encoded as Postgres stores them.
func (f *batchFold) collectChanges() (Changes, error) {
	if err := encodeBlocks(f.blocks); err != nil {
		return Changes{}, err
	}
	if err := encodeEntryStates(f.entries); err != nil {
		return Changes{}, err
	}
	for _, a := range f.used {
		if err := a.encodeDayUsage(); err != nil {
			return Changes{}, err
		}
	}
	c := f.out
	c.Sessions, c.Executions, c.Blocks, c.Calls = takeDirtyRows(f.sessions), takeDirtyRows(f.executions), takeDirtyRows(f.blocks), takeDirtyRows(f.calls)
	c.Conversations, c.Approvals, c.Sandboxes, c.Keys = takeDirtyRows(f.conversations), takeDirtyRows(f.approvals), takeDirtyRows(f.sandboxes), takeDirtyRows(f.keys)
	c.Files, c.Usage = takeDirtyRows(f.files), takeDirtyRows(f.usage)
	c.Entries, c.Versions = takeDirtyRows(f.entries), takeDirtyRows(f.versions)
	c.TenantUsage, c.TenantBudgets, c.TenantLimits = takeDirtyRows(f.tenantUsage), takeDirtyRows(f.tenantBudgets), takeDirtyRows(f.tenantLimits)
	deleted := takeDirtyRows(f.deleted)
	c.Deleted = append(deleted.New, deleted.Changed...)
	for _, k := range f.order {
		l := f.live[k]
		if a := f.model.sessions[k]; a.session != nil {
			l.Tip = a.session.row.Tip
		}
		c.Announcements = append(c.Announcements, *l)
	}
	f.releaseFinalBlocks()
	for _, a := range f.used {
		a.kept = nil
		if n := a.rowCount(); n != a.counted {
			f.model.rows += n - a.counted
			a.counted = n
		}
	}
	return c, nil
}

// releaseFinalBlocks releases the content of blocks that no further event changes. Only their ids stay in memory, because a long execution
// has many.
func (f *batchFold) releaseFinalBlocks() {
	for _, e := range f.blocks {
		if a := f.model.sessions[RowKey{e.row.Tenant, e.row.Session}]; e.row.isFinal() && a.blocks[e.row.ID] == e {
			a.blocks[e.row.ID] = f.model.final
		}
	}
}

// useSession returns the rows of a session in the model, and records that this fold uses them.
func (f *batchFold) useSession(k RowKey) *sessionRows {
	a := f.model.useSession(k)
	f.used = append(f.used, a)
	return a
}

// announcementOf returns the announcement to gateways about the session k. The caller adds this fold's changes to it.
func (f *batchFold) announcementOf(k RowKey) *Announcement {
	l := f.live[k]
	if l == nil {
		l = &Announcement{Session: k}
		f.live[k] = l
		f.order = append(f.order, k)
	}
	return l
}

// foldSessionCommit folds a commit of a session into the rows of the session.
func (f *batchFold) foldSessionCommit(rec eventlog.Record) error {
	k := RowKey{rec.Subject.Tenant, rec.Subject.ID}
	a := f.useSession(k)
	if err := f.countEvents(a, rec); err != nil {
		return err
	}
	position := rec.Position.String()
	var before *Session
	if a.session != nil {
		row := a.session.row
		before = &row
	}
	defer f.noteChange(a, before, a.deleted, rec.Position)
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

// noteChange sets ChangedAt of a session that a commit created, deleted, or changed in what lists of sessions show. before is the session's row before
// the commit, nil for none, and deleted whether the session was deleted before.
func (f *batchFold) noteChange(a *sessionRows, before *Session, deleted bool, position eventlog.Position) {
	seq := int64(position.Seq) //nolint:gosec // sequences of streams are far below the limit
	switch {
	case a.session != nil && (before == nil || !a.session.row.isListedAs(*before)):
		a.session.row.ChangedAt = seq
	case a.deleted && !deleted:
		a.tombstone.row.ChangedAt = seq
	default:
		return
	}
	f.announcementOf(a.key).Changed = true
}

// isListedAs reports whether lists of sessions show the same of two states of a session. The time of its last event does not count.
func (s Session) isListedAs(o Session) bool {
	o.UpdatedAt, o.Tip, o.TipPosition, o.Spent, o.ChangedAt = s.UpdatedAt, s.Tip, s.TipPosition, s.Spent, s.ChangedAt
	return s == o
}

// foldEvent gives an event the session's next seq, adds the row of the event, and applies the event to the session's
// other rows. With CommitBatch.Bare it does not apply the event to other rows.
func (f *batchFold) foldEvent(a *sessionRows, position string, actor events.Actor, e events.Event) error {
	s := f.findOrAddSession(a, e)
	s.Tip++
	s.TipPosition, s.UpdatedAt = position, postgresTime(e.Time)
	row, err := f.newEventRow(a, s, position, e)
	if err != nil {
		return err
	}
	f.out.Events = append(f.out.Events, row)
	if err := f.evolveState(a, s, e); err != nil {
		return err
	}
	l := f.announcementOf(a.key)
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
	if id := validRowID(e.ExecutionID); id != "" {
		x := f.findOrAddExecution(a, s, id, e)
		if err := f.addReportedUsage(a, &x.row, e); err != nil {
			return err
		}
		ended = x.row.hasEnded()
		if !ended {
			f.foldExecution(a, s, x, e)
			f.foldApproval(a, s, x, actor, e)
			if x.row.hasEnded() {
				if err := f.addUsageAtExecutionEnd(a, &x.row, e); err != nil {
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
		f.foldToolCall(a, s, e)
		f.foldConversation(a, s, e)
	}
	f.foldSandbox(a, e)
	f.foldFile(a, s, e)
	f.foldModelRequest(a, e)
	return nil
}

// newEventRow returns the row of an event in the table events. Its seq is the session's tip, which counts the event
// already.
func (f *batchFold) newEventRow(a *sessionRows, s *Session, position string, e events.Event) (*Event, error) {
	name := e.Type()
	if f.bare {
		e.Data = events.OpaquePayload{Name: name, Raw: json.RawMessage(history.UnprojectableData)}
	}
	var err error
	if f.scratch, err = e.AppendWire(f.scratch[:0], a.key.ID, uint32(s.Tip), position); err != nil {
		return nil, err
	}
	return &Event{Tenant: a.key.Tenant, Session: a.key.ID, Seq: s.Tip, Type: validText(string(name)), JSON: validText(string(f.scratch))}, nil
}

// findOrAddSession returns the session's row and marks it as changed. If there is none, it adds the row, with e as the
// first event. An event of any type can be the first one, because earlier commits may be unreadable.
func (f *batchFold) findOrAddSession(a *sessionRows, e events.Event) *Session {
	if a.session == nil {
		a.session = &cachedRow[Session]{row: Session{
			Tenant: a.key.Tenant, ID: a.key.ID, Group: f.model.group, Status: sessionStatusOpen, Options: "{}", Environments: "[]", CreatedAt: postgresTime(e.Time),
		}}
	}
	return markChanged(&f.sessions, a.session)
}

// foldAfterDeletion folds an event of a session that was deleted before. Only sandbox_usage, run_retired and
// content_removed have an effect.
func (f *batchFold) foldAfterDeletion(a *sessionRows, rec eventlog.Record, e events.Event) error {
	switch d := e.Data.(type) {
	case events.SandboxUsage:
		return f.addSandboxCostAfterDeletion(a, e, d)
	case events.RunRetired:
		f.replaceAuditRows(rec, d)
		markChanged(&f.deleted, a.tombstone).Agent = "" // the commit that names it may be removed from now on
		f.deleteEventsAndBlocks(a)
		return f.replaceSessionUsage(a, d)
	case events.ContentRemoved:
		t := markChanged(&f.deleted, a.tombstone)
		t.Removed, t.Agent = true, ""
		return f.subtractStoredBytes(a)
	}
	return nil
}

// foldSession folds an event into the session's row.
func (f *batchFold) foldSession(s *Session, e events.Event) {
	switch d := e.Data.(type) {
	case events.SessionCreated:
		s.Agent, s.AgentVersion, s.Architecture, s.Provider = validText(d.Agent), validText(d.AgentVersion), validText(d.Architecture), validText(d.Provider)
		s.Options, s.Metadata, s.CreatedAt = optionsJSON(d.Options), optionalJSON(d.Metadata), postgresTime(e.Time)
		s.AgentRef, s.Instance, s.Environments = validText(d.AgentRef.String()), validText(d.Instance.String()), referencesJSON(d.Environments)
	case events.SessionForked:
		text, _ := marshalUnescaped(d) // a struct of strings and numbers always encodes
		s.Parent, s.Forked = validText(d.Parent), validText(text)
	case events.SessionOptionsUpdated:
		s.Options = optionsJSON(d.Options)
		if len(d.Metadata) > 0 {
			s.Metadata = optionalJSON(d.Metadata)
		}
	case events.SessionIdle:
		s.Idle = true
	case events.ExecutionDispatched:
		s.Idle = false
	case events.SessionClosed:
		s.Status = sessionStatusClosed
	case events.SandboxUsage:
		s.SandboxMs += clampInt64(d.DurationMs)
		s.SandboxCostUSD = clampFinite(s.SandboxCostUSD + d.CostUSD)
	case events.WorkspaceSynced:
		s.Snapshot, s.SnapshotAt = validText(d.Snapshot), postgresTimePointer(e.Time)
		s.WorkspaceFiles, s.WorkspaceBytes = int64(d.Files), clampInt64(d.Bytes)
	}
}

// deleteSession deletes the rows of a session from the model and from Postgres, except its events and blocks: forks
// read these until the session is retired. Rows that this fold has changed are not written.
func (f *batchFold) deleteSession(a *sessionRows, e events.Event) error {
	if err := a.encodeDayUsage(); err != nil {
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
	f.out.States = removeMatching(f.out.States, func(r *SavedSessionState) bool { return r.Tenant == a.key.Tenant && r.Session == a.key.ID })
	f.out.Ended = removeMatching(f.out.Ended, func(r EndedExecution) bool { return r.Session == a.key })
	if stored {
		f.out.Gone = append(f.out.Gone, a.key)
	}
	a.tombstone = &cachedRow[DeletedSession]{row: DeletedSession{Tenant: a.key.Tenant, ID: a.key.ID, Group: f.model.group, At: postgresTime(e.Time), Spent: a.session.row.Spent, Parent: a.session.row.Parent, Forked: a.session.row.Forked, Agent: a.session.row.Agent}}
	markChanged(&f.deleted, a.tombstone)
	fresh := newSessionRows(a.key)
	a.session, a.deleted, a.complete, a.kept, a.history = nil, true, false, a.blocks, nil
	a.executions, a.blocks, a.calls = fresh.executions, fresh.blocks, fresh.calls
	a.conversations, a.approvals, a.sandboxes = fresh.conversations, fresh.approvals, fresh.sandboxes
	a.files, a.usage, a.usageByDay = fresh.files, fresh.usage, nil
	return nil
}

// deleteEventsAndBlocks deletes the events and blocks of a session that was deleted before and is retired now.
func (f *batchFold) deleteEventsAndBlocks(a *sessionRows) {
	discardChanges(a.kept)
	f.out.Events = removeMatching(f.out.Events, func(r *Event) bool { return r.Tenant == a.key.Tenant && r.Session == a.key.ID })
	f.out.Retired = append(f.out.Retired, a.key)
}

// discardChanges marks rows as unchanged, so that they are not written to Postgres.
func discardChanges[R any](rows map[string]*cachedRow[R]) {
	for _, e := range rows {
		if e != nil {
			e.dirty = false
		}
	}
}

// removeMatching removes the elements for which gone returns true from the list, in place, and returns the shortened
// list.
func removeMatching[R any](list []R, gone func(R) bool) []R {
	kept := list[:0]
	for _, r := range list {
		if !gone(r) {
			kept = append(kept, r)
		}
	}
	return kept
}

// foldBlock folds an event about a block of a conversation into the block's row.
func (f *batchFold) foldBlock(a *sessionRows, s *Session, e events.Event) {
	id := validRowID(blocks.ChangedBlockID(e))
	if id == "" {
		return
	}
	was := a.blocks[id]
	if was != nil && was.row.isFinal() {
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
		was = &cachedRow[Block]{row: Block{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, FirstSeq: s.Tip, ExecutionOrd: f.executionOrder(a, e),
		}}
		a.blocks[id] = was
	}
	b := markChanged(&f.blocks, was)
	b.block, b.LastSeq = *next, s.Tip
	b.Execution, b.Conversation = validRowID(next.ExecutionID), validRowID(next.ConversationID)
	b.Kind, b.Status = validText(string(next.Kind)), validText(string(next.Status))
}

// executionOrder returns the number by which a block is ordered: that of its execution within the session. A block
// without an execution is ordered with the first execution, as in blocks.BlockView.
func (f *batchFold) executionOrder(a *sessionRows, e events.Event) int32 {
	if x := a.executions[validRowID(e.ExecutionID)]; x != nil {
		return x.row.Ord
	}
	return 0
}

// optionsJSON returns the JSON of session options, as the value of a column.
func optionsJSON(o events.Options) string {
	// A struct of strings and numbers: it always encodes.
	text, _ := marshalUnescaped(o)
	return validText(text)
}

// marshalUnescaped returns the JSON of v without HTML escapes, as stored events have it.
func marshalUnescaped(v any) (string, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return "", err
	}
	return string(bytes.TrimSuffix(b.Bytes(), []byte("\n"))), nil
}
