package client

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

// TestNewCall_HasARouteForEachMethod tests that the route of each method that does not stream can be filled in, and that
// requests of methods that create something have an Idempotency-Key.
func TestNewCall_HasARouteForEachMethod(t *testing.T) {
	t.Parallel()
	services := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			md := services.Get(i).Methods().Get(j)
			if md.IsStreamingServer() {
				continue
			}
			input, err := protoregistry.GlobalTypes.FindMessageByName(md.Input().FullName())
			if err != nil {
				t.Fatal(err)
			}
			request := input.New()
			for k := range md.Input().Fields().Len() { // any text is a path segment
				if fd := md.Input().Fields().Get(k); fd.Kind() == protoreflect.StringKind && !fd.IsList() {
					request.Set(fd, protoreflect.ValueOfString("text"))
				}
			}
			method := "/" + string(services.Get(i).FullName()) + "/" + string(md.Name())
			c, err := newCall(method, request.Interface())
			if err != nil || len(c.path) < 2 || c.path[0] != "api" || strings.Contains(strings.Join(c.path, "/"), "{") {
				t.Errorf("%s: %+v, %v", method, c, err)
			}
			if c.body != nil && (c.method == http.MethodGet || c.method == http.MethodDelete) {
				t.Errorf("%s: %s with body %s", method, c.method, c.body)
			}
			if spoolv1.TakesIdempotencyKey(method) && (c.key == "" || !c.repeatable) || !c.repeatable && c.key != "" {
				t.Errorf("%s: key %q, repeatable %v", method, c.key, c.repeatable)
			}
		}
	}
}

func TestNewCall_SplitsPathQueryAndBody(t *testing.T) {
	t.Parallel()
	at := uint32(7)
	for _, x := range []struct {
		method  string
		request proto.Message
		want    string
	}{
		{spoolv1.Sessions_GetSessionState_FullMethodName, &spoolv1.GetSessionStateRequest{SessionId: "ses_1", At: &at, PageSize: 200}, "GET api/sessions/ses_1/state?at=7&pageSize=200 "},
		{spoolv1.Events_ListEvents_FullMethodName, &spoolv1.ListEventsRequest{SessionId: "ses_1", Types: []string{"a", "b"}}, "GET api/sessions/ses_1/events?types=a&types=b "},
		{spoolv1.Sessions_ForkSession_FullMethodName, &spoolv1.ForkSessionRequest{SessionId: "ses_1", At: &at}, `POST api/sessions/ses_1/fork? {"at":7}`},
		{spoolv1.Executions_StartExecution_FullMethodName, &spoolv1.StartExecutionRequest{Content: "x", Wait: "30s"}, `POST api/executions?wait=30s {"content":"x"}`},
		{spoolv1.Sessions_SyncSession_FullMethodName, &spoolv1.SyncSessionRequest{SessionId: "ses_1"}, "POST api/sessions/ses_1/sync? {}"},
		{spoolv1.Keys_RevokeKey_FullMethodName, &spoolv1.RevokeKeyRequest{KeyId: "key_1", Tenant: "acme"}, "DELETE api/keys/key_1?tenant=acme "},
	} {
		before := proto.Clone(x.request)
		c, err := newCall(x.method, x.request)
		if got := c.method + " " + strings.Join(c.path, "/") + "?" + c.query.Encode() + " " + string(c.body); err != nil || got != x.want {
			t.Errorf("got  %s, %v\nwant %s", got, err, x.want)
		}
		if !proto.Equal(before, x.request) {
			t.Errorf("%s: the request was changed to %v", x.method, x.request)
		}
	}
}

// TestNewCall_WaitExtendsTheTimeout tests that a request that waits at the server may take longer than other requests.
func TestNewCall_WaitExtendsTheTimeout(t *testing.T) {
	t.Parallel()
	f := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(300 * time.Millisecond) // longer than the timeout of a request
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"executionId":"exe_1","cursor":7}`))
	}))
	t.Cleanup(f.Close)
	c, err := New(Config{URL: f.URL, Timeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, err := c.Executions.StartExecution(t.Context(), &spoolv1.StartExecutionRequest{Content: "x", Wait: "1m"})
	if err != nil || r.GetCursor() != 7 {
		t.Errorf("got %v, %v", r, err)
	}
}
