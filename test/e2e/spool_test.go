// Package e2e tests the whole of Spool through its API, with real NATS, real Postgres, the real runner and real
// agents against a scripted model server.
package e2e

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestBuiltInAgent_RunsAndRemembers tests that a query writes a program and runs it, and that the second turn knows
// the first, in the same process.
func TestBuiltInAgent_RunsAndRemembers(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateways: 2, Sessions: 2, Projectors: 2})
	session := c.CreateSession("spool", nil)
	s, end := c.RunQuery(session, "Remember the code word heron, then write a program that prints the first ten primes and run it.", nil)
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("ended with %s %s\n%s", end.Type, end.Data, s.View)
	}
	if !strings.Contains(s.View.String(), "29") {
		t.Fatalf("the program did not run:\n%s", s.View)
	}
	s, end = c.RunQuery(session, "What did I ask you to remember?", s)
	if end.Type != (events.ExecutionCompleted{}).EventType() || !strings.Contains(string(end.Data), "heron") {
		t.Fatalf("the second turn ended with %s %s\n%s", end.Type, end.Data, s.View)
	}
}
