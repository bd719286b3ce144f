package reactor

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// ErrGone is the error of Again for a session that does not exist, or was deleted.
var ErrGone = errors.New("the session does not exist, or was deleted")

// Again publishes a job for a session if an executor has anything to do for it, even if jobs for the same work were
// published before: the id of the job is new. The cause must be unique to the call.
func (r *Reactor) Again(ctx context.Context, tenant, id, cause string) error {
	l, err := r.settle(ctx, tenant, id)
	if err != nil {
		return err
	}
	if l.Life.Status == session.None || l.Life.Status == session.Deleted {
		return fmt.Errorf("session %s: %w", id, ErrGone)
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
	return r.putJob(ctx, l, of+"."+cause)
}
