package projector

import (
	"context"
	"errors"
	"iter"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// item is a commit that a group folds, or a marker for the end of the log.
type item struct {
	rec    eventlog.Record
	poison *fold.Poison
	end    bool
}

// payloadTries is the maximum number of times that the object store is asked for the payload of a commit before the
// commit is projected without it. A replica of the store may lag.
const payloadTries = 3

// maxLateness is how much longer than the fastest commit since the last catch-up a commit may take from its append to its arrival. After a
// slower commit the reader leaves live delivery and catches up, together with other groups.
const maxLateness = 2 * time.Second

// errLate is the error of the push function that failWhenLate returns, for a commit that arrives later than maxLateness
// allows.
var errLate = errors.New("commits arrive too late")

// feed reads the group's commits after a position, up to the end of the log and then new ones, until ctx ends.
func (g *group) feed(ctx context.Context, after eventlog.Position) {
	f := feeder{group: g.n, partitions: g.p.deps.Log.Partitioning(), after: after, retry: newBackoff(g.logger, "read the log")}
	queue := func(it item, bytes int) error { return g.records.push(ctx, it, bytes) }
	filter := eventlog.Filter{Partitions: g.p.deps.Log.Partitioning().PartitionsInGroup(g.n), Foreign: true}
	for ctx.Err() == nil {
		f.push = queue
		g.arrived()
		if !g.p.catchUps[g.shard].join(ctx, &f) {
			continue
		}
		if queue(item{end: true}, 0) != nil {
			return
		}
		f.push = g.failWhenLate(queue)
		for ctx.Err() == nil && !f.late {
			f.run(ctx, g.p.deps.Log.Tail(ctx, f.after, filter))
		}
		f.late = false
	}
}

// failWhenLate returns a push function that fails when commits arrive late. The clocks of the server and the projector may
// differ, so lateness is measured relative to the fastest commit.
func (g *group) failWhenLate(queue func(item, int) error) func(item, int) error {
	best := time.Duration(math.MaxInt64)
	return func(it item, bytes int) error {
		if err := queue(it, bytes); err != nil {
			return err
		}
		age := g.p.deps.Now().Sub(it.rec.Time)
		best = min(best, age)
		if age-best > maxLateness {
			return errLate
		}
		return nil
	}
}

// feeder reads a group's commits from the log and pushes them to the group. A commit that cannot be read is pushed as a
// fold.Poison.
type feeder struct {
	group      int
	partitions events.Partitioning
	after      eventlog.Position
	push       func(it item, bytes int) error // called with each item; its error ends the read
	retry      backoff
	tries      int  // attempts to read the payload of the next commit
	late       bool // push returned errLate
}

// run pushes the records of an iterator and reports whether it reached the end.
func (f *feeder) run(ctx context.Context, reading iter.Seq2[eventlog.Record, error]) bool {
	for rec, err := range reading {
		it := item{rec: rec}
		if err != nil {
			if ctx.Err() != nil {
				return false
			}
			if !f.isPoison(rec, err) {
				f.retry.wait(ctx, err)
				return false
			}
			// A commit that did not decode has no events for any reader; a commit without its payload has all its
			// events.
			it.poison = newPoison(f.partitions, it.group(f.partitions, rec.Position.Shard), rec, err)
		}
		if rec.Position.Seq <= f.after.Seq {
			continue // a duplicate delivery
		}
		f.tries, f.after = 0, rec.Position
		f.retry.reset()
		size := len(rec.Commit.Events)
		it.rec.Commit.State = nil
		if rec.Events != nil || err != nil {
			it.rec.Commit.Events = nil // they are decoded
		}
		if pushed := f.push(it, size); pushed != nil || err != nil {
			f.late = errors.Is(pushed, errLate)
			return false
		}
	}
	return ctx.Err() == nil
}

// isPoison reports whether an error concerns only one commit and would occur again, as opposed to an error of the
// log.
func (f *feeder) isPoison(rec eventlog.Record, err error) bool {
	if rec.Position.Seq == 0 || errors.Is(err, eventlog.ErrUnavailable) {
		return false
	}
	if rec.Events == nil {
		return true
	}
	f.tries++
	return f.tries > payloadTries
}
