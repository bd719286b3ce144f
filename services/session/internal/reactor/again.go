package reactor

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// ErrSessionGone is returned by RepublishJob for a session that does not exist, or was deleted.
var ErrSessionGone = errors.New("the session does not exist, or was deleted")

// RepublishJob publishes a job for a session if an executor must do something for it, even if jobs for the same work
// were published before: the job's id is new. The cause must be unique to the call.
func (r *Reactor) RepublishJob(ctx context.Context, tenant, id, cause string) error {
	l, err := r.completeDueWork(ctx, tenant, id)
	if err != nil {
		return err
	}
	if l.Life.Status == session.None || l.Life.Status == session.Deleted {
		return fmt.Errorf("session %s: %w", id, ErrSessionGone)
	}
	var of string
	switch l.DueWork() {
	case run.ExecuteTurn:
		of = l.Life.Active.Dispatch
	case run.ReleaseSandbox, run.SyncWorkspace:
		of = run.JobID(&l.Life, &l.Run)
	default:
		return nil
	}
	return r.storeJob(ctx, l, of+"."+cause)
}
