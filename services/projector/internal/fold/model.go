package fold

import (
	"container/list"
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/events/history"
)

// Model caches the rows of one projector group in memory and folds commits into them. It must be used by one goroutine.
// If changes could not be written to Postgres, the caller must discard the Model, because it has the changes already.
type Model struct {
	group         int16
	limit         int
	sessions      map[RowKey]*sessionRows
	recent        *list.List // of *sessionRows, most recently used first
	keys          map[RowKey]*cachedRow[APIKey]
	entries       map[RowKey]*cachedRow[CatalogueEntry]
	versions      map[ChildKey]*cachedRow[CatalogueVersion]
	rows          int
	stateInterval int64 // defaultStateInterval, except in tests

	// final stands for each block that is complete and stored, of which no further event changes anything.
	final *cachedRow[Block]

	lastDay  string // result of the last call of cachedUTCDay
	dayBegin int64  // Unix time at which lastDay begins; not set while lastDay is ""

	tenantUsage   map[RowKey]*cachedRow[TenantUsage]
	tenantBudgets map[RowKey]*cachedRow[TenantBudget]
	tenantLimits  map[string]*cachedRow[TenantLimits] // by tenant
}

// New returns an empty Model of a projector group. It keeps about limit rows in memory.
func New(group, limit int) *Model {
	return &Model{
		group: int16(group), limit: limit, sessions: map[RowKey]*sessionRows{}, recent: list.New(), keys: map[RowKey]*cachedRow[APIKey]{},
		entries: map[RowKey]*cachedRow[CatalogueEntry]{}, versions: map[ChildKey]*cachedRow[CatalogueVersion]{},
		tenantUsage: map[RowKey]*cachedRow[TenantUsage]{}, tenantBudgets: map[RowKey]*cachedRow[TenantBudget]{},
		tenantLimits: map[string]*cachedRow[TenantLimits]{}, stateInterval: defaultStateInterval,
		final: &cachedRow[Block]{row: Block{Status: string(events.StatusComplete)}, stored: true},
	}
}

// cachedRow is a row that a Model has in memory. A nil cachedRow means that Postgres does not have the row.
type cachedRow[R any] struct {
	row    R
	stored bool // Postgres has the row, in this or an earlier state
	dirty  bool // whether the present fold changed the row
}

// sessionRows holds the rows of one session that a Model has in memory.
type sessionRows struct {
	key       RowKey
	element   *list.Element
	session   *cachedRow[Session] // nil if the session does not exist
	deleted   bool
	tombstone *cachedRow[DeletedSession]   // set if the session is deleted
	kept      map[string]*cachedRow[Block] // blocks of a session that this fold deleted; they are kept until it is retired
	// complete means that rows that are not in memory do not exist, because the session began while it was in memory.
	complete bool
	counted  int // number of its rows that are counted in Model.rows

	executions    map[string]*cachedRow[Execution]
	blocks        map[string]*cachedRow[Block]
	calls         map[string]*cachedRow[ToolCall]
	conversations map[string]*cachedRow[Conversation]
	approvals     map[string]*cachedRow[Approval]
	sandboxes     map[string]*cachedRow[Sandbox]
	files         map[string]*cachedRow[File]
	usage         map[string]*cachedRow[ModelUsage]

	history *history.State // state after the last event; nil if it is not in memory

	usageByDay        map[string]dayUsage // Session.Spent by day; nil if it was not decoded
	usageByDayChanged bool                // whether Session.Spent lacks a part of usageByDay
}

// newSessionRows returns the rows of the session k, without any row.
func newSessionRows(k RowKey) *sessionRows {
	return &sessionRows{
		key: k, executions: map[string]*cachedRow[Execution]{}, blocks: map[string]*cachedRow[Block]{}, calls: map[string]*cachedRow[ToolCall]{},
		conversations: map[string]*cachedRow[Conversation]{}, approvals: map[string]*cachedRow[Approval]{}, sandboxes: map[string]*cachedRow[Sandbox]{},
		files: map[string]*cachedRow[File]{}, usage: map[string]*cachedRow[ModelUsage]{},
	}
}

// rowCount returns the number of the session's rows in memory.
func (a *sessionRows) rowCount() int {
	return 1 + len(a.executions) + len(a.blocks) + len(a.calls) + len(a.conversations) + len(a.approvals) + len(a.sandboxes) + len(a.files) + len(a.usage)
}

