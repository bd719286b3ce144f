// Package waits publishes why executions wait on this executor.
package waits

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
)

const (
	// minWait is the duration of a wait after which it is published. Shorter waits cost no write.
	minWait = time.Second
	// ChangeInterval is the minimum time between the publication of a wait and that of another reason of it. Reasons can change
	// all the time: two limits may be reached at once.
	ChangeInterval = 5 * time.Second
	// passInterval is the interval at which a Recorder looks for waits to publish.
	passInterval = time.Second
	// retention is the time after which a wait is forgotten that was not recorded again. It exceeds the longest delay of a
	// job that waits for a slot, because the execution is recorded only when its job is delivered.
	retention = 45 * time.Second
	// maxWaits is the maximum number of waits that a Recorder holds; it ignores further ones.
	maxWaits = 10_000
	// maxPassWrites is the maximum number of waits that one pass publishes. The next pass continues.
	maxPassWrites = 1000
	// passTimeout is the time limit of one pass.
	passTimeout = 10 * time.Second
)

// Bucket stores the reasons of waits.
type Bucket interface {
	Find(ctx context.Context, execution string) (waiting.Stored, error)
	Put(ctx context.Context, e waiting.Entry, revision uint64) error
	Delete(ctx context.Context, execution string) error
}

// Config configures a Recorder. Every field is required.
type Config struct {
	Bucket Bucket
	Now    func() time.Time // clock of the streams
	Logger *slog.Logger
}

// A Recorder holds the present waits of executions in memory and publishes those that last. Record and End do no I/O. A nil
// Recorder records nothing. It is safe for concurrent use.
type Recorder struct {
	cfg Config

	mu    sync.Mutex
	waits map[string]*wait // by execution
	ended []string         // executions whose published waits have ended

	failed bool // whether the last pass failed; used by Run only
}

// A wait is the present wait of an execution. Recorder.mu guards it.
type wait struct {
	entry     waiting.Entry
	open      bool      // the wait lasts until End, even if it is not recorded again
	published time.Time // when the bucket's entry was written, by this executor or another one; zero before the first comparison
	changed   bool      // the reason that was published is another one
	stored    bool      // the bucket may have an entry of this executor for the execution
}

// interval returns the minimum time from the last publication to the next one.
func (w *wait) interval() time.Duration {
	if w.changed {
		return ChangeInterval
	}
	return topology.WaitRefreshInterval
}

// New returns a Recorder, which publishes nothing before Run.
func New(cfg Config) *Recorder { return &Recorder{cfg: cfg, waits: map[string]*wait{}} }

// Record records that an execution waits. The wait has lasted since e.Since, or since it was recorded first. e.Seen is set by
// Record. The wait is forgotten if it is not recorded again for a while.
func (r *Recorder) Record(e waiting.Entry) { r.record(e, false) }

// Begin records that an execution waits, until End is called for it.
func (r *Recorder) Begin(e waiting.Entry) { r.record(e, true) }

func (r *Recorder) record(e waiting.Entry, open bool) {
	if r == nil {
		return
	}
	e.Seen = r.cfg.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.waits[e.Execution]
	switch {
	case w == nil && len(r.waits) >= maxWaits:
		return
	case w == nil:
		w = &wait{}
		r.waits[e.Execution] = w
	case w.entry.IsSameWait(e):
		if w.entry.Since.Before(e.Since) {
			e.Since = w.entry.Since
		}
	default:
		w.changed = true
	}
	w.entry, w.open = e, open
}

// End records that an execution no longer waits.
func (r *Recorder) End(execution string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.waits[execution]
	if w == nil {
		return
	}
	delete(r.waits, execution)
	if w.stored {
		r.ended = append(r.ended, execution)
	}
}

// Run publishes waits until ctx ends.
func (r *Recorder) Run(ctx context.Context) {
	tick := time.NewTicker(passInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := r.publish(ctx)
		if ctx.Err() == nil {
			r.logChange(err)
		}
	}
}

// logChange logs the error of a pass, unless the pass before failed too.
func (r *Recorder) logChange(err error) {
	switch {
	case err != nil && !r.failed:
		r.cfg.Logger.Warn("the reasons for which executions wait cannot be published; trying again", "error", err)
	case err == nil && r.failed:
		r.cfg.Logger.Info("the reasons for which executions wait are published again")
	}
	r.failed = err != nil
}

// publish makes one pass: it deletes the entries of waits that have ended, and writes those that are due. It stops at the
// first error; the next pass repeats the rest.
func (r *Recorder) publish(ctx context.Context) error {
	due, ended := r.takeDue()
	if len(due) == 0 && len(ended) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	for i, execution := range ended {
		if err := r.cfg.Bucket.Delete(ctx, execution); err != nil {
			if errors.Is(err, waiting.ErrNoBucket) {
				return err
			}
			r.mu.Lock()
			r.ended = append(r.ended, ended[i:]...)
			r.mu.Unlock()
			return err
		}
	}
	for _, e := range due {
		if err := r.publishEntry(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// takeDue returns the entries that must be published, and the executions whose entries must be deleted. It forgets waits that
// were not recorded for a while: another executor may publish their present state.
func (r *Recorder) takeDue() (due []waiting.Entry, ended []string) {
	now := r.cfg.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	ended, r.ended = r.ended, nil
	for execution, w := range r.waits {
		switch {
		case !w.open && now.Sub(w.entry.Seen) > retention:
			delete(r.waits, execution)
		case len(due) < maxPassWrites && now.Sub(w.entry.Since) >= minWait && now.Sub(w.published) >= w.interval():
			if w.open {
				w.entry.Seen = now
			}
			due = append(due, w.entry)
		}
	}
	return due, ended
}

// publishEntry writes an entry, unless another executor has written the same wait within the refresh interval, or has seen the
// execution later in another wait. If the bucket has an entry of the same wait with an earlier Since, that Since applies to both.
func (r *Recorder) publishEntry(ctx context.Context, e waiting.Entry) error {
	have, err := r.cfg.Bucket.Find(ctx, e.Execution)
	if err != nil && !errors.Is(err, waiting.ErrInvalid) { // an entry that is not valid is replaced
		return err
	}
	written, write := have.Written, !have.Seen.After(e.Seen)
	if have.IsSameWait(e) {
		if have.Since.Before(e.Since) {
			e.Since = have.Since
		}
		write = r.cfg.Now().Sub(written) >= topology.WaitRefreshInterval
	}
	if write {
		err := r.cfg.Bucket.Put(ctx, e, have.Revision)
		if write = err == nil; err != nil && !errors.Is(err, waiting.ErrChanged) {
			return err
		}
		written = r.cfg.Now()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.waits[e.Execution]
	switch {
	case w == nil && write: // it ended meanwhile
		r.ended = append(r.ended, e.Execution)
	case w == nil:
	case w.entry.IsSameWait(e):
		w.entry.Since, w.published, w.changed, w.stored = e.Since, written, false, w.stored || write
	default:
		w.stored = w.stored || write
	}
	return nil
}
