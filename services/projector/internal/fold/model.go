package fold

import (
	"container/list"
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/events/history"
)

// Model holds the rows of one projector group that are in memory. It must be used by one goroutine. If a change could not be stored, the Model must
// be discarded, because it has the change.
type Model struct {
	group         int16
	limit         int
	sessions      map[Key]*aggregate
	recent        *list.List // of *aggregate, most recently used first
	keys          map[Key]*entry[APIKey]
	entries       map[Key]*entry[Entry]
	versions      map[Child]*entry[Version]
	rows          int
	stateInterval int64 // defaultStateInterval, except in tests

	// final stands for each block that is complete and stored, of which no further event changes anything.
	final *entry[Block]

	lastDay  string // result of the last call of day
	dayBegin int64  // Unix time at which lastDay begins; not set while lastDay is ""

	tenantUsage   map[Key]*entry[TenantUsage]
	tenantBudgets map[Key]*entry[TenantBudget]
	tenantLimits  map[string]*entry[TenantLimits] // by tenant
}

// New returns the model of a group that keeps about limit rows in memory.
func New(group, limit int) *Model {
	return &Model{
		group: int16(group), limit: limit, sessions: map[Key]*aggregate{}, recent: list.New(), keys: map[Key]*entry[APIKey]{},
		entries: map[Key]*entry[Entry]{}, versions: map[Child]*entry[Version]{},
		tenantUsage: map[Key]*entry[TenantUsage]{}, tenantBudgets: map[Key]*entry[TenantBudget]{},
		tenantLimits: map[string]*entry[TenantLimits]{}, stateInterval: defaultStateInterval,
		final: &entry[Block]{row: Block{Status: string(events.StatusComplete)}, stored: true},
	}
}

// entry is a row of a Model; a nil entry is a row that is known not to exist.
type entry[R any] struct {
	row    R
	stored bool // Postgres has the row, in this or an earlier state
	dirty  bool // whether the present fold changed the row
}

// aggregate holds the rows of one session that a Model has in memory.
type aggregate struct {
	key       Key
	element   *list.Element
	session   *entry[Session] // nil if the session does not exist
	deleted   bool
	tombstone *entry[Deleted]          // set if the session is deleted
	kept      map[string]*entry[Block] // blocks of a session that this fold deleted; they are kept until it is retired
	// complete means that rows that are not in memory do not exist, because the session began while it was in memory.
	complete bool
	counted  int // number of its rows that are counted in Model.rows

	executions    map[string]*entry[Execution]
	blocks        map[string]*entry[Block]
	calls         map[string]*entry[ToolCall]
	conversations map[string]*entry[Conversation]
	approvals     map[string]*entry[Approval]
	sandboxes     map[string]*entry[Sandbox]
	files         map[string]*entry[File]
	usage         map[string]*entry[Usage]

	history *history.State // state after the last event; nil if it is not in memory

	shares        map[string]dayUsage // Session.Spent by day; nil if it was not decoded
	sharesChanged bool                // whether Session.Spent lacks a part of shares
}

func newAggregate(k Key) *aggregate {
	return &aggregate{
		key: k, executions: map[string]*entry[Execution]{}, blocks: map[string]*entry[Block]{}, calls: map[string]*entry[ToolCall]{},
		conversations: map[string]*entry[Conversation]{}, approvals: map[string]*entry[Approval]{}, sandboxes: map[string]*entry[Sandbox]{},
		files: map[string]*entry[File]{}, usage: map[string]*entry[Usage]{},
	}
}

func (a *aggregate) size() int {
	return 1 + len(a.executions) + len(a.blocks) + len(a.calls) + len(a.conversations) + len(a.approvals) + len(a.sandboxes) + len(a.files) + len(a.usage)
}

