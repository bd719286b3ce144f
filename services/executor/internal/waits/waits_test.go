package waits_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/executor/internal/waits"
)

// bucket is a bucket in memory whose entries expire as those in NATS do. It counts its operations.
type bucket struct {
	mu      sync.Mutex
	err     error
	entries map[string]waiting.Stored
	puts    map[string]int
	finds   int
	last    uint64
}

func newBucket() *bucket {
	return &bucket{entries: map[string]waiting.Stored{}, puts: map[string]int{}}
}

func (b *bucket) Find(_ context.Context, execution string) (waiting.Stored, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.finds++
	if s, ok := b.entries[execution]; ok && time.Since(s.Written) < topology.WaitTTL {
		return s, b.err
	}
	return waiting.Stored{}, b.err
}

func (b *bucket) Put(_ context.Context, e waiting.Entry, revision uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if have, ok := b.entries[e.Execution]; ok && time.Since(have.Written) < topology.WaitTTL && have.Revision != revision {
		return waiting.ErrChanged
	}
	b.last++
	b.entries[e.Execution] = waiting.Stored{Entry: e, Revision: b.last, Written: time.Now()}
	b.puts[e.Execution]++
	return b.err
}

func (b *bucket) Delete(_ context.Context, execution string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.entries, execution)
	return b.err
}

// get returns the entry of an execution, and false if there is none.
func (b *bucket) get(execution string) (waiting.Entry, bool) {
	s, _ := b.Find(context.Background(), execution)
	return s.Entry, s.Revision > 0
}

// run runs a Recorder until the test ends.
func run(t *testing.T, b *bucket) *waits.Recorder {
	t.Helper()
	r := waits.New(waits.Config{Bucket: b, Now: time.Now, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return r
}

func entry(execution string, reason waiting.Reason) waiting.Entry {
	return waiting.Entry{Execution: execution, Reason: reason, Since: time.Now(), Detail: "because"}
}

func TestRecorder_DoesNotPublishAShortWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBucket()
		r := run(t, b)
		for range 100 {
			r.Record(entry("exe_1", waiting.Slot))
			time.Sleep(9 * time.Millisecond)
		}
		r.End("exe_1")
		time.Sleep(time.Minute)
		if b.puts["exe_1"] != 0 || b.finds != 0 {
			t.Errorf("%d writes and %d reads for a wait of 0.9 s", b.puts["exe_1"], b.finds)
		}
	})
}

// TestRecorder_WritesOncePerRefresh tests that two executors together write each of a thousand waits once per refresh, although
// they record it all the time, and that its entry never expires.
func TestRecorder_WritesOncePerRefresh(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBucket()
		all := []*waits.Recorder{run(t, b), run(t, b)}
		const executions, seconds = 1000, 120
		began := time.Now()
		for i := range seconds * 2 {
			for n := range executions {
				all[(i+n)%2].Record(entry(fmt.Sprint("exe_", n), waiting.Slot))
			}
			time.Sleep(time.Second / 2)
			for n := range executions {
				if e, found := b.get(fmt.Sprint("exe_", n)); i > 6 && !found || found && e.Since.After(began.Add(time.Second/2)) {
					t.Fatalf("exe_%d after %s: %+v, %v", n, time.Since(began), e, found)
				}
			}
		}
		most := int(seconds*time.Second/topology.WaitRefreshInterval) + 1
		for execution, n := range b.puts {
			if n > most || n < most/2 {
				t.Errorf("%s was written %d times in %d s, want at most %d", execution, n, seconds, most)
			}
		}
		if len(b.puts) != executions {
			t.Errorf("%d executions were written", len(b.puts))
		}
	})
}

// TestRecorder_WritesFewChangesOfTheReason tests that a wait whose reason changes all the time is not written at each change.
func TestRecorder_WritesFewChangesOfTheReason(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBucket()
		r := run(t, b)
		const changes = 60
		for n := range changes {
			for range 4 {
				r.Record(entry("exe_1", []waiting.Reason{waiting.Slot, waiting.TenantLimit}[n%2]))
				time.Sleep(time.Second / 2)
			}
		}
		if most := int(changes*2*time.Second/waits.ChangeInterval) + 1; b.puts["exe_1"] > most || b.puts["exe_1"] < most/2 {
			t.Errorf("%d writes for %d changes, want at most %d", b.puts["exe_1"], changes, most)
		}
	})
}

