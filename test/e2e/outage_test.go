package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestOutage_OfNATS tests that a run continues after an outage of NATS. During the outage, commands are answered with
// 503, Retry-After and the reason. Nothing is lost or repeated.
func TestOutage_OfNATS(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Outages: true, Gateways: 2, Script: script(t, "stream.yaml")})
	session, execution, s := midRun(t, c)
	c.Outage.StopNATS()
	unavailable(t, c, session, "NATS")
	c.Outage.StartNATS()
	completesAfterTheOutage(t, c, session, execution, s)
}

// TestOutage_OfPostgres tests that the log continues without Postgres, and that requests that need it are answered
// with 503. Afterwards the read models catch up and the stream continues without a gap.
func TestOutage_OfPostgres(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Outages: true, Gateways: 2, Script: script(t, "stream.yaml")})
	session, execution, s := midRun(t, c)
	c.Outage.StopPostgres()
	status, raw := request(t, "GET", c.URL(1)+"/api/sessions/"+session, nil, nil)
	refused(t, "read without Postgres", 503, "UNAVAILABLE", "", status, raw)
	c.Outage.StartPostgres()
	completesAfterTheOutage(t, c, session, execution, s)
}

// midRun starts a run, and returns when its text is being streamed.
func midRun(t *testing.T, c *harness.Cluster) (session, execution string, s *harness.Stream) {
	t.Helper()
	session = c.CreateSession("spool", nil)
	s, err := c.JoinSocket(0, session, nil)
	if err != nil {
		t.Fatal(err)
	}
	execution = c.PostMessage(session, "list the folder")
	for {
		w, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		if w.Type == events.TextDelta {
			return session, execution, s
		}
	}
}

// completesAfterTheOutage checks that the run completes on the stream, without a gap, and that a further run completes after it.
func completesAfterTheOutage(t *testing.T, c *harness.Cluster, session, execution string, s *harness.Stream) {
	t.Helper()
	s = follow(t, c, session, execution, s)
	if end := s.Events[len(s.Events)-1]; end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("ended with %s %s", end.Type, end.Data)
	}
	harness.Eventually(t, "the gateway is ready again", func() bool {
		status, _ := request(t, "GET", c.URL(0)+"/readyz", nil, nil)
		return status == 200
	})
	if _, end := c.RunQuery(session, "and again", s); end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("the next turn ended with %s %s", end.Type, end.Data)
	}
}

// follow reads the stream to the execution's end, and joins again whenever it is cut off.
func follow(t *testing.T, c *harness.Cluster, session, execution string, s *harness.Stream) *harness.Stream {
	t.Helper()
	gateway := 0
	harness.Eventually(t, "the execution ends on the stream", func() bool {
		if _, err := s.ReadUntilEnd(execution); err == nil {
			return true
		}
		s.Close()
		gateway = 1 - gateway
		if next, err := c.JoinSocket(gateway, session, s); err == nil {
			s = next
		}
		return false
	})
	s.Close()
	return s
}

// unavailable posts a message, which must be refused as unavailable.
func unavailable(t *testing.T, c *harness.Cluster, session, what string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", c.URL(0)+"/api/sessions/"+session+"/messages", strings.NewReader(`{"content":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // the body is only read
	var p problem
	if err := json.NewDecoder(resp.Body).Decode(&p); err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 503 || p.Code != "UNAVAILABLE" || resp.Header.Get("Retry-After") == "" {
		t.Errorf("a message without %s: %d %+v, Retry-After %q", what, resp.StatusCode, p, resp.Header.Get("Retry-After"))
	}
	harness.Eventually(t, "/readyz names it", func() bool {
		status, raw := request(t, "GET", c.URL(0)+"/readyz", nil, nil)
		return status == 503 && strings.Contains(strings.ToLower(string(raw)), strings.ToLower(what))
	})
}
