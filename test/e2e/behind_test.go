package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// endless is a script with an agent whose tool call runs until it is stopped.
const endless = `
rules:
  - match: {tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: "while :; do sleep 0.1; done"}}
`

// behindRequest is a request that is sent while the read models are behind.
type behindRequest struct {
	name, method, path string
	body               any
}

// TestNoProjector_ControlsOfWhatWasAcceptedTakeEffect tests that, while no projector runs, an accepted session and an
// accepted execution take controls, files and messages. Reads of them return READ_MODEL_BEHIND. For another tenant
// they do not exist.
func TestNoProjector_ControlsOfWhatWasAcceptedTakeEffect(t *testing.T) {
	t.Parallel()
	const rootKey = "the-root-key-of-the-behind-test-0000"
	c := harness.New(t, harness.Options{Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKey}, Script: endless})
	root := withKey(t, c, rootKey)
	ours, theirs := root.tenant("ours"), root.tenant("theirs")
	spool, message := map[string]any{"architecture": "spool"}, map[string]any{"content": "wait"}
	known := ours.made(http.StatusCreated, "/api/sessions", spool).SessionID
	harness.Eventually(t, "the read models show the session", func() bool {
		code, _ := ours.asks("GET", "/api/sessions/"+known, nil)
		return code == http.StatusOK
	})
	c.StopProjectors()

	fresh := ours.made(http.StatusCreated, "/api/sessions", spool).SessionID
	running := ours.made(http.StatusAccepted, "/api/sessions/"+fresh+"/messages", message).ExecutionID
	waiting := ours.made(http.StatusAccepted, "/api/sessions/"+fresh+"/messages", message).ExecutionID
	other := ours.made(http.StatusAccepted, "/api/sessions/"+known+"/messages", message).ExecutionID
	withFile := map[string]any{"content": "with a file", "workspaceFiles": []any{map[string]any{"path": "a", "content": "x"}}}
	none, noExecution := events.DeriveID(events.KindSession, "nobody's"), events.DeriveID(events.KindExecution, "nobody's")

	for _, r := range []behindRequest{
		{"GET of a session", "GET", "/api/sessions/" + fresh, nil},
		{"events of a session", "GET", "/api/sessions/" + fresh + "/events", nil},
		{"stream of a session", "GET", "/api/sessions/" + fresh + "/events/stream", nil},
		{"live file of a session", "GET", "/api/sessions/" + fresh + "/files/a?live=1", nil},
		{"GET of an execution", "GET", "/api/executions/" + other, nil},
	} {
		code, raw := ours.asks(r.method, r.path, r.body)
		refused(t, r.name, 503, "READ_MODEL_BEHIND", "", code, raw)
	}
	for _, r := range []behindRequest{
		{"session", "GET", "/api/sessions/" + fresh, nil},
		{"execution", "GET", "/api/executions/" + other, nil},
		{"cancel", "POST", "/api/executions/" + running + "/cancel", nil},
		{"file", "PUT", "/api/sessions/" + fresh + "/files/a", "x"},
		{"message with a file", "POST", "/api/sessions/" + fresh + "/messages", withFile},
	} {
		code, raw := theirs.asks(r.method, r.path, r.body)
		path := strings.NewReplacer(fresh, none, other, noExecution, running, noExecution).Replace(r.path)
		missing, rawMissing := theirs.asks(r.method, path, r.body)
		if code != 404 || missing != 404 || string(raw) != string(rawMissing) {
			t.Errorf("%s: for another tenant's id the answer is %d %s, for a missing one %d %s", r.name, code, raw, missing, rawMissing)
		}
	}
	ours.joinIsBehind(fresh)
	ours.grpcIsBehind(fresh, waiting)
	for _, r := range []behindRequest{
		{"put a file", "PUT", "/api/sessions/" + fresh + "/files/b", "x"},
		{"message with a file", "POST", "/api/sessions/" + fresh + "/messages", withFile},
		{"pause", "POST", "/api/executions/" + running + "/pause", nil},
		{"resume", "POST", "/api/executions/" + running + "/resume", nil},
		{"cancel of one that runs", "POST", "/api/executions/" + running + "/cancel", nil},
		{"cancel in a session that is shown", "POST", "/api/executions/" + other + "/cancel", nil},
		{"end of a session's sandbox", "POST", "/api/sessions/" + fresh + "/environment/terminate", nil},
	} {
		// The request may be refused because the execution does not run yet, or has ended.
		if code, raw := ours.asks(r.method, r.path, r.body); code/100 != 2 && code != http.StatusConflict {
			t.Errorf("%s: answered %d %s", r.name, code, raw)
		}
	}

	c.StartProjector()
	harness.Eventually(t, "the read models show that the executions were cancelled", func() bool {
		for _, id := range []string{waiting, other} {
			_, raw := ours.asks("GET", "/api/executions/"+id, nil)
			if !strings.Contains(string(raw), `"cancelled"`) {
				return false
			}
		}
		return true
	})
	for _, session := range []string{known, fresh} {
		if code, raw := ours.asks("DELETE", "/api/sessions/"+session, nil); code/100 != 2 {
			t.Errorf("delete: %d %s", code, raw)
		}
		c.AwaitDeleted("ours", session)
	}
}

