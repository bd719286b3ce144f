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

// queuedCommit is a commit in the queue of the group that folds it, or a marker for the end of the log.
type queuedCommit struct {
	rec    eventlog.Record
	poison *fold.PoisonCommit
	end    bool
}

// maxPayloadTries is the maximum number of times that the projector requests the payload of a commit from the object
// store. After that, the commit is projected without its payload. More than one request is made because a replica of
// the store may lag.
const maxPayloadTries = 3

// maxLateness is the maximum time by which the delay of a commit, from its append to its arrival at the projector, may
// exceed the smallest delay since the last catch-up. After a slower commit, the group leaves live delivery and reads
// its backlog together with other groups.
const maxLateness = 2 * time.Second

// errCommitsLate is returned for a commit that arrives at the projector later than maxLateness allows.
var errCommitsLate = errors.New("commits arrive too late")

// queueCommits reads the group's commits after a position and puts them into the group's queue: first those up to the
// end of the log, and then new ones, until ctx ends.
func (g *groupProjection) queueCommits(ctx context.Context, after eventlog.Position) {
	f := commitReader{group: g.n, partitions: g.p.deps.Log.Partitioning(), after: after, retry: newBackoff(g.logger, "read the log")}
	queue := func(it queuedCommit, bytes int) error { return g.records.push(ctx, it, bytes) }
	filter := eventlog.Filter{Partitions: g.p.deps.Log.Partitioning().PartitionsInGroup(g.n), Foreign: true}
	for ctx.Err() == nil {
		f.push = queue
		g.arrived()
		if !g.p.backlogReaders[g.shard].readBacklog(ctx, &f) {
			continue
		}
		if queue(queuedCommit{end: true}, 0) != nil {
			return
		}
		f.push = g.withLatenessCheck(queue)
		for ctx.Err() == nil && !f.late {
			f.pushCommits(ctx, g.p.deps.Log.Tail(ctx, f.after, filter))
		}
		f.late = false
	}
}

// withLatenessCheck returns a function that calls queue with each commit, and returns errCommitsLate if the commit
// arrived late. The clocks of the server and the projector may differ, so lateness is measured relative to the fastest
// commit.
func (g *groupProjection) withLatenessCheck(queue func(queuedCommit, int) error) func(queuedCommit, int) error {
	best := time.Duration(math.MaxInt64)
	return func(it queuedCommit, bytes int) error {
		if err := queue(it, bytes); err != nil {
			return err
		}
		age := g.p.deps.Now().Sub(it.rec.Time)
		best = min(best, age)
		if age-best > maxLateness {
			return errCommitsLate
		}
		return nil
	}
}

// commitReader reads a group's commits from the log and passes each to the function push. A commit that cannot be read
// is passed as a fold.PoisonCommit.
type commitReader struct {
	group      int
	partitions events.Partitioning
	after      eventlog.Position
	push       func(it queuedCommit, bytes int) error // called with each item; its error ends the read
	retry      backoff
	tries      int  // attempts to read the payload of the next commit
	late       bool // push returned errCommitsLate
}

// pushCommits passes the commits of an iterator over the log to f.push, and reports whether it reached the end of the
// iterator.
func (f *commitReader) pushCommits(ctx context.Context, reading iter.Seq2[eventlog.Record, error]) bool {
	for rec, err := range reading {
		it := queuedCommit{rec: rec}
		if err != nil {
			if ctx.Err() != nil {
				return false
			}
			if !f.isPoison(rec, err) {
				f.retry.logAndPause(ctx, err)
				return false
			}
			// A commit that did not decode has no events for any reader; a commit without its payload has all its
			// events.
			it.poison = newPoisonCommit(f.partitions, it.groupNumber(f.partitions, rec.Position.Shard), rec, err)
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
			f.late = errors.Is(pushed, errCommitsLate)
			return false
		}
	}
	return ctx.Err() == nil
}

// isPoison reports whether the error of a read from the log concerns only the commit rec and would occur again, as
// opposed to an error of the whole log.
func (f *commitReader) isPoison(rec eventlog.Record, err error) bool {
	if rec.Position.Seq == 0 || errors.Is(err, eventlog.ErrUnavailable) {
		return false
	}
	if rec.Events == nil {
		return true
	}
	f.tries++
	return f.tries > maxPayloadTries
}
