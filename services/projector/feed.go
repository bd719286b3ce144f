package projector

import (
	"context"
	"errors"
	"iter"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// item is a commit to fold, or the news that the log's end was reached.
type item struct {
	rec    eventlog.Record
	poison *fold.Poison
	end    bool
}

// payloadTries is how often the object store is asked for data that it does not
// have, before the commit is projected without: a replica may lag.
const payloadTries = 3

// feed reads the group's commits, to the log's end and then on, until ctx ends.
func (g *group) feed(ctx context.Context) {
	f := feeder{group: g.n, after: g.position(), retry: backoff{logger: g.logger, doing: "read the log"}}
	f.push = func(it item, bytes int) error { return g.records.push(ctx, it, bytes) }
	filter := eventlog.Filter{Partitions: topology.GroupPartitions(g.n)}
	for !f.run(ctx, g.p.deps.Log.Read(ctx, f.after, filter)) {
		if ctx.Err() != nil {
			return
		}
	}
	if f.push(item{end: true}, 0) != nil {
		return
	}
	for ctx.Err() == nil {
		f.run(ctx, g.p.deps.Log.Tail(ctx, f.after, filter))
	}
}

// feeder reads a group's commits past those that cannot be read.
type feeder struct {
	group int
	after eventlog.Position
	push  func(it item, bytes int) error // an error ends the reading
	retry backoff
	tries int // for the payload of the commit after
}

// run pushes what a reading yields and tells whether it came to its end.
func (f *feeder) run(ctx context.Context, reading iter.Seq2[eventlog.Record, error]) bool {
	for rec, err := range reading {
		it := item{rec: rec}
		if err != nil {
			if ctx.Err() != nil {
				return false
			}
			if !f.poisonous(rec, err) {
				f.retry.wait(ctx, err)
				return false
			}
			// What did not decode has no events, here and for every other reader; what lacks a payload has them all.
			it.poison = poisonOf(f.group, rec, err)
		}
		if rec.Position.Seq <= f.after.Seq {
			continue // delivered twice
		}
		f.retry.tries, f.tries, f.after = 0, 0, rec.Position
		size := len(rec.Commit.Events)
		it.rec.Commit.Events, it.rec.Commit.State = nil, nil
		if f.push(it, size) != nil || err != nil {
			return false
		}
	}
	return ctx.Err() == nil
}

// poisonous tells an error of one commit, which another try does not change, from one of the log.
func (f *feeder) poisonous(rec eventlog.Record, err error) bool {
	if rec.Position.Seq == 0 || errors.Is(err, eventlog.ErrUnavailable) {
		return false
	}
	if rec.Events == nil {
		return true
	}
	f.tries++
	return f.tries > payloadTries
}
