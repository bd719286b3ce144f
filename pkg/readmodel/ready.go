package readmodel

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/topology"
)

// AwaitCaughtUp blocks until every projector group has once reached the end of the log. From then on, a session that
// is not in the read models does not exist.
func AwaitCaughtUp(ctx context.Context, pool *pgxpool.Pool) error {
	pauses := retry.Doubling(5*time.Millisecond, 100*time.Millisecond)
	for {
		var groups int
		err := pool.QueryRow(ctx, "SELECT count(*) FROM checkpoints WHERE caught_up").Scan(&groups)
		if err == nil && groups == topology.ProjectorGroups {
			return nil
		}
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return fmt.Errorf("the read models have not caught up: %d of %d groups are ready: %w", groups, topology.ProjectorGroups, ctx.Err())
		}
	}
}
