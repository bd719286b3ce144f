package janitor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session/internal/usage"
)

// sessionKey is the tenant and the id of a session.
type sessionKey struct{ Tenant, ID string }

// deletedSessionsPageSize is the number of deleted sessions that one SQL query lists.
const deletedSessionsPageSize = 500

// processDeletedSessions processes every deleted session whose content was not removed yet, until the pass has removed
// the maximum number of sessions. A failure for one session does not prevent the work for others.
func (p *pass) processDeletedSessions(ctx context.Context) error {
	var errs []error
	var last sessionKey
	for {
		rows, err := p.conn.Query(ctx, "SELECT tenant, id FROM deleted_sessions WHERE NOT removed AND (tenant, id) > ($1, $2) ORDER BY tenant, id LIMIT $3", last.Tenant, last.ID, deletedSessionsPageSize)
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("list deleted sessions: %w", err))...)
		}
		list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[sessionKey])
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("list deleted sessions: %w", err))...)
		}
		for _, k := range list {
			if err := p.advanceDeletedSession(ctx, k); err != nil {
				errs = append(errs, fmt.Errorf("session %s of tenant %s: %w", k.ID, k.Tenant, err))
			}
			if last = k; ctx.Err() != nil || p.removed == p.cfg.Sessions {
				return errors.Join(errs...)
			}
		}
		if len(list) < deletedSessionsPageSize {
			return errors.Join(errs...)
		}
	}
}

// advanceDeletedSession does the next step for a deleted session: it retires the session's runs when nothing reads or
// writes them any more, and erases the content when the grace period after that has passed.
func (p *pass) advanceDeletedSession(ctx context.Context, k sessionKey) error {
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.LeaderOnly)
	if err != nil {
		return err
	}
	if l.Life.Status != session.Deleted {
		return fmt.Errorf("the read models say that session %s of tenant %s is deleted, and the log does not", k.ID, k.Tenant)
	}
	at := max(l.LifeHead.Seq, l.RunHead.Seq)
	waits, err := p.waitReason(ctx, l, at)
	if err == nil && waits == "" {
		waits, err = p.keptByForksReason(ctx, l)
	}
	switch {
	case err != nil:
		return err
	case waits != "":
		p.addItem(ReportItem{Kind: KindSession, Tenant: k.Tenant, Name: k.ID, Waits: waits})
		return nil
	case !l.Run.Retired:
		p.addItem(ReportItem{Kind: KindSession, Tenant: k.Tenant, Name: k.ID, Waits: fmt.Sprintf("its runs are not retired yet; its content goes %s after that", p.cfg.Grace)})
		if p.dry {
			return nil
		}
		return p.retireRuns(ctx, l)
	}
	rec, err := p.log.CommitAt(ctx, p.sessions.Position(k.ID, l.RunHead.Seq))
	if err != nil {
		return fmt.Errorf("read the end of session %s: %w", k.ID, err)
	}
	if slices.ContainsFunc(rec.Events, func(e events.Event) bool { _, done := e.Data.(events.ContentRemoved); return done }) {
		return nil // the read models do not have the session yet
	}
	if due := rec.Time.Add(p.cfg.Grace); p.now().Before(due) {
		p.addItem(ReportItem{Kind: KindSession, Tenant: k.Tenant, Name: k.ID, Waits: "its content goes at " + due.UTC().Format(time.RFC3339)})
		return nil
	}
	return p.eraseContent(ctx, l)
}