func TestRecorder_FollowsTheReason(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBucket()
		r := run(t, b)
		r.Record(entry("exe_1", waiting.Slot))
		time.Sleep(3 * time.Second)
		if e, _ := b.get("exe_1"); e.Reason != waiting.Slot {
			t.Errorf("got %+v", e)
		}
		changed := time.Now()
		for range 60 {
			r.Record(entry("exe_1", waiting.TenantLimit))
			time.Sleep(100 * time.Millisecond)
		}
		if e, _ := b.get("exe_1"); e.Reason != waiting.TenantLimit || !e.Since.Equal(changed) {
			t.Errorf("got %+v, want %s since %s", e, waiting.TenantLimit, changed)
		}
		r.End("exe_1")
		time.Sleep(2 * time.Second)
		if e, found := b.get("exe_1"); found {
			t.Errorf("after its end: %+v", e)
		}
	})
}

// TestRecorder_ForgetsAWait tests that a wait that is no longer recorded ends, and that one which was begun lasts until its end.
func TestRecorder_ForgetsAWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBucket()
		r := run(t, b)
		r.Record(entry("exe_recorded", waiting.Slot))
		r.Begin(entry("exe_begun", waiting.Slot))
		time.Sleep(10 * time.Minute)
		if _, found := b.get("exe_recorded"); found || b.puts["exe_recorded"] > 4 {
			t.Errorf("a wait that is not recorded any more was written %d times, found %v", b.puts["exe_recorded"], found)
		}
		if e, found := b.get("exe_begun"); !found || time.Since(e.Seen) > topology.WaitTTL {
			t.Errorf("a wait that was begun: %+v, %v", e, found)
		}
		r.End("exe_begun")
		time.Sleep(2 * time.Second)
		if _, found := b.get("exe_begun"); found {
			t.Error("a wait that has ended is in the bucket")
		}
	})
}

// TestRecorder_KeepsTheNewerReasonOfAnotherExecutor tests that an executor that has not seen an execution lately does not replace
// what another one has seen since.
func TestRecorder_KeepsTheNewerReasonOfAnotherExecutor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBucket()
		old, now := run(t, b), run(t, b)
		old.Record(entry("exe_1", waiting.Slot))
		for i := range 400 {
			now.Record(entry("exe_1", waiting.TenantLimit))
			time.Sleep(100 * time.Millisecond)
			if e, _ := b.get("exe_1"); i > 50 && e.Reason != waiting.TenantLimit {
				t.Fatalf("pass %d: %+v", i, e)
			}
		}
	})
}

// TestRecorder_SurvivesFailures tests that waits are published, and ended ones deleted, after NATS has failed for a while.
func TestRecorder_SurvivesFailures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBucket()
		r := run(t, b)
		r.Begin(entry("exe_ends", waiting.Slot))
		time.Sleep(3 * time.Second)
		fail := func(err error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.err = err
		}
		fail(errors.New("away"))
		r.End("exe_ends")
		r.Begin(entry("exe_1", waiting.Slot))
		time.Sleep(5 * time.Second)
		b.mu.Lock()
		b.entries["exe_ends"] = waiting.Stored{Entry: entry("exe_ends", waiting.Slot), Revision: 99, Written: time.Now()} // the delete did not reach NATS
		b.entries["exe_1"] = waiting.Stored{Revision: 100, Written: time.Now()}                                           // an entry that is not valid
		b.mu.Unlock()
		fail(waiting.ErrInvalid)
		time.Sleep(2 * time.Second)
		fail(nil)
		time.Sleep(20 * time.Second)
		if _, found := b.get("exe_ends"); found {
			t.Error("a wait that ended while NATS was away is in the bucket")
		}
		if e, found := b.get("exe_1"); !found || e.Reason != waiting.Slot {
			t.Errorf("a wait that began while NATS was away: %+v, %v", e, found)
		}
	})
}

func TestRecorder_NilRecordsNothing(t *testing.T) {
	t.Parallel()
	var r *waits.Recorder
	r.Record(entry("exe_1", waiting.Slot))
	r.Begin(entry("exe_1", waiting.Slot))
	r.End("exe_1")
}
