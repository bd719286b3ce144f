package e2e

import (
	"net/http"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestLimits_ReachGatewaysAndExecutors tests that limits that are set through the API reach gateways and executors,
// with the rights of each service's NATS user.
func TestLimits_ReachGatewaysAndExecutors(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{})
	limits := func(l map[string]any) {
		t.Helper()
		c.Call(0, "PUT", "/api/limits", map[string]any{"limits": l}, nil)
	}
	limits(map[string]any{"sessions": 1, "slots": 1, "sandboxes": 1})
	first := c.CreateSession("spool", nil)
	var refused struct{ Code string }
	if code := c.Call(0, "POST", "/api/sessions", map[string]any{"architecture": "spool"}, &refused); code != http.StatusTooManyRequests || refused.Code != "TENANT_SESSIONS" {
		t.Errorf("a second session: %d %s", code, refused.Code)
	}
	s, end := c.RunQuery(first, program, nil)
	s.Close()
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("the turn ended with %s %s", end.Type, end.Data)
	}
	var now struct {
		Limits, Used struct{ Sessions, Slots, Sandboxes, EventsPerDay, EventBytesPerDay float64 }
	}
	c.Call(0, "GET", "/api/limits", nil, &now)
	if now.Limits.Sessions != 1 || now.Used.Sessions != 1 || now.Used.Sandboxes != 1 || now.Used.Slots != 0 {
		t.Errorf("limits and use: %+v", now)
	}

	// A turn of a second session takes the sandbox of the first session, which gets a new one with its next turn.
	limits(map[string]any{"sandboxes": 1})
	var second string
	harness.Eventually(t, "the limit of sessions is gone", func() bool {
		var made struct{ SessionID string }
		if c.Call(0, "POST", "/api/sessions", map[string]any{"architecture": "spool"}, &made) != http.StatusCreated {
			return false
		}
		second = made.SessionID
		return true
	})
	t.Cleanup(func() { c.DeleteSession(second) })
	for _, session := range []string{second, first} {
		s, end := c.RunQuery(session, program, nil)
		s.Close()
		if end.Type != (events.ExecutionCompleted{}).EventType() {
			t.Fatalf("the turn ended with %s %s", end.Type, end.Data)
		}
		harness.Eventually(t, "one sandbox is left", func() bool {
			c.Call(0, "GET", "/api/limits", nil, &now)
			return now.Used.Sandboxes == 1
		})
	}

	// The events of the sessions are counted, and a limit below that number refuses new work. Without the limit the
	// tenant continues.
	session := map[string]any{"architecture": "spool"}
	harness.Eventually(t, "events of today are counted", func() bool {
		c.Call(0, "POST", "/api/sessions", session, nil)
		c.Call(0, "GET", "/api/limits", nil, &now)
		return now.Used.EventsPerDay > 0 && now.Used.EventBytesPerDay >= 256*now.Used.EventsPerDay
	})
	limits(map[string]any{"eventsPerDay": 1})
	harness.Eventually(t, "the limit of events refuses a session", func() bool {
		return c.Call(0, "POST", "/api/sessions", session, &refused) == http.StatusTooManyRequests && refused.Code == "TENANT_EVENTS"
	})
	c.Call(0, "DELETE", "/api/limits", nil, nil)
	harness.Eventually(t, "the limit of events is gone", func() bool {
		return c.Call(0, "POST", "/api/sessions", session, &refused) == http.StatusCreated
	})
	s, end = c.RunQuery(first, program, nil)
	s.Close()
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Errorf("the turn ended with %s %s", end.Type, end.Data)
	}
}
