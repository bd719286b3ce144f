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
	CodeExited      = "AGENT_EXITED"
	CodeSilent      = "AGENT_SILENT"
	CodeOutOfMemory = "OUT_OF_MEMORY"
)

// IsDeath reports whether a code in the runner's journal is the death of the agent, after which another attempt may follow.
func IsDeath(code string) bool {
	return code == CodeExited || code == CodeSilent || code == CodeOutOfMemory
}

// A Policy limits the attempts of an execution.
type Policy struct {
	Agent       events.Retries // of the agent's definition; the zero value if it has none
	SandboxLost uint32         // most attempts after the loss of a sandbox, if Agent has no limit
}

// Attempts returns how often the agent may be started, by the code of the last death.
func (p Policy) Attempts(code string) uint32 {
	switch {
	case p.Agent.Attempts > 0:
		return p.Agent.Attempts
	case code == CodeSandboxLost:
		return p.SandboxLost
	}
	return 1
}

// Next returns how long the next attempt waits after so many attempts have died. ok is false if there is no further attempt, or none
// before the execution's deadline; a zero deadline is none.
func (p Policy) Next(code string, died uint32, now, deadline time.Time) (wait time.Duration, ok bool) {
	if died >= p.Attempts(code) {
		return 0, false
	}
	wait = p.Agent.Backoff(died)
	return wait, deadline.IsZero() || now.Add(wait).Before(deadline)
}

// Suffix returns which attempt the last one was, for the message of its end; "" if only one was allowed.
func (p Policy) Suffix(code string, died uint32) string {
	of := p.Attempts(code)
	switch {
	case of <= 1:
		return ""
	case died < of:
		return fmt.Sprintf(" (attempt %d of %d; the next would begin after the execution's time limit)", died, of)
	}
	return fmt.Sprintf(" (attempt %d of %d)", died, of)
}
