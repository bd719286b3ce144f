package supervisor

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/runner"
)

// warmUp is a request to Supervisor.Run to start the process of an agent without a query.
type warmUp struct {
	run    *run
	answer chan *runner.CommandError
}

// Warm starts the agent's process for queries like q, so that the next query finds it running. q needs no execution and
// no content and, in a sandbox of the warm pool, no session. Warm returns when the process was started and the agent's
// session was opened. It does nothing if the agent's process is alive.
func (s *Supervisor) Warm(ctx context.Context, q runner.Query) *runner.CommandError {
	r, refusal := s.prepare(q)
	if refusal != nil {
		refusal.Message = redact.New(q.Redact...).String(refusal.Message)
		return refusal
	}
	m := warmUp{r, make(chan *runner.CommandError, 1)}
	if !s.requestWarmUp(m) {
		r.kill()
		return nil
	}
	select {
	case refusal := <-m.answer:
		return refusal
	case <-ctx.Done():
		return &runner.CommandError{Code: "INTERNAL", Message: "the runner did not finish it: " + ctx.Err().Error()}
	}
}

// requestWarmUp passes a request to Run. It returns false if a process of the agent runs, or another request waits.
func (s *Supervisor) requestWarmUp(m warmUp) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.active != nil || s.warm != nil {
		return false
	}
	select {
	case s.warms <- m:
		return true
	default:
		return false
	}
}

// dropWarmUp answers a waiting request of Warm without starting a process, because a turn starts one.
func (s *Supervisor) dropWarmUp() {
	select {
	case m := <-s.warms:
		m.run.kill()
		m.answer <- nil
	default:
	}
}

func (s *Supervisor) warmUp(r *run, resume *agentSessions) *runner.CommandError {
	defer r.kill() // releases its context
	if s.current() != nil {
		return nil
	}
	if r.launch.Resume, r.launch.Fork = r.query.Resume, r.query.Fork; r.launch.Resume == "" && r.query.SessionID != "" {
		r.launch.Resume = resume.get(r.query)
	}
	s.hide(redact.New(r.query.Redact...))
	if _, err := s.launch(r); err != nil {
		var refusal *runner.CommandError
		if errors.As(err, &refusal) {
			return refusal
		}
		e := cannotStart(err)
		return &runner.CommandError{Code: e.Code, Message: e.Message}
	}
	return nil
}