// MissingRows lists, by table, the rows that the caller of Model.Fold must first read from Postgres and pass to
// Model.PutRows.
type MissingRows struct {
	Sessions      []RowKey
	Histories     []RowKey // sessions whose last saved state, and the events since, are needed
	Keys          []RowKey
	Entries       []RowKey
	Versions      []ChildKey
	Executions    []ChildKey
	Blocks        []ChildKey
	Calls         []ChildKey
	Conversations []ChildKey
	Approvals     []ChildKey
	Sandboxes     []ChildKey
	Files         []ChildKey
	Usage         []ChildKey
	TenantUsage   []RowKey
	TenantBudgets []RowKey
	TenantLimits  []string // tenants
}

// Empty reports whether no rows are missing.
func (m MissingRows) Empty() bool {
	return len(m.Sessions)+len(m.Histories)+len(m.Keys)+len(m.Entries)+len(m.Versions)+len(m.Executions)+len(m.Blocks)+len(m.Calls)+len(m.Conversations)+len(m.Approvals)+len(m.Sandboxes)+len(m.Files)+len(m.Usage)+
		len(m.TenantUsage)+len(m.TenantBudgets)+len(m.TenantLimits) == 0
}

// FoundRows holds those of the rows listed in a MissingRows that exist in Postgres.
type FoundRows struct {
	Sessions      []Session
	Deleted       []DeletedSession
	States        []SavedSessionState // the last one of each session
	Events        []Event             // events of each session after its state, ascending
	Keys          []APIKey
	Entries       []CatalogueEntry
	Versions      []CatalogueVersion
	Executions    []Execution
	Blocks        []Block
	Calls         []ToolCall
	Conversations []Conversation
	Approvals     []Approval
	Sandboxes     []Sandbox
	Files         []File
	Usage         []ModelUsage
	TenantUsage   []TenantUsage
	TenantBudgets []TenantBudget
	TenantLimits  []TenantLimits
}

// MissingRows returns the rows that Fold needs for the batch and that are not in memory, without duplicates. Some
// needed rows are known only when the session's row is in memory, so the caller must call MissingRows again after
// PutRows, until the result is empty.
func (m *Model) MissingRows(b CommitBatch) MissingRows {
	w := missingRowCollector{model: m, requested: map[any]bool{}}
	added := map[RowKey]int{}
	for _, rec := range b.Records {
		k := RowKey{rec.Subject.Tenant, rec.Subject.ID}
		if rec.Subject.Aspect.IsCatalogue() {
			w.requestUsageDay(k.Tenant, storedBytesDay)
			for _, e := range rec.Events {
				w.requestAPIKey(rec.Subject.Tenant, e)
				w.requestCatalogueRows(k, rec.Subject.Aspect, e)
				w.requestBudgetOrLimits(k.Tenant, e)
			}
			continue
		}
		a := w.requestSession(k)
		added[k] += len(rec.Events)
		for _, e := range rec.Events {
			w.requestEvent(k, a, e)
			w.requestUsageRows(k.Tenant, e)
		}
	}
	for k, n := range added {
		w.requestSessionState(k, n)
	}
	return w.out
}

// missingRowCollector collects the rows that Model.Fold needs for a batch of commits and that the Model does not have
// in memory.
type missingRowCollector struct {
	model     *Model
	requested map[any]bool
	out       MissingRows

	usageTenant, usageDay string // the last rows of usage that were requested
}

// requestSession returns the rows of a session that are in memory. If there are none, it requests the session's row and
// returns nil.
func (w *missingRowCollector) requestSession(k RowKey) *sessionRows {
	a := w.model.sessions[k]
	if a == nil && !w.requested[k] {
		w.requested[k] = true
		w.out.Sessions = append(w.out.Sessions, k)
	}
	return a
}

// requestedAPIKey is the key of an API key's row in the map missingRowCollector.requested. Its type distinguishes it
// from the keys of other rows.
type requestedAPIKey RowKey

// requestAPIKey requests the row of the API key that an event is about.
func (w *missingRowCollector) requestAPIKey(tenant string, e events.Event) {
	id := apiKeyID(e)
	k := RowKey{tenant, id}
	if _, ok := w.model.keys[k]; !ok && id != "" && !w.requested[requestedAPIKey(k)] {
		w.requested[requestedAPIKey(k)] = true
		w.out.Keys = append(w.out.Keys, k)
	}
}

