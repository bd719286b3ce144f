package janitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// noteTrimmed records a removed object that events of its session had counted, for reportTrimmed.
func (p *pass) noteTrimmed(item Item, o object) {
	if item.Kind != KindSnapshots && item.Kind != KindFiles {
		return
	}
	k := sessionKey{item.Tenant, item.Name}
	t := p.trimmed[k]
	t.Objects++
	t.Bytes += o.Size
	p.trimmed[k] = t
}

// snapshotLate is the maximum time from the end of a turn to the commit of the snapshot that an executor takes after
// the turn.
const snapshotLate = time.Hour

// reportTrimmed records in the log which objects were removed from the workspaces of sessions, so that they no longer
// count as stored by the tenants.
//
// Only the holder of a session's runs may write to them while an execution runs. So the report waits for the end of
// the turn and for the snapshot after it, because an executor whose commit is refused takes no snapshot. At rest, any
// writer whose append is refused loads the session again.
func (p *pass) reportTrimmed(ctx context.Context) error {
	var errs []error
	for k, t := range p.trimmed {
		if err := p.reportTrimmedOf(ctx, k, t); err != nil {
			errs = append(errs, fmt.Errorf("report what was removed of session %s of tenant %s: %w", k.ID, k.Tenant, err))
		}
	}
	return errors.Join(errs...)
}

// reportTrimmedOf does the work of reportTrimmed for one session.
func (p *pass) reportTrimmedOf(ctx context.Context, k sessionKey, t events.WorkspaceTrimmed) error {
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.LeaderOnly)
	switch {
	case err != nil:
		return err
	case l.Life.Status == session.Deleted || l.Run.Retired: // the removal of its content subtracts all stored bytes
		delete(p.trimmed, k)
		return nil
	case !l.Run.IsIdle(), l.Run.Syncing != "":
		return nil
	case l.Run.Snapshot.At.Before(l.Run.EndedAt) && p.now().Sub(l.Run.EndedAt) < snapshotLate:
		return nil
	}
	m := events.NewEventList(events.CommandMeta{CommandID: events.DeriveID(events.KindCommand, "janitor", "trim", l.Tenant, l.ID, fmt.Sprint(l.RunHead.Seq)), Now: p.now()})
	m.Add("", t)
	d, err := run.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch, Events: m.Events()})
	if err != nil {
		return err
	}
	err = p.sessions.AppendRun(ctx, l, janitorActor, events.DeriveID(events.KindCommit, m.Events()[0].ID), d)
	var conflict *eventlog.ConflictError
	if errors.As(err, &conflict) {
		return nil // the next pass tries again
	}
	if err == nil {
		delete(p.trimmed, k)
	}
	return err
}
