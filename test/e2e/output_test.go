package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// shouting is an agent that speaks ACP. It prints lines that are not messages as fast as it can: for 8 s before it
// answers, or for ever.
const shouting = `#!/bin/bash
line=$(printf 'x%.0s' {1..1000})
while read -r request; do
  id=$(grep -o '"id":[0-9]*' <<<"$request" | head -n 1)
  case $request in
  *'"method":"initialize"'*) echo '{"jsonrpc":"2.0",'"$id"',"result":{"protocolVersion":1,"authMethods":[],"agentCapabilities":{}}}' ;;
  *'"method":"session/new"'*) echo '{"jsonrpc":"2.0",'"$id"',"result":{"sessionId":"s1"}}' ;;
  *'"method":"session/prompt"'*)
    case $request in
    *'shout for ever'*) exec yes "$line" ;;
    *'shout for 8 seconds'*) timeout 8 yes "$line" ;;
    esac
    echo '{"jsonrpc":"2.0",'"$id"',"result":{"stopReason":"end_turn"}}' ;;
  esac
done
`

// createShouter creates a session with that agent, which may begin anew: it cannot continue a conversation with another process.
func createShouter(t *testing.T, c *harness.Cluster) (session string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shouting")
	if err := os.WriteFile(path, []byte(shouting), 0o700); err != nil { //nolint:gosec // an executable script
		t.Fatal(err)
	}
	return c.CreateSession("acp", map[string]any{"sessionOptions": map[string]any{"command": []string{path}, "onConversationLoss": "continue"}})
}

// said returns the events of an execution that came from the sandbox, and the number of error events with a code.
func said(s *harness.Stream, execution, code string) (list []events.WireEvent, coded int) {
	for _, w := range s.Events {
		if w.ExecutionID != execution || w.Source != events.FromRunner {
			continue
		}
		list = append(list, w)
	}
	for _, w := range s.Events {
		if e, ok := w.Event().Data.(events.Error); ok && w.ExecutionID == execution && e.Code == code {
			coded++
		}
	}
	return list, coded
}

// TestOutput_TooFastIsSlowed tests that an agent that prints as fast as it can for 8 s is slowed down. The log states
// that, the turn completes, and so does the next one.
func TestOutput_TooFastIsSlowed(t *testing.T) {
	t.Parallel()
	const rate = 100
	c := harness.New(t, harness.Options{Executor: executor.Config{OutputEventsPerSecond: rate}})
	session := createShouter(t, c)
	s, end := c.RunQuery(session, "shout for 8 seconds", nil)
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("ended with %s %s", end.Type, end.Data)
	}
	list, slowed := said(s, end.ExecutionID, "OUTPUT_SLOWED")
	took := list[len(list)-1].Time.Sub(list[0].Time)
	if most := int(10*rate + rate*took.Seconds()); len(list) > most+10 || len(list) < 10*rate || slowed != 1 {
		t.Errorf("%d events in %s, %d of them about the slowdown; at most %d are allowed", len(list), took, slowed, most)
	}
	if _, end := c.RunQuery(session, "hello", s); end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Errorf("the next turn ended with %s %s", end.Type, end.Data)
	}
}

// TestOutput_PastItsLimitIsCut tests that an agent that prints for ever is stopped at the limit of its execution. The
// log states where the output is cut and why the execution failed. The next turn completes.
func TestOutput_PastItsLimitIsCut(t *testing.T) {
	t.Parallel()
	const limit = 400
	c := harness.New(t, harness.Options{Executor: executor.Config{OutputEvents: limit, KillAfter: time.Second}})
	session := createShouter(t, c)
	s, end := c.RunQuery(session, "shout for ever", nil)
	failed, _ := end.Event().Data.(events.ExecutionFailed)
	list, cut := said(s, end.ExecutionID, "OUTPUT_LIMIT")
	if failed.Code != "OUTPUT_LIMIT" || len(list) > limit || len(list) < limit-10 || cut != 1 {
		t.Errorf("the turn ended with %s %s after %d events, %d of them about the cut", end.Type, end.Data, len(list), cut)
	}
	if _, end := c.RunQuery(session, "hello", s); end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Errorf("the next turn ended with %s %s", end.Type, end.Data)
	}
}