// made sends a request that creates something, and returns the answer.
func (k keyHolder) made(status int, path string, body any) (a struct{ SessionID, ExecutionID string }) {
	k.t.Helper()
	k.gets(status, "POST", path, body, &a)
	return a
}

// joinIsBehind joins a session by WebSocket and checks that the answer is READ_MODEL_BEHIND.
func (k keyHolder) joinIsBehind(session string) {
	k.t.Helper()
	header := http.Header{}
	for name, value := range k.header {
		header.Set(name, value)
	}
	// the body of a WebSocket handshake does not need to be closed
	//nolint:bodyclose // after Dial the body never needs to be closed
	conn, _, err := websocket.Dial(k.t.Context(), "ws"+strings.TrimPrefix(k.c.URL(0), "http")+"/api/ws", &websocket.DialOptions{HTTPHeader: header})
	if err != nil {
		k.t.Fatal(err)
	}
	defer conn.CloseNow() //nolint:errcheck // no message is in transit
	if err := conn.Write(k.t.Context(), websocket.MessageText, []byte(`{"type":"session:join","requestId":"r1","sessionId":"`+session+`"}`)); err != nil {
		k.t.Fatal(err)
	}
	_, raw, err := conn.Read(k.t.Context())
	var m struct{ Type, Code, RequestID string }
	if err = errors.Join(err, json.Unmarshal(raw, &m)); err != nil || m.Type != "error" || m.Code != "READ_MODEL_BEHIND" || m.RequestID != "r1" {
		k.t.Errorf("the answer to a join is %s: %v", raw, err)
	}
}

// grpcIsBehind reads a session over gRPC, which must fail with READ_MODEL_BEHIND, and cancels an execution.
func (k keyHolder) grpcIsBehind(session, execution string) {
	k.t.Helper()
	conn, err := grpc.NewClient(k.c.GRPCAddress(0), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		k.t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // no call is in progress
	ctx := metadata.AppendToOutgoingContext(k.t.Context(), "authorization", k.header["Authorization"])
	_, err = spoolv1.NewSessionsClient(conn).GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: session})
	var reason string
	var delay bool
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			reason = d.GetReason()
		case *errdetails.RetryInfo:
			delay = d.GetRetryDelay().AsDuration() > 0
		}
	}
	if reason != "READ_MODEL_BEHIND" || !delay {
		k.t.Errorf("GetSession returned %v, reason %q", err, reason)
	}
	if _, err = spoolv1.NewExecutionsClient(conn).CancelExecution(ctx, &spoolv1.CancelExecutionRequest{ExecutionId: execution}); err != nil {
		k.t.Errorf("CancelExecution returned %v", err)
	}
}
