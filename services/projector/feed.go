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
	f := feeder{g: g, after: g.position(), retry: backoff{logger: g.logger, doing: "read the log"}}
	filter := eventlog.Filter{Partitions: topology.GroupPartitions(g.n)}
	for !f.run(ctx, g.p.deps.Log.Read(ctx, f.after, filter)) {
		if ctx.Err() != nil {
			return
		}
	}
	if g.records.push(ctx, item{end: true}, 0) != nil {
		return
	}
	for ctx.Err() == nil {
		f.run(ctx, g.p.deps.Log.Tail(ctx, f.after, filter))
	}
}

type feeder struct {
	g     *group
	after eventlog.Position
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
			it.poison = f.g.poison(rec, err)
		}
		f.retry.tries, f.tries, f.after = 0, 0, rec.Position
		size := len(rec.Commit.Events)
		it.rec.Commit.Events, it.rec.Commit.State = nil, nil
		if f.g.records.push(ctx, it, size) != nil {
			return false
		}
		if err != nil {
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