// requestEvent requests the rows that an event of a session changes, such as those of its execution, block and tool
// call.
func (w *missingRowCollector) requestEvent(k RowKey, a *sessionRows, e events.Event) {
	w.requestExecution(k, a, e.ExecutionID)
	w.requestBlock(k, a, blocks.ChangedBlockID(e))
	if id := toolCallID(e); id != "" {
		requestChild(w, k, a, id, childKindCall, func(a *sessionRows) bool { _, ok := a.calls[id]; return ok }, &w.out.Calls)
	}
	if id := conversationID(e); id != "" {
		requestChild(w, k, a, id, childKindConversation, func(a *sessionRows) bool { _, ok := a.conversations[id]; return ok }, &w.out.Conversations)
	}
	if id := approvalID(e); id != "" {
		requestChild(w, k, a, id, childKindApproval, func(a *sessionRows) bool { _, ok := a.approvals[id]; return ok }, &w.out.Approvals)
		w.requestApprovedCall(k, a, id)
	}
	if id := sandboxID(e); id != "" {
		requestChild(w, k, a, id, childKindSandbox, func(a *sessionRows) bool { _, ok := a.sandboxes[id]; return ok }, &w.out.Sandboxes)
	}
	if id := fileID(e); id != "" {
		requestChild(w, k, a, id, childKindFile, func(a *sessionRows) bool { _, ok := a.files[id]; return ok }, &w.out.Files)
	}
	if id := modelUsageID(e); id != "" {
		requestChild(w, k, a, id, childKindUsage, func(a *sessionRows) bool { _, ok := a.usage[id]; return ok }, &w.out.Usage)
	}
}

// requestApprovedCall requests the row of the tool call that the approval request id is about, if the row of the
// request is in memory.
func (w *missingRowCollector) requestApprovedCall(k RowKey, a *sessionRows, id string) {
	if a == nil || a.approvals[id] == nil {
		return
	}
	if call := a.approvals[id].row.ToolUseID; call != "" {
		requestChild(w, k, a, call, childKindCall, func(a *sessionRows) bool { _, ok := a.calls[call]; return ok }, &w.out.Calls)
	}
}

// requestExecution requests the row of an execution; id may be "".
func (w *missingRowCollector) requestExecution(k RowKey, a *sessionRows, id string) {
	if id = validRowID(id); id != "" {
		requestChild(w, k, a, id, childKindExecution, func(a *sessionRows) bool { _, ok := a.executions[id]; return ok }, &w.out.Executions)
	}
}

// requestBlock requests the row of a block; id may be "".
func (w *missingRowCollector) requestBlock(k RowKey, a *sessionRows, id string) {
	if id = validRowID(id); id != "" {
		requestChild(w, k, a, id, childKindBlock, func(a *sessionRows) bool { _, ok := a.blocks[id]; return ok }, &w.out.Blocks)
	}
}

// The kinds of rows that a ChildKey can identify, which distinguish rows of different tables that have equal ids.
const (
	childKindExecution = iota
	childKindBlock
	childKindCall
	childKindConversation
	childKindApproval
	childKindSandbox
	childKindFile
	childKindUsage
	childKindVersion
)

// requestedChild is the key of a ChildKey in the map missingRowCollector.requested, together with the kind of the row.
type requestedChild struct {
	ChildKey
	kind int
}

// requestChild adds the key of a row that belongs to a session to list, unless the model knows whether the row exists.
// present reports whether the model knows this, for a session in memory.
func requestChild(w *missingRowCollector, k RowKey, a *sessionRows, id string, kind int, present func(*sessionRows) bool, list *[]ChildKey) {
	if a != nil && (a.complete || a.deleted || present(a)) {
		return
	}
	ref := requestedChild{ChildKey{k, id}, kind}
	if !w.requested[ref] {
		w.requested[ref] = true
		*list = append(*list, ref.ChildKey)
	}
}

// PutRows puts rows that were read from Postgres into the model. asked lists the rows that were requested; p holds
// those that exist. PutRows records the other requested rows as not existing, so that MissingRows does not return them
// again.
func (m *Model) PutRows(asked MissingRows, p FoundRows) error {
	fresh := map[RowKey]*sessionRows{}
	for _, k := range asked.Sessions {
		a := newSessionRows(k)
		a.element = m.recent.PushFront(a)
		m.sessions[k], fresh[k] = a, a
	}
	for _, s := range p.Sessions {
		m.sessions[RowKey{s.Tenant, s.ID}].session = &cachedRow[Session]{row: s, stored: true}
	}
	for _, d := range p.Deleted {
		a := m.sessions[RowKey{d.Tenant, d.ID}]
		a.deleted, a.tombstone = true, &cachedRow[DeletedSession]{row: d, stored: true}
	}
	for _, a := range fresh {
		if a.complete = a.session == nil && !a.deleted; a.complete {
			a.history = &history.State{}
		}
	}
	if err := m.putSessionStates(asked, p); err != nil {
		return err
	}
	for _, k := range asked.Keys {
		m.keys[k] = nil
	}
	for _, k := range p.Keys {
		m.keys[RowKey{k.Tenant, k.ID}] = &cachedRow[APIKey]{row: k, stored: true}
	}
	m.putTenantRows(asked, p)
	if err := m.putCatalogueRows(asked, p); err != nil {
		return err
	}
	return m.putChildren(asked, p)
}

