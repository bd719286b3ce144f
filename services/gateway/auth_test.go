package gateway_test

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// withKey returns a client of the gateway with a key.
func (s *served) withKey(key string) *served {
	c := *s
	c.key = key
	return &c
}

func rootKey() string { return rand.Text() + rand.Text() }

func TestKeys_AuthenticateAndManageOneTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})

	g.get("/health").want(t, 200)
	g.get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	made := g.withKey(root).do("POST", "/api/keys", `{"name":"first","tenant":"acme"}`).want(t, 201)
	key := made.text("key")
	if !strings.HasPrefix(key, "spool_sk_") || !strings.HasPrefix(key, made.text("prefix")) || made.text("tenant") != "acme" {
		t.Fatalf("got %s", made)
	}
	for _, c := range s.commands(t) {
		if strings.Contains(string(c.Body), key) {
			t.Errorf("the key itself was sent: %s", c.Body)
		}
	}
	acme := g.withKey(key)
	id := acme.do("POST", "/api/sessions", `{}`).want(t, 201).text("sessionId")
	acme.get("/api/sessions/"+id).want(t, 200)
	if c := s.commands(t)[1]; c.Tenant != "acme" || c.Actor != (events.Actor{Kind: "key", ID: made.text("keyId"), Key: made.text("keyId"), Address: "127.0.0.1"}) {
		t.Errorf("the command is %+v", c)
	}
	if list := acme.get("/api/keys").want(t, 200); !strings.Contains(string(list.body), made.text("keyId")) || strings.Contains(string(list.body), key) {
		t.Errorf("got %s", list)
	}
	acme.do("POST", "/api/keys", `{"name":"x","tenant":"default"}`).wantProblem(t, 403, "FORBIDDEN", "tenant")
	own := acme.do("POST", "/api/keys", `{"name":"second"}`).want(t, 201)
	if own.text("tenant") != "acme" {
		t.Errorf("got %s", own)
	}
	other := "0" // the last character may be any
	if key[10:11] == other {
		other = "1"
	}
	for name, wrong := range map[string]string{
		"one character off":  key[:len(key)-1] + "_",
		"well made, unknown": key[:10] + other + key[11:],
		"none of ours":       "sk-123",
		"empty":              " ",
	} {
		if a := g.withKey(wrong).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization"); a.header.Get("WWW-Authenticate") == "" {
			t.Errorf("%s: no WWW-Authenticate", name)
		}
	}
	g.get("/api/sessions", header("Authorization", "Basic abc")).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	_, err := spoolv1.NewSessionsClient(g.conn()).ListSessions(t.Context(), &spoolv1.ListSessionsRequest{})
	wantCode(t, err, codes.Unauthenticated, "UNAUTHENTICATED", "Authorization")
	if _, err := spoolv1.NewSessionsClient(g.conn()).ListSessions(acme.context(t.Context()), &spoolv1.ListSessionsRequest{}); err != nil {
		t.Error(err)
	}

	acme.do("DELETE", "/api/keys/"+own.text("keyId"), "").want(t, 200)
	g.withKey(own.text("key")).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	acme.do("DELETE", "/api/keys/"+oldID(t, events.KindKey), "").wantProblem(t, 404, "KEY_NOT_FOUND", "keyId")
	// Metrics are for the operator only: they show which routes other tenants use, and how often.
	acme.get("/metrics").wantProblem(t, 403, "FORBIDDEN", "Authorization")
	g.get("/metrics").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	info, err := reflectionv1.NewServerReflectionClient(g.conn()).ServerReflectionInfo(t.Context())
	must(t, err)
	_, err = info.Recv()
	wantCode(t, err, codes.Unauthenticated, "UNAUTHENTICATED", "Authorization")
	g.withKey(root).wantMetric(t, "spool_gateway_unauthenticated_total 10")
}

