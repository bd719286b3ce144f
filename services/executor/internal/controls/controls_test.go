package controls_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/controls"
)

const every = time.Second

// countingLog counts the requests for changes, and can block those for shard 0.
type countingLog struct {
	eventlog.Log

	mu    sync.Mutex
	looks []int // number of subjects of each request
	block bool  // requests for shard 0 block
}

func (l *countingLog) setBlocked(block bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.block = block
}

func (l *countingLog) ChangedAmong(ctx context.Context, after eventlog.Position, subjects []events.Subject) (eventlog.Changes, error) {
	l.mu.Lock()
	l.looks = append(l.looks, len(subjects))
	blocked := l.block && after.Shard == 0
	l.mu.Unlock()
	if blocked {
		<-ctx.Done()
		return eventlog.Changes{}, ctx.Err()
	}
	return l.Log.ChangedAmong(ctx, after, subjects)
}

// takeLooks returns the requests since the last call.
func (l *countingLog) takeLooks() []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.looks
	l.looks = nil
	return list
}

type bed struct {
	t       *testing.T
	log     *countingLog
	mem     *memlog.Log
	watcher *controls.Watcher
}

// run calls test with a Watcher that runs in a bubble of synctest.
func run(t *testing.T, test func(b *bed)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem, err := memlog.New(memlog.Config{Shards: 2})
		if err != nil {
			t.Fatal(err)
		}
		log := &countingLog{Log: mem}
		b := &bed{t: t, log: log, mem: mem, watcher: controls.New(controls.Config{Log: log, Every: every, Logger: slog.New(slog.DiscardHandler)})}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { b.watcher.Run(ctx) })
		test(b)
		cancel()
		running.Wait()
	})
}

// session creates a session in a shard and returns the head of its life.
func (b *bed) session(shard int, name string) eventlog.Head {
	return eventlogtest.AppendCommits(b.t, b.mem, eventlogtest.SessionSubject(shard, 2, name), name, 1)[0]
}

// control appends an event to the life of a session.
func (b *bed) control(head eventlog.Head) eventlog.Head {
	b.t.Helper()
	next, err := b.mem.Append(b.t.Context(), head, eventlogtest.Draft(fmt.Sprint("control of ", head.Subject, head.Seq), "control"))
	if err != nil {
		b.t.Fatal(err)
	}
	return next
}

// beat blocks until the Watcher has requested the changes once more.
func (b *bed) beat() {
	time.Sleep(every)
	synctest.Wait()
}

func moved(x *controls.Watch) bool {
	select {
	case <-x.Changed():
		return true
	default:
		return false
	}
}

// TestWatcher_FindsControls: a change is signalled once, after the next request, and only for the session that
// changed.
func TestWatcher_FindsControls(t *testing.T) {
	run(t, func(b *bed) {
		one, two := b.session(0, "one"), b.session(1, "two")
		x, y := b.watcher.Watch(one), b.watcher.Watch(two)
		b.beat()
		if moved(x) || moved(y) {
			t.Error("a session that did not change is signalled")
		}
		for range 3 {
			one = b.control(one)
			b.beat()
			if !moved(x) || moved(y) {
				t.Error("not exactly the session that changed is signalled")
			}
			b.beat()
			if moved(x) {
				t.Error("a change is signalled twice")
			}
		}
		x.Close()
		b.control(one)
		b.beat()
		if moved(x) {
			t.Error("a session is signalled after Close")
		}
	})
}

// TestWatcher_ChangeBeforeWatch: a change between the load of a session and its Watch is found, although the changes
// of other sessions were read past it.
func TestWatcher_ChangeBeforeWatch(t *testing.T) {
	run(t, func(b *bed) {
		old := b.session(0, "old")
		b.watcher.Watch(b.session(0, "other"))
		b.control(old)
		b.control(b.session(0, "later"))
		b.beat()
		x := b.watcher.Watch(old)
		b.beat()
		if !moved(x) {
			t.Error("the change is not signalled")
		}
	})
}

// TestWatcher_LaggingReplica: a change that the replica does not have yet is signalled when it has it, also if other replicas answered in between.
func TestWatcher_LaggingReplica(t *testing.T) {
	run(t, func(b *bed) {
		one := b.session(0, "one")
		x := b.watcher.Watch(one)
		y := b.watcher.Watch(b.session(0, "two"))
		b.beat()
		b.mem.SetFaults(memlog.Faults{Behind: func(s events.Subject) int {
			if s == one.Subject {
				return 1
			}
			return 0
		}})
		b.control(one)
		b.beat()
		b.beat()
		if moved(x) {
			t.Fatal("a change is signalled that the replica does not have")
		}
		b.mem.SetFaults(memlog.Faults{})
		b.beat()
		if !moved(x) || moved(y) {
			t.Error("not exactly the session that changed is signalled")
		}
	})
}

// TestWatcher_OneRequest: the changes of all sessions of a shard are read with one request, and those of new sessions
// with a further one.
func TestWatcher_OneRequest(t *testing.T) {
	run(t, func(b *bed) {
		for i := range 50 {
			b.watcher.Watch(b.session(0, fmt.Sprint("session ", i)))
		}
		want := func(looks ...int) {
			t.Helper()
			b.beat()
			if got := b.log.takeLooks(); fmt.Sprint(got) != fmt.Sprint(looks) {
				t.Errorf("looks at %v sessions, want %v", got, looks)
			}
		}
		want(50)
		want(50)
		b.watcher.Watch(b.session(0, "new"))
		want(50, 1)
		want(51)
	})
}

// TestWatcher_ShardsAreIndependent: a shard that does not answer delays no other, and its changes are found later.
func TestWatcher_ShardsAreIndependent(t *testing.T) {
	run(t, func(b *bed) {
		one, two := b.session(0, "one"), b.session(1, "two")
		x, y := b.watcher.Watch(one), b.watcher.Watch(two)
		b.log.setBlocked(true)
		b.control(one)
		b.control(two)
		b.beat()
		if moved(x) || !moved(y) {
			t.Error("the shard that answers is delayed")
		}
		b.log.setBlocked(false)
		time.Sleep(10*time.Second + every)
		synctest.Wait()
		if !moved(x) {
			t.Error("the change of the other shard is not signalled")
		}
	})
}
