package jobs

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/bus/bustest"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
)

// turns records the sessions that it is called with, and calls execute.
type turns struct {
	calls   int
	execute func(call int) error
}

func (t *turns) Execute(context.Context, *eventlog.SessionState, *handling.Session) error {
	t.calls++
	return t.execute(t.calls)
}

// publisher records the topics of messages by id.
type publisher struct {
	err       error
	published map[string]string
}

func (p *publisher) Publish(topic string, list ...*message.Message) error {
	for _, m := range list {
		p.published[m.UUID] = topic
	}
	return p.err
}

func (p *publisher) Close() error { return nil }

func newHandler(t *testing.T) (*Handler, *runlogtest.Fixture, *turns) {
	t.Helper()
	bed, executed := runlogtest.New(t), &turns{}
	return &Handler{
		Executor: bed.Writer.Executor, Sessions: bed.Writer.Sessions, Handling: handling.NewSessionSet(), Runs: bed.Writer, Turns: executed, Logger: slog.New(slog.DiscardHandler),
	}, bed, executed
}

func (h *Handler) handle(t *testing.T) error {
	t.Helper()
	s, _ := h.Handling.BeginHandling(runlogtest.Session, 1)
	defer h.Handling.AbandonHandling(runlogtest.Session, s)
	return h.handleSession(t.Context(), topology.SessionRef{Tenant: runlogtest.Tenant, Session: runlogtest.Session}, s)
}

// TestRouted: the handler is reached through the Router alone.
func TestRouted(t *testing.T) {
	t.Parallel()
	bustest.RequireUnroutedRefused(t, (&Handler{}).Handle, []byte(`{"tenant":"default","session":"ses_01JGK0000000000000000000AA"}`))
}

// TestSession_UntilNothingIsDue: a session that changed is loaded again, and one whose execution has ended is done.
func TestSession_UntilNothingIsDue(t *testing.T) {
	t.Parallel()
	h, bed, executed := newHandler(t)
	bed.AppendLife(events.MessageAccepted{}, events.ExecutionDispatched{})
	executed.execute = func(call int) error {
		if call == 1 {
			return runlog.ErrChanged
		}
		x := bed.ClaimExecution()
		return x.AppendEnd(t.Context(), run.EndExecution{CommandMeta: bed.Writer.NewMeta(), Outcome: events.ExecutionCompleted{}})
	}
	if err := h.handle(t); err != nil || executed.calls != 2 {
		t.Errorf("%v after %d calls", err, executed.calls)
	}
}

// TestSession_Changing: a session that changes all the time is returned.
func TestSession_Changing(t *testing.T) {
	t.Parallel()
	h, bed, executed := newHandler(t)
	bed.AppendLife(events.MessageAccepted{}, events.ExecutionDispatched{})
	executed.execute = func(int) error { return runlog.ErrChanged }
	if err := h.handle(t); !errors.Is(err, runlog.ErrChanged) || executed.calls != maxSessionLoads {
		t.Errorf("%v after %d calls", err, executed.calls)
	}
}

// TestSession_Refuses: an execution that was cancelled before its claim ends without a turn.
func TestSession_Refuses(t *testing.T) {
	t.Parallel()
	h, bed, executed := newHandler(t)
	bed.CancelExecution()
	if err := h.handle(t); err != nil || executed.calls > 0 {
		t.Errorf("%v, %d turns", err, executed.calls)
	}
	if l := bed.LoadSession(); !l.Run.HasEnded(runlogtest.Execution) || l.Run.Phase != run.Cancelled {
		t.Errorf("phase %s", l.Run.Phase)
	}
}

// TestJobResult: conditions that pass are delivered again later, and any other error is one of the job.
func TestJobResult(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		err   error
		later bool
	}{
		"success":            {},
		"stopping":           {permits.ErrStopping, true},
		"store full":         {&storage.ReservedError{}, true},
		"fenced":             {run.ErrFenced, true},
		"engine unavailable": {&sandbox.Error{Code: sandbox.CodeEngineUnavailable}, true},
		"another error":      {broken, false},
	} {
		got := jobResult(c.err)
		if !errors.Is(got, c.err) || (got != c.err) != c.later { //nolint:errorlint // the identity shows whether it was wrapped
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestMoveJob: a job of a sandbox on another engine is published there once, and returned if that fails.
func TestMoveJob(t *testing.T) {
	t.Parallel()
	h, _, _ := newHandler(t)
	p := &publisher{published: map[string]string{}}
	h.Jobs = p
	msg := message.NewMessage("id", []byte("{}"))
	away := &idle.OtherEngineError{Sandbox: run.Sandbox{ID: "sbx_1", Provider: "docker", Engine: "there"}}
	for range 2 {
		if err := h.moveJob(t.Context(), msg, away); err != nil {
			t.Error(err)
		}
	}
	if len(p.published) != 1 {
		t.Errorf("published %v", p.published)
	}
	for _, topic := range p.published {
		if topic != topology.EngineJobSubject("docker", "there") {
			t.Errorf("published to %s", topic)
		}
	}
	p.err = errors.New("NATS is away")
	if err := h.moveJob(t.Context(), msg, away); !errors.Is(err, away) {
		t.Errorf("a job that could not be moved: %v", err)
	}
	if err := h.moveJob(t.Context(), msg, run.ErrFenced); !errors.Is(err, run.ErrFenced) {
		t.Errorf("any other result: %v", err)
	}
}
