// Package runlogtest claims an execution in a log in memory, for tests of packages that append to it.
package runlogtest

import (
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
)

// Tenant, Session and Execution are those of a Fixture.
const Tenant = "default"

var (
	Session   = events.DeriveID(events.KindSession, "runlogtest")
	Execution = events.DeriveID(events.KindExecution, "runlogtest")
)

// A Fixture holds a log in memory with one session, whose life is empty, and an executor that appends to it.
type Fixture struct {
	Log    *memlog.Log
	Writer *runlog.Writer

	t      *testing.T
	mu     sync.Mutex
	stored []events.Event
}

// New returns a Fixture.
func New(t *testing.T) *Fixture {
	t.Helper()
	log, err := memlog.New(memlog.Config{})
	if err != nil {
		t.Fatal(err)
	}
	b := &Fixture{Log: log, t: t}
	b.Writer = &runlog.Writer{
		Sessions: eventlog.Sessions{Log: log}, Executor: events.DeriveID(events.KindExecutor, "runlogtest"), Now: time.Now,
		Stored: func(list []events.Event) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.stored = append(b.stored, list...)
		},
	}
	return b
}

// Stored returns the events that the executor has stored so far.
func (b *Fixture) Stored() []events.Event {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.stored)
}

// Types returns the types of the events that the executor has stored so far.
func (b *Fixture) Types() []events.Type {
	var out []events.Type
	for _, e := range b.Stored() {
		out = append(out, e.Data.EventType())
	}
	return out
}

// Load returns the session as the log has it.
func (b *Fixture) Load() *eventlog.SessionState {
	b.t.Helper()
	l, err := b.Writer.Sessions.Load(b.t.Context(), Tenant, Session, eventlog.LeaderOnly)
	if err != nil {
		b.t.Fatal(err)
	}
	return l
}

// Claim claims Execution for the executor, under the next epoch.
func (b *Fixture) Claim() *runlog.Execution {
	b.t.Helper()
	l := b.Load()
	d, err := b.Writer.Decide(l.Run, run.ClaimExecution{CommandMeta: b.Writer.Meta(), ExecutionID: Execution, Turn: 1, Executor: b.Writer.Executor})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.Writer.Append(b.t.Context(), l, d); err != nil {
		b.t.Fatal(err)
	}
	return b.Writer.Execution(l, slog.New(slog.DiscardHandler))
}

// AppendLife appends facts about Execution to the life of the session, as the session service does.
func (b *Fixture) AppendLife(facts ...events.Payload) {
	b.t.Helper()
	l := b.Load()
	mint := events.NewEventList(b.Writer.Meta())
	for _, f := range facts {
		mint.Add(Execution, f)
	}
	if err := b.Writer.Sessions.AppendLife(b.t.Context(), l, events.Actor{Kind: "service", ID: "session"}, b.Writer.Meta().CommandID, mint.Events()); err != nil {
		b.t.Fatal(err)
	}
}

// Cancel cancels Execution, which is dispatched for that.
func (b *Fixture) Cancel() {
	b.t.Helper()
	b.AppendLife(events.MessageAccepted{}, events.ExecutionDispatched{}, events.CancelRequested{Control: 1, Reason: "cancelled"})
	if l := b.Load(); l.Life.ControlOf(Execution).N != 1 {
		b.t.Fatalf("the life is %+v", l.Life)
	}
}
