package commits_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/commits"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
)

const window = 50 * time.Millisecond

func newBuffer(t *testing.T) (*commits.Buffer, *runlogtest.Fixture, *runlog.Execution) {
	t.Helper()
	bed := runlogtest.New(t)
	x := bed.ClaimExecution()
	b := commits.New(x, window)
	t.Cleanup(b.Close)
	return b, bed, x
}

func add(t *testing.T, b *commits.Buffer, list ...events.Event) {
	t.Helper()
	if err := b.Add(list...); err != nil {
		t.Fatal(err)
	}
}

func fact(message string) events.Payload { return events.Error{Code: "TEST", Message: message} }

// messages returns the messages of the stored facts.
func messages(bed *runlogtest.Fixture) string {
	var out []string
	for _, e := range bed.StoredEvents() {
		if f, ok := e.Data.(events.Error); ok {
			out = append(out, f.Message)
		}
	}
	return strings.Join(out, " ")
}

// TestBuffer_Window: a commit takes all pending events, and the next one waits for the window, unless it is expedited.
func TestBuffer_Window(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, bed, x := newBuffer(t)
		if b.IsDue() {
			t.Error("due without an event")
		}
		add(t, b, x.NewEvents(fact("1"), fact("2"))...)
		if !b.IsDue() {
			t.Fatal("the first commit is not due")
		}
		acked := make(chan uint64, 1)
		b.StartCommit(t.Context(), func(line uint64) { acked <- line })
		add(t, b, x.NewEvents(fact("3"))...)
		if b.IsDue() || b.IsIdle() {
			t.Error("a second commit while one is in flight")
		}
		if err := b.FinishCommit(<-b.Done()); err != nil {
			t.Fatal(err)
		}
		<-acked
		if got := messages(bed); got != "1 2" || x.Session.RunHead.Seq != bed.LoadSession().RunHead.Seq {
			t.Errorf("stored %q", got)
		}
		began := time.Now()
		if b.IsDue() {
			t.Error("due within the window")
		}
		<-b.DueTimer()
		if waited := time.Since(began); waited != window || !b.IsDue() {
			t.Errorf("due %v after %s", b.IsDue(), waited)
		}
		b.StartCommit(t.Context(), func(uint64) {})
		add(t, b, x.NewEvents(fact("4"))...)
		if err := b.FinishCommit(<-b.Done()); err != nil {
			t.Fatal(err)
		}
		if b.Expedite(); !b.IsDue() {
			t.Error("not due although expedited")
		}
	})
}

// TestBuffer_Flush: all events are stored in their order, after the commit in flight.
func TestBuffer_Flush(t *testing.T) {
	t.Parallel()
	b, bed, x := newBuffer(t)
	add(t, b, x.NewEvents(fact("1"))...)
	b.StartCommit(t.Context(), func(uint64) {})
	add(t, b, x.NewEvents(fact("3"))...)
	b.AddFirst(x.NewEvents(fact("2"))...)
	if err := b.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := messages(bed); got != "1 2 3" || !b.IsStored() {
		t.Errorf("stored %q, all: %v", got, b.IsStored())
	}
}

// TestBuffer_Fenced: the commit of an execution that another executor has claimed fails, and no line is acknowledged.
func TestBuffer_Fenced(t *testing.T) {
	t.Parallel()
	b, bed, x := newBuffer(t)
	bed.ClaimExecution()
	add(t, b, x.NewEvents(fact("1"))...)
	b.StartCommit(t.Context(), func(uint64) { t.Error("acknowledged") })
	if err := b.FinishCommit(<-b.Done()); !errors.Is(err, run.ErrFenced) {
		t.Errorf("error %v", err)
	}
}

// TestBuffer_Close: the state has what the commit in flight stored before it was cancelled.
func TestBuffer_Close(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.ClaimExecution()
	b := commits.New(x, window)
	ctx, cancel := context.WithCancel(t.Context())
	bed.Log.SetFaults(memlog.Faults{AfterAppend: func(context.Context, eventlog.Head) error { cancel(); return nil }})
	add(t, b, x.NewEvents(fact("1"))...)
	before := x.Session.RunHead.Seq
	b.StartCommit(ctx, func(uint64) {})
	b.Close()
	if x.Session.RunHead.Seq == before || x.Session.RunHead.Seq != bed.LoadSession().RunHead.Seq || !b.IsIdle() {
		t.Errorf("the head is %d, after %d", x.Session.RunHead.Seq, before)
	}
}

// TestBuffer_EncodesAnEventOnce: between Add and the stored commit an event's data is not encoded again. The test counts the allocations
// of the process, so it does not run beside other tests.
func TestBuffer_EncodesAnEventOnce(t *testing.T) {
	const size = 200_000
	message := strings.Repeat("x", size)
	b, bed, x := newBuffer(t)
	allocated := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.TotalAlloc
	}
	add(t, b, x.NewEvents(fact(message))...)
	before := allocated()
	if err := b.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A commit copies the encoded events into its list, and the list into its message.
	if n := allocated() - before; n > 3*size+100_000 {
		t.Errorf("%d bytes were allocated to store an encoded event of %d bytes", n, size)
	}
	if messages(bed) != message {
		t.Error("the event was not stored")
	}
}

// TestBuffer_IsFull: four megabytes of events are the most that may wait.
func TestBuffer_IsFull(t *testing.T) {
	t.Parallel()
	b, _, x := newBuffer(t)
	large := fact(strings.Repeat("x", 1<<20))
	for n := range 4 {
		if b.IsFull() {
			t.Fatalf("full after %d megabytes", n)
		}
		add(t, b, x.NewEvents(large)...)
	}
	if !b.IsFull() {
		t.Error("not full")
	}
	if list := b.TakePending(); len(list) != 4 || b.IsFull() || !b.IsStored() {
		t.Errorf("took %d events", len(list))
	}
}
