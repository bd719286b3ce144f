package reads

import (
	"context"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// MaxPositionWait bounds how long a read waits for minPosition.
const MaxPositionWait = 5 * time.Second

// WaitPosition blocks until the read models contain a position of a session or catalogue entry. It does not wait for
// "". It returns READ_MODEL_BEHIND after MaxPositionWait.
func (s *Store) WaitPosition(ctx context.Context, id, position string) error {
	if position == "" {
		return nil
	}
	want, err := eventlog.ParsePosition(position)
	if err != nil {
		return problem.Invalid("minPosition", "%+q is not a position: send back what an answer gave as position", truncate.Text(position, 64))
	}
	deadline := time.Now().Add(MaxPositionWait)
	pauses := retry.Doubling(2*time.Millisecond, 50*time.Millisecond)
	for {
		var shard int
		var have int64
		if _, err := s.one(ctx, []any{&shard, &have}, "SELECT shard, position FROM checkpoints WHERE grp = $1", readmodel.Group(id)); err != nil {
			return err
		}
		if have > 0 && shard != want.Shard {
			return problem.Invalid("minPosition", "%s is not a position of this session", position)
		}
		if uint64(have) >= want.Seq {
			return nil
		}
		if !time.Now().Before(deadline) {
			return problem.New(problem.ReadModelBehind, "minPosition", "the read models did not reach the position within 5 s; nothing is lost, try again")
		}
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return problem.From(ctx.Err())
		}
	}
}

// Progress is how far a projector group is.
type Progress struct {
	Position uint64
	CaughtUp bool
	Lag      time.Duration
}

// Progress returns how far each projector group is, by group.
func (s *Store) Progress(ctx context.Context) (map[int]Progress, error) {
	out := map[int]Progress{}
	err := s.rows(ctx, func(r row) error {
		var grp int
		var position, lag int64
		var p Progress
		err := r.Scan(&grp, &position, &p.CaughtUp, &lag)
		p.Position, p.Lag = uint64(position), time.Duration(lag)*time.Millisecond
		out[grp] = p
		return err
	}, "SELECT grp, position, caught_up, lag_ms FROM checkpoints")
	return out, err
}
