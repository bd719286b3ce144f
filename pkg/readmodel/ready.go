package readmodel

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/pkg/topology"
)

// AwaitCaughtUp blocks until every projector group has once reached the end of the log. From then on, a session that
// is not in the read models does not exist.
func AwaitCaughtUp(ctx context.Context, pool *pgxpool.Pool) error {
	wait := 5 * time.Millisecond
	for {
		var groups int
		err := pool.QueryRow(ctx, "SELECT count(*) FROM checkpoints WHERE caught_up").Scan(&groups)
		if err == nil && groups == topology.ProjectorGroups {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the read models have not caught up: %d of %d groups are ready: %w", groups, topology.ProjectorGroups, ctx.Err())
		case <-time.After(wait):
			wait = min(2*wait, 100*time.Millisecond)
		}
	}
}
