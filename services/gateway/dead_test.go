package gateway_test

import (
	"encoding/json"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// addDeadLetter adds a letter to DEAD.
func (w *world) addDeadLetter(subject, body, reason string) {
	w.t.Helper()
	msg := nats.NewMsg(topology.DeadSubject(subject))
	msg.Data = []byte(body)
	msg.Header.Set(topology.HeaderDeadSubject, subject)
	msg.Header.Set(topology.HeaderDeadReason, reason)
	msg.Header.Set(topology.HeaderDeadHandler, "jobs")
	msg.Header.Set(topology.HeaderDeadDelivered, "3")
	_, err := w.js.PublishMsg(w.t.Context(), msg)
	must(w.t, err)
}

// TestDeadLetters_AreListedShownRetriedAndDropped tests pages, tenants, and that an invalid id yields an error that
// names the field.
func TestDeadLetters_AreListedShownRetriedAndDropped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	job, err := topology.SessionRef{Tenant: "default", Session: id}.Encode()
	must(t, err)
	foreign, err := topology.SessionRef{Tenant: "other", Session: id}.Encode()
	must(t, err)
	w.addDeadLetter("job.local.any", string(job), "nobody can do this")
	w.addDeadLetter("job.local.any", string(foreign), "another tenant's")
	w.addDeadLetter("job.local.any", "{", "it names no session")
	w.addDeadLetter(topology.CommandSubject(topology.ServiceSession, "default", id), "{", "half a command")

	var page struct {
		DeadLetters []struct {
			ID, Reason, SessionID string
			Delivered             int
			Retryable             bool
			Message               *string
		} `json:"deadLetters"`
		NextPageToken string `json:"nextPageToken"`
	}
	read := func(query string) {
		t.Helper()
		page.DeadLetters, page.NextPageToken = nil, ""
		must(t, json.Unmarshal(g.do("GET", "/api/dead"+query, "").want(t, 200).body, &page))
	}
	read("?pageSize=2")
	if l := page.DeadLetters; len(l) != 2 || l[0].Reason != "nobody can do this" || l[0].SessionID != id || !l[0].Retryable || l[0].Delivered != 3 || l[0].Message != nil ||
		l[1].Reason != "it names no session" || l[1].Retryable || page.NextPageToken == "" {
		t.Fatalf("the first page: %+v", page)
	}
	first := page.DeadLetters[0].ID
	read("?pageSize=2&pageToken=" + page.NextPageToken)
	if l := page.DeadLetters; len(l) != 1 || l[0].Reason != "half a command" || l[0].Retryable || page.NextPageToken != "" {
		t.Fatalf("the second page: %+v", page)
	}
	if got := g.do("GET", "/api/dead/"+first, "").want(t, 200).text("message"); got != string(job) {
		t.Errorf("the message is %q", got)
	}
	g.do("POST", "/api/dead/"+first+"/retry", "").want(t, 200)
	g.do("DELETE", "/api/dead/"+first, "").want(t, 200)
	sent := s.commands(t)
	if len(sent) != 2 || sent[0].Type != command.TypeRetryDeadLetter || sent[1].Type != command.TypeDropDeadLetter || string(sent[0].Body) != `{"sequence":`+first+`}` {
		t.Errorf("sent %+v", sent)
	}
	g.do("GET", "/api/dead/2", "").wantProblem(t, 404, "DEAD_LETTER_NOT_FOUND", "id") // another tenant's
	g.do("POST", "/api/dead/99/retry", "").wantProblem(t, 404, "DEAD_LETTER_NOT_FOUND", "id")
	g.do("GET", "/api/dead/x", "").wantProblem(t, 400, "INVALID_REQUEST", "id")
	g.do("GET", "/api/dead?pageSize=101", "").wantProblem(t, 400, "INVALID_REQUEST", "pageSize")
	g.do("GET", "/api/dead?pageToken=x", "").wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
}