// TestRevokedKey_EndsItsStreams tests that the streams of a revoked key end within about a second.
func TestRevokedKey_EndsItsStreams(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	made := g.withKey(root).do("POST", "/api/keys", `{"name":"x"}`).want(t, 201)
	mine := g.withKey(made.text("key"))
	id := w.session("default")
	c, s, r := mine.ws(id, 1), mine.sse(id, 1), mine.rpc(id, 1)
	still := g.withKey(g.withKey(root).do("POST", "/api/keys", `{"name":"y"}`).want(t, 201).text("key")).sse(id, 1)
	defer s.close()
	defer r.close()
	defer still.close()
	w.emit("default", id, events.Event{Data: events.Log{}})
	for _, one := range []stream{c, s, r, still} {
		_, err := one.next()
		must(t, err)
	}
	mine.do("DELETE", "/api/keys/"+made.text("keyId"), "").want(t, 200)
	began := time.Now()
	for _, one := range []stream{c, s, r} {
		var p errProblem
		if _, err := one.next(); !errors.As(err, &p) || p.code != "UNAUTHENTICATED" {
			t.Errorf("got %v", err)
		}
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("the streams ended after %s", took)
	}
	if _, err := c.receive(); websocket.CloseStatus(err) != websocket.StatusPolicyViolation {
		t.Errorf("the WebSocket ended with %v", err)
	}
	w.emit("default", id, events.Event{Data: events.Log{}})
	_, err := still.next()
	must(t, err)
}

// TestRootKey_OnlyManagesKeysLimitsAndBudgets tests that the root key can manage keys, limits and budgets, and that
// every other REST route, gRPC method and stream answers FORBIDDEN with advice to create a key, without sending a
// command.
func TestRootKey_OnlyManagesKeysLimitsAndBudgets(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	key := rootKey()
	root := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: key}).withKey(key)
	id := w.session("default")
	conn := root.conn()
	allowed := map[string]bool{"spool.v1.Keys": true, "spool.v1.Budgets": true, "spool.v1.Limits": true}
	calls := 0
	services := spoolv1.File_spool_v1_spool_proto.Services()
	for i := range services.Len() {
		service := services.Get(i)
		for j := range service.Methods().Len() {
			m := service.Methods().Get(j)
			if allowed[string(service.FullName())] || m.Name() == "ExchangeSignInCode" { // which ignores keys
				continue
			}
			calls++
			stream, err := conn.NewStream(root.context(t.Context()), &grpc.StreamDesc{ServerStreams: true}, fmt.Sprintf("/%s/%s", service.FullName(), m.Name()))
			must(t, err)
			must(t, stream.SendMsg(dynamicpb.NewMessage(m.Input())))
			must(t, stream.CloseSend())
			wantCode(t, stream.RecvMsg(dynamicpb.NewMessage(m.Output())), codes.PermissionDenied, "FORBIDDEN", "Authorization")

			rule, ok := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
			if !ok || rule == nil {
				continue
			}
			for verb, path := range map[string]string{"GET": rule.GetGet(), "POST": rule.GetPost(), "PUT": rule.GetPut(), "PATCH": rule.GetPatch(), "DELETE": rule.GetDelete()} {
				if path == "" {
					continue
				}
				path = strings.NewReplacer("{session_id}", id, "{execution_id}", newID(t, events.KindExecution), "{approval_id}", newID(t, events.KindApproval), "{slug}", "x").Replace(path)
				body := ""
				if rule.GetBody() != "" {
					body = "{}"
				}
				if p := root.do(verb, path, body).wantProblem(t, 403, "FORBIDDEN", "Authorization"); !strings.Contains(p.text("detail"), "create a key") {
					t.Errorf("%s %s: got %s", verb, path, p)
				}
			}
		}
	}
	if calls < 30 {
		t.Errorf("only %d methods were called", calls)
	}
	for _, route := range []struct{ method, path, body string }{
		{"GET", "/api/ws", ""}, {"GET", "/api/sessions/" + id + "/events/stream", ""}, {"GET", "/api/sessions/" + id + "/files", ""},
		{"PUT", "/api/sessions/" + id + "/files/a.txt", "x"}, {"DELETE", "/api/sessions/" + id + "/files/a.txt", ""},
		{"POST", "/api/skills?scope=platform", "x"}, {"GET", "/api/skills/x/archive", ""}, {"GET", "/api/keysmith", ""},
	} {
		root.do(route.method, route.path, route.body).wantProblem(t, 403, "FORBIDDEN", "Authorization")
	}
	if n := len(s.commands(t)); n != 0 {
		t.Fatalf("%d commands were sent", n)
	}
	made := root.do("POST", "/api/keys", `{"name":"x"}`).want(t, 201)
	root.get("/api/keys").want(t, 200)
	root.do("DELETE", "/api/keys/"+made.text("keyId"), "").want(t, 200)
	root.get("/api/budgets").want(t, 200)
}

