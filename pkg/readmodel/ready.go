package readmodel

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
)

// AwaitCaughtUp blocks until every projector group has once reached the end of the log. From then on, a session that
// is not in the read models does not exist.
func AwaitCaughtUp(ctx context.Context, pool *pgxpool.Pool, partitions events.Partitioning) error {
	pauses := retry.NewDoubling(5*time.Millisecond, 100*time.Millisecond)
	for {
		var groups int
		err := pool.QueryRow(ctx, "SELECT count(*) FROM checkpoints WHERE caught_up AND grp < $1", partitions.GroupCount()).Scan(&groups)
		if err == nil && groups == partitions.GroupCount() {
			return nil
		}
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return fmt.Errorf("the read models have not caught up: %d of %d groups are ready: %w", groups, partitions.GroupCount(), ctx.Err())
		}
	}
}
