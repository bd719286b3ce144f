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

// A Fixture is a test fixture: a log in memory with one session, whose life is empty, and an executor that
// appends to the log.
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

// StoredEvents returns the events that the fixture's executor has stored so far.
func (b *Fixture) StoredEvents() []events.Event {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.stored)
}

// StoredTypes returns the types of the events that the fixture's executor has stored so far.
func (b *Fixture) StoredTypes() []events.Type {
	var out []events.Type
	for _, e := range b.StoredEvents() {
		out = append(out, e.Data.EventType())
	}
	return out
}

// LoadSession loads the fixture's session from the log.
func (b *Fixture) LoadSession() *eventlog.SessionState {
	b.t.Helper()
	l, err := b.Writer.Sessions.Load(b.t.Context(), Tenant, Session, eventlog.LeaderOnly)
	if err != nil {
		b.t.Fatal(err)
	}
	return l
}

// ClaimExecution claims Execution for the fixture's executor, under the next epoch.
func (b *Fixture) ClaimExecution() *runlog.Execution {
	b.t.Helper()
	l := b.LoadSession()
	d, err := b.Writer.Decide(l.Run, run.ClaimExecution{CommandMeta: b.Writer.NewMeta(), ExecutionID: Execution, Turn: 1, Executor: b.Writer.Executor})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.Writer.AppendDecision(b.t.Context(), l, d); err != nil {
		b.t.Fatal(err)
	}
	return b.Writer.Execution(l, slog.New(slog.DiscardHandler))
}

// AppendLife appends facts about Execution to the session's life, as the session service does.
func (b *Fixture) AppendLife(facts ...events.Payload) {
	b.t.Helper()
	l := b.LoadSession()
	mint := events.NewEventList(b.Writer.NewMeta())
	for _, f := range facts {
		mint.Add(Execution, f)
	}
	if err := b.Writer.Sessions.AppendLife(b.t.Context(), l, events.Actor{Kind: "service", ID: "session"}, b.Writer.NewMeta().CommandID, mint.Events()); err != nil {
		b.t.Fatal(err)
	}
}

// CancelExecution dispatches Execution and then cancels it.
func (b *Fixture) CancelExecution() {
	b.t.Helper()
	b.AppendLife(events.MessageAccepted{}, events.ExecutionDispatched{}, events.CancelRequested{Control: 1, Reason: "cancelled"})
	if l := b.LoadSession(); l.Life.ControlOf(Execution).N != 1 {
		b.t.Fatalf("the life is %+v", l.Life)
	}
}
