package gateway_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc/codes"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// signInWorld is an installation whose gateways require a key.
type signInWorld struct {
	*world
	t    *testing.T
	root string
}

func newSignInWorld(t *testing.T) *signInWorld {
	t.Helper()
	w := newWorld(t)
	w.serveCommands()
	return &signInWorld{w, t, rootKey()}
}

// run runs one more gateway of the installation.
func (w *signInWorld) run() *served {
	w.t.Helper()
	return w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: w.root})
}

// keyOf returns a client of the gateway with a new key of a role, and the id of the key.
func (w *signInWorld) keyOf(g *served, role string) (client *served, id string) {
	w.t.Helper()
	made := g.withKey(w.root).do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","role":%q}`, role)).want(w.t, 201)
	return g.withKey(made.text("key")), made.text("keyId")
}

// newCode returns a new code that the client's key has created.
func (s *served) newCode() string {
	s.t.Helper()
	return s.do("POST", "/api/signin/codes", "{}").want(s.t, 201).text("code")
}

// exchange exchanges a code without a key.
func (s *served) exchange(code string) answer {
	s.t.Helper()
	return s.withKey("").do("POST", "/api/signin/sessions", fmt.Sprintf(`{"code":%q}`, code))
}

// TestSignInCode_IsExchangedOnce tests that one of many exchanges of a code succeeds, at any gateway, and that the
// session credential has the rights of the key that created the code, at all gateways.
func TestSignInCode_IsExchangedOnce(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	first, second := w.run(), w.run()
	key, _ := w.keyOf(first, "use")
	code := key.newCode()
	answers := make([]answer, 8)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() { answers[i] = []*served{first, second}[i%2].exchange(code) })
	}
	wg.Wait()
	var credential string
	for _, a := range answers {
		if a.status == 201 && credential == "" {
			credential = a.text("credential")
			continue
		}
		a.wantProblem(t, 401, "UNAUTHENTICATED", "code")
	}
	if credential == "" {
		t.Fatal("no exchange succeeded")
	}
	for _, g := range []*served{first, second} {
		session := g.withKey(credential)
		session.get("/api/sessions").want(t, 200)
		session.get("/api/keys").wantProblem(t, 403, "FORBIDDEN", "Authorization")
		session.do("POST", "/api/signin/codes", "{}").wantProblem(t, 403, "FORBIDDEN", "Authorization")
		session.withKey(code).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	}
}

func TestSignInCode_IsExchangedOverGRPCWithoutAKey(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, _ := w.keyOf(g, "admin")
	made, err := spoolv1.NewSignInClient(g.conn()).CreateSignInCode(key.context(t.Context()), &spoolv1.CreateSignInCodeRequest{})
	must(t, err)
	if made.GetValidMs() != 60_000 {
		t.Errorf("the code is valid for %d ms, want a minute", made.GetValidMs())
	}
	client := spoolv1.NewSignInClient(g.conn())
	out, err := client.ExchangeSignInCode(t.Context(), &spoolv1.ExchangeSignInCodeRequest{Code: made.GetCode()})
	must(t, err)
	if out.GetRole() != "admin" || out.GetTenant() != "default" {
		t.Errorf("got %v", out)
	}
	g.withKey(out.GetCredential()).get("/api/keys").want(t, 200)
	_, err = client.ExchangeSignInCode(t.Context(), &spoolv1.ExchangeSignInCodeRequest{Code: made.GetCode()})
	wantCode(t, err, codes.Unauthenticated, "UNAUTHENTICATED", "code")
	_, err = client.CreateSignInCode(t.Context(), &spoolv1.CreateSignInCodeRequest{})
	wantCode(t, err, codes.Unauthenticated, "UNAUTHENTICATED", "Authorization")
}

// TestSignInCode_IsRefused tests codes that were never valid, and routes that resemble the only one that needs no key.
func TestSignInCode_IsRefused(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, id := w.keyOf(g, "admin")
	code := key.newCode()
	last := "0"
	if strings.HasSuffix(code, last) {
		last = "1"
	}
	for _, bad := range []string{"", "x", code[:len(code)-1], code[:len(code)-1] + last, "spool_sk_" + strings.TrimPrefix(code, "spool_sc_"), key.key, code + " ", strings.Repeat("a", 100_000)} {
		g.exchange(bad).wantProblem(t, 401, "UNAUTHENTICATED", "code")
	}
	for _, route := range []string{"POST /api/signin/codes", "GET /api/signin/sessions", "PUT /api/signin/sessions", "POST /api/signin/sessions/", "POST /api/signin/sessions/x", "POST /api/signin//sessions", "POST /api/signin/%73essions/"} {
		verb, path, _ := strings.Cut(route, " ")
		g.do(verb, path, "").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	}
	key.do("DELETE", "/api/keys/"+id, "").want(t, 200)
	g.exchange(code).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
}

