package fold

import (
	"encoding/json"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Batch is the input of one call of Model.Fold: commits in the order of the log.
type Batch struct {
	Records []eventlog.Record
	Poison  []Poison
	// Bare means that only the rows of the events are written, without their data and without any effect on other rows. It is for a commit
	// whose rows Postgres refuses.
	Bare bool
}

// Rows are the rows of one table that a fold changed, without duplicates. New are rows that Postgres does not have yet;
// Changed are rows that it has in an earlier state.
type Rows[R any] struct{ New, Changed []*R }

// Len returns the number of rows.
func (r Rows[R]) Len() int { return len(r.New) + len(r.Changed) }

// Changes are the changes that a fold makes to the read models. They must be applied in this order: deletions, rows,
// and then the rows that end with an execution.
type Changes struct {
	Gone          []Key // sessions whose rows are deleted, except events and blocks
	Retired       []Key // sessions whose events and blocks are deleted
	Sessions      Rows[Session]
	Executions    Rows[Execution]
	Blocks        Rows[Block]
	Calls         Rows[ToolCall]
	Conversations Rows[Conversation]
	Approvals     Rows[Approval]
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
	Deleted       []*Deleted // without duplicates
	Poison        []*Poison
	AuditGone     []Key // deleted sessions whose audit rows are deleted, except those of the deletion
	Audit         []*AuditRow
	States        []*SavedState
	Ended         []Ended
	Live          []Live
}

// Ended is an execution that a fold ended. The execution's open calls, sub-agents and approval requests end with it.
type Ended struct {
	Session   Key
	Execution string
	At        time.Time
	Seq       int64 // of the event
}

// Live is the announcement of a fold's changes of one session to gateways: the new events and the last seq.
type Live struct {
	Session Key
	Events  []*Event
	Tip     int64
}

// Empty reports whether nothing changed.
func (c *Changes) Empty() bool {
	return len(c.Gone)+len(c.Retired)+len(c.Events)+len(c.Deleted)+len(c.Poison)+len(c.AuditGone)+len(c.Audit)+len(c.Ended)+len(c.States)+
		c.Sessions.Len()+c.Executions.Len()+c.Blocks.Len()+c.Calls.Len()+c.Conversations.Len()+c.Approvals.Len()+c.Sandboxes.Len()+c.Files.Len()+c.Usage.Len()+c.Keys.Len()+
		c.Entries.Len()+c.Versions.Len()+c.TenantUsage.Len()+c.TenantBudgets.Len()+c.TenantLimits.Len() == 0
}

// splitRows returns the dirty rows of list, the new and the changed ones, and marks them as stored and clean: the caller stores them.
func splitRows[R any](list []*entry[R]) (rows Rows[R]) {
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

// markChanged adds e to list, the rows that this fold has changed, unless the list has it, and returns the row, which
// the caller may then change.
func markChanged[R any](list *[]*entry[R], e *entry[R]) *R {
	if !e.dirty {
		e.dirty = true
		*list = append(*list, e)
	}
	return &e.row
}

// encodeBlocks sets the field JSON of the changed blocks of list.
func encodeBlocks(list []*entry[Block]) error {
	var scratch []byte
	for _, e := range list {
		if !e.dirty {
			continue
		}
		var err error
		if scratch, err = e.row.block.AppendJSON(scratch[:0]); err != nil {
			return err
		}
		e.row.JSON = clean(string(scratch))
		if e.row.final() {
			e.row.block = events.Block{}
		}
	}
	return nil
}

// jsonValue returns the row value of an application's JSON; nil for none.
func jsonValue(m json.RawMessage) *string {
	if len(m) == 0 {
		return nil
	}
	s := clean(string(m))
	return &s
}
