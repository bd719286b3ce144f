package fold_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// memory holds the read models in memory and applies changes by the rules of package store.
type memory struct {
	t             testing.TB
	sessions      map[fold.RowKey]fold.Session
	deleted       map[fold.RowKey]fold.DeletedSession
	executions    map[fold.ChildKey]fold.Execution
	blocks        map[fold.ChildKey]fold.Block
	calls         map[fold.ChildKey]fold.ToolCall
	conversations map[fold.ChildKey]fold.Conversation
	approvals     map[fold.ChildKey]fold.Approval
	sandboxes     map[fold.ChildKey]fold.Sandbox
	files         map[fold.ChildKey]fold.File
	usage         map[fold.ChildKey]fold.ModelUsage
	keys          map[fold.RowKey]fold.APIKey
	entries       map[fold.RowKey]fold.CatalogueEntry
	versions      map[fold.ChildKey]fold.CatalogueVersion
	events        map[string]fold.Event
	poison        map[string]fold.PoisonCommit
	tenantUsage   map[fold.RowKey]fold.TenantUsage
	tenantBudgets map[fold.RowKey]fold.TenantBudget
	tenantLimits  map[string]fold.TenantLimits
	audit         map[string]fold.AuditRow
	states        map[string]fold.SavedSessionState
}

func newMemory(t testing.TB) *memory {
	return &memory{
		t: t, sessions: map[fold.RowKey]fold.Session{}, deleted: map[fold.RowKey]fold.DeletedSession{}, executions: map[fold.ChildKey]fold.Execution{},
		blocks: map[fold.ChildKey]fold.Block{}, calls: map[fold.ChildKey]fold.ToolCall{}, conversations: map[fold.ChildKey]fold.Conversation{},
		approvals: map[fold.ChildKey]fold.Approval{},
		sandboxes: map[fold.ChildKey]fold.Sandbox{}, files: map[fold.ChildKey]fold.File{}, usage: map[fold.ChildKey]fold.ModelUsage{}, keys: map[fold.RowKey]fold.APIKey{},
		entries: map[fold.RowKey]fold.CatalogueEntry{}, versions: map[fold.ChildKey]fold.CatalogueVersion{}, events: map[string]fold.Event{},
		poison: map[string]fold.PoisonCommit{}, audit: map[string]fold.AuditRow{},
		tenantUsage: map[fold.RowKey]fold.TenantUsage{}, tenantBudgets: map[fold.RowKey]fold.TenantBudget{}, tenantLimits: map[string]fold.TenantLimits{},
		states: map[string]fold.SavedSessionState{},
	}
}

func child(tenant, session, id string) fold.ChildKey {
	return fold.ChildKey{Session: fold.RowKey{Tenant: tenant, ID: session}, ID: id}
}

// fold looks up, folds and applies a batch, like a group.
func (m *memory) fold(model *fold.Model, b fold.CommitBatch) fold.Changes {
	m.t.Helper()
	for missing := model.MissingRows(b); !missing.Empty(); missing = model.MissingRows(b) {
		if err := model.PutRows(missing, m.load(missing)); err != nil {
			m.t.Fatal(err)
		}
	}
	c, err := model.Fold(b)
	if err != nil {
		m.t.Fatal(err)
	}
	m.apply(&c)
	model.EvictRows()
	return c
}

func (m *memory) load(asked fold.MissingRows) (p fold.FoundRows) {
	for _, k := range asked.Sessions {
		if s, ok := m.sessions[k]; ok {
			p.Sessions = append(p.Sessions, s)
		}
		if _, ok := m.deleted[k]; ok {
			p.Deleted = append(p.Deleted, m.deleted[k])
		}
	}
	m.histories(asked, &p)
	for _, k := range asked.Keys {
		if r, ok := m.keys[k]; ok {
			p.Keys = append(p.Keys, r)
		}
	}
	for _, k := range asked.Entries {
		if r, ok := m.entries[k]; ok {
			p.Entries = append(p.Entries, r)
		}
	}
	p.Versions = find(m.versions, asked.Versions)
	p.Executions = find(m.executions, asked.Executions)
	p.Blocks = find(m.blocks, asked.Blocks)
	p.Calls = find(m.calls, asked.Calls)
	p.Conversations = find(m.conversations, asked.Conversations)
	p.Approvals = find(m.approvals, asked.Approvals)
	p.Sandboxes = find(m.sandboxes, asked.Sandboxes)
	p.Files = find(m.files, asked.Files)
	p.Usage = find(m.usage, asked.Usage)
	for _, k := range asked.TenantUsage {
		if r, ok := m.tenantUsage[k]; ok {
			p.TenantUsage = append(p.TenantUsage, r)
		}
	}
	for _, tenant := range asked.TenantLimits {
		if r, ok := m.tenantLimits[tenant]; ok {
			p.TenantLimits = append(p.TenantLimits, r)
		}
	}
	for _, k := range asked.TenantBudgets {
		if r, ok := m.tenantBudgets[k]; ok {
			p.TenantBudgets = append(p.TenantBudgets, r)
		}
	}
	return p
}

