package reads

import (
	"context"
	"strconv"
)

// storedUsageIDs returns the ids of the rows of the table tenant_usage that count the bytes which a tenant stores,
// one for each projector group.
func storedUsageIDs(groups int) []string {
	ids := make([]string, groups)
	for g := range ids {
		ids[g] = "/" + strconv.Itoa(g)
	}
	return ids
}

// StoredBytes returns how many bytes a tenant stores, and the position of each projector group up to which they are
// counted.
func (s *Store) StoredBytes(ctx context.Context, tenant string) (bytes int64, positions map[int]uint64, err error) {
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
