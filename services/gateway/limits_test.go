package gateway_test

import (
	"context"
	"encoding/json"
	"testing"

	"google.golang.org/grpc/codes"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// setLimits does what session service and projector do.
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
	w.tell(tenant, budget.Tenant{Limits: l})
}

// TestLimits_AreSetWithTheRootKey: limits of tenants are set and removed with the root key alone. A tenant sees its own,
// with what it uses.
func TestLimits_AreSetWithTheRootKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	admin := g.as(root)
	acme := g.as(admin.do("POST", "/api/keys", `{"name":"a","tenant":"acme"}`).want(t, 201).text("key"))
	w.session("acme")

	all := `{"slots":1,"sandboxes":2,"sessions":3,"streams":4,"requestsPerSecond":500.5,"requestBurst":600,"keys":7,"storageBytes":9007199254740992,"eventsPerDay":9,"eventBytesPerDay":10}`
	admin.do("PUT", "/api/limits", `{"tenant":"acme","limits":{"keys":99}}`).want(t, 200)
	admin.do("PUT", "/api/limits", `{"tenant":"acme","limits":`+all+`}`).want(t, 200)
	for who, path := range map[*served]string{acme: "/api/limits", admin: "/api/limits?tenant=acme"} {
		a := who.get(path).want(t, 200)
		for field, want := range map[string]float64{
			"slots": 1, "sandboxes": 2, "sessions": 3, "streams": 4, "requestsPerSecond": 500.5, "requestBurst": 600, "keys": 7, "storageBytes": 1 << 53, "eventsPerDay": 9, "eventBytesPerDay": 10,
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
		"half a byte":              {admin, "PUT", "/api/limits", `{"limits":{"storageBytes":0.5}}`, 400, "INVALID_REQUEST", "limits.storageBytes"},
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

	w.untold.Store(true)
	admin.do("PUT", "/api/limits", `{"tenant":"acme","limits":{"slots":9}}`).wantProblem(t, 503, "READ_MODEL_BEHIND", "")
}