// histories loads the last state of sessions and the events since, like package store.
func (m *memory) histories(asked fold.MissingRows, p *fold.FoundRows) {
	for _, k := range asked.Histories {
		var last fold.SavedSessionState
		for _, s := range m.states {
			if s.Tenant == k.Tenant && s.Session == k.ID && s.Seq > last.Seq {
				last = s
			}
		}
		if last.Seq > 0 {
			p.States = append(p.States, last)
		}
		for _, e := range m.events {
			if e.Tenant == k.Tenant && e.Session == k.ID && e.Seq > last.Seq {
				p.Events = append(p.Events, e)
			}
		}
	}
	slices.SortFunc(p.Events, func(a, b fold.Event) int { return cmp.Compare(a.Seq, b.Seq) })
}

func find[R any](rows map[fold.ChildKey]R, asked []fold.ChildKey) (out []R) {
	for _, c := range asked {
		if r, ok := rows[c]; ok {
			out = append(out, r)
		}
	}
	return out
}

func (m *memory) apply(c *fold.Changes) {
	m.t.Helper()
	for _, k := range c.Gone {
		delete(m.sessions, k)
		drop(m.executions, k)
		drop(m.calls, k)
		drop(m.conversations, k)
		drop(m.approvals, k)
		drop(m.sandboxes, k)
		drop(m.files, k)
		drop(m.usage, k)
		maps.DeleteFunc(m.states, func(_ string, s fold.SavedSessionState) bool { return s.Tenant == k.Tenant && s.Session == k.ID })
	}
	for _, k := range c.Retired {
		drop(m.blocks, k)
		for id, e := range m.events {
			if e.Tenant == k.Tenant && e.Session == k.ID {
				delete(m.events, id)
			}
		}
	}
	put(m.t, m.sessions, c.Sessions, func(r fold.Session) fold.RowKey { return fold.RowKey{Tenant: r.Tenant, ID: r.ID} })
	put(m.t, m.executions, c.Executions, func(r fold.Execution) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.blocks, c.Blocks, func(r fold.Block) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.calls, c.Calls, func(r fold.ToolCall) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.conversations, c.Conversations, func(r fold.Conversation) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.approvals, c.Approvals, func(r fold.Approval) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.sandboxes, c.Sandboxes, func(r fold.Sandbox) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.files, c.Files, func(r fold.File) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.usage, c.Usage, func(r fold.ModelUsage) fold.ChildKey { return child(r.Tenant, r.Session, r.ID) })
	put(m.t, m.keys, c.Keys, func(r fold.APIKey) fold.RowKey { return fold.RowKey{Tenant: r.Tenant, ID: r.ID} })
	put(m.t, m.entries, c.Entries, func(r fold.CatalogueEntry) fold.RowKey { return fold.RowKey{Tenant: r.Tenant, ID: r.ID} })
	put(m.t, m.versions, c.Versions, func(r fold.CatalogueVersion) fold.ChildKey { return child(r.Tenant, r.Entry, r.ID) })
	put(m.t, m.tenantUsage, c.TenantUsage, func(r fold.TenantUsage) fold.RowKey { return fold.RowKey{Tenant: r.Tenant, ID: r.ID} })
	put(m.t, m.tenantLimits, c.TenantLimits, func(r fold.TenantLimits) string { return r.Tenant })
	put(m.t, m.tenantBudgets, c.TenantBudgets, func(r fold.TenantBudget) fold.RowKey { return fold.RowKey{Tenant: r.Tenant, ID: r.ID} })
	for _, e := range c.Events {
		id := fmt.Sprint(e.Tenant, " ", e.Session, " ", e.Seq)
		if _, there := m.events[id]; there {
			m.t.Fatalf("event %s is inserted twice", id)
		}
		m.events[id] = *e
	}
	for _, s := range c.States {
		m.states[fmt.Sprint(s.Tenant, " ", s.Session, " ", s.Seq)] = *s
	}
	for _, d := range c.Deleted {
		m.deleted[fold.RowKey{Tenant: d.Tenant, ID: d.ID}] = *d
	}
	for id, r := range m.audit {
		if slices.Contains(c.AuditGone, fold.RowKey{Tenant: r.Tenant, ID: r.Subject}) && !strings.HasSuffix(r.Types, "session_deleted") {
			delete(m.audit, id)
		}
	}
	for _, r := range c.Audit {
		id := fmt.Sprint(r.Tenant, " ", r.Shard, " ", r.Seq)
		if _, there := m.audit[id]; !there {
			m.audit[id] = *r
		}
	}
	for _, p := range c.Poison {
		m.poison[p.Position] = *p
	}
	m.end(c.Ended)
}

