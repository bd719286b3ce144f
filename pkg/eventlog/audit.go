package eventlog

import (
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// AuditEntryOf returns the audit entry of a commit: who caused the commit, and its event types. ok is false if no
// client caused the commit. Times are truncated to microseconds, the precision of Postgres.
func AuditEntryOf(rec Record) (a events.AuditEntry, ok bool) {
	actor := rec.Commit.Actor
	if !actor.IsClient() {
		return a, false
	}
	a = events.AuditEntry{Seq: rec.Position.Seq, Time: rec.Time.UTC().Truncate(time.Microsecond), Actor: actor.WrittenBy(actor.Service)}
	for _, e := range rec.Events {
		if !slices.Contains(a.Types, e.Type()) {
			a.Types = append(a.Types, e.Type())
		}
		if a.ExecutionID == "" {
			a.ExecutionID = e.ExecutionID
		}
	}
	return a, true
}

// maxAuditBytes is the maximum size in bytes of the audit entries in a session's run_retired, so that they stay inside
// its commit.
const maxAuditBytes = events.MaxInlineBytes * 3 / 4

// NewestAuditEntries returns the newest of a session's audit entries that fit into run_retired, ascending by sequence.
func NewestAuditEntries(list []events.AuditEntry) ([]events.AuditEntry, error) {
	size := 0
	for i := len(list) - 1; i >= 0; i-- {
		b, err := encodeJSON(list[i])
		if err != nil {
			return nil, err
		}
		if size += len(b) + 1; size > maxAuditBytes {
			return list[i+1:], nil
		}
	}
	return list, nil
}
