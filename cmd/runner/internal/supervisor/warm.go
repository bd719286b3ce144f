package supervisor

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/runner"
)

// warmUpRequest is a request to Supervisor.Run to start the process of an agent without a query.
type warmUpRequest struct {
	run    *acceptedQuery
	answer chan *runner.CommandError
}

// WarmUp starts the agent's process for queries like q, so that the next query finds it running. q needs no execution
// and no content and, in a sandbox of the warm pool, no session. WarmUp returns when the process was started and the
// agent's session was opened. It does nothing if a process of the agent is alive.
func (s *Supervisor) WarmUp(ctx context.Context, q runner.Query) *runner.CommandError {
	r, refusal := s.prepareQuery(q)
	if refusal != nil {
		refusal.Message = redact.New(q.Redact...).RedactString(refusal.Message)
		return refusal
	}
	m := warmUpRequest{r, make(chan *runner.CommandError, 1)}
	if !s.requestWarmUp(m) {
		r.kill()
		return nil
	}
	select {
	case refusal := <-m.answer:
		return refusal
	case <-ctx.Done():
		return &runner.CommandError{Code: "INTERNAL", Message: "the process of the agent was not started: " + ctx.Err().Error()}
	}
}

// requestWarmUp passes a request of WarmUp to Run. It returns false if a process of the agent runs, or another request
// waits.
func (s *Supervisor) requestWarmUp(m warmUpRequest) bool {
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

// answerWarmUp answers a waiting request of WarmUp without starting a process, because the turn that begins starts one.
func (s *Supervisor) answerWarmUp() {
	select {
	case m := <-s.warms:
		m.run.kill()
		m.answer <- nil
	default:
	}
}

// startWarmProcess starts the agent's process without a query, unless one is alive. resume holds the agent's own
// session ids.
func (s *Supervisor) startWarmProcess(r *acceptedQuery, resume *agentSessions) *runner.CommandError {
	defer r.kill() // releases its context
	if s.currentProcess() != nil {
		return nil
	}
	if r.launch.Resume, r.launch.Fork = r.query.Resume, r.query.Fork; r.launch.Resume == "" && r.query.SessionID != "" {
		r.launch.Resume = resume.agentSessionOf(r.query)
	}
	s.setRedaction(redact.New(r.query.Redact...))
	if _, err := s.launchProcess(r); err != nil {
		var refusal *runner.CommandError
		if errors.As(err, &refusal) {
			return refusal
		}
		e := startFailureOutcome(err)
		return &runner.CommandError{Code: e.Code, Message: e.Message}
	}
	return nil
}
