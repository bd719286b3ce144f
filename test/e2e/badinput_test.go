package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// problem is an error as clients receive it.
type problem struct {
	Status int    `json:"status"`
	Code   string `json:"code"`
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// request sends a raw request, also one that a regular client would never send.
func request(t *testing.T, method, url string, header map[string]string, body []byte) (int, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	defer resp.Body.Close() //nolint:errcheck // the body was read to its end
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, raw
}

func refused(t *testing.T, name string, status int, code, field string, gotStatus int, raw []byte) {
	t.Helper()
	var p problem
	if err := json.Unmarshal(raw, &p); err != nil {
		t.Errorf("%s: answered %d %.200s", name, gotStatus, raw)
		return
	}
	if gotStatus != status || p.Status != status || p.Code != code || p.Field != field || p.Detail == "" || strings.Count(p.Detail, "\n") > 0 {
		t.Errorf("%s: answered %d %+v, want %d %s on %q", name, gotStatus, p, status, code, field)
	}
}

// TestInvalidRequests_AreRefused tests that each invalid request is answered with one clear sentence and the right
// status, and changes nothing.
func TestInvalidRequests_AreRefused(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{})
	session := c.CreateSession("spool", nil)
	before := len(eventsOf(t, c, session))
	missing := events.DeriveID(events.KindSession, "nobody's")
	post := func(text string) []byte {
		b, err := json.Marshal(map[string]string{"content": text})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, b := range []struct {
		name, method, path string
		body               []byte
		status             int
		code, field        string
	}{
		{"unknown session", "POST", "/api/sessions/" + missing + "/messages", post("x"), 404, "SESSION_NOT_FOUND", "sessionId"},
		{"unknown session, read", "GET", "/api/sessions/" + missing, nil, 404, "SESSION_NOT_FOUND", "sessionId"},
		{"unknown session, events", "GET", "/api/sessions/" + missing + "/events", nil, 404, "SESSION_NOT_FOUND", "sessionId"},
		{"unknown session, stream", "GET", "/api/sessions/" + missing + "/events/stream", nil, 404, "SESSION_NOT_FOUND", "sessionId"},
		{"unknown architecture", "POST", "/api/sessions", []byte(`{"architecture":"eliza"}`), 400, "INVALID_REQUEST", "architecture"},
		{"unknown sandbox", "POST", "/api/sessions", []byte(`{"sandbox":"sandpit"}`), 400, "INVALID_REQUEST", "sandbox"},
		{"empty message", "POST", "/api/sessions/" + session + "/messages", post(" \n "), 400, "INVALID_REQUEST", "content"},
		{"no message", "POST", "/api/sessions/" + session + "/messages", []byte(`{}`), 400, "INVALID_REQUEST", "content"},
		{"10 MB", "POST", "/api/sessions/" + session + "/messages", post(strings.Repeat("x", 10<<20)), 413, "PAYLOAD_TOO_LARGE", "content"},
		{"over 1 MiB", "POST", "/api/sessions/" + session + "/messages", post(strings.Repeat("x", 1<<20+1)), 413, "PAYLOAD_TOO_LARGE", "content"},
		{"invalid UTF-8", "POST", "/api/sessions/" + session + "/messages", []byte("{\"content\":\"a\xff\xfeb\"}"), 400, "INVALID_REQUEST", "content"},
		{"unknown field", "POST", "/api/sessions/" + session + "/messages", []byte(`{"content":"x","colour":"red"}`), 400, "INVALID_REQUEST", "colour"},
		{"wrong type", "POST", "/api/sessions", []byte(`{"sessionOptions":{"idleTimeoutMs":"soon"}}`), 400, "INVALID_REQUEST", "sessionOptions.idleTimeoutMs"},
		{"id with *", "GET", "/api/sessions/ses_*", nil, 400, "INVALID_REQUEST", "sessionId"},
		{"id with >", "GET", "/api/sessions/%3E", nil, 400, "INVALID_REQUEST", "sessionId"},
		{"id with dots", "GET", "/api/sessions/ses_a.b.c", nil, 400, "INVALID_REQUEST", "sessionId"},
		{"id with a space", "GET", "/api/sessions/ses_%20", nil, 400, "INVALID_REQUEST", "sessionId"},
		{"id with NUL", "GET", "/api/sessions/ses_%00", nil, 400, "INVALID_REQUEST", "sessionId"},
		{"cursor that is no number", "GET", "/api/sessions/" + session + "/events?after=soon", nil, 400, "INVALID_REQUEST", "after"},
		{"cursor below zero", "GET", "/api/sessions/" + session + "/events?after=-1", nil, 400, "INVALID_REQUEST", "after"},
		{"cursor of 2^64", "GET", "/api/sessions/" + session + "/events?after=18446744073709551616", nil, 400, "INVALID_REQUEST", "after"},
		{"cursor from the future", "GET", "/api/sessions/" + session + "/events/stream?after=4000000000", nil, 409, "CURSOR_AHEAD", "after"},
		{"execution that is not there", "POST", "/api/executions/" + events.DeriveID(events.KindExecution, "x") + "/cancel", []byte(`{}`), 404, "EXECUTION_NOT_FOUND", "executionId"},
		{"no such route", "GET", "/api/dance", nil, 404, "NOT_FOUND", ""},
	} {
		status, raw := request(t, b.method, c.URL(0)+b.path, nil, b.body)
		refused(t, b.name, b.status, b.code, b.field, status, raw)
	}
	key := map[string]string{"Idempotency-Key": "k1"}
	first, raw := request(t, "POST", c.URL(0)+"/api/sessions/"+session+"/messages", key, post("once"))
	again, rawAgain := request(t, "POST", c.URL(0)+"/api/sessions/"+session+"/messages", key, post("once"))
	if first != 202 || again != 202 || string(raw) != string(rawAgain) {
		t.Errorf("repeated with the same key and body: %d %s, then %d %s", first, raw, again, rawAgain)
	}
	status, raw := request(t, "POST", c.URL(0)+"/api/sessions/"+session+"/messages", key, post("other"))
	refused(t, "one key, another body", 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key", status, raw)
	s, err := c.JoinSocket(0, session, nil)
	if err != nil {
		t.Fatal(err)
	}
	var accepted struct {
		ExecutionID string `json:"executionId"`
	}
	if err := json.Unmarshal(rawAgain, &accepted); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ReadUntilEnd(accepted.ExecutionID); err != nil {
		t.Fatal(err)
	}
	s.Close()
	messages := 0
	for _, e := range eventsOf(t, c, session)[before:] {
		if e.Type == (events.MessageAccepted{}).EventType() {
			messages++
		}
	}
	if messages != 1 {
		t.Errorf("%d messages were accepted, want 1", messages)
	}
	c.DeleteSession(session)
}

// TestLargestMessage_IsAccepted tests a message of 1 MiB of which JSON escapes every byte.
func TestLargestMessage_IsAccepted(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: "rules:\n  - steps: [{text: read}]\n"})
	_, end := c.RunQuery(c.CreateSession("spool", nil), strings.Repeat("\x01", 1<<20), nil)
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("ended with %s %.300s", end.Type, end.Data)
	}
}

