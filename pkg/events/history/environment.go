package history

import (
	"github.com/spoolhq/spool/pkg/events"
)

// applySandbox applies an event about a sandbox to the most recent sandbox in the state.
func (s *State) applySandbox(e events.Event) {
	box := func(id string) *Sandbox {
		if s.Sandbox == nil || s.Sandbox.ID != id {
			s.Sandbox = &Sandbox{ID: id, CreatedAt: e.Time}
		} else {
			copied := *s.Sandbox
			s.Sandbox = &copied
		}
		return s.Sandbox
	}
	gone := func(id, status, reason string) {
		if s.Sandbox != nil && s.Sandbox.ID == id && s.Sandbox.EndedAt == nil {
			b := box(id)
			b.Status, b.Reason, b.EndedAt = status, reason, &e.Time
		}
	}
	switch d := e.Data.(type) {
	case events.SandboxCreating:
		b := box(d.SandboxID)
		b.Status, b.Provider, b.Engine = "creating", d.Provider, d.Engine
	case events.SandboxReady:
		b := box(d.SandboxID)
		b.Status, b.Provider, b.Engine, b.Image = "ready", d.Provider, d.Engine, d.Image
	case events.SandboxPaused:
		box(d.SandboxID).Status = "paused"
	case events.SandboxResumed:
		box(d.SandboxID).Status = "ready"
	case events.SandboxHealth:
		b := box(d.SandboxID)
		b.Health, b.MemoryBytes, b.DiskBytes = d.Status, d.MemoryBytes, d.DiskBytes
		if b.EndedAt == nil {
			b.Reason = d.Reason
		}
	case events.SandboxReplaced:
		gone(d.SandboxID, "replaced", d.Lost)
	case events.SandboxTerminated:
		gone(d.SandboxID, "terminated", d.Reason)
	case events.SandboxFailed:
		gone(d.SandboxID, "failed", d.Code+": "+d.Message)
	}
}

// FileChangeTypes returns the types of the events that record a difference between the workspace and its last snapshot.
func FileChangeTypes() []events.Type {
	return []events.Type{
		events.FileCreated{}.EventType(), events.FileModified{}.EventType(), events.FileDeleted{}.EventType(),
		events.FilePut{}.EventType(), events.FileRemoved{}.EventType(),
	}
}

// applyFiles applies an event of the workspace: it stores the last snapshot, and counts the file changes since that snapshot.
func (s *State) applyFiles(e events.Event) {
	switch d := e.Data.(type) {
	case events.WorkspaceSynced:
		if d.Snapshot != "" {
			s.Snapshot, s.FileChanges = &Snapshot{d.Snapshot, s.Seq, e.Time, d.Files, d.Bytes}, 0
		}
	case events.FileCreated, events.FileModified, events.FileDeleted, events.FilePut, events.FileRemoved:
		s.FileChanges++
	}
}
