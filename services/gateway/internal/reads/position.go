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

// WaitPosition blocks until the read models contain a position of a session or catalogue entry. It does not wait for
// "". It returns READ_MODEL_BEHIND after MaxPositionWait.
func (s *Store) WaitPosition(ctx context.Context, id, position string) error {
	deadline := time.Now().Add(MaxPositionWait)
	return s.awaitPosition(ctx, id, position, deadline, retry.NewDoubling(2*time.Millisecond, 50*time.Millisecond))
}

// AwaitPosition is like WaitPosition, but blocks until ctx ends. It reads Postgres less often the longer it waits, because
// many requests may wait at once for read models that are behind.
func (s *Store) AwaitPosition(ctx context.Context, id, position string) error {
	return s.awaitPosition(ctx, id, position, time.Time{}, retry.NewDoubling(2*time.Millisecond, time.Second))
}

// awaitPosition blocks until the read models contain a position. It returns READ_MODEL_BEHIND after the deadline; zero means
// no deadline.
func (s *Store) awaitPosition(ctx context.Context, id, position string, deadline time.Time, pauses *retry.Pauses) error {
	if position == "" {
		return nil
	}
	want, err := eventlog.ParsePosition(position)
	if err != nil {
		return problem.Invalid("minPosition", "%+q is not a position: send the position of a response", truncate.Text(position, 64))
	}
	for {
		c, err := s.checkpoint(ctx, id)
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

// Progress is the checkpoint of a projector group and its lag.
type Progress struct {
	Position uint64
	CaughtUp bool
	Lag      time.Duration
}

// Progress returns the progress of each projector group, by group.
func (s *Store) Progress(ctx context.Context) (map[int]Progress, error) {
	rows, err := s.queries.Checkpoints(ctx)
	out := map[int]Progress{}
	for _, r := range rows {
		out[int(r.Grp)] = Progress{uint64(r.Position), r.CaughtUp, time.Duration(r.LagMs) * time.Millisecond}
	}
	return out, err
}
