package reads

import (
	"context"
	"strconv"

	"github.com/spoolhq/spool/pkg/topology"
)

// storedRows are the ids of the rows of tenant_usage that contain what a tenant stores now, one for each projector
// group.
var storedRows = func() []string {
	ids := make([]string, topology.ProjectorGroups)
	for g := range ids {
		ids[g] = "/" + strconv.Itoa(g)
	}
	return ids
}()

// Stored returns how many bytes a tenant stores, and the position of each projector group up to which they are
// counted.
func (s *Store) Stored(ctx context.Context, tenant string) (bytes int64, positions map[int]uint64, err error) {
	var groups, seqs []int64
	// One statement reads both, so that the sum and the positions are consistent.
	_, err = s.one(ctx, []any{&bytes, &groups, &seqs}, `SELECT
			(SELECT coalesce(sum(stored_bytes), 0)::bigint FROM tenant_usage WHERE tenant = $1 AND id = ANY ($2)),
			ARRAY(SELECT grp::bigint FROM checkpoints ORDER BY grp), ARRAY(SELECT position FROM checkpoints ORDER BY grp)`, tenant, storedRows)
	if err != nil {
		return 0, nil, err
	}
	positions = map[int]uint64{}
	for i, g := range groups {
		positions[int(g)] = uint64(seqs[i]) //nolint:gosec // a position of the log
	}
	return max(0, bytes), positions, nil
}
