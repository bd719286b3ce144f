package projector

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/services/projector/internal/store"
)

// rounds runs a sharedWriter that commits nothing, and records when it commits which groups.
type rounds struct {
	*sharedWriter
	ctx   context.Context
	start time.Time
	took  time.Duration // how long each transaction takes

	mu  sync.Mutex
	log []string
}

func newRounds(t *testing.T) *rounds {
	ctx, stop := context.WithCancel(t.Context())
	r := &rounds{sharedWriter: newSharedWriter(nil), ctx: ctx, start: time.Now()}
	r.commit = func(_ context.Context, list []*submittedWrite) {
		line := fmt.Sprint(time.Since(r.start), ":")
		slices.SortFunc(list, func(a, b *submittedWrite) int { return a.write.Group - b.write.Group })
		for _, s := range list {
			line += fmt.Sprint(" ", s.write.Group)
		}
		r.mu.Lock()
		r.log = append(r.log, line)
		r.mu.Unlock()
		time.Sleep(r.took)
		sendResult(list, nil)
	}
	var running sync.WaitGroup
	running.Go(func() { r.runCommits(ctx) })
	t.Cleanup(func() { stop(); running.Wait() })
	return r
}

// project waits for a shared commit, folds for a time, and commits.
func (r *rounds) project(group int, folds time.Duration) {
	t, err := r.joinNextCommit(r.ctx)
	if err != nil {
		return
	}
	time.Sleep(folds)
	_ = t.submitWrite(r.ctx, nil, store.GroupWrite{Group: group})
}

// spendBurst makes as many shared commits at once as are allowed, so that the next one begins after sharedCommitInterval.
func (r *rounds) spendBurst() {
	for range sharedCommitBurst {
		r.project(9, 0)
	}
	r.log = nil
}

func (r *rounds) expect(t *testing.T, want ...string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if fmt.Sprint(r.log) != fmt.Sprint(want) {
		t.Errorf("transactions %q, want %q", r.log, want)
	}
}

func TestWriter_CommitsAtOnceWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRounds(t)
		for range 3 {
			r.project(1, 0)
			time.Sleep(sharedCommitInterval)
		}
		r.expect(t, "0s: 1", "15ms: 1", "30ms: 1")
	})
}

func TestWriter_CommitsAllGroupsTogetherUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRounds(t)
		r.spendBurst()
		r.took = time.Millisecond
		var all sync.WaitGroup
		for g := range 3 {
			all.Go(func() {
				time.Sleep(time.Duration(g) * time.Millisecond)
				for time.Since(r.start) < 40*time.Millisecond {
					r.project(g, time.Millisecond)
				}
			})
		}
		all.Wait()
		r.expect(t, "16ms: 0 1 2", "31ms: 0 1 2", "46ms: 0 1 2")
	})
}

func TestWriter_DoesNotWaitForASlowGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRounds(t)
		r.spendBurst()
		var all sync.WaitGroup
		all.Go(func() { r.project(1, time.Millisecond) })
		all.Go(func() { r.project(2, 100*time.Millisecond) })
		all.Wait()
		r.expect(t, "20ms: 1", "115ms: 2")
	})
}

func TestWriter_DoesNotWaitForAGroupThatLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRounds(t)
		r.spendBurst()
		var all sync.WaitGroup
		all.Go(func() { r.project(1, 0) })
		all.Go(func() {
			left, err := r.joinNextCommit(r.ctx)
			if err != nil {
				t.Error(err)
			}
			time.Sleep(time.Millisecond)
			left.leaveCommit()
			left.leaveCommit() // has no effect
		})
		all.Wait()
		r.project(3, 0)
		r.expect(t, "16ms: 1", "30ms: 3")
	})
}

// TestWriter_CommitsAFullBatchAtOnce tests that a group with many commits does not wait for shared commits.
func TestWriter_CommitsAFullBatchAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRounds(t)
		for g := range 3 {
			full := sharedCommitMember{w: r.sharedWriter}
			if err := full.submitWrite(r.ctx, nil, store.GroupWrite{Group: g}); err != nil {
				t.Fatal(err)
			}
		}
		r.expect(t, "0s: 0", "0s: 1", "0s: 2")
	})
}

// TestWriter_StopsWithoutAnswer tests that a group that waits for a shared commit or for a transaction ends with its context.
func TestWriter_StopsWithoutAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newSharedWriter(nil)
		ctx, stop := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() {
			if _, err := w.joinNextCommit(ctx); err == nil {
				t.Error("a round began without a writer")
			}
		})
		all.Go(func() {
			full := sharedCommitMember{w: w}
			if err := full.submitWrite(ctx, nil, store.GroupWrite{}); err == nil {
				t.Error("a write was committed without a writer")
			}
		})
		synctest.Wait()
		stop()
		all.Wait()
	})
}

// TestWriter_SavesRoundsForABurst tests that shared commits that were not used allow a burst, and not more.
func TestWriter_SavesRoundsForABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRounds(t)
		for range 6 {
			r.project(1, 0)
		}
		time.Sleep(time.Second)
		for range 6 {
			r.project(1, 0)
		}
		r.expect(t, "0s: 1", "0s: 1", "0s: 1", "0s: 1", "15ms: 1", "30ms: 1", "1.03s: 1", "1.03s: 1", "1.03s: 1", "1.03s: 1", "1.045s: 1", "1.06s: 1")
	})
}
