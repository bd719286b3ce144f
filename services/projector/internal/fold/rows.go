// Package fold computes the read models from the log: the rows that a batch of commits changes, given the rows that exist. It does no I/O.
// To fold a commit means to apply its events, in order, to the rows.
package fold

import (
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// RowKey is the primary key of a row that belongs to a tenant: a session, an API key, a catalogue entry, a budget, or the
// usage of a day.
type RowKey struct{ Tenant, ID string }

// ChildKey is the primary key of a row that belongs to a session or to a catalogue entry. Session is the key of that
// session or entry.
type ChildKey struct {
	Session RowKey
	ID      string
}

// The row types. The migrations of readmodel describe their fields.
type (
	// Session is a row of the table sessions.
	Session struct {
		Tenant, ID      string
		Group           int16
		Status          string
		Agent           string
		AgentVersion    string
		Architecture    string
		Provider        string
		Options         string
		Metadata        *string
		CreatedAt       time.Time
		UpdatedAt       time.Time
		Tip             int64
		TipPosition     string
		ActiveExecution string
		Queued          int32
		Executions      int32
		Idle            bool
		Snapshot        string
		SnapshotAt      *time.Time
		WorkspaceFiles  int64
		WorkspaceBytes  int64
		AgentRef        string
		Instance        string
		Environments    string
		Title           string
		Spent           string // JSON of what the session added to tenant_usage, by day; "" for nothing
		Parent          string // parent session; "" if the session is not a fork
		Forked          string // JSON of events.SessionForked; "" for none
		SandboxMs       int64  // running time of its metered sandboxes
		SandboxCostUSD  float64
		ChangedAt       int64 // stream sequence of the last commit that changed what lists of sessions show
	}
	// DeletedSession is a row of the table deleted_sessions.
	DeletedSession struct {
		Tenant, ID string
		Group      int16
		At         time.Time
		Spent      string // as in Session; once it is retired, the value of run_retired
		Removed    bool   // whether its content was removed
		Parent     string // as in Session
		Forked     string
		Agent      string
		ChangedAt  int64 // stream sequence of the commit that deleted it
	}
	// Execution is a row of the table executions.
	Execution struct {
		Tenant, Session, ID string
		Ord                 int32
		Phase               string
		Code                string
		Message             string
		Reason              string
		Attempt             int32
		Executor            string
		Model               string
		Input, Output       int64
		CacheRead           int64
		CacheWrite          int64
		CostUSD             float64
		Result              string
		Metadata            *string
		QueuedAt            time.Time
		DispatchedAt        *time.Time
		StartedAt           *time.Time
		EndedAt             *time.Time
		DurationMs          int64
		FirstSeq            int64
		Resolved            *string
		Metered             bool
		Query               string
		SandboxMs           int64 // running time of its metered sandboxes during the execution
		SandboxCostUSD      float64
		RecoveredFrom       string // the failed execution that it continues; "" for none
		OpenApprovals       int32
	}
	// Block is a row of the table blocks. JSON is the encoded form of block; it is only set while the row is read or
	// written.
	Block struct {
		Tenant, Session, ID string
		Execution           string
		Conversation        string
		Kind                string
		Status              string
		ExecutionOrd        int32
		FirstSeq, LastSeq   int64
		JSON                string
		block               events.Block
	}
	// Event is a row of the table events.
	Event struct {
		Tenant, Session string
		Seq             int64
		Type            string
		JSON            string
	}
	// ToolCall is a row of the table tool_calls. ID is the column tool_use_id.
	ToolCall struct {
		Tenant, Session, ID string
		Block               string
		Execution           string
		Conversation        string
		ToolName            string
		Decision            string
		Status              string
		StartedAt           time.Time
		EndedAt             *time.Time
		DurationMs          int64
		FirstSeq            int64
	}
	// Conversation is a row of the table conversations.
	Conversation struct {
		Tenant, Session, ID string
		Parent              string
		Execution           string
		Subagent            string
		ToolUseID           string
		Name                string
		Status              string
		StartedAt           time.Time
		EndedAt             *time.Time
		DurationMs          int64
		FirstSeq            int64
	}
	// Approval is a row of the table approvals.
	Approval struct {
		Tenant, Session, ID string
		Execution           string
		Conversation        string
		Kind                string
		ToolName            string
		ToolUseID           string
		Title               string
		Status              string
		Cause               string
		Request             string
		Verdict             string
		Decision            *string
		Actor               *string
		RequestedSeq        int64
		RequestedAt         time.Time
		DecidedSeq          int64
		DecidedAt           *time.Time
		EndedSeq            int64
		EndedAt             *time.Time
	}
	// Sandbox is a row of the table sandboxes.
	Sandbox struct {
		Tenant, Session, ID string
		Provider            string
		Engine              string
		Status              string
		Reason              string
		CreatedAt           time.Time
		ReadyAt             *time.Time
		EndedAt             *time.Time
		Image               string
		Health              string
		HealthWhy           string
		MemoryBytes         int64
		DiskBytes           int64
	}
	// File is a row of the table files. ID is the file's path, or a hash of a long path.
	File struct {
		Tenant, Session, ID string
		Path                string
		Size                int64
		Binary              bool
		Deleted             bool
		Execution           string
		ChangedAt           time.Time
		LastSeq             int64
	}
	// ModelUsage is a row of the table usage: the model requests of an execution to one model on one day. ID is derived
	// from execution, provider, model and day.
	ModelUsage struct {
		Tenant, Session, ID string
		Execution           string
		Provider            string
		Model               string
		Day                 string
		Requests, Failed    int64
		Input, Output       int64
		CacheRead           int64
		CacheWrite          int64
		CostUSD             float64
		Prices              string
		FirstByteMs         int64
		DurationMs          int64
	}
	// APIKey is a row of the table keys.
	APIKey struct {
		Tenant, ID string
		Group      int16
		Name       string
		Prefix     string
		SHA256     string
		CreatedAt  time.Time
		RevokedAt  *time.Time
		Role       string
		Agents     string
		ExpiresAt  *time.Time
		CreatedBy  string
	}
	// CatalogueEntry is a row of the table catalogue_entries.
	CatalogueEntry struct {
		Tenant, ID string
		Group      int16
		Kind       string
		Scope      string
		Org        string
		Slug       string
		Latest     string
		State      string
		Removed    bool
		CreatedAt  time.Time
		UpdatedAt  time.Time
		state      versions.State
	}
	// CatalogueVersion is a row of the table catalogue_versions. Entry is the id of the catalogue entry.
	CatalogueVersion struct {
		Tenant, Entry, ID string
		Group             int16
		Spec              string
		Document          string
		CreatedAt         time.Time
		Position          string
		Removed           bool
	}
	// PoisonCommit is a row of the table poison: a commit that could not be projected completely.
	PoisonCommit struct {
		Group    int16
		Position string
		Subject  string
		Reason   string
		At       time.Time
	}
)

// The phases of an execution and the statuses of a session in rows.
const (
	phaseQueued    = "queued"
	phaseStarting  = "starting"
	phaseRunning   = "running"
	phaseWaiting   = "waiting_for_approval"
	phasePaused    = "paused"
	phaseCompleted = "completed"
	phaseFailed    = "failed"
	phaseCancelled = "cancelled"

	sessionStatusOpen   = "open"
	sessionStatusClosed = "closed"

	statusPending  = "pending"
	statusComplete = "complete"
	statusError    = "error"
)

// hasEnded reports whether the execution has had its terminal event.
func (x *Execution) hasEnded() bool {
	return x.Phase == phaseCompleted || x.Phase == phaseFailed || x.Phase == phaseCancelled
}

// isQueued reports whether the execution is queued and was not dispatched, so that the session counts it as queued.
func (x *Execution) isQueued() bool { return x.Phase == phaseQueued && x.DispatchedAt == nil }

// isFinal reports whether the block has ended, so that no event changes it any more.
func (b *Block) isFinal() bool { return b.Status != statusPending }

// validRowID returns the id in the form in which read models store ids; see readmodel.Key.
func validRowID(id string) string { return readmodel.KeyValue(id) }

// validText returns the text s in the form in which read models store texts; see readmodel.Text.
func validText(s string) string { return readmodel.TextValue(s) }

// clampTime returns the time t in UTC. If JSON cannot encode its year, it returns the zero time or the end of the year
// 9999.
func clampTime(t time.Time) time.Time {
	t = t.UTC()
	switch {
	case t.Year() < 1:
		return time.Time{}
	case t.Year() > 9999:
		return time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	}
	return t
}

// postgresTime returns the time t as Postgres stores it: in UTC, with microsecond precision.
func postgresTime(t time.Time) time.Time { return clampTime(t).Truncate(time.Microsecond) }

// postgresTimePointer returns a pointer to postgresTime of t.
func postgresTimePointer(t time.Time) *time.Time {
	m := postgresTime(t)
	return &m
}
