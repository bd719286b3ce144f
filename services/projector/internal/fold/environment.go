package fold

import (
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// sandboxID returns the row id of the sandbox that an event is about, or "" for another event.
func sandboxID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.SandboxCreating:
		return validRowID(d.SandboxID)
	case events.SandboxReady:
		return validRowID(d.SandboxID)
	case events.SandboxReplaced:
		return validRowID(d.SandboxID)
	case events.SandboxTerminated:
		return validRowID(d.SandboxID)
	case events.SandboxFailed:
		return validRowID(d.SandboxID)
	case events.SandboxPaused:
		return validRowID(d.SandboxID)
	case events.SandboxResumed:
		return validRowID(d.SandboxID)
	case events.SandboxHealth:
		return validRowID(d.SandboxID)
	}
	return ""
}

// foldSandbox folds an event about a sandbox into the sandbox's row. The event may come after the end of its execution,
// because a sandbox may outlast executions.
func (f *batchFold) foldSandbox(a *sessionRows, e events.Event) {
	id := sandboxID(e)
	if id == "" {
		return
	}
	b := a.sandboxes[id]
	if b == nil {
		b = &cachedRow[Sandbox]{row: Sandbox{Tenant: a.key.Tenant, Session: a.key.ID, ID: id, CreatedAt: postgresTime(e.Time)}}
		a.sandboxes[id] = b
	}
	if b.row.EndedAt != nil {
		return
	}
	row := markChanged(&f.sandboxes, b)
	switch d := e.Data.(type) {
	case events.SandboxCreating:
		row.Status, row.Provider, row.Engine = "creating", validText(d.Provider), validText(d.Engine)
	case events.SandboxReady:
		row.Status, row.Provider, row.Engine, row.ReadyAt = "ready", validText(d.Provider), validText(d.Engine), postgresTimePointer(e.Time)
		row.Image = validText(d.Image)
	case events.SandboxPaused:
		row.Status = "paused"
	case events.SandboxResumed:
		row.Status = "ready"
	case events.SandboxHealth:
		row.Health, row.HealthWhy, row.MemoryBytes, row.DiskBytes = validText(d.Status), validText(d.Reason), clampInt64(d.MemoryBytes), clampInt64(d.DiskBytes)
	case events.SandboxReplaced:
		row.Status, row.Reason, row.EndedAt = "replaced", validText(d.Lost), postgresTimePointer(e.Time)
	case events.SandboxTerminated:
		row.Status, row.Reason, row.EndedAt = "terminated", validText(d.Reason), postgresTimePointer(e.Time)
	case events.SandboxFailed:
		row.Status, row.Reason, row.EndedAt = "failed", validText(d.Code+": "+d.Message), postgresTimePointer(e.Time)
	}
}

// fileID returns the row id of the file that an event is about, or "" for another event.
func fileID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.FileCreated:
		return validRowID(d.Path)
	case events.FileModified:
		return validRowID(d.Path)
	case events.FileDeleted:
		return validRowID(d.Path)
	}
	return ""
}

// foldFile folds a change of a file into the file's row. The event may come after the end of its execution.
func (f *batchFold) foldFile(a *sessionRows, s *Session, e events.Event) {
	id := fileID(e)
	if id == "" {
		return
	}
	x := a.files[id]
	if x == nil {
		x = &cachedRow[File]{row: File{Tenant: a.key.Tenant, Session: a.key.ID, ID: id}}
		a.files[id] = x
	}
	row := markChanged(&f.files, x)
	row.Execution, row.ChangedAt, row.LastSeq = validRowID(e.ExecutionID), postgresTime(e.Time), s.Tip
	switch d := e.Data.(type) {
	case events.FileCreated:
		row.Path, row.Size, row.Binary, row.Deleted = validText(d.Path), clampInt64(d.Size), d.Binary, false
	case events.FileModified:
		row.Path, row.Size, row.Binary, row.Deleted = validText(d.Path), clampInt64(d.Size), d.Binary, false
	case events.FileDeleted:
		row.Path, row.Size, row.Deleted = validText(d.Path), 0, true
	}
}

// modelUsageID returns the id of the row of the table usage to which an event adds a model request, or "" for another
// event.
func modelUsageID(e events.Event) string {
	d, ok := e.Data.(events.ModelCalled)
	if !ok {
		return ""
	}
	return validRowID(e.ExecutionID + " " + utcDay(e.Time) + " " + d.Provider + " " + d.Model)
}

// utcDay returns the UTC day of a time, such as 2026-01-31.
func utcDay(t time.Time) string { return clampTime(t).Format(time.DateOnly) }

// cachedUTCDay returns the same as utcDay. It formats the day only if it differs from that of the last call.
func (m *Model) cachedUTCDay(t time.Time) string {
	t = clampTime(t)
	const seconds = 24 * 60 * 60
	if age := t.Unix() - m.dayBegin; m.lastDay == "" || age < 0 || age >= seconds {
		m.lastDay, m.dayBegin = utcDay(t), t.Truncate(24*time.Hour).Unix()
	}
	return m.lastDay
}

// foldModelRequest adds the model request that an event reports to the row of the table usage for its execution, day,
// provider and model. It does nothing for other events.
func (f *batchFold) foldModelRequest(a *sessionRows, e events.Event) {
	d, ok := e.Data.(events.ModelCalled)
	if !ok {
		return
	}
	id := modelUsageID(e)
	x := a.usage[id]
	if x == nil {
		x = &cachedRow[ModelUsage]{row: ModelUsage{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Execution: validRowID(e.ExecutionID),
			Provider: validText(d.Provider), Model: validText(d.Model), Day: utcDay(e.Time),
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
		row.Prices = validText(d.Prices)
	}
	row.FirstByteMs += int64(d.FirstByteMs)
	row.DurationMs += int64(d.DurationMs)
}

// clampInt64 returns n, or the largest int64 if n is larger, because Postgres has no unsigned integers.
func clampInt64(n uint64) int64 { return int64(min(n, math.MaxInt64)) } //nolint:gosec // bounded just here