// Missing lists, by table, the rows that the caller of Model.Fold must first read from Postgres and pass to Model.Put.
type Missing struct {
	Sessions      []Key
	Histories     []Key // sessions whose last saved state, and the events since, are needed
	Keys          []Key
	Entries       []Key
	Versions      []Child
	Executions    []Child
	Blocks        []Child
	Calls         []Child
	Conversations []Child
	Approvals     []Child
	Sandboxes     []Child
	Files         []Child
	Usage         []Child
	TenantUsage   []Key
	TenantBudgets []Key
	TenantLimits  []string // tenants
}

// Empty reports whether nothing must be looked up.
func (m Missing) Empty() bool {
	return len(m.Sessions)+len(m.Histories)+len(m.Keys)+len(m.Entries)+len(m.Versions)+len(m.Executions)+len(m.Blocks)+len(m.Calls)+len(m.Conversations)+len(m.Approvals)+len(m.Sandboxes)+len(m.Files)+len(m.Usage)+
		len(m.TenantUsage)+len(m.TenantBudgets)+len(m.TenantLimits) == 0
}

// Present holds those of the rows listed in a Missing that exist in Postgres.
type Present struct {
	Sessions      []Session
	Deleted       []Deleted
	States        []SavedState // the last one of each session
	Events        []Event      // events of each session after its state, ascending
	Keys          []APIKey
	Entries       []Entry
	Versions      []Version
	Executions    []Execution
	Blocks        []Block
	Calls         []ToolCall
	Conversations []Conversation
	Approvals     []Approval
	Sandboxes     []Sandbox
	Files         []File
	Usage         []Usage
	TenantUsage   []TenantUsage
	TenantBudgets []TenantBudget
	TenantLimits  []TenantLimits
}

