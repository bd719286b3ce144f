package projector

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/topology"
)

// A catch-up waits for other groups that start at the same time: a moment in any
// case, and longer while some are on their way.
const (
	gather     = 10 * time.Millisecond
	gatherMost = 100 // times gather
)

// catchUp reads a shard from far behind for several groups at once. A server
// that filters by eight subjects looks through all subjects of a block for each
// message of a backlog, for each group again; read once, whole, and dealt out
// here, a backlog costs a fraction.
type catchUp struct {
	log   eventlog.Log
	shard int

	coming atomic.Int32 // groups that have begun to start and do not ride yet

	mu      sync.Mutex
	waiting []*rider // the first one reads for all
}

// expect announces a group that is about to ride; gone takes it back, or says that it rides.
func (c *catchUp) expect() (gone func()) {
	c.coming.Add(1)
	return sync.OnceFunc(func() { c.coming.Add(-1) })
}

// rider is a group that catches up.
type rider struct {
	ctx   context.Context // of the group
	feed  *feeder
	ended chan struct{} // closed when the reading has ended; then complete is set
	// complete tells that the log's end was reached, and not that the reading broke off.
	complete bool
}

// ride brings a group to the log's end and tells whether it came there; if not, it rides again.
func (c *catchUp) ride(ctx context.Context, f *feeder) bool {
	r := &rider{ctx: ctx, feed: f, ended: make(chan struct{})}
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
	riders := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	defer func() {
		for _, r := range riders {
			close(r.ended)
		}
	}()
	c.read(ctx, riders)
	return r.complete
}

// gather waits until no other group is on its way, within bounds.
func (c *catchUp) gather(ctx context.Context) {
	t := time.NewTicker(gather)
	defer t.Stop()
	for range gatherMost {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if c.coming.Load() == 0 {
			return
		}
	}
}

// read deals a shard's commits out until its end.
func (c *catchUp) read(ctx context.Context, riders []*rider) {
	byGroup := map[int]*rider{}
	all := feeder{group: c.shard, after: riders[0].feed.after, retry: riders[0].feed.retry}
	for _, r := range riders {
		byGroup[r.feed.group] = r
		if r.feed.after.Seq < all.after.Seq {
			all.after = r.feed.after
		}
	}
	all.push = func(it item, bytes int) error {
		r := byGroup[it.group(c.shard)]
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
			for _, r := range riders {
				r.complete = r.ctx.Err() == nil
			}
			return
		}
	}
}

// group is the group that folds an item. What has no subject that can be read
// falls to the first group of its shard.
func (it item) group(shard int) int {
	if it.rec.Subject.ID == "" {
		return shard
	}
	return topology.GroupOf(it.rec.Subject.Partition())
}
