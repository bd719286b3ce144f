package projector

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Before a backlogReader reads the shard, it waits for other groups that start at the same time: one groupWaitInterval, and
// then up to maxGroupWaitIntervals in total while groups are starting.
const (
	// groupWaitInterval is the interval at which a backlogReader checks whether other groups are still starting.
	groupWaitInterval = 10 * time.Millisecond
	// maxGroupWaitIntervals is the maximum number of intervals for which a backlogReader waits for other groups.
	maxGroupWaitIntervals = 100
)

// backlogReader reads the backlog of a shard once, for several projector groups at the same time, and distributes the
// commits to the groups. This is much cheaper than a consumer for each group, for which the NATS server would search
// the blocks of the stream again.
type backlogReader struct {
	log   eventlog.Log
	shard int

	starting atomic.Int32 // groups that are starting and have not called readBacklog yet

	mu      sync.Mutex
	waiting []*backlogMember // the first one reads for all of them
}

// expectGroup records that a group is about to call readBacklog, so that a read of the shard waits for the group. The
// caller must call arrived when the group calls readBacklog or gives up.
func (c *backlogReader) expectGroup() (arrived func()) {
	c.starting.Add(1)
	return sync.OnceFunc(func() { c.starting.Add(-1) })
}

// backlogMember is a projector group that waits for its commits from a backlogReader.
type backlogMember struct {
	ctx   context.Context // context of the group
	feed  *commitReader
	ended chan struct{} // closed when the read has ended; complete is set before
	// complete reports whether the end of the log was reached.
	complete bool
}

// readBacklog pushes a group's commits to f up to the end of the log, and reports whether it reached the end. If it did
// not, the caller must call readBacklog again. The first of several concurrent callers reads the shard for all of them.
func (c *backlogReader) readBacklog(ctx context.Context, f *commitReader) bool {
	r := &backlogMember{ctx: ctx, feed: f, ended: make(chan struct{})}
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
	c.awaitExpectedGroups(ctx)
	c.mu.Lock()
	members := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	defer func() {
		for _, r := range members {
			close(r.ended)
		}
	}()
	c.distributeCommits(ctx, members)
	return r.complete
}

// awaitExpectedGroups blocks until every group for which expectGroup was called has called readBacklog, or until
// maxGroupWaitIntervals have passed.
func (c *backlogReader) awaitExpectedGroups(ctx context.Context) {
	t := time.NewTicker(groupWaitInterval)
	defer t.Stop()
	for range maxGroupWaitIntervals {
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

// distributeCommits reads a shard up to the end of the log, and pushes each commit to the member that folds the
// commit's group.
func (c *backlogReader) distributeCommits(ctx context.Context, members []*backlogMember) {
	byGroup := map[int]*backlogMember{}
	all := commitReader{group: c.shard, partitions: c.log.Partitioning(), after: members[0].feed.after, retry: members[0].feed.retry}
	for _, r := range members {
		byGroup[r.feed.group] = r
		if r.feed.after.Seq < all.after.Seq {
			all.after = r.feed.after
		}
	}
	all.push = func(it queuedCommit, bytes int) error {
		r := byGroup[it.groupNumber(c.log.Partitioning(), c.shard)]
		if r == nil || it.rec.Position.Seq <= r.feed.after.Seq || r.ctx.Err() != nil {
			return ctx.Err()
		}
		if r.feed.push(it, bytes) == nil {
			r.feed.after = it.rec.Position
		}
		return ctx.Err()
	}
	for ctx.Err() == nil {
		if all.pushCommits(ctx, c.log.Read(ctx, all.after, eventlog.Filter{})) {
			for _, r := range members {
				r.complete = r.ctx.Err() == nil
			}
			return
		}
	}
}

// groupNumber returns the number of the group that folds the commit. Commits without a valid subject belong to the
// first group of their shard.
func (it queuedCommit) groupNumber(partitions events.Partitioning, shard int) int {
	if it.rec.Subject.ID == "" {
		return shard
	}
	return partitions.GroupOfID(it.rec.Subject.ID)
}