// TestTenants_CannotSeeEachOthersSessions tests that another tenant's session does not exist for a client, over all protocols.
func TestTenants_CannotSeeEachOthersSessions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	tenants := map[string]*served{}
	for _, name := range []string{"a", "b"} {
		tenants[name] = g.withKey(g.withKey(root).do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","tenant":%q}`, name)).want(t, 201).text("key"))
	}
	theirs, none := w.session("a"), oldID(t, events.KindSession)
	exe := newID(t, events.KindExecution)
	w.emit("a", theirs, events.Event{ExecutionID: exe, Data: events.MessageAccepted{BlockID: "b"}})
	tenants["a"].get("/api/sessions/"+theirs).want(t, 200)
	b := tenants["b"]
	ctx := b.context(t.Context())
	conn := b.conn()
	for _, route := range []struct{ method, path, body string }{
		{"GET", "", ""}, {"PATCH", "", `{"metadata":1}`}, {"DELETE", "", ""}, {"POST", "/messages", `{"content":"x"}`}, {"POST", "/interrupt", ""},
		{"GET", "/events", ""}, {"GET", "/events/stream", ""}, {"GET", "/blocks", ""}, {"GET", "/conversations", ""}, {"GET", "/executions", ""}, {"GET", "/files?live=1", ""},
		{"GET", "/state", ""}, {"GET", "/state?at=1", ""}, {"GET", "/diff?from=1&to=1", ""}, {"GET", "/compare?with=" + none, ""}, {"GET", "/files?at=1", ""}, {"GET", "/files/a?at=1", ""}, {"GET", "/files/a?live=1", ""},
	} {
		got := b.do(route.method, "/api/sessions/"+theirs+route.path, route.body).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
		want := b.do(route.method, "/api/sessions/"+none+route.path, route.body)
		if string(got.body) != string(want.body) {
			t.Errorf("%s %s: another tenant's can be distinguished from a missing one: %s, %s", route.method, route.path, got, want)
		}
	}
	b.get("/api/executions/"+exe).wantProblem(t, 404, "EXECUTION_NOT_FOUND", "executionId")
	for _, control := range []string{"/cancel", "/recover"} {
		b.do("POST", "/api/executions/"+exe+control, "").wantProblem(t, 404, "EXECUTION_NOT_FOUND", "executionId")
	}
	for _, list := range []string{"/api/sessions", "/api/executions", "/api/keys"} {
		if a := b.get(list).want(t, 200); strings.Contains(string(a.body), theirs) || strings.Contains(string(a.body), exe) {
			t.Errorf("%s shows another tenant's: %s", list, a)
		}
	}
	c := b.dial()
	c.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q}`, theirs))
	c.wantError("SESSION_NOT_FOUND", "sessionId")
	_, err := spoolv1.NewSessionsClient(conn).GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: theirs})
	wantCode(t, err, codes.NotFound, "SESSION_NOT_FOUND", "sessionId")
	st, err := spoolv1.NewEventsClient(conn).StreamEvents(ctx, &spoolv1.StreamEventsRequest{SessionId: theirs})
	must(t, err)
	_, err = st.Recv()
	wantCode(t, err, codes.NotFound, "SESSION_NOT_FOUND", "sessionId")
	// The same Idempotency-Key of two tenants denotes two requests.
	one := tenants["a"].do("POST", "/api/sessions", `{}`, header("Idempotency-Key", "k")).want(t, 201)
	two := b.do("POST", "/api/sessions", `{"metadata":2}`, header("Idempotency-Key", "k")).want(t, 201)
	if one.text("sessionId") == two.text("sessionId") {
		t.Error("two tenants were given one session")
	}
}

func TestNew_RefusesUnsafeSettings(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for want, cfg := range map[string]gateway.Config{
		"listen: 0.0.0.0:7700 can be reached from other machines, where keys are needed: use --auth keys, or listen on 127.0.0.1":        {Listen: "0.0.0.0:7700"},
		"grpc-listen: :7701 can be reached from other machines":                                                                          {GRPCListen: ":7701"},
		`listen: "7700" is not host:port`:                                                                                                {Listen: "7700"},
		`auth: "maybe" is neither off nor keys`:                                                                                          {Auth: "maybe"},
		"listen: 0.0.0.0:7700 can be reached from other machines, where TLS is needed: name a certificate with --tls-cert and --tls-key": {Listen: "0.0.0.0:7700", Auth: gateway.AuthKeys},
		"grpc-listen: :7701 can be reached from other machines, where TLS is needed":                                                     {GRPCListen: ":7701", Auth: gateway.AuthKeys},
		"listen: [::]:7700 can be reached from other machines, where TLS is needed":                                                      {Listen: "[::]:7700", Auth: gateway.AuthKeys},
		"listen: nowhere.invalid:7700 can be reached from other machines, where TLS is needed":                                           {Listen: "nowhere.invalid:7700", Auth: gateway.AuthKeys},
		"listen: 127.0.0.1:7700 can be reached from other machines, where TLS is needed":                                                 {Auth: gateway.AuthKeys, PublishedAddress: "0.0.0.0"},
		"listen: 0.0.0.0:7700 can be reached from other machines, where keys are needed":                                                 {Listen: "0.0.0.0:7700", PublishedAddress: "127.0.0.1"},
		"a certificate needs both files: set --tls-cert and --tls-key":                                                                   {TLSCert: "x"},
		"tls-cert: open missing":                          {TLSCert: "missing", TLSKey: "missing"},
		"root-key has 5 characters; it needs 32 or more":  {RootKey: "short"},
		`allowed-origins: "app.example" is not an origin`: {AllowedOrigins: []string{"app.example"}},
		"write-timeout: -1s is negative":                  {WriteTimeout: -time.Second},
	} {
		if _, err := gateway.New(cfg, gateway.Deps{NATS: w.nc, Pool: w.pool}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
	for what, cfg := range map[string]gateway.Config{
		"a proxy speaks TLS": {BehindTLSProxy: true}, "published on loopback": {PublishedAddress: "127.0.0.1"}, "published on loopback of IPv6": {PublishedAddress: "::1"},
	} {
		cfg.Listen, cfg.GRPCListen, cfg.Auth = "0.0.0.0:7700", ":7701", gateway.AuthKeys
		if _, err := gateway.New(cfg, gateway.Deps{NATS: w.nc, Pool: w.pool}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, host := range []string{"localhost", "127.0.0.2", "[::1]"} {
		if _, err := gateway.New(gateway.Config{Listen: host + ":7700"}, gateway.Deps{NATS: w.nc, Pool: w.pool}); err != nil {
			t.Errorf("on %s: %v", host, err)
		}
	}
	taken := w.gateway(gateway.Config{})
	g, err := gateway.New(gateway.Config{Listen: strings.TrimPrefix(taken.url, "http://")}, gateway.Deps{NATS: w.nc, Pool: w.pool})
	must(t, err)
	if err := g.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "choose another address with --listen") {
		t.Errorf("got %v", err)
	}
}
