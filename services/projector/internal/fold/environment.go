package fold

import (
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// sandboxID returns the row key of the sandbox that an event is about, or "".
func sandboxID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.SandboxCreating:
		return rowKey(d.SandboxID)
	case events.SandboxReady:
		return rowKey(d.SandboxID)
	case events.SandboxReplaced:
		return rowKey(d.SandboxID)
	case events.SandboxTerminated:
		return rowKey(d.SandboxID)
	case events.SandboxFailed:
		return rowKey(d.SandboxID)
	case events.SandboxPaused:
		return rowKey(d.SandboxID)
	case events.SandboxResumed:
		return rowKey(d.SandboxID)
	case events.SandboxHealth:
		return rowKey(d.SandboxID)
	}
	return ""
}

// foldSandbox folds an event into the row of the sandbox that it is about. A sandbox may outlast executions, so the event may come after the
// end of its execution.
func (f *folding) foldSandbox(a *aggregate, e events.Event) {
	id := sandboxID(e)
	if id == "" {
		return
	}
	b := a.sandboxes[id]
	if b == nil {
		b = &entry[Sandbox]{row: Sandbox{Tenant: a.key.Tenant, Session: a.key.ID, ID: id, CreatedAt: pgTime(e.Time)}}
		a.sandboxes[id] = b
	}
	if b.row.EndedAt != nil {
		return
	}
	row := markChanged(&f.sandboxes, b)
	switch d := e.Data.(type) {
	case events.SandboxCreating:
		row.Status, row.Provider, row.Engine = "creating", clean(d.Provider), clean(d.Engine)
	case events.SandboxReady:
		row.Status, row.Provider, row.Engine, row.ReadyAt = "ready", clean(d.Provider), clean(d.Engine), pgTimePointer(e.Time)
		row.Image = clean(d.Image)
	case events.SandboxPaused:
		row.Status = "paused"
	case events.SandboxResumed:
		row.Status = "ready"
	case events.SandboxHealth:
		row.Health, row.HealthWhy, row.MemoryBytes, row.DiskBytes = clean(d.Status), clean(d.Reason), clampInt64(d.MemoryBytes), clampInt64(d.DiskBytes)
	case events.SandboxReplaced:
		row.Status, row.Reason, row.EndedAt = "replaced", clean(d.Lost), pgTimePointer(e.Time)
	case events.SandboxTerminated:
		row.Status, row.Reason, row.EndedAt = "terminated", clean(d.Reason), pgTimePointer(e.Time)
	case events.SandboxFailed:
		row.Status, row.Reason, row.EndedAt = "failed", clean(d.Code+": "+d.Message), pgTimePointer(e.Time)
	}
}

// fileID returns the row key of the file that an event is about, or "".
func fileID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.FileCreated:
		return rowKey(d.Path)
	case events.FileModified:
		return rowKey(d.Path)
	case events.FileDeleted:
		return rowKey(d.Path)
	}
	return ""
}

// foldFile folds a change of a file into the file's row. The event may come after the end of its execution.
func (f *folding) foldFile(a *aggregate, s *Session, e events.Event) {
	id := fileID(e)
	if id == "" {
		return
	}
	x := a.files[id]
	if x == nil {
		x = &entry[File]{row: File{Tenant: a.key.Tenant, Session: a.key.ID, ID: id}}
		a.files[id] = x
	}
	row := markChanged(&f.files, x)
	row.Execution, row.ChangedAt, row.LastSeq = rowKey(e.ExecutionID), pgTime(e.Time), s.Tip
	switch d := e.Data.(type) {
	case events.FileCreated:
		row.Path, row.Size, row.Binary, row.Deleted = clean(d.Path), clampInt64(d.Size), d.Binary, false
	case events.FileModified:
		row.Path, row.Size, row.Binary, row.Deleted = clean(d.Path), clampInt64(d.Size), d.Binary, false
	case events.FileDeleted:
		row.Path, row.Size, row.Deleted = clean(d.Path), 0, true
	}
}

// usageID returns the row key of the row of usage to which an event adds a model request, or "".
func usageID(e events.Event) string {
	d, ok := e.Data.(events.ModelCalled)
	if !ok {
		return ""
	}
	return rowKey(e.ExecutionID + " " + day(e.Time) + " " + d.Provider + " " + d.Model)
}

// day returns the UTC day of a time, such as 2026-01-31.
func day(t time.Time) string { return clampTime(t).Format(time.DateOnly) }

// day returns the result of the function day. It formats the day only if it is another one than that of the last call.
func (m *Model) day(t time.Time) string {
	t = clampTime(t)
	const seconds = 24 * 60 * 60
	if age := t.Unix() - m.dayBegin; m.lastDay == "" || age < 0 || age >= seconds {
		m.lastDay, m.dayBegin = day(t), t.Truncate(24*time.Hour).Unix()
	}
	return m.lastDay
}

// foldModelCall adds a model request, if the event is one, to the row of usage of its execution, day, provider and model.
func (f *folding) foldModelCall(a *aggregate, e events.Event) {
	d, ok := e.Data.(events.ModelCalled)
	if !ok {
		return
	}
	id := usageID(e)
	x := a.usage[id]
	if x == nil {
		x = &entry[Usage]{row: Usage{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Execution: rowKey(e.ExecutionID),
			Provider: clean(d.Provider), Model: clean(d.Model), Day: day(e.Time),
		}}
		a.usage[id] = x
	}
	row := markChanged(&f.usage, x)
	row.Requests++
	if d.Status == 0 || d.Status >= 400 {
		row.Failed++
	}
	row.Input += int64(d.Usage.InputTokens)
	row.Output += int64(d.Usage.OutputTokens)
	row.CacheRead += int64(d.Usage.CacheReadTokens)
	row.CacheWrite += int64(d.Usage.CacheWriteTokens)
	row.CostUSD += d.CostUSD
	if d.Prices != "" {
		row.Prices = clean(d.Prices)
	}
	row.FirstByteMs += int64(d.FirstByteMs)
	row.DurationMs += int64(d.DurationMs)
}

// clampInt64 limits a number to the 63 bits that Postgres stores.
func clampInt64(n uint64) int64 { return int64(min(n, math.MaxInt64)) } //nolint:gosec // bounded just here