// putChildren puts rows that belong to sessions, such as executions and blocks, into the model, as PutRows does.
func (m *Model) putChildren(asked MissingRows, p FoundRows) error {
	recordAbsentRows(m, asked.Executions, func(a *sessionRows, id string) { a.executions[id] = nil })
	recordAbsentRows(m, asked.Blocks, func(a *sessionRows, id string) { a.blocks[id] = nil })
	recordAbsentRows(m, asked.Calls, func(a *sessionRows, id string) { a.calls[id] = nil })
	recordAbsentRows(m, asked.Conversations, func(a *sessionRows, id string) { a.conversations[id] = nil })
	recordAbsentRows(m, asked.Approvals, func(a *sessionRows, id string) { a.approvals[id] = nil })
	recordAbsentRows(m, asked.Sandboxes, func(a *sessionRows, id string) { a.sandboxes[id] = nil })
	recordAbsentRows(m, asked.Files, func(a *sessionRows, id string) { a.files[id] = nil })
	recordAbsentRows(m, asked.Usage, func(a *sessionRows, id string) { a.usage[id] = nil })
	for _, r := range p.Executions {
		m.sessions[RowKey{r.Tenant, r.Session}].executions[r.ID] = &cachedRow[Execution]{row: r, stored: true}
	}
	for _, r := range p.Blocks {
		if !r.isFinal() {
			if err := json.Unmarshal([]byte(r.JSON), &r.block); err != nil {
				return fmt.Errorf("decode stored block %s of %s: %w", r.ID, r.Session, err)
			}
		}
		r.JSON = ""
		m.sessions[RowKey{r.Tenant, r.Session}].blocks[r.ID] = &cachedRow[Block]{row: r, stored: true}
	}
	for _, r := range p.Calls {
		m.sessions[RowKey{r.Tenant, r.Session}].calls[r.ID] = &cachedRow[ToolCall]{row: r, stored: true}
	}
	for _, r := range p.Conversations {
		m.sessions[RowKey{r.Tenant, r.Session}].conversations[r.ID] = &cachedRow[Conversation]{row: r, stored: true}
	}
	for _, r := range p.Approvals {
		m.sessions[RowKey{r.Tenant, r.Session}].approvals[r.ID] = &cachedRow[Approval]{row: r, stored: true}
	}
	for _, r := range p.Sandboxes {
		m.sessions[RowKey{r.Tenant, r.Session}].sandboxes[r.ID] = &cachedRow[Sandbox]{row: r, stored: true}
	}
	for _, r := range p.Files {
		m.sessions[RowKey{r.Tenant, r.Session}].files[r.ID] = &cachedRow[File]{row: r, stored: true}
	}
	for _, r := range p.Usage {
		m.sessions[RowKey{r.Tenant, r.Session}].usage[r.ID] = &cachedRow[ModelUsage]{row: r, stored: true}
	}
	return nil
}

// recordAbsentRows calls record for each requested row, to record that the row does not exist; putChildren then adds
// the rows that exist. It leaves out sessions all of whose rows are in memory.
func recordAbsentRows(m *Model, asked []ChildKey, record func(*sessionRows, string)) {
	for _, c := range asked {
		if a := m.sessions[c.Session]; !a.complete {
			record(a, c.ID)
		}
	}
}

// useSession returns the rows of a session that PutRows has added, and marks the session as recently used.
func (m *Model) useSession(k RowKey) *sessionRows {
	a := m.sessions[k]
	m.recent.MoveToFront(a.element)
	return a
}

// EvictRows removes rows from memory until about the limit of rows is left: all rows of the catalogue and of budgets,
// and those of the sessions that were used least recently. It must not be called during a fold.
func (m *Model) EvictRows() {
	if len(m.keys) > m.limit {
		clear(m.keys)
	}
	if len(m.tenantUsage) > m.limit {
		clear(m.tenantUsage)
	}
	clear(m.tenantBudgets)
	clear(m.tenantLimits)
	// Definitions may be large, and are rarely changed twice in a row.
	clear(m.entries)
	clear(m.versions)
	for m.rows > m.limit && m.recent.Len() > 0 {
		last := m.recent.Back()
		a := m.recent.Remove(last).(*sessionRows)
		delete(m.sessions, a.key)
		m.rows -= a.counted
	}
}
