package gateway_test

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// setLimits writes the row of limits and publishes it, like the session service and the projector.
func (w *world) setLimits(tenant string, l events.TenantLimits) {
	w.t.Helper()
	text, err := json.Marshal(l)
	if err == nil {
		_, err = w.pool.Exec(context.Background(), `INSERT INTO tenant_limits (tenant, grp, limits, set_at, removed) VALUES ($1, 0, $2, now(), false)
			ON CONFLICT (tenant) DO UPDATE SET limits = $2`, tenant, string(text))
	}
	if err != nil {
		w.t.Error(err)
	}
	w.publishTenant(tenant, budget.Tenant{Limits: l})
}

// TestLimits_AreSetWithTheRootKey tests that only the root key can set and remove limits, and that a tenant sees its
// own limits with its use.
func TestLimits_AreSetWithTheRootKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	admin := g.withKey(root)
	acme := g.withKey(admin.do("POST", "/api/keys", `{"name":"a","tenant":"acme"}`).want(t, 201).text("key"))
	w.session("acme")

	all := `{"slots":1,"sandboxes":2,"sessions":3,"streams":4,"requestsPerSecond":500.5,"requestBurst":600,"keys":7,"eventsPerDay":9007199254740992,"eventBytesPerDay":10,"storageBytes":11}`
	admin.do("PUT", "/api/limits", `{"tenant":"acme","limits":{"keys":99}}`).want(t, 200)
	admin.do("PUT", "/api/limits", `{"tenant":"acme","limits":`+all+`}`).want(t, 200)
	for who, path := range map[*served]string{acme: "/api/limits", admin: "/api/limits?tenant=acme"} {
		a := who.get(path).want(t, 200)
		for field, want := range map[string]float64{
			"slots": 1, "sandboxes": 2, "sessions": 3, "streams": 4, "requestsPerSecond": 500.5, "requestBurst": 600, "keys": 7, "eventsPerDay": 1 << 53, "eventBytesPerDay": 10, "storageBytes": 11,
		} {
			if got := a.number("limits", field); got != want {
				t.Errorf("limit %s is %v, want %v", field, got, want)
			}
		}
		if s, k := a.number("used", "sessions"), a.number("used", "keys"); s != 1 || k != 1 {
			t.Errorf("%v sessions and %v keys are used, want 1 and 1", s, k)
		}
	}
	if a := admin.get("/api/limits?tenant=other").want(t, 200); a.number("limits", "slots") != 0 || a.number("used", "sessions") != 0 {
		t.Errorf("another tenant has %s", a)
	}

	for name, c := range map[string]struct {
		who                *served
		method, path, body string
		status             int
		code, field        string
	}{
		"a tenant's own key":       {acme, "PUT", "/api/limits", `{"limits":{"keys":5}}`, 403, "FORBIDDEN", ""},
		"a tenant removes":         {acme, "DELETE", "/api/limits", "", 403, "FORBIDDEN", ""},
		"another's":                {acme, "GET", "/api/limits?tenant=other", "", 403, "FORBIDDEN", "tenant"},
		"no limit":                 {admin, "PUT", "/api/limits", `{"limits":{}}`, 400, "INVALID_REQUEST", "limits"},
		"slots that are negative":  {admin, "PUT", "/api/limits", `{"limits":{"slots":-1}}`, 400, "INVALID_REQUEST", "limits.slots"},
		"rate that is negative":    {admin, "PUT", "/api/limits", `{"limits":{"requestsPerSecond":-0.5}}`, 400, "INVALID_REQUEST", "limits.requestsPerSecond"},
		"events that are negative": {admin, "PUT", "/api/limits", `{"limits":{"eventsPerDay":-1}}`, 400, "INVALID_REQUEST", "limits.eventsPerDay"},
		"half a byte":              {admin, "PUT", "/api/limits", `{"limits":{"eventBytesPerDay":0.5}}`, 400, "INVALID_REQUEST", "limits.eventBytesPerDay"},
		"half a stored byte":       {admin, "PUT", "/api/limits", `{"limits":{"storageBytes":0.5}}`, 400, "INVALID_REQUEST", "limits.storageBytes"},
		"a tenant of no name":      {admin, "PUT", "/api/limits", `{"tenant":"a b","limits":{"keys":5}}`, 400, "INVALID_REQUEST", "tenant"},
		"none to remove":           {admin, "DELETE", "/api/limits?tenant=other", "", 404, "LIMITS_NOT_FOUND", "tenant"},
	} {
		t.Run(name, func(t *testing.T) {
			c.who.do(c.method, c.path, c.body).wantProblem(t, c.status, c.code, c.field)
		})
	}
	_, err := spoolv1.NewLimitsClient(g.conn()).SetLimits(acme.context(t.Context()), &spoolv1.SetLimitsRequest{Limits: &spoolv1.TenantLimits{Slots: 1}})
	wantCode(t, err, codes.PermissionDenied, "FORBIDDEN", "")
	got, err := spoolv1.NewLimitsClient(g.conn()).GetLimits(acme.context(t.Context()), &spoolv1.GetLimitsRequest{})
	if err != nil || got.GetLimits().GetSlots() != 1 {
		t.Errorf("gRPC returns %v, %v", got, err)
	}
	admin.do("DELETE", "/api/limits?tenant=acme", "").want(t, 200)
	if a := acme.get("/api/limits").want(t, 200); a.number("limits", "slots") != 0 {
		t.Errorf("after the removal the tenant has %s", a)
	}

	w.budgetsUnpublished.Store(true)
	admin.do("PUT", "/api/limits", `{"tenant":"acme","limits":{"slots":9}}`).wantProblem(t, 503, "READ_MODEL_BEHIND", "")
}

