package fold

import (
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// AuditRow is a row of the table audit: who caused a commit, when, and what it is about.
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

// addAuditRow adds the row of the table audit for a commit that a client caused; for other commits it does nothing.
func (f *batchFold) addAuditRow(rec eventlog.Record) {
	if a, ok := eventlog.AuditEntryOf(rec); ok {
		f.out.Audit = append(f.out.Audit, f.newAuditRow(rec, a))
	}
}

// newAuditRow returns the row of the table audit for the audit entry a. The subject and the shard are those of the
// commit rec.
func (f *batchFold) newAuditRow(rec eventlog.Record, a events.AuditEntry) *AuditRow {
	types := make([]string, len(a.Types))
	for i, t := range a.Types {
		types[i] = string(t)
	}
	return &AuditRow{
		Tenant: rec.Subject.Tenant, Shard: int16(rec.Position.Shard), Seq: clampInt64(a.Seq), Group: f.model.group, At: postgresTime(a.Time), //nolint:gosec // there are 8 shards
		Aspect: string(rec.Subject.Aspect), Subject: rec.Subject.ID, About: catalogueSubject(rec), Execution: validRowID(a.ExecutionID), Types: validText(strings.Join(types, ",")),
		ActorKind: validRowID(a.Actor.Kind), Actor: validRowID(a.Actor.ID), Key: validRowID(a.Actor.Key), User: validText(a.Actor.User), Service: validText(a.Actor.Service), Address: validText(a.Actor.Address),
	}
}

// catalogueSubject returns the API key's id or the catalogue entry's reference that a commit of the catalogue is about,
// or "" for another commit.
func catalogueSubject(rec eventlog.Record) string {
	for _, e := range rec.Events {
		if id := apiKeyID(e); id != "" {
			return id
		}
		if c, ok := entryChangeOf(rec.Subject.Aspect, e); ok {
			return validText(c.ref.String())
		}
	}
	return ""
}

// typeSessionDeleted is the event type session_deleted, which is the last one in AuditRow.Types for the commit that
// deletes a session. That commit stays in the log.
const typeSessionDeleted = events.Type("session_deleted")

// isSessionDeletion reports whether the row belongs to the commit that deleted its session.
func (a *AuditRow) isSessionDeletion() bool {
	return strings.HasSuffix(a.Types, string(typeSessionDeleted))
}

// replaceAuditRows replaces the audit rows of a deleted session, except that of the deletion, by the audit entries that
// its run_retired event lists, because the log may no longer have the commits. A fold that read the commits, and one
// that did not, write equal rows.
func (f *batchFold) replaceAuditRows(rec eventlog.Record, d events.RunRetired) {
	k := RowKey{rec.Subject.Tenant, rec.Subject.ID}
	f.out.Audit = removeMatching(f.out.Audit, func(a *AuditRow) bool { return a.Tenant == k.Tenant && a.Subject == k.ID && !a.isSessionDeletion() })
	f.out.AuditGone = append(f.out.AuditGone, k)
	present := map[int64]bool{}
	for _, a := range f.out.Audit {
		present[a.Seq] = present[a.Seq] || a.Tenant == k.Tenant && a.Shard == int16(rec.Position.Shard) //nolint:gosec // there are 8 shards
	}
	rec.Subject.Aspect, rec.Events = events.Life, nil
	for _, kept := range d.Audit {
		if a := f.newAuditRow(rec, kept); kept.Seq < rec.Position.Seq && !present[a.Seq] {
			f.out.Audit, present[a.Seq] = append(f.out.Audit, a), true
		}
	}
}
