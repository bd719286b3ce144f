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

// ErrChanged is returned when a session has changed since it was loaded: the caller has to load it again.
var ErrChanged = errors.New("the session has changed since it was loaded")

// A Writer appends to the runs of sessions. It is safe for concurrent use.
type Writer struct {
	Sessions eventlog.Sessions
	Executor string   // id of the executor
	Rate     run.Rate // price of sandboxes; zero if they have none
	Now      func() time.Time
	Stored   func([]events.Event) // is called with the events of each commit that was stored
}

// NewID returns a new id.
func (w *Writer) NewID(kind events.Kind) (string, error) {
	return events.NewID(kind, w.Now(), rand.Reader)
}

// Meta returns the id and the time of a new command.
func (w *Writer) Meta() events.Meta {
	id, err := w.NewID(events.KindCommand)
	if err != nil {
		// rand.Reader does not fail. If it did, ids from the clock would still be unique within a session.
		id = events.Derive(events.KindCommand, w.Executor, w.Now().String())
	}
	return events.Meta{CommandID: id, Now: w.Now().UTC()}
}

// Events returns facts as the events of a new command. They belong to an execution, or with "" to the session.
func (w *Writer) Events(execution string, facts ...events.Payload) []events.Event {
	m := events.NewEventList(w.Meta())
	for _, f := range facts {
		m.Add(execution, f)
	}
	return m.Events()
}

// Decide returns the decision of run.Decide. If it ends a metered sandbox, the decision also records how long the sandbox ran.
func (w *Writer) Decide(s run.State, c run.Command) (run.Decision, error) {
	d, err := run.Decide(s, c)
	if err != nil {
		return d, err
	}
	return run.Meter(s, d, w.Rate), nil
}

// Append appends a decision in one commit and updates l. It returns ErrChanged if another commit was first.
func (w *Writer) Append(ctx context.Context, l *eventlog.Loaded, d run.Decision) error {
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

// AppendEvents appends events to a session in which nothing runs, under the next epoch. It returns ErrChanged if that is no longer so.
func (w *Writer) AppendEvents(ctx context.Context, l *eventlog.Loaded, list []events.Event) error {
	d, err := w.Decide(l.Run, run.Record{Epoch: l.Run.Epoch + 1, Events: list})
	if err != nil {
		return ErrChanged
	}
	next := *l
	return w.Append(ctx, &next, d)
}

// AppendFacts appends facts about the session, which belong to no execution, as AppendEvents does.
func (w *Writer) AppendFacts(ctx context.Context, l *eventlog.Loaded, facts ...events.Payload) error {
	return w.AppendEvents(ctx, l, w.Events("", facts...))
}

// AppendAll appends a decision in as many commits as it needs, and returns the state after the last one that was stored, also with an
// error. It does not change l. While the log is unavailable or full it tries again until ctx ends. The error wraps run.ErrFenced if another executor has
// appended to the session's runs.
func (w *Writer) AppendAll(ctx context.Context, l *eventlog.Loaded, d run.Decision, log *slog.Logger) (*eventlog.Loaded, error) {
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

// appendPart appends a decision that fits into one commit, and updates l.
func (w *Writer) appendPart(ctx context.Context, l *eventlog.Loaded, d run.Decision, log *slog.Logger) error {
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

func (w *Writer) actor() events.Actor {
	return events.Actor{Kind: "executor", ID: w.Executor}.WrittenBy("executor/" + w.Executor)
}