// TestRateLimit_RefusesOneTenant tests that a tenant above its request rate is refused with the time to wait, over
// REST, gRPC and WebSocket, while other tenants and the root key are served.
func TestRateLimit_RefusesOneTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	// Only the burst is available during the test.
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantRequests: 1, MaxTenantBurst: 1000})
	hostile, other := g.withNewKey(root, "hostile"), g.withNewKey(root, "other")
	id := w.session("hostile")
	g.withKey(root).do("PUT", "/api/limits", `{"tenant":"hostile","limits":{"requestsPerSecond":0.001,"requestBurst":3}}`).want(t, 200)
	// The gateway's own watch may receive the limits later than the answer.
	var refused answer
	for deadline := time.Now().Add(patience); refused.status != 429; refused = hostile.get("/api/sessions") {
		if time.Now().After(deadline) {
			t.Fatal("no request was refused")
		}
	}
	refused.wantProblem(t, 429, "RATE_LIMITED", "")
	if after, err := strconv.Atoi(refused.header.Get("Retry-After")); err != nil || after < 500 || after > 1000 {
		t.Errorf("Retry-After is %q, want the time until the next of a thousand seconds", refused.header.Get("Retry-After"))
	}
	hostile.get("/api/sessions/"+id+"/events/stream").wantProblem(t, 429, "RATE_LIMITED", "")
	hostile.get("/api/ws", header("Upgrade", "websocket")).wantProblem(t, 429, "RATE_LIMITED", "")
	_, err := spoolv1.NewSessionsClient(g.conn()).ListSessions(hostile.context(t.Context()), &spoolv1.ListSessionsRequest{})
	wantCode(t, err, codes.ResourceExhausted, "RATE_LIMITED", "")
	var wait *errdetails.RetryInfo
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			wait = info
		}
	}
	if d := wait.GetRetryDelay().AsDuration(); d < 500*time.Second {
		t.Errorf("gRPC has a retry delay of %s", d)
	}
	other.get("/api/sessions").want(t, 200)
	for range 20 {
		g.withKey(root).get("/api/limits?tenant=hostile").want(t, 200)
	}
	// With a higher limit the tenant is served again.
	g.withKey(root).do("PUT", "/api/limits", `{"tenant":"hostile","limits":{"requestsPerSecond":1000}}`).want(t, 200)
	for deadline := time.Now().Add(patience); hostile.get("/api/sessions").status != 200; {
		if time.Now().After(deadline) {
			t.Fatal("the tenant is refused for good")
		}
	}

	// On a gateway without keys, where every client is tenant default, that tenant's own limit does not lock out the
	// operator.
	open := w.gateway(gateway.Config{MaxTenantRequests: 1, MaxTenantBurst: 1})
	for range 20 {
		open.get("/api/limits").want(t, 200)
	}

	// The gateway's settings apply to a tenant without own limits.
	strict := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantRequests: 1, MaxTenantBurst: 2}).withKey(other.key)
	for n := 1; strict.get("/api/sessions").status == 200; n++ {
		if n > 100 {
			t.Fatal("a hundred requests were served")
		}
	}
}