// waitReason returns the reason why the content of a deleted session cannot be removed yet, as a sentence that names
// the service that still reads or writes the session up to a sequence. It returns "" if there is none.
func (p *pass) waitReason(ctx context.Context, l *eventlog.SessionState, at uint64) (string, error) {
	switch {
	case l.Run.Retired:
	case l.DueWork() != run.NoWork, !l.Run.IsIdle(), l.Life.Active.ExecutionID != "" && !l.Run.IsDone(l.Life.Active):
		return "an execution has not ended", nil
	case l.Run.Sandbox.ID != "":
		return "its sandbox is not released", nil
	}
	group := p.log.Partitioning().GroupOfID(l.ID)
	var position uint64
	var caughtUp bool
	err := p.conn.QueryRow(ctx, "SELECT position, caught_up FROM checkpoints WHERE grp = $1", group).Scan(&position, &caughtUp)
	if err != nil {
		return "", fmt.Errorf("read the checkpoint of group %d: %w", group, err)
	}
	if position < at || !caughtUp {
		return "the projector has not passed it", nil
	}
	shard := p.sessions.Position(l.ID, at).Shard
	c, err := p.js.Consumer(ctx, topology.EventsStreamName(shard), topology.ReactorDurable(shard))
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return "the session service has not passed it", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the position of the session service: %w", err)
	}
	if c.CachedInfo().AckFloor.Stream < at {
		return "the session service has not passed it", nil
	}
	counted, err := usage.HasFolded(ctx, p.js, shard, at)
	if err != nil {
		return "", err
	}
	if !counted {
		return "the session service has not counted its usage", nil
	}
	return "", nil
}

// janitorActor is the actor in the janitor's commits.
var janitorActor = events.Actor{Kind: "service", ID: "janitor"}.WrittenBy("janitor")

// retireRuns ends the runs of a deleted session. From then on the guard refuses every other writer, also one that read
// no commit, because each subject keeps a commit.
func (p *pass) retireRuns(ctx context.Context, l *eventlog.SessionState) error {
	usage, stored, err := p.sessionUsage(ctx, l)
	if err != nil {
		return err
	}
	shard := p.sessions.Position(l.ID, 1).Shard
	life, err := p.countCommits(ctx, shard, l.LifeHead.Subject)
	if err != nil {
		return err
	}
	runs, err := p.countCommits(ctx, shard, events.RunSubject(l.Tenant, l.ID))
	if err != nil {
		return err
	}
	audit, err := p.auditEntriesToKeep(ctx, l)
	if err != nil {
		return err
	}
	if life == 0 {
		return fmt.Errorf("retire session %s: the log has no commit on %s, but session_deleted is there", l.ID, l.LifeHead.Subject)
	}
	return p.appendToRuns(ctx, l, "retire", func(meta events.CommandMeta) run.Command {
		return run.RetireRuns{CommandMeta: meta, Usage: usage, Life: life - 1, Runs: runs, Audit: audit, Stored: stored}
	})
}

// auditEntriesToKeep returns the audit entries of a deleted session that its event run_retired keeps. It leaves out the
// deletion, whose commit is not erased.
func (p *pass) auditEntriesToKeep(ctx context.Context, l *eventlog.SessionState) ([]events.AuditEntry, error) {
	var list []events.AuditEntry
	for rec, err := range p.sessionCommits(ctx, l.LifeHead.Subject) {
		if err != nil {
			return nil, err
		}
		if a, ok := eventlog.AuditEntryOf(rec); ok && rec.Position.Seq != l.LifeHead.Seq {
			list = append(list, a)
		}
	}
	return eventlog.NewestAuditEntries(list)
}

// sessionCommits yields the commits of a session, or of one of its subjects. If the payload of a commit is lost, it
// yields the commit without the payload, and continues after it.
func (p *pass) sessionCommits(ctx context.Context, of events.Subject) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		at := eventlog.Position{Shard: p.sessions.Position(of.ID, 1).Shard}
		for ended := false; !ended; {
			ended = true
			for rec, err := range p.log.Read(ctx, at, eventlog.Filter{Subject: of}) {
				if err != nil && (rec.Position.Seq == 0 || !errors.Is(err, eventlog.ErrNotFound)) {
					yield(rec, fmt.Errorf("read session %s: %w", of.ID, err))
					return
				}
				at, ended = rec.Position, err == nil
				if !yield(rec, nil) {
					return
				}
			}
		}
	}
}

// appendToRuns decides on the command that command returns, and appends the decision to the session's runs. If another
// writer appended first, it returns no error: the next pass checks again. step names the command in error messages.
func (p *pass) appendToRuns(ctx context.Context, l *eventlog.SessionState, step string, command func(events.CommandMeta) run.Command) error {
	id := events.DeriveID(events.KindCommand, "janitor", step, l.Tenant, l.ID)
	d, err := run.Decide(l.Run, command(events.CommandMeta{CommandID: id, Now: p.now()}))
	if err != nil {
		return fmt.Errorf("%s session %s: %w", step, l.ID, err)
	}
	next := *l
	err = p.sessions.AppendRun(ctx, &next, janitorActor, events.DeriveID(events.KindCommit, id), d)
	var conflict *eventlog.ConflictError
	if errors.As(err, &conflict) {
		p.logger.Info("another writer appended first", "step", step, "session", l.ID)
		return nil
	}
	return err
}