// Missing returns the rows that the batch needs and that are not in memory, without duplicates. Which rows of a
// session are needed may depend on the session's row, so the caller must call Missing again after Put until the
// result is empty.
func (m *Model) Missing(b Batch) Missing {
	w := lookup{model: m, seen: map[any]bool{}}
	added := map[Key]int{}
	for _, rec := range b.Records {
		k := Key{rec.Subject.Tenant, rec.Subject.ID}
		if rec.Subject.Aspect.IsCatalogue() {
			w.requestUsageDay(k.Tenant, noDay)
			for _, e := range rec.Events {
				w.requestKey(rec.Subject.Tenant, e)
				w.requestEntry(k, rec.Subject.Aspect, e)
				w.requestTenant(k.Tenant, e)
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
		w.requestHistory(k, n)
	}
	return w.out
}

// lookup collects the rows that a batch needs and that a Model does not have in memory.
type lookup struct {
	model *Model
	seen  map[any]bool
	out   Missing

	usageTenant, usageDay string // the last rows of usage that were requested
}

// requestSession requests a session's rows and returns the session, or nil if it is not in memory.
func (w *lookup) requestSession(k Key) *aggregate {
	a := w.model.sessions[k]
	if a == nil && !w.seen[k] {
		w.seen[k] = true
		w.out.Sessions = append(w.out.Sessions, k)
	}
	return a
}

// keyRef is the key of an API key in the map lookup.seen. Its type keeps it apart from the keys of other rows.
type keyRef Key

// requestKey requests the row of the API key that an event is about.
func (w *lookup) requestKey(tenant string, e events.Event) {
	id := keyID(e)
	k := Key{tenant, id}
	if _, ok := w.model.keys[k]; !ok && id != "" && !w.seen[keyRef(k)] {
		w.seen[keyRef(k)] = true
		w.out.Keys = append(w.out.Keys, k)
	}
}

// requestEvent requests the rows that an event of a session is about.
func (w *lookup) requestEvent(k Key, a *aggregate, e events.Event) {
	w.requestExecution(k, a, e.ExecutionID)
	w.requestBlock(k, a, blocks.ChangedBlockID(e))
	if id := callID(e); id != "" {
		requireChild(w, k, a, id, childCall, func(a *aggregate) bool { _, ok := a.calls[id]; return ok }, &w.out.Calls)
	}
	if id := conversationID(e); id != "" {
		requireChild(w, k, a, id, childConversation, func(a *aggregate) bool { _, ok := a.conversations[id]; return ok }, &w.out.Conversations)
	}
	if id := approvalID(e); id != "" {
		requireChild(w, k, a, id, childApproval, func(a *aggregate) bool { _, ok := a.approvals[id]; return ok }, &w.out.Approvals)
		w.requestApprovedCall(k, a, id)
	}
	if id := sandboxID(e); id != "" {
		requireChild(w, k, a, id, childSandbox, func(a *aggregate) bool { _, ok := a.sandboxes[id]; return ok }, &w.out.Sandboxes)
	}
	if id := fileID(e); id != "" {
		requireChild(w, k, a, id, childFile, func(a *aggregate) bool { _, ok := a.files[id]; return ok }, &w.out.Files)
	}
	if id := usageID(e); id != "" {
		requireChild(w, k, a, id, childUsage, func(a *aggregate) bool { _, ok := a.usage[id]; return ok }, &w.out.Usage)
	}
}

// requestApprovedCall requests the row of the call that an approval request is about, if the request is in memory.
func (w *lookup) requestApprovedCall(k Key, a *aggregate, id string) {
	if a == nil || a.approvals[id] == nil {
		return
	}
	if call := a.approvals[id].row.ToolUseID; call != "" {
		requireChild(w, k, a, call, childCall, func(a *aggregate) bool { _, ok := a.calls[call]; return ok }, &w.out.Calls)
	}
}

// requestExecution requests the row of an execution; id may be "".
func (w *lookup) requestExecution(k Key, a *aggregate, id string) {
	if id = rowKey(id); id != "" {
		requireChild(w, k, a, id, childExecution, func(a *aggregate) bool { _, ok := a.executions[id]; return ok }, &w.out.Executions)
	}
}

// requestBlock requests the row of a block; id may be "".
func (w *lookup) requestBlock(k Key, a *aggregate, id string) {
	if id = rowKey(id); id != "" {
		requireChild(w, k, a, id, childBlock, func(a *aggregate) bool { _, ok := a.blocks[id]; return ok }, &w.out.Blocks)
	}
}

// The kinds of children, which distinguish equal ids.
const (
	childExecution = iota
	childBlock
	childCall
	childConversation
	childApproval
	childSandbox
	childFile
	childUsage
	childVersion
)

// childRef is the key of a Child in the map lookup.seen; kind is the kind of the row.
type childRef struct {
	Child
	kind int
}

// requireChild requests a row that belongs to a session, by adding it to list, unless the model knows whether the row exists. present reports that
// for a session in memory.
func requireChild(w *lookup, k Key, a *aggregate, id string, kind int, present func(*aggregate) bool, list *[]Child) {
	if a != nil && (a.complete || a.deleted || present(a)) {
		return
	}
	ref := childRef{Child{k, id}, kind}
	if !w.seen[ref] {
		w.seen[ref] = true
		*list = append(*list, ref.Child)
	}
}

// Put puts rows that were read from Postgres into the model. asked are the rows that were requested, and p are those that exist. The
// other requested rows are recorded as not existing, so that the model does not request them again.
func (m *Model) Put(asked Missing, p Present) error {
	fresh := map[Key]*aggregate{}
	for _, k := range asked.Sessions {
		a := newAggregate(k)
		a.element = m.recent.PushFront(a)
		m.sessions[k], fresh[k] = a, a
	}
	for _, s := range p.Sessions {
		m.sessions[Key{s.Tenant, s.ID}].session = &entry[Session]{row: s, stored: true}
	}
	for _, d := range p.Deleted {
		a := m.sessions[Key{d.Tenant, d.ID}]
		a.deleted, a.tombstone = true, &entry[Deleted]{row: d, stored: true}
	}
	for _, a := range fresh {
		if a.complete = a.session == nil && !a.deleted; a.complete {
			a.history = &history.State{}
		}
	}
	if err := m.putHistories(asked, p); err != nil {
		return err
	}
	for _, k := range asked.Keys {
		m.keys[k] = nil
	}
	for _, k := range p.Keys {
		m.keys[Key{k.Tenant, k.ID}] = &entry[APIKey]{row: k, stored: true}
	}
	m.putTenants(asked, p)
	if err := m.putEntries(asked, p); err != nil {
		return err
	}
	return m.putChildren(asked, p)
}

// putChildren puts the rows that belong to sessions into the model, as Put does.
func (m *Model) putChildren(asked Missing, p Present) error {
	recordAbsent(m, asked.Executions, func(a *aggregate, id string) { a.executions[id] = nil })
	recordAbsent(m, asked.Blocks, func(a *aggregate, id string) { a.blocks[id] = nil })
	recordAbsent(m, asked.Calls, func(a *aggregate, id string) { a.calls[id] = nil })
	recordAbsent(m, asked.Conversations, func(a *aggregate, id string) { a.conversations[id] = nil })
	recordAbsent(m, asked.Approvals, func(a *aggregate, id string) { a.approvals[id] = nil })
	recordAbsent(m, asked.Sandboxes, func(a *aggregate, id string) { a.sandboxes[id] = nil })
	recordAbsent(m, asked.Files, func(a *aggregate, id string) { a.files[id] = nil })
	recordAbsent(m, asked.Usage, func(a *aggregate, id string) { a.usage[id] = nil })
	for _, r := range p.Executions {
		m.sessions[Key{r.Tenant, r.Session}].executions[r.ID] = &entry[Execution]{row: r, stored: true}
	}
	for _, r := range p.Blocks {
		if !r.final() {
			if err := json.Unmarshal([]byte(r.JSON), &r.block); err != nil {
				return fmt.Errorf("decode stored block %s of %s: %w", r.ID, r.Session, err)
			}
		}
		r.JSON = ""
		m.sessions[Key{r.Tenant, r.Session}].blocks[r.ID] = &entry[Block]{row: r, stored: true}
	}
	for _, r := range p.Calls {
		m.sessions[Key{r.Tenant, r.Session}].calls[r.ID] = &entry[ToolCall]{row: r, stored: true}
	}
	for _, r := range p.Conversations {
		m.sessions[Key{r.Tenant, r.Session}].conversations[r.ID] = &entry[Conversation]{row: r, stored: true}
	}
	for _, r := range p.Approvals {
		m.sessions[Key{r.Tenant, r.Session}].approvals[r.ID] = &entry[Approval]{row: r, stored: true}
	}
	for _, r := range p.Sandboxes {
		m.sessions[Key{r.Tenant, r.Session}].sandboxes[r.ID] = &entry[Sandbox]{row: r, stored: true}
	}
	for _, r := range p.Files {
		m.sessions[Key{r.Tenant, r.Session}].files[r.ID] = &entry[File]{row: r, stored: true}
	}
	for _, r := range p.Usage {
		m.sessions[Key{r.Tenant, r.Session}].usage[r.ID] = &entry[Usage]{row: r, stored: true}
	}
	return nil
}

// recordAbsent calls record for each requested row, to record it as not existing; putChildren then replaces those that exist. A complete session
// needs no such record.
func recordAbsent(m *Model, asked []Child, record func(*aggregate, string)) {
	for _, c := range asked {
		if a := m.sessions[c.Session]; !a.complete {
			record(a, c.ID)
		}
	}
}

// useSession returns a session that Put has added, and marks it as recently used.
func (m *Model) useSession(k Key) *aggregate {
	a := m.sessions[k]
	m.recent.MoveToFront(a.element)
	return a
}

// Trim removes the least recently used sessions until about the limit of rows is left. It must be called between
// folds.
func (m *Model) Trim() {
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
		a := m.recent.Remove(last).(*aggregate)
		delete(m.sessions, a.key)
		m.rows -= a.counted
	}
}