// TestUnknownModel_FailsTheExecution tests that the error of the model server ends the execution with a code.
func TestUnknownModel_FailsTheExecution(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: "models: [known]\nrules:\n  - steps: [{text: hello}]\n"})
	session := c.CreateSession("spool", map[string]any{"model": "unknown"})
	_, end := c.RunQuery(session, "hello", nil)
	if end.Type != (events.ExecutionFailed{}).EventType() || !strings.Contains(string(end.Data), "MODEL_NOT_FOUND") {
		t.Fatalf("ended with %s %s", end.Type, end.Data)
	}
	c.DeleteSession(session)
}

// TestTenants_AreSeparate tests that a wrong key is answered with 401 everywhere, and that another tenant's id is
// answered with the same 404 as an id that does not exist.
func TestTenants_AreSeparate(t *testing.T) {
	t.Parallel()
	const root = "a-root-key-of-more-than-32-characters"
	c := harness.New(t, harness.Options{Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: root}})
	make := func(tenant string) string {
		status, raw := request(t, "POST", c.URL(0)+"/api/keys", map[string]string{"Authorization": "Bearer " + root}, []byte(`{"name":"test","tenant":"`+tenant+`"}`))
		var k struct {
			Key string `json:"key"`
		}
		if err := json.Unmarshal(raw, &k); err != nil || k.Key == "" {
			t.Fatalf("key of %s: %d %s", tenant, status, raw)
		}
		return k.Key
	}
	ours := map[string]string{"Authorization": "Bearer " + make("ours")}
	theirs := map[string]string{"Authorization": "Bearer " + make("theirs")}
	var s struct {
		SessionID string `json:"sessionId"`
	}
	var status int
	var raw []byte
	harness.Eventually(t, "the new key is accepted", func() bool {
		status, raw = request(t, "POST", c.URL(0)+"/api/sessions", ours, []byte(`{"architecture":"spool"}`))
		return status == 201
	})
	if err := json.Unmarshal(raw, &s); err != nil {
		t.Fatal(err)
	}
	missing := events.DeriveID(events.KindSession, "nobody's")
	for _, path := range []string{"", "/events", "/events/stream", "/blocks", "/conversations", "/executions", "/files?live=1", "/files/a.txt?live=1"} {
		status, raw := request(t, "GET", c.URL(0)+"/api/sessions/"+s.SessionID+path, map[string]string{"Authorization": "Bearer spool_sk_wrong"}, nil)
		refused(t, "wrong key on "+path, 401, "UNAUTHENTICATED", "Authorization", status, raw)
		harness.Eventually(t, "the other key is accepted", func() bool {
			status, _ := request(t, "GET", c.URL(0)+"/api/sessions", theirs, nil)
			return status == 200
		})
		foreign, rawForeign := request(t, "GET", c.URL(0)+"/api/sessions/"+s.SessionID+path, theirs, nil)
		none, rawNone := request(t, "GET", c.URL(0)+"/api/sessions/"+missing+path, theirs, nil)
		if foreign != 404 || none != 404 || strings.ReplaceAll(string(rawForeign), s.SessionID, missing) != string(rawNone) {
			t.Errorf("foreign %s: %d %s; missing: %d %s", path, foreign, rawForeign, none, rawNone)
		}
	}
	status, raw = request(t, "POST", c.URL(0)+"/api/sessions/"+s.SessionID+"/messages", theirs, []byte(`{"content":"x"}`))
	refused(t, "posting to a foreign session", 404, "SESSION_NOT_FOUND", "sessionId", status, raw)
}

func eventsOf(t *testing.T, c *harness.Cluster, session string) []events.WireEvent {
	t.Helper()
	var page struct {
		Events []events.WireEvent `json:"events"`
	}
	c.Call(0, "GET", "/api/sessions/"+session+"/events?limit=1000", nil, &page)
	return page.Events
}
