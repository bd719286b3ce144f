package api

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/progress"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Values of WatchExecutionRequest.every_events.
const (
	defaultEventsPerStatus = 10
	maxEventsPerStatus     = 1000
)

// WatchExecution sends the status of an execution until the final one was sent.
func (s *Server) WatchExecution(r *spoolv1.WatchExecutionRequest, out grpc.ServerStreamingServer[spoolv1.ExecutionStatus]) error {
	every := r.GetEveryEvents()
	switch {
	case every == 0:
		every = defaultEventsPerStatus
	case every > maxEventsPerStatus:
		return problem.Invalid("everyEvents", "value is %d; the limit is %d", every, maxEventsPerStatus)
	}
	p, err := auth.From(out.Context())
	if err != nil {
		return err
	}
	if err := reads.CheckExecutionID(r.GetExecutionId()); err != nil {
		return err
	}
	ctx, release := s.Watch.AddStream(out.Context(), p)
	defer release()
	if len(p.Agents) > 0 {
		if _, err := s.Reads.CheckVisibleExecution(ctx, p.Tenant, r.GetExecutionId(), p.Agents); err != nil {
			return err
		}
	}
	first, err := s.Reads.ExecutionStatus(ctx, p.Tenant, r.GetExecutionId(), r.GetMinPosition())
	if err != nil {
		return err
	}
	defer s.Metrics.BeginStream(streamKindWatch)()
	w := &statusWatch{status: first, every: every, due: make(chan struct{}, 1)}
	err = s.watchStatus(ctx, p, w, out)
	if err != nil && out.Context().Err() == nil {
		s.Metrics.CountCut(streamKindWatch, string(problem.From(err).Code))
	}
	return err
}

// streamKindWatch is the kind of WatchExecution in the metrics of streams.
const streamKindWatch = "watch"

// watchStatus folds the session's events into the status of w and sends the status with out, until the final status
// was sent. Sending runs in its own goroutine, because it blocks for as long as the client does not read. After an
// error, or if the client takes longer than WriteTimeout to read the final status, watchStatus returns without
// waiting for that goroutine.
func (s *Server) watchStatus(ctx context.Context, p auth.Principal, w *statusWatch, out grpc.ServerStreamingServer[spoolv1.ExecutionStatus]) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sent := make(chan error, 1)
	go func() {
		err := w.sendDueStatuses(ctx, func(m *spoolv1.ExecutionStatus) error {
			if err := out.Send(m); err != nil {
				return err
			}
			s.Metrics.CountSent(streamKindWatch, proto.Size(m))
			return nil
		})
		if err != nil {
			cancel(err)
		}
		sent <- err
	}()
	w.setSendDue()
	if err := s.foldStatus(ctx, p, w); err != nil {
		return err
	}
	slow := time.NewTimer(s.WriteTimeout)
	defer slow.Stop()
	select {
	case err := <-sent:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-slow.C:
		return problem.New(problem.SlowClient, "", "the client took too long to read the final status; call again")
	}
}

// foldStatus follows the session's events and folds them into the status of w, until the execution has ended.
func (s *Server) foldStatus(ctx context.Context, p auth.Principal, w *statusWatch) error {
	if w.status.Final {
		return nil
	}
	reader, err := s.Live.Join(ctx, p.Tenant, p.Agents, w.status.SessionId, w.status.Seq)
	if err != nil {
		return err
	}
	defer reader.Close()
	reader.SkipText()
	for {
		frames, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		for _, f := range frames {
			if ended, err := w.applyFrame(f); ended || err != nil {
				return err
			}
		}
	}
}

// statusWatch holds the newest status of an execution for one client of WatchExecution. A newer status replaces one
// that was not sent yet.
type statusWatch struct {
	every uint32        // number of events of the execution after which a status is due
	due   chan struct{} // has a value while a status is due; has a buffer of one

	mu     sync.Mutex
	status *spoolv1.ExecutionStatus
	unsent uint32 // number of the execution's events since the last status was sent
}

// setSendDue makes sendDueStatuses send the newest status.
func (w *statusWatch) setSendDue() {
	select {
	case w.due <- struct{}{}:
	default:
	}
}

// applyFrame folds the event of a frame into the status of the execution. ended reports whether the status is the
// final one.
func (w *statusWatch) applyFrame(f live.Frame) (ended bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f.Lag != nil {
		w.status.Lag = nil
		if f.Lag.Lagging {
			w.status.Lag = &spoolv1.Lag{Lagging: true, LagMs: f.Lag.LagMs}
		}
		w.setSendDue()
		return false, nil
	}
	e, err := events.DecodeWireEvent(f.JSON)
	if err != nil {
		return false, problem.From(err)
	}
	phase := w.status.Phase
	progress.Apply(w.status, e.Seq, history.EventFromReadModel(e))
	if e.ExecutionID == w.status.ExecutionId {
		w.unsent++
	}
	if w.unsent >= w.every || w.status.Phase != phase {
		w.setSendDue()
	}
	return w.status.Final, nil
}

// takeDueStatus returns a copy of the newest status, and records that it is no longer due.
func (w *statusWatch) takeDueStatus() *spoolv1.ExecutionStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.due:
	default:
	}
	w.unsent = 0
	m := proto.CloneOf(w.status)
	progress.TrimForSending(m)
	return m
}

// sendDueStatuses calls send with each status that is due, until it has sent the final one. The error is that of send, or the cause of
// ctx.
func (w *statusWatch) sendDueStatuses(ctx context.Context, send func(*spoolv1.ExecutionStatus) error) error {
	for {
		select {
		case <-w.due:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		m := w.takeDueStatus()
		if err := send(m); err != nil || m.Final {
			return err
		}
	}
}
