package eventlog

import (
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Audit returns what the audit lists of a commit; ok is false for a commit that no client caused. Times are in microseconds, as Postgres has
// them.
func Audit(rec Record) (a events.Audited, ok bool) {
	actor := rec.Commit.Actor
	if !actor.IsClient() {
		return a, false
	}
	a = events.Audited{Seq: rec.Position.Seq, Time: rec.Time.UTC().Truncate(time.Microsecond), Actor: actor.WrittenBy(actor.Service)}
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

// maxAudit bounds in bytes what a session's run_retired keeps of the audit: it has to stay in its commit.
const maxAudit = events.MaxInline * 3 / 4

// KeepAudit returns the newest of a session's audited commits, ascending by sequence, that fit into run_retired.
func KeepAudit(list []events.Audited) ([]events.Audited, error) {
	size := 0
	for i := len(list) - 1; i >= 0; i-- {
		b, err := encode(list[i])
		if err != nil {
			return nil, err
		}
		if size += len(b) + 1; size > maxAudit {
			return list[i+1:], nil
		}
	}
	return list, nil
}