// countCommits returns the number of commits of a subject that the stream's leader has.
func (p *pass) countCommits(ctx context.Context, shard int, s events.Subject) (uint32, error) {
	subject := p.log.Partitioning().Subject(s)
	info, err := p.streams[shard].stream.Info(ctx, jetstream.WithSubjectFilter(subject))
	if err != nil {
		return 0, fmt.Errorf("count commits of %s: %w", s, err)
	}
	return uint32(info.State.Subjects[subject]), nil //nolint:gosec // a session has no four billion commits
}

// sessionUsage returns the usage that a deleted session added to its tenant's usage, and the bytes that it stores. It
// reads the read models, which waitReason found to include the session's last commit.
func (p *pass) sessionUsage(ctx context.Context, l *eventlog.SessionState) (out []events.DayUsage, stored uint64, err error) {
	var text string
	if err := p.conn.QueryRow(ctx, "SELECT spent FROM deleted_sessions WHERE tenant = $1 AND id = $2", l.Tenant, l.ID).Scan(&text); err != nil {
		return nil, 0, fmt.Errorf("read the usage of session %s: %w", l.ID, err)
	}
	if text == "" {
		return nil, 0, nil
	}
	days := map[string]struct {
		events.BudgetUsage
		Events     uint64 `json:"events"`
		EventBytes uint64 `json:"eventBytes"`
		Stored     uint64 `json:"stored"`
	}{}
	if err := json.Unmarshal([]byte(text), &days); err != nil {
		return nil, 0, fmt.Errorf("read the usage of session %s: %w", l.ID, err)
	}
	for _, day := range slices.Sorted(maps.Keys(days)) {
		d := days[day]
		if day == "" { // the row with the bytes that the session stores now
			stored = d.Stored
			continue
		}
		out = append(out, events.DayUsage{Day: day, Spent: d.BudgetUsage, Logged: events.OutputSize{Events: d.Events, Bytes: d.EventBytes}})
	}
	return out, stored, nil
}

// eraseContent erases the content of a deleted session. Each step can be interrupted and repeated; content_removed is
// appended when nothing is left.
func (p *pass) eraseContent(ctx context.Context, l *eventlog.SessionState) error {
	k := sessionKey{l.Tenant, l.ID}
	held, err := p.readRemainingReferences(ctx, l)
	if err != nil {
		return err
	}
	files, err := p.workspaces.objectsOf(ctx, k)
	if err != nil {
		return err
	}
	payloads, err := p.payloads.objectsOf(ctx, k)
	if err != nil {
		return err
	}
	payloads = append(payloads, held.payloads...)
	item := ReportItem{Kind: KindSession, Tenant: l.Tenant, Name: l.ID, Messages: held.commits, Objects: uint32(len(files) + len(payloads))} //nolint:gosec // a count
	for _, o := range slices.Concat(files, payloads) {
		item.Bytes += o.Size
	}
	p.addItem(item)
	if p.dry {
		return nil
	}
	if err := p.purgeKeyValues(ctx, k, held.executions); err != nil {
		return err
	}
	for _, o := range files {
		if err := p.workspaces.removeObject(ctx, o); err != nil {
			return err
		}
	}
	for _, o := range payloads {
		if err := p.payloads.removeObject(ctx, o); err != nil {
			return err
		}
	}
	// The log is erased last, because it names the other data.
	e := p.streams[p.sessions.Position(l.ID, 1).Shard]
	messages := uint32(0)
	for _, h := range []eventlog.Head{l.LifeHead, l.RunHead} {
		n, err := e.eraseSubject(ctx, p.log.Partitioning().Subject(h.Subject), h.Seq)
		if err != nil {
			return err
		}
		messages += n
	}
	p.removed++
	p.counts.countRemoved(KindSession, 1, item.Bytes)
	p.logger.Info("the content of a deleted session was removed", "tenant", l.Tenant, "session", l.ID, "commits", messages, "objects", item.Objects)
	return p.appendToRuns(ctx, l, "erase", func(meta events.CommandMeta) run.Command {
		return run.RecordErasure{CommandMeta: meta, Messages: messages, Objects: item.Objects}
	})
}

