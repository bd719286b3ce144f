package jslog

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// ChangedAmong returns those of the given subjects that changed; see eventlog.ChangeReader.
func (l *Log) ChangedAmong(ctx context.Context, after eventlog.Position, subjects []events.Subject) (eventlog.Changes, error) {
	c := eventlog.Changes{Through: after, Last: map[string]uint64{}}
	if err := (eventlog.Filter{}).Check(l.partitions, after.Shard, l.shards); err != nil {
		return c, err
	}
	names := make([]string, len(subjects))
	for i, s := range subjects {
		if err := s.Check(); err != nil {
			return c, fmt.Errorf("read changes: %w", err)
		}
		if s.Partition()%l.shards != after.Shard {
			return c, fmt.Errorf("read changes: %s is not in shard %d", s, after.Shard)
		}
		names[i] = l.natsSubject(s)
	}
	through := uint64(math.MaxUint64)
	for batch := range slices.Chunk(names, lastRequestSubjects) {
		end, err := l.readLastMessages(ctx, after, 0, batch, func(m message) { c.Last[l.chainOf(m.Subject)] = m.Seq })
		if err != nil {
			return c, fmt.Errorf("read changes after %s: %w: %w", after, eventlog.ErrUnavailable, err)
		}
		through = min(through, end)
	}
	if len(names) > 0 {
		c.Through.Seq = max(after.Seq, through)
	}
	return c, nil
}