// TestSignInCode_Expires tests that NATS removes codes after a minute, and that a removed code is refused.
func TestSignInCode_Expires(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, _ := w.keyOf(g, "use")
	codesStream, err := w.js.Stream(t.Context(), "KV_"+topology.BucketSignInCodes)
	must(t, err)
	cfg := codesStream.CachedInfo().Config
	if cfg.MaxAge != time.Minute {
		t.Errorf("codes are removed after %s, want a minute", cfg.MaxAge)
	}
	cfg.MaxAge, cfg.Duplicates = 100*time.Millisecond, 100*time.Millisecond // so that the test need not wait for a minute
	_, err = w.js.UpdateStream(t.Context(), cfg)
	must(t, err)
	code := key.newCode()
	for {
		info, err := codesStream.Info(t.Context())
		must(t, err)
		if info.State.LastSeq > 0 && info.State.Msgs == 0 {
			break
		}
	}
	g.exchange(code).wantProblem(t, 401, "UNAUTHENTICATED", "code")
}

// TestSignInSession_EndsWithItsKey tests that a session credential is refused, and its streams end, when the key is revoked.
func TestSignInSession_EndsWithItsKey(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, id := w.keyOf(g, "admin")
	session := g.withKey(g.exchange(key.newCode()).want(t, 201).text("credential"))
	events := session.sse(w.session("default"), 0)
	defer events.close()
	session.get("/api/sessions").want(t, 200)
	g.withKey(w.root).do("DELETE", "/api/keys/"+id, "").want(t, 200)
	session.get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	wantUnauthenticatedEnd(t, events)
}

// wantUnauthenticatedEnd reads a stream until it ends, which must be with UNAUTHENTICATED.
func wantUnauthenticatedEnd(t *testing.T, s stream) {
	t.Helper()
	for {
		_, err := s.next()
		var p errProblem
		switch {
		case err == nil:
		case errors.As(err, &p) && p.code == "UNAUTHENTICATED":
			return
		default:
			t.Fatalf("the stream ended with %v", err)
		}
	}
}

// TestSignInSession_Expires tests that a session credential is refused, and its streams end, after eight hours.
func TestSignInSession_Expires(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	now := time.Now()
	var mu sync.Mutex
	clock := func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}
	w.now = clock
	g := w.run()
	key, _ := w.keyOf(g, "use")
	set := func(to time.Time) {
		mu.Lock()
		defer mu.Unlock()
		now = to
	}
	began := now
	// The credential expires in a second of the real clock, which ends its streams.
	set(began.Add(time.Second - topology.SignInSessionTTL))
	session := g.withKey(g.exchange(key.newCode()).want(t, 201).text("credential"))
	set(began)
	events := session.sse(w.session("default"), 0)
	defer events.close()
	wantUnauthenticatedEnd(t, events)
	set(began.Add(time.Second - time.Millisecond))
	session.get("/api/sessions").want(t, 200)
	set(began.Add(time.Second))
	session.get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
}

// TestSignIn_StoresOnlyHashes tests that neither bucket contains a code or a session credential.
func TestSignIn_StoresOnlyHashes(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, _ := w.keyOf(g, "use")
	kept := key.newCode()
	taken := key.newCode()
	credential := g.exchange(taken).want(t, 201).text("credential")
	for bucket, want := range map[string]int{topology.BucketSignInCodes: 1, topology.BucketSignInSessions: 1} {
		entries := bucketEntries(t, w.js, bucket)
		if len(entries) != want {
			t.Errorf("bucket %s has %d entries, want %d", bucket, len(entries), want)
		}
		for _, e := range entries {
			for _, secret := range []string{kept, taken, credential, key.key} {
				if strings.Contains(e, strings.Split(secret, "_")[2]) {
					t.Errorf("bucket %s contains %s in %s", bucket, secret, e)
				}
			}
		}
	}
}

// bucketEntries returns names and values of all entries of a bucket.
func bucketEntries(t *testing.T, js jetstream.JetStream, bucket string) (list []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	kv, err := js.KeyValue(ctx, bucket)
	must(t, err)
	names, err := kv.Keys(ctx)
	must(t, err)
	for _, name := range names {
		e, err := kv.Get(ctx, name)
		must(t, err)
		list = append(list, name+" "+string(e.Value()))
	}
	return list
}

// TestLocalKey_HasTheRightsOfACallerWithoutAKey tests that a gateway that requires a key accepts its local key for all
// that a gateway without keys serves, and refuses another key and requests without one.
func TestLocalKey_HasTheRightsOfACallerWithoutAKey(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	local, err := gateway.NewKey()
	must(t, err)
	other, err := gateway.NewKey()
	must(t, err)
	w.localKey = local
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys})
	for _, path := range []string{"/api/sessions", "/api/keys", "/api/budgets", "/api/audit", "/metrics"} {
		g.withKey(local).get(path).want(t, 200)
		g.get(path).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
		g.withKey(other).get(path).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	}
	session := g.exchange(g.withKey(local).newCode()).want(t, 201).text("credential")
	g.withKey(session).get("/api/keys").want(t, 200)
	// A data folder whose local key was removed gets another key, which also ends the sessions of the former one.
	w.localKey = other
	g = w.gateway(gateway.Config{Auth: gateway.AuthKeys})
	g.withKey(local).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	g.withKey(session).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	if _, err := gateway.New(gateway.Config{Auth: gateway.AuthKeys}, gateway.Deps{NATS: w.nc, Pool: w.pool, LocalKey: local[:len(local)-1]}); err == nil {
		t.Error("a local key that was cut is accepted")
	}
}
