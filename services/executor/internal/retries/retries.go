// Package retries decides whether another attempt of an execution follows after one has died, and when.
package retries

import (
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Codes of deaths after which another attempt may follow.
const (
	CodeSandboxLost = "SANDBOX_LOST"
	CodeAgentExited = "AGENT_EXITED"
	CodeAgentSilent = "AGENT_SILENT"
	CodeOutOfMemory = "OUT_OF_MEMORY"
)

// IsDeath reports whether a turn that ended with this code ended because the agent died, so that another attempt may
// follow.
func IsDeath(code string) bool {
	return code == CodeAgentExited || code == CodeAgentSilent || code == CodeOutOfMemory
}

// A Policy limits how often an execution's agent is started.
type Policy struct {
	Agent       events.Retries // of the agent's definition; the zero value if it has none
	SandboxLost uint32         // maximum number of attempts after the loss of a sandbox, if Agent has no limit
}

// MaxAttempts returns how often the agent may be started in total, which depends on the error code with which the last
// attempt died.
func (p Policy) MaxAttempts(code string) uint32 {
	switch {
	case p.Agent.Attempts > 0:
		return p.Agent.Attempts
	case code == CodeSandboxLost:
		return p.SandboxLost
	}
	return 1
}

// NextWait returns the wait before the next attempt, after died attempts have died, the last one with an error code. ok is
// false if no further attempt is allowed, or if it would start after the execution's deadline. A zero deadline means no
// deadline.
func (p Policy) NextWait(code string, died uint32, now, deadline time.Time) (wait time.Duration, ok bool) {
	if died >= p.MaxAttempts(code) {
		return 0, false
	}
	wait = p.Agent.Backoff(died)
	return wait, deadline.IsZero() || now.Add(wait).Before(deadline)
}

// AttemptSuffix returns a phrase with the number of the last attempt, for the end of the message of its failure, or "" if
// only one attempt was allowed.
func (p Policy) AttemptSuffix(code string, died uint32) string {
	of := p.MaxAttempts(code)
	switch {
	case of <= 1:
		return ""
	case died < of:
		return fmt.Sprintf(" (attempt %d of %d; the next would begin after the execution's time limit)", died, of)
	}
	return fmt.Sprintf(" (attempt %d of %d)", died, of)
}
