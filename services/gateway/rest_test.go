package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// TestREST_LifeCycleOfASession tests the life cycle of a session over REST, and that application data is returned byte for
// byte.
func TestREST_LifeCycleOfASession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	const metadata = `{"big":1152921504606846976,"neg":-1152921504606846977,"f":1.10,"e":1E400,"k":{"":null,"a.b":[{}]},"<&>":"\u0000\ud83d\ude00\u2028","dup":1,"dup":2}`

	made := g.do("POST", "/api/sessions", `{"architecture":"spool","model":"m","sessionOptions":{"idleTimeoutMs":4294967295,"modelProvider":"nvidia"},"metadata": `+metadata+`}`).want(t, 201)
	id := made.text("sessionId")
	one := g.get("/api/sessions/"+id+"?minPosition="+made.text("position")).want(t, 200)
	if !strings.Contains(string(one.body), `"metadata":`+metadata+`,`) {
		t.Errorf("the metadata changed:\n%s\nwant %s", one.body, metadata)
	}
	if one.field("sessionOptions", "idleTimeoutMs") != json.Number("4294967295") || one.text("sessionOptions", "model") != "m" || one.text("sessionOptions", "modelProvider") != "nvidia" || one.text("status") != "open" {
		t.Errorf("got %s", one)
	}
	posted := g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"é <b>","metadata":`+metadata+`}`).want(t, 202)
	exe := posted.text("executionId")
	events := g.get("/api/sessions/"+id+"/events?minPosition="+posted.text("position")).want(t, 200)
	if n := strings.Count(string(events.body), `"metadata":`+metadata); n != 2 {
		t.Errorf("%d of 2 events have the metadata as it was given:\n%s", n, events.body)
	}
	if got := g.get("/api/executions/"+exe).want(t, 200); !strings.Contains(string(got.body), `"metadata":`+metadata+`,`) || got.text("sessionId") != id {
		t.Errorf("got %s", got)
	}
	if got := g.get("/api/sessions/"+id+"/executions").want(t, 200); !strings.Contains(string(got.body), exe) {
		t.Errorf("got %s", got)
	}
	if got := g.get("/api/executions?phase=queued").want(t, 200); !strings.Contains(string(got.body), exe) {
		t.Errorf("got %s", got)
	}
	blocks := g.get("/api/sessions/"+id+"/blocks").want(t, 200)
	if !strings.Contains(string(blocks.body), `"kind":"user_message"`) || !strings.Contains(string(blocks.body), `"content":"é <b>"`) {
		t.Errorf("got %s", blocks)
	}
	if got := g.get("/api/sessions/"+id+"/conversations").want(t, 200); !strings.Contains(string(got.body), `"conversationId":"main"`) {
		t.Errorf("got %s", got)
	}
	for _, c := range []struct {
		method, path, body string
		status             int
	}{
		{"POST", "/api/sessions/" + id + "/interrupt", "", 202},
		{"POST", "/api/executions/" + exe + "/cancel", "{}", 202},
		{"POST", "/api/sessions/" + id + "/sync", "", 202},
		{"POST", "/api/sessions/" + id + "/environment/terminate", "{}", 202},
		{"POST", "/api/executions/" + exe + "/pause", "", 202},
		{"POST", "/api/executions/" + exe + "/resume", "", 202},
		{"POST", "/api/executions/" + exe + "/terminate", "", 202},
		{"PATCH", "/api/sessions/" + id, `{"clear":["egress"]}`, 200},
		{"PATCH", "/api/sessions/" + id, `{"metadata":null}`, 200},
	} {
		if a := g.do(c.method, c.path, c.body).want(t, c.status); a.text("position") == "" {
			t.Errorf("%s %s: %s has no position", c.method, c.path, a)
		}
	}
	if got := g.get("/api/sessions/"+id).want(t, 200); !strings.Contains(string(got.body), `"metadata":null`) {
		t.Errorf("null is metadata like any other JSON: %s", got)
	}
	g.do("DELETE", "/api/sessions/"+id, "").want(t, 200)
	for _, path := range []string{"", "/events", "/blocks", "/executions", "/conversations", "/events/stream"} {
		g.get("/api/sessions/"+id+path).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	}
}

// TestREST_StartExecutionNeedsOnlyContent tests an execution with only the required fields.
func TestREST_StartExecutionNeedsOnlyContent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	a := g.do("POST", "/api/executions", `{"content":"hello","metadata":[1]}`).want(t, 202)
	got := g.get("/api/executions/"+a.text("executionId")+"?minPosition="+a.text("position")).want(t, 200)
	if got.text("sessionId") != a.text("sessionId") {
		t.Errorf("got %s", got)
	}
	g.do("POST", "/api/executions/"+a.text("executionId")+"/cancel", "").want(t, 202)
}

func TestREST_PagesAreCompleteAndInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	want := map[string]bool{}
	for range 7 {
		want[w.session("default")] = true
	}
	w.session("other")
	token, last := "", "z"
	for range 4 {
		page := g.get("/api/sessions?pageSize=2&status=open&pageToken="+token).want(t, 200)
		list, _ := page.field("sessions").([]any)
		for _, s := range list {
			id, _ := s.(map[string]any)["sessionId"].(string)
			if !want[id] || id >= last {
				t.Errorf("%s comes after %s, or twice, or is not mine", id, last)
			}
			delete(want, id)
			last = id
		}
		token = page.text("nextPageToken")
	}
	if len(want) != 0 || token != "" {
		t.Errorf("not listed: %v; token %q", want, token)
	}
	if a := g.get("/api/sessions?status=closed").want(t, 200); string(a.body) != `{"sessions":[],"nextPageToken":""}`+"\n" {
		t.Errorf("got %s", a)
	}
}

func TestREST_EventsAreSelectedByPageAndType(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	for range 10 {
		w.emit("default", id, events.Event{Data: events.Log{Message: "x"}}, events.Event{Data: events.Error{Code: "C"}})
	}
	var seqs []string
	for after := "0"; ; {
		page := g.get("/api/sessions/"+id+"/events?limit=4&types=log,session_created&after="+after).want(t, 200)
		if page.field("tip") != json.Number("21") {
			t.Fatalf("tip: %s", page)
		}
		list, _ := page.field("events").([]any)
		for _, e := range list {
			seqs = append(seqs, fmt.Sprint(e.(map[string]any)["seq"]))
		}
		after = fmt.Sprint(page.field("next"))
		if after == "21" {
			break
		}
	}
	if got := strings.Join(seqs, " "); got != "1 2 4 6 8 10 12 14 16 18 20" {
		t.Errorf("got %s", got)
	}
}

// TestREST_BadInputNamesTheField tests that every invalid request is refused with one sentence and the name of the field.
func TestREST_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	at := "/api/sessions/" + id
	unknown, unknownExe := oldID(t, events.KindSession), oldID(t, events.KindExecution)
	deep := strings.Repeat(`{"a":`, 100_000) + "1" + strings.Repeat("}", 100_000)
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code, field              string
	}{
		{"no such route", "GET", "/api/nothing", "", 404, "NOT_FOUND", ""},
		{"no such control", "POST", "/api/executions/" + unknownExe + "/rewind", "", 404, "NOT_FOUND", ""},
		{"recovery of an unknown execution", "POST", "/api/executions/" + unknownExe + "/recover", "", 404, "EXECUTION_NOT_FOUND", "executionId"},
		{"pause of an unknown execution", "POST", "/api/executions/" + unknownExe + "/pause", "", 404, "EXECUTION_NOT_FOUND", "executionId"},
		{"resume of no execution", "POST", "/api/executions/x/resume", "", 400, "INVALID_REQUEST", "executionId"},
		{"sync of an unknown session", "POST", "/api/sessions/" + unknown + "/sync", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"end of no environment", "POST", "/api/sessions/x/environment/terminate", "", 400, "INVALID_REQUEST", "sessionId"},
		{"too short an interval", "POST", "/api/sessions", `{"sessionOptions":{"syncIntervalMs":999}}`, 400, "INVALID_REQUEST", "sessionOptions.syncIntervalMs"},
		{"no reference of an image", "POST", "/api/executions", `{"content":"x","sessionOptions":{"image":"A B"}}`, 400, "INVALID_REQUEST", "sessionOptions.image"},
		{"an empty program", "POST", "/api/sessions", `{"sessionOptions":{"command":[""]}}`, 400, "INVALID_REQUEST", "sessionOptions.command[0]"},
		{"a URL for a host", "POST", "/api/sessions", `{"sessionOptions":{"egress":["pypi.org","https://x.org/"]}}`, 400, "INVALID_REQUEST", "sessionOptions.egress[1]"},
		{"a file outside", "POST", "/api/sessions", `{"workspaceFiles":[{"path":"a","content":""},{"path":"../b","content":""}]}`, 400, "INVALID_REQUEST", "workspaceFiles[1].path"},
		{"a file without content", "POST", at + "/messages", `{"content":"x","workspaceFiles":[{"path":"a"}]}`, 400, "INVALID_REQUEST", "workspaceFiles[0].content"},
		{"a file of two contents", "POST", at + "/messages", `{"content":"x","workspaceFiles":[{"path":"a","content":"","contentBase64":""}]}`, 400, "INVALID_REQUEST", "workspaceFiles[0].contentBase64"},
		{"no base64", "POST", "/api/executions", `{"content":"x","workspaceFiles":[{"path":"a","contentBase64":"%"}]}`, 400, "INVALID_REQUEST", "workspaceFiles[0].contentBase64"},
		{"a file twice", "POST", "/api/sessions", `{"workspaceFiles":[{"path":"a","content":"1"},{"path":"a","content":"2"}]}`, 400, "INVALID_REQUEST", "workspaceFiles[1].path"},
		{"set-user-id", "POST", "/api/sessions", `{"workspaceFiles":[{"path":"a","content":"","mode":2541}]}`, 400, "INVALID_REQUEST", "workspaceFiles[0].mode"},
		{"files for an unknown session", "POST", "/api/sessions/" + unknown + "/messages", `{"content":"x","workspaceFiles":[{"path":"a","content":""}]}`, 404, "SESSION_NOT_FOUND", "sessionId"},
		{"body of 17 MiB", "POST", at + "/messages", `{"content":"` + strings.Repeat("x", 17<<20) + `"}`, 413, "PAYLOAD_TOO_LARGE", ""},
		{"wrong method", "PUT", at, "{}", 405, "METHOD_NOT_ALLOWED", ""},
		{"wrong method on a stream", "POST", at + "/events/stream", "{}", 405, "METHOD_NOT_ALLOWED", ""},
		{"wrong method on health", "POST", "/health", "", 405, "METHOD_NOT_ALLOWED", ""},
		{"unknown session", "GET", "/api/sessions/" + unknown, "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"post to an unknown session", "POST", "/api/sessions/" + unknown + "/messages", `{"content":"x"}`, 404, "SESSION_NOT_FOUND", "sessionId"},
		{"unknown execution", "POST", "/api/executions/" + unknownExe + "/cancel", "", 404, "EXECUTION_NOT_FOUND", "executionId"},
		{"unknown key", "DELETE", "/api/keys/" + oldID(t, events.KindKey), "", 404, "KEY_NOT_FOUND", "keyId"},
		{"id with a star", "GET", "/api/sessions/ses_*", "", 400, "INVALID_REQUEST", "sessionId"},
		{"id with >", "POST", "/api/sessions/%3E/messages", `{"content":"x"}`, 400, "INVALID_REQUEST", "sessionId"},
		{"id with dots", "DELETE", "/api/sessions/ses_.." + unknown[6:], "", 400, "INVALID_REQUEST", "sessionId"},
		{"id with a space", "POST", "/api/sessions/ses_%20" + unknown[5:] + "/interrupt", "", 400, "INVALID_REQUEST", "sessionId"},
		{"id with NUL", "GET", "/api/sessions/%00/events", "", 400, "INVALID_REQUEST", "sessionId"},
		{"id of no UTF-8", "GET", "/api/sessions/%ff/blocks", "", 400, "INVALID_REQUEST", "sessionId"},
		{"execution id", "POST", "/api/executions/*/cancel", "", 400, "INVALID_REQUEST", "executionId"},
		{"stream of a bad id", "GET", "/api/sessions/x.y/events/stream", "", 400, "INVALID_REQUEST", "sessionId"},
		{"empty message", "POST", at + "/messages", `{"content":" "}`, 400, "INVALID_REQUEST", "content"},
		{"no body", "POST", at + "/messages", ``, 400, "INVALID_REQUEST", "content"},
		{"message over 1 MiB", "POST", at + "/messages", `{"content":"` + strings.Repeat("x", 1<<20+1) + `"}`, 413, "PAYLOAD_TOO_LARGE", "content"},
		{"body of 10 MB", "PATCH", at, `{"metadata":"` + strings.Repeat("x", 10<<20) + `"}`, 413, "PAYLOAD_TOO_LARGE", ""},
		{"metadata over 16 KiB", "POST", "/api/sessions", `{"metadata":"` + strings.Repeat("x", 16<<10) + `"}`, 413, "PAYLOAD_TOO_LARGE", "metadata"},
		{"invalid UTF-8", "POST", at + "/messages", "{\"content\":\"a\xff\"}", 400, "INVALID_REQUEST", "content"},
		{"deep metadata", "POST", at + "/messages", `{"content":"x","metadata":` + deep + `}`, 400, "INVALID_REQUEST", "metadata"},
		{"no JSON", "POST", "/api/sessions", `{"agent"`, 400, "INVALID_REQUEST", "agent"},
		{"unknown field", "POST", "/api/sessions", `{"agnet":"x"}`, 400, "INVALID_REQUEST", "agnet"},
		{"wrong type", "POST", "/api/sessions", `{"sessionOptions":{"turnLimitMs":"1h"}}`, 400, "INVALID_REQUEST", "sessionOptions.turnLimitMs"},
		{"a model provider that is none", "POST", "/api/sessions", `{"sessionOptions":{"modelProvider":"gpt"}}`, 400, "INVALID_REQUEST", "sessionOptions.modelProvider"},
		{"two models", "POST", "/api/sessions", `{"model":"a","sessionOptions":{"model":"b"}}`, 400, "INVALID_REQUEST", "model"},
		{"id in path and body", "POST", at + "/messages", `{"sessionId":"` + unknown + `","content":"x"}`, 400, "INVALID_REQUEST", "sessionId"},
		{"content and parts", "POST", at + "/messages", `{"content":"x","parts":[{"type":"text","text":"y"}]}`, 400, "INVALID_REQUEST", "parts"},
		{"nothing to change", "PATCH", at, `{}`, 400, "INVALID_REQUEST", "sessionOptions"},
		{"body of a GET", "GET", at, `{}`, 400, "INVALID_REQUEST", ""},
		{"parameter of a POST", "POST", at + "/interrupt?force=1", ``, 400, "INVALID_REQUEST", "force"},
		{"unknown parameter", "GET", at + "/events?afer=1", "", 400, "INVALID_REQUEST", "afer"},
		{"negative cursor", "GET", at + "/events?after=-1", "", 400, "INVALID_REQUEST", "after"},
		{"cursor of 2^64", "GET", at + "/events?after=18446744073709551616", "", 400, "INVALID_REQUEST", "after"},
		{"cursor of 2^32", "GET", at + "/events/stream?after=4294967296", "", 400, "INVALID_REQUEST", "after"},
		{"cursor of letters", "GET", at + "/events/stream?after=x", "", 400, "INVALID_REQUEST", "after"},
		{"unknown parameter of a stream", "GET", at + "/events/stream?from=1", "", 400, "INVALID_REQUEST", "from"},
		{"cursor in the future", "GET", at + "/events?after=2", "", 409, "CURSOR_AHEAD", "after"},
		{"cursor in the future, stream", "GET", at + "/events/stream?after=4294967295", "", 409, "CURSOR_AHEAD", "after"},
		{"limit", "GET", at + "/events?limit=1001", "", 400, "INVALID_REQUEST", "limit"},
		{"page size", "GET", "/api/sessions?pageSize=201", "", 400, "INVALID_REQUEST", "pageSize"},
		{"page token", "GET", "/api/sessions?pageToken=abc", "", 400, "INVALID_REQUEST", "pageToken"},
		{"status", "GET", "/api/sessions?status=gone", "", 400, "INVALID_REQUEST", "status"},
		{"phase", "GET", "/api/executions?phase=x", "", 400, "INVALID_REQUEST", "phase"},
		{"position", "GET", at + "?minPosition=x", "", 400, "INVALID_REQUEST", "minPosition"},
		{"position of another shard", "GET", at + "?minPosition=3-1", "", 400, "INVALID_REQUEST", "minPosition"},
		{"key without a name", "POST", "/api/keys", `{}`, 400, "INVALID_REQUEST", "name"},
		{"key of no tenant", "POST", "/api/keys", `{"name":"x","tenant":"A.b"}`, 400, "INVALID_REQUEST", "tenant"},
		{"no upgrade", "GET", "/api/ws", "", 400, "INVALID_REQUEST", "Upgrade"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := g.do(c.method, c.path, c.body).wantProblem(t, c.status, c.code, c.field)
			if d := a.text("detail"); len(d) > 300 || strings.Contains(d, "\n") {
				t.Errorf("not one sentence: %q", d)
			}
		})
	}
	if a := g.get(at + "/events?after=7"); a.field("tip") != json.Number("1") {
		t.Errorf("a cursor that cannot be served names the tip: %s", a)
	}
	for _, c := range s.commands(t) {
		if err := events.CheckID("sessionId", events.KindSession, c.SessionID); err != nil && c.SessionID != "" {
			t.Errorf("reached a subject: %v", err)
		}
	}
}

func TestREST_ServesHealthMetricsAndOpenAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	g.get("/health").want(t, 200)
	g.get("/healthz").want(t, 200)
	if a := g.get("/readyz").want(t, 200); a.text("checks", "nats") != "ok" || a.text("checks", "postgres") != "ok" {
		t.Errorf("got %s", a)
	}
	if a := g.get("/api/openapi.json").want(t, 200); a.text("openapi") != "3.1.0" || a.field("paths", "/api/ws") == nil {
		t.Errorf("got %.200s", a)
	}
	g.do("POST", "/api/sessions", `{}`).want(t, 201)
	g.get("/api/sessions/x").want(t, 400)
	metrics := string(g.get("/metrics").want(t, 200).body)
	for _, line := range []string{
		`spool_gateway_http_requests_total{method="POST",route="/api/sessions",status="201"} 1`,
		`spool_gateway_http_requests_total{method="GET",route="/api/sessions/{session_id}",status="400"} 1`,
		`spool_gateway_commands_total{outcome="ok",type="create_session"} 1`,
	} {
		if !strings.Contains(metrics, line+"\n") {
			t.Errorf("no line %s", line)
		}
	}
}

func TestREST_RefusesForeignOriginsAndHosts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{AllowedOrigins: []string{"https://App.example"}})
	host := strings.TrimPrefix(g.url, "http://")
	for _, c := range []struct {
		name, method, path string
		opt                option
		status             int
		field              string
	}{
		{"foreign origin posts", "POST", "/api/sessions", header("Origin", "https://evil.example"), 403, "Origin"},
		{"no origin at all", "POST", "/api/sessions", header("Origin", "null"), 403, "Origin"},
		{"own origin posts", "POST", "/api/sessions", header("Origin", "http://"+host), 201, ""},
		{"allowed origin posts", "POST", "/api/sessions", header("Origin", "https://app.example"), 201, ""},
		{"foreign origin reads, without CORS", "GET", "/api/sessions", header("Origin", "https://evil.example"), 200, ""},
		{"foreign origin opens a WebSocket", "GET", "/api/ws", func(r *http.Request) {
			r.Header.Set("Origin", "https://evil.example")
			r.Header.Set("Upgrade", "websocket")
			r.Header.Set("Connection", "Upgrade")
		}, 403, "Origin"},
		{"name bound to loopback", "GET", "/api/sessions", func(r *http.Request) { r.Host = "evil.example:7700" }, 403, "Host"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := g.do(c.method, c.path, "", c.opt)
			if c.status == 403 {
				a.wantProblem(t, 403, "ORIGIN_REFUSED", c.field)
			} else {
				a.want(t, c.status)
			}
			if cors := a.header.Get("Access-Control-Allow-Origin"); (cors != "") != strings.Contains(c.name, "allowed") {
				t.Errorf("CORS header %q", cors)
			}
		})
	}
	pre := g.do("OPTIONS", "/api/sessions", "", header("Origin", "https://app.example"), header("Access-Control-Request-Method", "POST"))
	if pre.want(t, 204).header.Get("Access-Control-Allow-Methods") == "" {
		t.Error("the preflight is not answered")
	}
}
