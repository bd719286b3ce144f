package fold

import (
	"encoding/json"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// CommitBatch is the input of one call of Model.Fold: commits in the order of the log.
type CommitBatch struct {
	Records []eventlog.Record
	Poison  []PoisonCommit
	// Bare means that only the rows of the events are written, without their data and without any effect on other rows. It is for a commit
	// whose rows Postgres refuses.
	Bare bool
}

// ChangedRows are the rows of one table that a fold changed, without duplicates. New are rows that Postgres does not have yet;
// Changed are rows that it has in an earlier state.
type ChangedRows[R any] struct{ New, Changed []*R }

// Len returns the number of rows.
func (r ChangedRows[R]) Len() int { return len(r.New) + len(r.Changed) }

// Changes holds what a fold changes in the read models. The store must apply it in this order: deletions, then rows,
// and then the ends of what ends with an execution.
type Changes struct {
	Gone          []RowKey // sessions whose rows are deleted, except events and blocks
	Retired       []RowKey // sessions whose events and blocks are deleted
	Sessions      ChangedRows[Session]
	Executions    ChangedRows[Execution]
	Blocks        ChangedRows[Block]
	Calls         ChangedRows[ToolCall]
	Conversations ChangedRows[Conversation]
	Approvals     ChangedRows[Approval]
	Sandboxes     ChangedRows[Sandbox]
	Files         ChangedRows[File]
	Usage         ChangedRows[ModelUsage]
	Keys          ChangedRows[APIKey]
	Entries       ChangedRows[CatalogueEntry]
	Versions      ChangedRows[CatalogueVersion]
	TenantUsage   ChangedRows[TenantUsage]
	TenantBudgets ChangedRows[TenantBudget]
	TenantLimits  ChangedRows[TenantLimits]
	Events        []*Event
	Deleted       []*DeletedSession // without duplicates
	Poison        []*PoisonCommit
	AuditGone     []RowKey // deleted sessions whose audit rows are deleted, except those of the deletion
	Audit         []*AuditRow
	States        []*SavedSessionState
	Ended         []EndedExecution
	Announcements []Announcement
}

// EndedExecution identifies an execution that ended. The store also ends its open calls, sub-agents and approval
// requests.
type EndedExecution struct {
	Session   RowKey
	Execution string
	At        time.Time
	Seq       int64 // of the event
}

// Announcement holds what the projector announces to gateways about one session: the new events and the seq of the last
// event.
type Announcement struct {
	Session RowKey
	Events  []*Event
	Tip     int64
	Changed bool // lists of sessions show something new
}

// Empty reports whether nothing changed.
func (c *Changes) Empty() bool {
	return len(c.Gone)+len(c.Retired)+len(c.Events)+len(c.Deleted)+len(c.Poison)+len(c.AuditGone)+len(c.Audit)+len(c.Ended)+len(c.States)+
		c.Sessions.Len()+c.Executions.Len()+c.Blocks.Len()+c.Calls.Len()+c.Conversations.Len()+c.Approvals.Len()+c.Sandboxes.Len()+c.Files.Len()+c.Usage.Len()+c.Keys.Len()+
		c.Entries.Len()+c.Versions.Len()+c.TenantUsage.Len()+c.TenantBudgets.Len()+c.TenantLimits.Len() == 0
}

// takeDirtyRows returns the rows of list that were changed, and marks them as stored and unchanged. The caller must
// write them to Postgres.
func takeDirtyRows[R any](list []*cachedRow[R]) (rows ChangedRows[R]) {
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

// markChanged adds the row e to list, which holds the rows that the present fold has changed, unless the list has it.
// It returns the row, which the caller may then change.
func markChanged[R any](list *[]*cachedRow[R], e *cachedRow[R]) *R {
	if !e.dirty {
		e.dirty = true
		*list = append(*list, e)
	}
	return &e.row
}

// encodeBlocks sets the field JSON of each changed block in list.
func encodeBlocks(list []*cachedRow[Block]) error {
	var scratch []byte
	for _, e := range list {
		if !e.dirty {
			continue
		}
		var err error
		if scratch, err = e.row.block.AppendJSON(scratch[:0]); err != nil {
			return err
		}
		e.row.JSON = validText(string(scratch))
		if e.row.isFinal() {
			e.row.block = events.Block{}
		}
	}
	return nil
}

// optionalJSON returns the JSON m as the value of a nullable column, or nil if m is empty.
func optionalJSON(m json.RawMessage) *string {
	if len(m) == 0 {
		return nil
	}
	s := validText(string(m))
	return &s
}
