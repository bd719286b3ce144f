package api

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// MaxWait is the longest time for which a request may wait for the end of its execution.
const MaxWait = 10 * time.Minute

// ParseWait parses the field wait of a request. It returns 0 for "".
func ParseWait(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	switch {
	case err != nil:
		return 0, problem.Invalid("wait", "%s is not a duration such as 30s or 2m", truncate.Quote(text, 40))
	case d < 0:
		return 0, problem.Invalid("wait", "%s is negative", d)
	case d > MaxWait:
		return 0, problem.Invalid("wait", "%s is longer than 10m, the longest wait", d)
	}
	return d, nil
}

const (
	// streamKindWait is the kind of waiting requests in the metrics of streams.
	streamKindWait = "wait"
	// lastReadTimeout bounds the last read of an execution, which takes place when the time that a request waits for
	// its end is up.
	lastReadTimeout = time.Second
	// maxRejoinPause is the longest pause before a waiting request joins its session's feed again after an error.
	maxRejoinPause = time.Second
)

// executionWait is the wait of a request for the end of the execution that it creates. It counts as a stream of the tenant.
type executionWait struct {
	server    *Server
	principal auth.Principal
	limit     time.Duration
	release   func()

	session, execution, position string
	endSeq                       uint32 // seq of the event that ended the execution; 0 if it is not known
	// openAt is the last seq at which the execution is known not to have ended; 0 if there is none.
	openAt uint32
	last   *spoolv1.Execution // the execution as it was read last; nil if it was not read
}

// beginWait admits the wait for which a request asks, before the command of the request is sent, so that a refused
// request has no effect. For the text "" or 0 it returns nil, whose awaitEnd does not wait. The caller must call
// close. The error is INVALID_REQUEST or TOO_MANY_STREAMS.
func (s *Server) beginWait(ctx context.Context, text string) (*executionWait, error) {
	limit, err := ParseWait(text)
	if err != nil || limit == 0 {
		return nil, err
	}
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	end, err := s.Admission.BeginStream(p.Tenant)
	if err != nil {
		return nil, err
	}
	counted := s.Metrics.BeginStream(streamKindWait)
	return &executionWait{server: s, principal: p, limit: limit, release: func() { counted(); end() }}, nil
}

// close ends the wait, which then no longer counts as a stream of the tenant.
func (w *executionWait) close() {
	if w != nil {
		w.release()
	}
}

// awaitEnd blocks until the execution of an accepted command has ended, the time is up or the gateway stops. It returns the
// execution as it is then, nil if the read models cannot be read, and a cursor of its session. The error is the reason why
// the request must not be answered: ctx has ended, the API key was revoked, or the session was deleted.
func (w *executionWait) awaitEnd(ctx context.Context, accepted command.Answer) (*spoolv1.Execution, *uint32, error) {
	if w == nil {
		return nil, nil, nil
	}
	w.session, w.execution, w.position = accepted.SessionID, accepted.ExecutionID, accepted.Position
	ctx, release := w.server.Watch.AddStream(ctx, w.principal)
	defer release()
	limited, cancel := context.WithTimeout(ctx, w.limit)
	defer cancel()
	limited, cancelStop := w.server.Live.ContextUntilStop(limited)
	defer cancelStop()
	err := w.followSession(limited)
	switch {
	case ctx.Err() != nil:
		return nil, nil, problem.From(context.Cause(ctx))
	case err != nil && limited.Err() == nil:
		return nil, nil, err
	case err != nil:
		w.rereadExecution(ctx)
	}
	cursor := w.openAt
	if spoolv1.HasEnded(w.last) {
		cursor = w.endSeq
	}
	return w.last, &cursor, nil
}

// followSession follows the events of the session until the execution has ended. After a temporary error it follows
// the session again. The error is the cause of ctx, or that the session was deleted.
func (w *executionWait) followSession(ctx context.Context) error {
	pauses := retry.NewDoubling(20*time.Millisecond, maxRejoinPause)
	for {
		err := w.followSessionOnce(ctx)
		if err == nil || isDeletedSession(err) {
			return err
		}
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return context.Cause(ctx)
		}
	}
}

// isDeletedSession reports whether an error means that a session that existed does not exist any more.
func isDeletedSession(err error) bool {
	var p *problem.Error
	return errors.As(err, &p) && (p.Code == problem.SessionNotFound || p.Code == problem.ExecutionNotFound)
}

// followSessionOnce follows the events of the session until the execution has ended or an error occurs.
func (w *executionWait) followSessionOnce(ctx context.Context) error {
	s := w.server
	// The read models must have the command: otherwise the session may not be found, or the execution that an earlier
	// request with the same Idempotency-Key created.
	if err := s.Reads.AwaitPosition(ctx, w.session, w.position); err != nil {
		return err
	}
	reader, err := s.Live.JoinTip(ctx, w.principal.Tenant, w.principal.Agents, w.session)
	if err != nil {
		return err
	}
	defer reader.Close()
	for {
		cursor := reader.Cursor() // the read models have all events up to it
		if err := w.readExecution(ctx); err != nil || spoolv1.HasEnded(w.last) {
			return err
		}
		if w.endSeq > 0 {
			return problem.New(problem.ReadModelBehind, "", "the read models do not have the end of the execution yet")
		}
		w.openAt = cursor
		if w.endSeq, err = reader.AwaitExecutionEnd(ctx, w.execution); err != nil {
			w.openAt = reader.Cursor()
			return err
		}
	}
}

// readExecution reads the execution from the read models, and the seq of its last event if it has ended.
func (w *executionWait) readExecution(ctx context.Context) error {
	s := w.server
	e, err := s.Reads.Execution(ctx, w.principal.Tenant, w.execution, "")
	if err != nil {
		return err
	}
	if spoolv1.HasEnded(e) && w.endSeq == 0 {
		if _, w.endSeq, err = s.Reads.ExecutionSpan(ctx, w.principal.Tenant, w.session, w.execution); err != nil {
			return err
		}
	}
	w.last = e
	return nil
}

// rereadExecution reads the execution once more when the time of the wait is up, unless the read models did not
// contain it. If the read fails, the wait keeps the execution as it was read before.
func (w *executionWait) rereadExecution(ctx context.Context) {
	if w.last == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, lastReadTimeout)
	defer cancel()
	_ = w.readExecution(ctx) // the answer then has the earlier state
}