func (m *memory) end(list []fold.EndedExecution) {
	for _, e := range list {
		for id, c := range m.calls {
			if id.Session == e.Session && c.Execution == e.Execution && c.Status == "pending" {
				c.Status, c.EndedAt = "error", &e.At
				m.calls[id] = c
			}
		}
		for id, c := range m.conversations {
			if id.Session == e.Session && c.Execution == e.Execution && c.Status == "running" {
				c.Status, c.EndedAt = "failed", &e.At
				m.conversations[id] = c
			}
		}
		for id, p := range m.approvals {
			if id.Session == e.Session && p.Execution == e.Execution && p.EndedSeq == 0 {
				p.Status, p.Cause, p.EndedSeq, p.EndedAt = "retracted", fold.CauseExecutionEnded, e.Seq, &e.At
				m.approvals[id] = p
			}
		}
	}
}

func drop[R any](rows map[fold.ChildKey]R, k fold.RowKey) {
	for id := range rows {
		if id.Session == k {
			delete(rows, id)
		}
	}
}

func put[K comparable, R any](t testing.TB, to map[K]R, rows fold.ChangedRows[R], key func(R) K) {
	t.Helper()
	for _, r := range rows.New {
		if _, there := to[key(*r)]; there {
			t.Fatalf("the fold inserts row %v, which exists", key(*r))
		}
		to[key(*r)] = *r
	}
	for _, r := range rows.Changed {
		if _, there := to[key(*r)]; !there {
			t.Fatalf("the fold updates row %v, which does not exist", key(*r))
		}
		to[key(*r)] = *r
	}
}

// equal compares two read models.
func (m *memory) equal(other *memory) error {
	for _, c := range []struct {
		name string
		a, b any
	}{
		{"sessions", m.sessions, other.sessions}, {"deleted", m.deleted, other.deleted}, {"executions", m.executions, other.executions},
		{"blocks", plain(m.blocks), plain(other.blocks)}, {"tool_calls", m.calls, other.calls}, {"conversations", m.conversations, other.conversations},
		{"approvals", m.approvals, other.approvals}, {"sandboxes", m.sandboxes, other.sandboxes}, {"files", m.files, other.files}, {"usage", m.usage, other.usage}, {"keys", m.keys, other.keys},
		{"entries", catalogueColumns(m.entries), catalogueColumns(other.entries)}, {"versions", m.versions, other.versions}, {"events", m.events, other.events}, {"poison", m.poison, other.poison}, {"session_states", m.states, other.states},
		{"tenant_usage", m.tenantUsage, other.tenantUsage}, {"tenant_budgets", m.tenantBudgets, other.tenantBudgets}, {"tenant_limits", m.tenantLimits, other.tenantLimits},
		{"audit", m.audit, other.audit},
	} {
		if !reflect.DeepEqual(c.a, c.b) {
			return fmt.Errorf("%s differ:\n%s\n%s", c.name, show(c.a), show(c.b))
		}
	}
	return nil
}

// plain returns blocks without fields that are not columns.
func plain(rows map[fold.ChildKey]fold.Block) map[fold.ChildKey][]any {
	out := map[fold.ChildKey][]any{}
	for k, r := range rows {
		out[k] = []any{r.Execution, r.Conversation, r.Kind, r.Status, r.ExecutionOrd, r.FirstSeq, r.LastSeq, r.JSON}
	}
	return out
}

// catalogueColumns returns the column values of each entry of the catalogue, for comparisons.
func catalogueColumns(rows map[fold.RowKey]fold.CatalogueEntry) map[fold.RowKey][]any {
	out := map[fold.RowKey][]any{}
	for k, r := range rows {
		out[k] = []any{r.Kind, r.Scope, r.Org, r.Slug, r.Latest, r.State, r.Removed, r.CreatedAt, r.UpdatedAt}
	}
	return out
}

func show(v any) string {
	rv := reflect.ValueOf(v)
	var lines []string
	for _, k := range rv.MapKeys() {
		text, _ := json.Marshal(rv.MapIndex(k).Interface())
		lines = append(lines, fmt.Sprintf("  %v: %s", k, text))
	}
	slices.Sort(lines)
	return fmt.Sprint(lines)
}
