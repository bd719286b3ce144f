package projector

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Before a catch-up reads the shard, it waits for other groups that start at the same time: one gatherInterval, and then
// up to maxGatherIntervals in total while groups are starting.
const (
	gatherInterval     = 10 * time.Millisecond
	maxGatherIntervals = 100
)

// catchUp reads the backlog of a shard for several groups at once. A consumer for each group makes the server search
// the blocks of the stream again for each group. Reading the whole shard once and distributing the commits here is much
// cheaper.
type catchUp struct {
	log   eventlog.Log
	shard int

	starting atomic.Int32 // groups that are starting and have not called join yet

	mu      sync.Mutex
	waiting []*member // the first one reads for all of them
}

// announceStart records that a group is about to call join, so that gather waits for the group. The caller must call
// arrived when the group calls join or gives up.
func (c *catchUp) announceStart() (arrived func()) {
	c.starting.Add(1)
	return sync.OnceFunc(func() { c.starting.Add(-1) })
}

// member is a projector group that reads its backlog through a catchUp.
type member struct {
	ctx   context.Context // context of the group
	feed  *feeder
	ended chan struct{} // closed when the read has ended; complete is set before
	// complete reports whether the end of the log was reached.
	complete bool
}

// join reads a group's commits up to the end of the log, and reports whether it reached the end. If it did not, the caller
// must call join again.
func (c *catchUp) join(ctx context.Context, f *feeder) bool {
	r := &member{ctx: ctx, feed: f, ended: make(chan struct{})}
	c.mu.Lock()
	c.waiting = append(c.waiting, r)
	leads := len(c.waiting) == 1
	c.mu.Unlock()
	if !leads {
		select {
		case <-r.ended:
			return r.complete
		case <-ctx.Done():
			return false
		}
	}
	c.gather(ctx)
	c.mu.Lock()
	members := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	defer func() {
		for _, r := range members {
			close(r.ended)
		}
	}()
	c.read(ctx, members)
	return r.complete
}

// gather waits until every group that has announced its start has called join, for at most maxGatherIntervals.
func (c *catchUp) gather(ctx context.Context) {
	t := time.NewTicker(gatherInterval)
	defer t.Stop()
	for range maxGatherIntervals {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if c.starting.Load() == 0 {
			return
		}
	}
}

// read distributes a shard's commits to the members, up to the end of the log.
func (c *catchUp) read(ctx context.Context, members []*member) {
	byGroup := map[int]*member{}
	all := feeder{group: c.shard, partitions: c.log.Partitioning(), after: members[0].feed.after, retry: members[0].feed.retry}
	for _, r := range members {
		byGroup[r.feed.group] = r
		if r.feed.after.Seq < all.after.Seq {
			all.after = r.feed.after
		}
	}
	all.push = func(it item, bytes int) error {
		r := byGroup[it.group(c.log.Partitioning(), c.shard)]
		if r == nil || it.rec.Position.Seq <= r.feed.after.Seq || r.ctx.Err() != nil {
			return ctx.Err()
		}
		if r.feed.push(it, bytes) == nil {
			r.feed.after = it.rec.Position
		}
		return ctx.Err()
	}
	for ctx.Err() == nil {
		if all.run(ctx, c.log.Read(ctx, all.after, eventlog.Filter{})) {
			for _, r := range members {
				r.complete = r.ctx.Err() == nil
			}
			return
		}
	}
}

// group returns the group that folds an item. Commits without a valid subject belong to the first group of their
// shard.
func (it item) group(partitions events.Partitioning, shard int) int {
	if it.rec.Subject.ID == "" {
		return shard
	}
	return partitions.GroupOfID(it.rec.Subject.ID)
}
