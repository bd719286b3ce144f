package reads

import (
	"context"
	"strconv"
)

// storedRows returns the ids of the rows of tenant_usage that contain what a tenant stores now, one for each projector
// group.
func storedRows(groups int) []string {
	ids := make([]string, groups)
	for g := range ids {
		ids[g] = "/" + strconv.Itoa(g)
	}
	return ids
}

// Stored returns how many bytes a tenant stores, and the position of each projector group up to which they are
// counted.
func (s *Store) Stored(ctx context.Context, tenant string) (bytes int64, positions map[int]uint64, err error) {
	// One statement reads both, so that the sum and the positions are consistent.
	r, err := s.queries.Stored(ctx, tenant, s.storedRows)
	if err != nil {
		return 0, nil, err
	}
	positions = map[int]uint64{}
	for i, g := range r.Groups {
		positions[int(g)] = uint64(r.Positions[i])
	}
	return max(0, r.Bytes), positions, nil
}
