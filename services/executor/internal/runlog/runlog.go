// Package runlog appends decisions about the runs of sessions to the log, in the name of one executor.
package runlog

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/retry"
)

// ErrChanged is returned when a session has changed since it was loaded. The caller has to load it again.
var ErrChanged = errors.New("the session has changed since it was loaded")

// A Writer appends events to the runs of sessions. It is safe for concurrent use.
type Writer struct {
	Sessions eventlog.Sessions
	Executor string          // id of the executor
	Rate     run.SandboxRate // price of sandboxes; zero if they have none
	Now      func() time.Time
	Stored   func([]events.Event) // is called with the events of each commit that was stored
}

// NewID returns a new id of the given kind.
func (w *Writer) NewID(kind events.IDKind) (string, error) {
	return events.NewID(kind, w.Now(), rand.Reader)
}

// NewMeta returns the metadata of a new command: its id and time.
func (w *Writer) NewMeta() events.CommandMeta {
	id, err := w.NewID(events.KindCommand)
	if err != nil {
		// rand.Reader does not fail. If it did, ids from the clock would still be unique within a session.
		id = events.DeriveID(events.KindCommand, w.Executor, w.Now().String())
	}
	return events.CommandMeta{CommandID: id, Now: w.Now().UTC()}
}

// NewEvents returns facts as the events of a new command. They belong to the given execution, or only to the session if execution is "".
func (w *Writer) NewEvents(execution string, facts ...events.Payload) []events.Event {
	m := events.NewEventList(w.NewMeta())
	for _, f := range facts {
		m.Add(execution, f)
	}
	return m.Events()
}

// Decide returns the decision of run.Decide about a command. If the decision ends a metered sandbox, it also records how long the sandbox
// ran.
func (w *Writer) Decide(s run.State, c run.Command) (run.Decision, error) {
	d, err := run.Decide(s, c)
	if err != nil {
		return d, err
	}
	return run.AddSandboxUsage(s, d, w.Rate), nil
}

// AppendDecision appends the events of a decision in one commit and updates l. It returns ErrChanged if another commit was stored first.
func (w *Writer) AppendDecision(ctx context.Context, l *eventlog.SessionState, d run.Decision) error {
	id, err := w.NewID(events.KindCommit)
	if err != nil {
		return err
	}
	err = w.Sessions.AppendRun(ctx, l, w.actor(), id, d)
	var conflict *eventlog.ConflictError
	if errors.As(err, &conflict) {
		return ErrChanged
	}
	if err == nil {
		w.Stored(d.Events)
	}
	return err
}

// AppendEvents appends events to the runs of a session in which no execution runs, under the next epoch. It returns ErrChanged if the
// session has changed since l was loaded.
func (w *Writer) AppendEvents(ctx context.Context, l *eventlog.SessionState, list []events.Event) error {
	d, err := w.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch + 1, Events: list})
	if err != nil {
		return ErrChanged
	}
	next := *l
	return w.AppendDecision(ctx, &next, d)
}

// AppendFacts appends facts about the session that belong to no execution, as AppendEvents does.
func (w *Writer) AppendFacts(ctx context.Context, l *eventlog.SessionState, facts ...events.Payload) error {
	return w.AppendEvents(ctx, l, w.NewEvents("", facts...))
}

// AppendAll appends the events of a decision in as many commits as necessary. It returns the state after the last commit that was stored,
// also with an error, and does not change l. While the log is unavailable or full it tries again until ctx ends. The error wraps
// run.ErrFenced if another executor has appended to the session's runs.
func (w *Writer) AppendAll(ctx context.Context, l *eventlog.SessionState, d run.Decision, log *slog.Logger) (*eventlog.SessionState, error) {
	parts, err := d.Split()
	if err != nil {
		return l, fmt.Errorf("split events of %s: %w", l.Run.Execution, err)
	}
	next := *l
	for _, part := range parts {
		if err := w.appendPart(ctx, &next, part, log); err != nil {
			return &next, err
		}
	}
	return &next, nil
}

// Pauses between two tries to append.
const (
	firstAppendPause = 50 * time.Millisecond
	maxAppendPause   = time.Second
)

// appendPart appends a part of a decision that fits into one commit, and updates l.
func (w *Writer) appendPart(ctx context.Context, l *eventlog.SessionState, d run.Decision, log *slog.Logger) error {
	id, err := w.NewID(events.KindCommit)
	if err != nil {
		return err
	}
	pauses := retry.NewDoubling(firstAppendPause, maxAppendPause)
	for {
		err := w.Sessions.AppendRunPart(ctx, l, w.actor(), id, d)
		var conflict *eventlog.ConflictError
		switch {
		case err == nil:
			w.Stored(d.Events)
			return nil
		case errors.As(err, &conflict):
			return fmt.Errorf("%w: %w", run.ErrFenced, err)
		case !errors.Is(err, eventlog.ErrUnavailable) && !errors.Is(err, eventlog.ErrFull):
			return err
		}
		pause := pauses.NextBackOff()
		log.Warn("the log cannot be written, trying again", "error", err, "pause", pause)
		if retry.Pause(ctx, pause) != nil {
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// actor returns this executor as the actor of events.
func (w *Writer) actor() events.Actor {
	return events.Actor{Kind: "executor", ID: w.Executor}.WrittenBy("executor/" + w.Executor)
}
