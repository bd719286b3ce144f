package gateway_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// last returns the actor of the last command.
func (s *sessions) last() events.Actor {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[len(s.all)-1].Actor
}

// createOverGRPC creates a session over gRPC with metadata.
func (s *served) createOverGRPC(md ...string) error {
	s.t.Helper()
	ctx := metadata.AppendToOutgoingContext(s.context(s.t.Context()), md...)
	_, err := spoolv1.NewSessionsClient(s.conn()).CreateSession(ctx, &spoolv1.CreateSessionRequest{})
	return err
}

// TestCaller_CommandsNameKeyUserAndAddress tests that commands name the key, the end user of the request, and the
// address of its client, and that X-Forwarded-For is believed from trusted proxies only.
func TestCaller_CommandsNameKeyUserAndAddress(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	commands := w.serveCommands()
	root := rootKey()
	const own, forged = "127.0.0.1", "203.0.113.9"
	for name, c := range map[string]struct {
		cfg  gateway.Config
		want string
	}{
		"no proxy":               {gateway.Config{}, own},
		"a proxy speaks TLS":     {gateway.Config{BehindTLSProxy: true}, forged},
		"a proxy here":           {gateway.Config{TrustedProxies: []string{"127.0.0.0/8", "::1"}}, forged},
		"a proxy somewhere else": {gateway.Config{BehindTLSProxy: true, TrustedProxies: []string{"10.0.0.0/8"}}, own},
	} {
		c.cfg.Auth, c.cfg.RootKey = gateway.AuthKeys, root
		g := w.gateway(c.cfg)
		made := g.withKey(root).do("POST", "/api/keys", `{"name":"app","tenant":"acme"}`, header("Spool-User", "operator")).want(t, 201)
		if want := (events.Actor{Kind: "key", ID: "root", Key: "root", User: "operator", Address: own}); commands.last() != want {
			t.Errorf("%s: a key was made by %+v, want %+v", name, commands.last(), want)
		}
		want := events.Actor{Kind: "key", ID: made.text("keyId"), Key: made.text("keyId"), User: "Änne <ann@example.com>", Address: c.want}
		g = g.withKey(made.text("key"))
		g.do("POST", "/api/sessions", "{}", header("Spool-User", want.User), header("X-Forwarded-For", "1.1.1.1, "+forged)).want(t, 201)
		if commands.last() != want {
			t.Errorf("%s: over REST by %+v, want %+v", name, commands.last(), want)
		}
		must(t, g.createOverGRPC("spool-user-bin", want.User, "x-forwarded-for", "1.1.1.1, "+forged))
		if commands.last() != want {
			t.Errorf("%s: over gRPC by %+v, want %+v", name, commands.last(), want)
		}
		must(t, g.createOverGRPC("spool-user", "bob", "x-real-ip", forged, "forwarded", "for="+forged))
		if want.User, want.Address = "bob", own; commands.last() != want {
			t.Errorf("%s: over gRPC by %+v, want %+v", name, commands.last(), want)
		}
	}
	g := w.gateway(gateway.Config{})
	g.get("/api/audit").want(t, 200)
	g.do("POST", "/api/sessions", "{}").want(t, 201)
	if want := (events.Actor{Kind: "user", ID: "local", Address: own}); commands.last() != want {
		t.Errorf("without a key by %+v, want %+v", commands.last(), want)
	}
}

// TestCaller_RefusesInvalidUsers tests that an invalid user is refused with the name of the header on every
// route that takes a key, including routes that only read.
func TestCaller_RefusesInvalidUsers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	for name, user := range map[string]string{
		"too long": strings.Repeat("ä", events.MaxUserBytes/2) + "b", "not UTF-8": "ann\xff", "a tab": "ann\tbob", "a control character": "ann\u0085bob", "an invisible one": "ann\u200bbob",
	} {
		for _, route := range []string{"POST /api/sessions", "GET /api/sessions", "GET /api/ws", "GET /api/audit"} {
			method, path, _ := strings.Cut(route, " ")
			a := g.do(method, path, "", header("Spool-User", user))
			if a.wantProblem(t, 400, "INVALID_REQUEST", "Spool-User"); t.Failed() {
				t.Fatalf("%s, %s", name, route)
			}
		}
		if err := g.createOverGRPC("spool-user-bin", user); !strings.Contains(fmt.Sprint(status.Convert(err).Details()), `"spool-user-bin"`) {
			t.Errorf("%s over gRPC: %v, %v", name, err, status.Convert(err).Details())
		}
	}
	if err := g.createOverGRPC("spool-user", "ann", "spool-user", "bob"); !strings.Contains(fmt.Sprint(status.Convert(err).Details()), `"spool-user"`) {
		t.Errorf("two users over gRPC: %v", err)
	}
	g.do("POST", "/api/sessions", "{}", header("Spool-User", strings.Repeat("ä", events.MaxUserBytes/2))).want(t, 201)
}

// TestCaller_IdempotencyKeyBelongsToOneUser tests that a repeat under the same Idempotency-Key for another user is a
// different request.
func TestCaller_IdempotencyKeyBelongsToOneUser(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	post := func(user string) answer {
		return g.do("POST", "/api/sessions", "{}", header("Idempotency-Key", "one"), header("Spool-User", user), header("X-Forwarded-For", user))
	}
	first := post("ann").want(t, 201).text("sessionId")
	if again := post("ann").want(t, 201).text("sessionId"); again != first {
		t.Errorf("the repeat made session %s, the request %s", again, first)
	}
	post("bob").wantProblem(t, 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key")
}