// TestRateLimit_ClosesAWebSocket tests that a message above the rate ends the connection.
func TestRateLimit_ClosesAWebSocket(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{MaxTenantRequests: 1, MaxTenantBurst: 3})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, strings.Replace(g.url, "http", "ws", 1)+"/api/ws", nil)
	must(t, err)
	defer func() { _ = ws.CloseNow() }()
	go func() {
		for ws.Write(ctx, websocket.MessageText, []byte(`{"type":"leave"}`)) == nil {
		}
	}()
	for err == nil {
		_, _, err = ws.Read(ctx)
	}
	if websocket.CloseStatus(err) != websocket.StatusTryAgainLater {
		t.Errorf("the connection ended with %v", err)
	}
}

// TestStreamLimit_TenantLimitOverridesTheSetting tests that a tenant's own limit of streams overrides the gateway's, and that a limit
// below the number of open streams ends none of them.
func TestStreamLimit_TenantLimitOverridesTheSetting(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantStreams: 2})
	one, other := g.withNewKey(root, "one"), g.withNewKey(root, "other")
	id, theirs := w.session("one"), w.session("other")
	first, second := one.sse(id, 1), one.sse(id, 1)
	defer first.close()
	defer second.close()
	path := "/api/sessions/" + id + "/events/stream"
	one.get(path).wantProblem(t, 429, "TOO_MANY_STREAMS", "")
	g.withKey(root).do("PUT", "/api/limits", `{"tenant":"one","limits":{"streams":1}}`).want(t, 200)
	one.get(path).wantProblem(t, 429, "TOO_MANY_STREAMS", "")
	g.wantStreams(root, 2)
	defer other.sse(theirs, 1).close()
	defer other.sse(theirs, 1).close()
	other.get("/api/sessions/"+theirs+"/events/stream").wantProblem(t, 429, "TOO_MANY_STREAMS", "")
}

// TestSessionLimit_HoldsForManyRequestsAtOnce tests that concurrent requests cannot exceed a tenant's limit of
// sessions, and that repeats and other tenants are served.
func TestSessionLimit_HoldsForManyRequestsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantSessions: 5})
	one, other := g.withNewKey(root, "one"), g.withNewKey(root, "other")
	one.do("POST", "/api/sessions", `{}`, header("Idempotency-Key", "first")).want(t, 201)
	answers := make(chan int, 40)
	for range cap(answers) / 2 {
		go func() { answers <- one.do("POST", "/api/sessions", `{}`).status }()
		go func() { answers <- one.do("POST", "/api/executions", `{"content":"go"}`).status }()
	}
	made := map[int]int{}
	for range cap(answers) {
		made[<-answers]++
	}
	if made[201]+made[202] != 4 || made[429] != cap(answers)-4 {
		t.Errorf("answers by status: %v, want 4 sessions", made)
	}
	one.do("POST", "/api/sessions", `{}`).wantProblem(t, 429, "TENANT_SESSIONS", "")
	one.do("POST", "/api/sessions", `{}`, header("Idempotency-Key", "first")).want(t, 201)
	other.do("POST", "/api/sessions", `{}`).want(t, 201)
	// A limit below the number of sessions refuses new sessions and ends none.
	g.withKey(root).do("PUT", "/api/limits", `{"tenant":"one","limits":{"sessions":2}}`).want(t, 200)
	one.do("POST", "/api/sessions", `{}`).wantProblem(t, 429, "TENANT_SESSIONS", "")
	if n := one.get("/api/limits").want(t, 200).number("used", "sessions"); n != 5 {
		t.Errorf("%v sessions are left", n)
	}
	g.withKey(root).do("PUT", "/api/limits", `{"tenant":"one","limits":{"sessions":6}}`).want(t, 200)
	for deadline := time.Now().Add(patience); one.do("POST", "/api/sessions", `{}`).status != 201; {
		if time.Now().After(deadline) {
			t.Fatal("the higher limit does not count")
		}
	}
}
