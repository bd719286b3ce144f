package reads

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// MaxPositionWait bounds how long a read waits for minPosition.
const MaxPositionWait = 5 * time.Second

// AwaitMinPosition blocks until the read models contain the position of a commit of the session or catalogue entry
// id. It does not wait for the position "". After MaxPositionWait it returns READ_MODEL_BEHIND.
func (s *Store) AwaitMinPosition(ctx context.Context, id, position string) error {
	deadline := time.Now().Add(MaxPositionWait)
	return s.pollPosition(ctx, id, position, deadline, retry.NewDoubling(2*time.Millisecond, 50*time.Millisecond))
}

// AwaitPosition is like AwaitMinPosition, but blocks until ctx ends. It reads Postgres less often the longer it
// waits, because many requests may wait at once for read models that are behind.
func (s *Store) AwaitPosition(ctx context.Context, id, position string) error {
	return s.pollPosition(ctx, id, position, time.Time{}, retry.NewDoubling(2*time.Millisecond, time.Second))
}

// pollPosition reads checkpoints until the read models contain a position, with pauses between the reads. It returns
// READ_MODEL_BEHIND after the deadline; zero means no deadline.
func (s *Store) pollPosition(ctx context.Context, id, position string, deadline time.Time, pauses *retry.Pauses) error {
	if position == "" {
		return nil
	}
	want, err := eventlog.ParsePosition(position)
	if err != nil {
		return problem.Invalid("minPosition", "%+q is not a position: send the position of a response", truncate.Text(position, 64))
	}
	for {
		c, err := s.groupCheckpoint(ctx, id)
		if err != nil {
			return err
		}
		if c.Position > 0 && int(c.Shard) != want.Shard {
			return problem.Invalid("minPosition", "%s is not a position of this session", position)
		}
		if uint64(c.Position) >= want.Seq {
			return nil
		}
		if !deadline.IsZero() && !time.Now().Before(deadline) {
			return problem.New(problem.ReadModelBehind, "minPosition", "the read models did not reach the position within 5 s; nothing is lost, try again")
		}
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return problem.From(ctx.Err())
		}
	}
}

// GroupProgress is the checkpoint of a projector group, and how far the group is behind the log.
type GroupProgress struct {
	Position uint64
	CaughtUp bool
	Lag      time.Duration
}

// Progress returns the progress of each projector group, by the number of the group.
func (s *Store) Progress(ctx context.Context) (map[int]GroupProgress, error) {
	rows, err := s.queries.Checkpoints(ctx)
	out := map[int]GroupProgress{}
	for _, r := range rows {
		out[int(r.Grp)] = GroupProgress{uint64(r.Position), r.CaughtUp, time.Duration(r.LagMs) * time.Millisecond}
	}
	return out, err
}
