package fold

import (
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// AuditRow is a row of audit.
type AuditRow struct {
	Tenant    string
	Shard     int16
	Seq       int64
	Group     int16
	At        time.Time
	Aspect    string
	Subject   string
	About     string
	Execution string
	Types     string
	ActorKind string
	Actor     string
	Key       string
	User      string
	Service   string
	Address   string
}

// addAudit adds the row for a commit that a client caused.
func (f *folding) addAudit(rec eventlog.Record) {
	if a, ok := eventlog.AuditEntryOf(rec); ok {
		f.out.Audit = append(f.out.Audit, f.auditRow(rec, a))
	}
}

// auditRow returns the row for a commit, with the subject and shard of rec.
func (f *folding) auditRow(rec eventlog.Record, a events.AuditEntry) *AuditRow {
	types := make([]string, len(a.Types))
	for i, t := range a.Types {
		types[i] = string(t)
	}
	return &AuditRow{
		Tenant: rec.Subject.Tenant, Shard: int16(rec.Position.Shard), Seq: clampInt64(a.Seq), Group: f.model.group, At: pgTime(a.Time), //nolint:gosec // there are 8 shards
		Aspect: string(rec.Subject.Aspect), Subject: rec.Subject.ID, About: about(rec), Execution: rowKey(a.ExecutionID), Types: clean(strings.Join(types, ",")),
		ActorKind: rowKey(a.Actor.Kind), Actor: rowKey(a.Actor.ID), Key: rowKey(a.Actor.Key), User: clean(a.Actor.User), Service: clean(a.Actor.Service), Address: clean(a.Actor.Address),
	}
}

// about returns the subject of a catalogue commit: an API key's id, or an entry's reference; "" for other commits.
func about(rec eventlog.Record) string {
	for _, e := range rec.Events {
		if id := keyID(e); id != "" {
			return id
		}
		if c, ok := entryChangeOf(rec.Subject.Aspect, e); ok {
			return clean(c.ref.String())
		}
	}
	return ""
}

// deletionType is the last type in AuditRow.Types for the commit that deletes a session. That commit stays in the log.
const deletionType = events.Type("session_deleted")

// deletes reports whether the row belongs to the commit that deleted its session.
func (a *AuditRow) deletes() bool { return strings.HasSuffix(a.Types, string(deletionType)) }

// keepAudit replaces the audit rows of the commits before a deletion with those that run_retired lists. These
// commits may be removed from the log; the rows are equal whether a fold read the commits or not.
func (f *folding) keepAudit(rec eventlog.Record, d events.RunRetired) {
	k := Key{rec.Subject.Tenant, rec.Subject.ID}
	f.out.Audit = remove(f.out.Audit, func(a *AuditRow) bool { return a.Tenant == k.Tenant && a.Subject == k.ID && !a.deletes() })
	f.out.AuditGone = append(f.out.AuditGone, k)
	present := map[int64]bool{}
	for _, a := range f.out.Audit {
		present[a.Seq] = present[a.Seq] || a.Tenant == k.Tenant && a.Shard == int16(rec.Position.Shard) //nolint:gosec // there are 8 shards
	}
	rec.Subject.Aspect, rec.Events = events.Life, nil
	for _, kept := range d.Audit {
		if a := f.auditRow(rec, kept); kept.Seq < rec.Position.Seq && !present[a.Seq] {
			f.out.Audit, present[a.Seq] = append(f.out.Audit, a), true
		}
	}
}