// remainingReferences lists what the remaining commits of a deleted session refer to: executions, and payloads in the
// object store.
type remainingReferences struct {
	commits    uint32
	executions []string
	payloads   []bucketObject // objects whose name is only their digest, as former versions named them
}

// readRemainingReferences reads the remaining commits of a deleted session and returns the executions and stored
// objects to which they refer. A payload that no longer exists does not prevent the reading of the others.
func (p *pass) readRemainingReferences(ctx context.Context, l *eventlog.SessionState) (remainingReferences, error) {
	var h remainingReferences
	digests := map[string]bool{}
	for rec, err := range p.sessionCommits(ctx, events.Subject{Tenant: l.Tenant, ID: l.ID}) {
		if err != nil {
			return h, err
		}
		if head := rec.Position.Seq; head == l.LifeHead.Seq || head >= l.RunHead.Seq {
			continue
		}
		h.commits++
		list, err := rec.Commit.DecodeEvents()
		if err != nil {
			return h, fmt.Errorf("read %s: %w", rec.Position, err)
		}
		for _, e := range list {
			if e.Type() == (events.MessageAccepted{}).EventType() {
				h.executions = append(h.executions, e.ExecutionID)
			}
			if o, ok := e.Data.(events.OpaquePayload); ok && events.IsPayloadRef(o.Raw) {
				var ref events.PayloadRef
				if err := json.Unmarshal(o.Raw, &ref); err != nil {
					return h, fmt.Errorf("read %s: %w", rec.Position, err)
				}
				digests[ref.SHA256] = true
			}
		}
	}
	for digest := range digests {
		o, found, err := p.payloads.findObject(ctx, digest)
		if err != nil {
			return h, err
		}
		if !found {
			continue // the object has the session in its name, or does not exist any more
		}
		shared, err := p.isPayloadReferenced(ctx, digest, l)
		if err != nil {
			return h, err
		}
		if !shared {
			h.payloads = append(h.payloads, o)
		}
	}
	return h, nil
}

// isPayloadReferenced reports whether a subject of another session refers to a payload by its digest alone. Commits of
// this version never do, so no such reference can appear later.
func (p *pass) isPayloadReferenced(ctx context.Context, digest string, l *eventlog.SessionState) (bool, error) {
	own := "." + l.Tenant + "." + l.ID + "."
	for _, e := range p.streams {
		found := false
		err := e.eachMessage(ctx, allMessagesConsumer("ev.>"), func(m streamMessage) {
			found = found || !strings.Contains(m.subject, own) && bytes.Contains(m.data, []byte(digest))
		})
		if found || err != nil {
			return found, err
		}
	}
	return false, nil
}

// purgeKeyValues purges the secrets that came with messages of a deleted session, and the records of its requests with
// an Idempotency-Key, from their key-value buckets.
func (p *pass) purgeKeyValues(ctx context.Context, k sessionKey, executions []string) error {
	for _, execution := range executions {
		if err := p.secrets.purge(ctx, "$KV."+topology.BucketSecrets+"."+k.Tenant+".x."+execution+".>"); err != nil {
			return err
		}
	}
	if p.requests == nil {
		p.requests = map[sessionKey][]string{}
		err := p.idempotency.eachMessage(ctx, lastPerSubjectConsumer("$KV."+topology.BucketIdempotency+".>"), func(m streamMessage) {
			var record struct {
				Answer struct {
					SessionID string `json:"sessionId"`
				} `json:"answer"`
			}
			tenant, _, _ := strings.Cut(strings.TrimPrefix(m.subject, "$KV."+topology.BucketIdempotency+"."), ".")
			if json.Unmarshal(m.data, &record) == nil && record.Answer.SessionID != "" {
				of := sessionKey{tenant, record.Answer.SessionID}
				p.requests[of] = append(p.requests[of], m.subject)
			}
		})
		if err != nil {
			return err
		}
	}
	for _, subject := range p.requests[k] {
		if err := p.idempotency.purge(ctx, subject); err != nil {
			return err
		}
	}
	return nil
}
