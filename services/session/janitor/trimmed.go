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

// recordTrimmedObject adds a removed object to those that appendTrimEvents records in the log, because the session's
// events had counted its bytes.
func (p *pass) recordTrimmedObject(item ReportItem, o bucketObject) {
	if item.Kind != KindSnapshots && item.Kind != KindFiles {
		return
	}
	k := sessionKey{item.Tenant, item.Name}
	t := p.trimmed[k]
	t.Objects++
	t.Bytes += o.Size
	p.trimmed[k] = t
}

// maxSnapshotDelay is the maximum time from the end of a turn to the commit of the snapshot that an executor takes after
// the turn.
const maxSnapshotDelay = time.Hour

// appendTrimEvents appends events that record which objects were removed from the workspaces of sessions, so that they
// no longer count as stored by the tenants.
//
// Only the holder of a session's runs may write to them while an execution runs. So appendTrimEvents waits for the end
// of the turn and for the snapshot after it, because an executor whose commit is refused takes no snapshot. When no
// execution runs, any writer whose append is refused loads the session again.
func (p *pass) appendTrimEvents(ctx context.Context) error {
	var errs []error
	for k, t := range p.trimmed {
		if err := p.appendTrimEvent(ctx, k, t); err != nil {
			errs = append(errs, fmt.Errorf("record the removed objects of session %s of tenant %s: %w", k.ID, k.Tenant, err))
		}
	}
	return errors.Join(errs...)
}

// appendTrimEvent does the work of appendTrimEvents for the session k, unless an execution runs or its snapshot is
// missing.
func (p *pass) appendTrimEvent(ctx context.Context, k sessionKey, t events.WorkspaceTrimmed) error {
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.LeaderOnly)
	switch {
	case err != nil:
		return err
	case l.Life.Status == session.Deleted || l.Run.Retired: // the removal of its content subtracts all stored bytes
		delete(p.trimmed, k)
		return nil
	case !l.Run.IsIdle(), l.Run.Syncing != "":
		return nil
	case l.Run.Snapshot.At.Before(l.Run.EndedAt) && p.now().Sub(l.Run.EndedAt) < maxSnapshotDelay:
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
