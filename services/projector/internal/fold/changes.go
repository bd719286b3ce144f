package fold

import (
	"encoding/json"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Batch is what is folded at once: records in the order of the log, and text in flight.
type Batch struct {
	Records []eventlog.Record
	Deltas  []Delta
	Poison  []Poison
	// Bare folds no more of the records than that their events are there: for a
	// commit that Postgres would not take otherwise.
	Bare bool
}

// Delta is text in flight of a session.
type Delta struct {
	Tenant, Session string
	events.Delta
}

// Rows are rows of one table that changed, each once: New ones Postgres does not have yet.
type Rows[R any] struct{ New, Changed []*R }

// Len is the number of rows.
func (r Rows[R]) Len() int { return len(r.New) + len(r.Changed) }

// Changes is what a batch does to the read models. Deletions come first, then
// rows, then what an ended execution ends.
type Changes struct {
	Gone          []Key   // sessions whose rows go, but for events and blocks
	Retired       []Key   // sessions whose events and blocks go
	TextGone      []Child // blocks whose text in flight goes
	Sessions      Rows[Session]
	Executions    Rows[Execution]
	Blocks        Rows[Block]
	Calls         Rows[ToolCall]
	Conversations Rows[Conversation]
	Sandboxes     Rows[Sandbox]
	Files         Rows[File]
	Usage         Rows[Usage]
	Keys          Rows[APIKey]
	Entries       Rows[Entry]
	Versions      Rows[Version]
	TenantUsage   Rows[TenantUsage]
	TenantBudgets Rows[TenantBudget]
	TenantLimits  Rows[TenantLimits]
	Events        []*Event
	Texts         []*Text    // a later one at the same place takes the former's
	Deleted       []*Deleted // each session once
	Poison        []*Poison
	AuditGone     []Key // deleted sessions whose rows of audit go, those of their deletion apart
	Audit         []*Audited
	States        []*SavedState
	Ended         []Ended
	Live          []Live
}

// Ended is an execution that ended: its calls and sub-agents that are open end
// with it, and the text of its blocks that never began goes.
type Ended struct {
	Session   Key
	Execution string
	At        time.Time
}

// Live is what is announced of one session.
type Live struct {
	Session Key
	Events  []*Event
	Deltas  []events.Delta
	Tip     int64
}

// Empty tells that nothing changed.
func (c *Changes) Empty() bool {
	return len(c.Gone)+len(c.Retired)+len(c.TextGone)+len(c.Events)+len(c.Texts)+len(c.Deleted)+len(c.Poison)+len(c.AuditGone)+len(c.Audit)+len(c.Ended)+len(c.States)+
		c.Sessions.Len()+c.Executions.Len()+c.Blocks.Len()+c.Calls.Len()+c.Conversations.Len()+c.Sandboxes.Len()+c.Files.Len()+c.Usage.Len()+c.Keys.Len()+
		c.Entries.Len()+c.Versions.Len()+c.TenantUsage.Len()+c.TenantBudgets.Len()+c.TenantLimits.Len() == 0
}

// settle splits the rows that are still dirty by whether Postgres has them, and
// takes them as stored from here on.
func settle[R any](list []*entry[R]) (rows Rows[R]) {
	for _, e := range list {
		if !e.dirty {
			continue
		}
		if e.stored {
			rows.Changed = append(rows.Changed, &e.row)
		} else {
			rows.New = append(rows.New, &e.row)
		}
		e.stored, e.dirty = true, false
	}
	return rows
}

// touch notes that a row changes.
func touch[R any](list *[]*entry[R], e *entry[R]) *R {
	if !e.dirty {
		e.dirty = true
		*list = append(*list, e)
	}
	return &e.row
}

// encodeBlocks gives changed blocks their JSON.
func encodeBlocks(list []*entry[Block]) error {
	for _, e := range list {
		if !e.dirty {
			continue
		}
		text, err := marshal(e.row.block)
		if err != nil {
			return err
		}
		e.row.JSON = clean(text)
		if e.row.final() {
			e.row.block = events.Block{}
		}
	}
	return nil
}

// raw is an application's JSON as a row keeps it; nil for none.
func raw(m json.RawMessage) *string {
	if len(m) == 0 {
		return nil
	}
	s := clean(string(m))
	return &s
}
