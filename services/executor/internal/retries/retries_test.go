package retries_test

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/retries"
)

// TestPolicy_Next: the agent's policy comes first, a lost sandbox has a limit of its own, and no attempt begins after the deadline.
func TestPolicy_Next(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	thrice := retries.Policy{Agent: events.Retries{Attempts: 3, BackoffMs: 100}, SandboxLost: 2}
	none := retries.Policy{SandboxLost: 2}
	backoff := thrice.Agent.Backoff(1)
	if backoff <= 0 {
		t.Fatalf("the backoff is %s", backoff)
	}
	for name, c := range map[string]struct {
		policy   retries.Policy
		code     string
		died     uint32
		deadline time.Time
		want     bool
		suffix   string
	}{
		"agent without retries exits":        {policy: none, code: retries.CodeAgentExited, died: 1},
		"agent without retries runs out":     {policy: none, code: retries.CodeOutOfMemory, died: 1},
		"first lost sandbox":                 {policy: none, code: retries.CodeSandboxLost, died: 1, want: true, suffix: " (attempt 1 of 2; the next would begin after the execution's time limit)"},
		"second lost sandbox":                {policy: none, code: retries.CodeSandboxLost, died: 2, suffix: " (attempt 2 of 2)"},
		"agent with retries":                 {policy: thrice, code: retries.CodeAgentExited, died: 2, want: true, suffix: " (attempt 2 of 3; the next would begin after the execution's time limit)"},
		"agent with retries loses a sandbox": {policy: thrice, code: retries.CodeSandboxLost, died: 2, want: true, suffix: " (attempt 2 of 3; the next would begin after the execution's time limit)"},
		"last of its retries":                {policy: thrice, code: retries.CodeAgentSilent, died: 3, suffix: " (attempt 3 of 3)"},
		"deadline after the wait":            {policy: thrice, code: retries.CodeAgentExited, died: 1, deadline: now.Add(backoff + time.Millisecond), want: true, suffix: " (attempt 1 of 3; the next would begin after the execution's time limit)"},
		"deadline at the end of the wait":    {policy: thrice, code: retries.CodeAgentExited, died: 1, deadline: now.Add(backoff), suffix: " (attempt 1 of 3; the next would begin after the execution's time limit)"},
	} {
		wait, ok := c.policy.NextWait(c.code, c.died, now, c.deadline)
		if ok != c.want || ok && wait != c.policy.Agent.Backoff(c.died) {
			t.Errorf("%s: another attempt %v, after %s", name, ok, wait)
		}
		if got := c.policy.AttemptSuffix(c.code, c.died); got != c.suffix {
			t.Errorf("%s: suffix %q, want %q", name, got, c.suffix)
		}
	}
}

// TestIsDeath: only deaths of the agent are followed by another attempt; other codes are errors of the query.
func TestIsDeath(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{
		retries.CodeAgentExited: true, retries.CodeAgentSilent: true, retries.CodeOutOfMemory: true, retries.CodeSandboxLost: false, "INTERNAL": false, "": false,
	} {
		if got := retries.IsDeath(code); got != want {
			t.Errorf("%q: %v", code, got)
		}
	}
}
