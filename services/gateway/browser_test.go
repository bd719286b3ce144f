package gateway_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc/codes"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// browser is a client with a session cookie.
type browser struct {
	*served
	cookie *http.Cookie
	csrf   string
}

// signIn exchanges a proof, the fields of the request's body, for a session cookie.
func (s *served) signIn(proof string, opts ...option) browser {
	s.t.Helper()
	a := s.withKey("").do("POST", "/api/signin/sessions", `{"cookie":true`+proof+`}`, opts...).want(s.t, 201)
	if a.text("credential") != "" {
		s.t.Errorf("the answer with a cookie has a credential: %s", a)
	}
	return browser{s.withKey(""), a.cookie(s.t), a.text("csrfToken")}
}

// cookie returns the only cookie that the response sets.
func (a answer) cookie(t testing.TB) *http.Cookie {
	t.Helper()
	list := (&http.Response{Header: a.header}).Cookies()
	if len(list) != 1 {
		t.Fatalf("the answer sets %d cookies: %v", len(list), a.header)
	}
	return list[0]
}

// withCookie sends the browser's cookie.
func (b browser) withCookie() option { return header("Cookie", b.cookie.Name+"="+b.cookie.Value) }

// send sends a request with the browser's cookie.
func (b browser) send(method, path, body string, opts ...option) answer {
	b.t.Helper()
	return b.do(method, path, body, append([]option{b.withCookie()}, opts...)...)
}

// at returns the browser as a client of another gateway.
func (b browser) at(g *served) browser { return browser{g.withKey(""), b.cookie, b.csrf} }

func byKey(key string) string   { return fmt.Sprintf(`,"apiKey":%q`, key) }
func byCode(code string) string { return fmt.Sprintf(`,"code":%q`, code) }

// TestCookie_SignsInWithEachProof tests that a code, an API key in the body and an API key in the header are exchanged for a
// cookie that has the rights of the key at every gateway, and that signing out ends its session there.
func TestCookie_SignsInWithEachProof(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	first, second := w.run(), w.run()
	key, id := w.keyOf(first, "use")
	for name, signIn := range map[string]func() browser{
		"code":   func() browser { return first.signIn(byCode(key.newCode())) },
		"body":   func() browser { return first.signIn(byKey(key.key)) },
		"header": func() browser { return first.signIn("", header("Authorization", "Bearer "+key.key)) },
	} {
		t.Run(name, func(t *testing.T) {
			b := signIn()
			if c := b.cookie; !c.HttpOnly || c.Secure || c.SameSite != http.SameSiteStrictMode || c.Path != "/" || c.Domain != "" || c.Name != "spool" {
				t.Errorf("the cookie is %s", c)
			}
			if left := time.Until(b.cookie.Expires); left < 167*time.Hour || left > 169*time.Hour {
				t.Errorf("the cookie expires in %s, want a week", left)
			}
			at := b.at(second)
			who := at.send("GET", "/api/signin/session", "").want(t, 200)
			if who.text("tenant") != "default" || who.text("role") != "use" || who.text("keyId") != id || who.text("keyName") != "x" || who.text("csrfToken") != b.csrf || who.text("expiresAt") == "" {
				t.Errorf("got %s", who)
			}
			at.send("GET", "/api/sessions", "").want(t, 200)
			at.send("GET", "/api/keys", "").wantProblem(t, 403, "FORBIDDEN", "Authorization")
			at.send("POST", "/api/sessions", `{}`, header("X-CSRF-Token", b.csrf)).want(t, 201)
			at.send("POST", "/api/signin/codes", "{}", header("X-CSRF-Token", b.csrf)).wantProblem(t, 403, "FORBIDDEN", "Authorization")
			b.withKey(b.cookie.Value).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
			out := at.send("DELETE", "/api/signin/session", "", header("X-CSRF-Token", b.csrf)).want(t, 200)
			if c := out.cookie(t); c.MaxAge >= 0 || c.Value != "" || c.Name != b.cookie.Name || c.Path != b.cookie.Path {
				t.Errorf("signing out sets the cookie %s", c)
			}
			b.send("GET", "/api/sessions", "").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
		})
	}
	key.get("/api/signin/session").want(t, 200)
	key.do("DELETE", "/api/signin/session", "").wantProblem(t, 400, "INVALID_REQUEST", "Authorization")
}

// TestCookie_RefusesProofs tests proofs that are not valid, and a cookie over gRPC.
func TestCookie_RefusesProofs(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, _ := w.keyOf(g, "use")
	credential := g.exchange(key.newCode()).want(t, 201).text("credential")
	b := g.signIn(byKey(key.key))
	for _, c := range []struct {
		name, proof string
		status      int
		code, field string
	}{
		{"no proof", "", 401, "UNAUTHENTICATED", "code"},
		{"a code and a key", byCode(key.newCode()) + byKey(key.key), 400, "INVALID_REQUEST", "apiKey"},
		{"a malformed key", byKey("x\r\nX: y"), 401, "UNAUTHENTICATED", "Authorization"},
		{"an unknown key", byKey("spool_sk_" + strings.Repeat("0", 38)), 401, "UNAUTHENTICATED", "Authorization"},
		{"the root key", byKey(w.root), 403, "FORBIDDEN", "Authorization"},
		{"a session credential", byKey(credential), 403, "FORBIDDEN", "Authorization"},
		{"the value of a cookie", byKey(b.cookie.Value), 401, "UNAUTHENTICATED", "Authorization"},
		{"another field", `,"apikey":"x"`, 400, "INVALID_REQUEST", "apikey"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := g.do("POST", "/api/signin/sessions", `{"cookie":true`+c.proof+`}`).wantProblem(t, c.status, c.code, c.field)
			if a.header.Get("Set-Cookie") != "" {
				t.Errorf("the answer sets a cookie: %v", a.header)
			}
		})
	}
	_, err := spoolv1.NewSignInClient(g.conn()).ExchangeSignInCode(t.Context(), &spoolv1.ExchangeSignInCodeRequest{ApiKey: key.key, Cookie: true})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "cookie")
	out, err := spoolv1.NewSignInClient(g.conn()).ExchangeSignInCode(t.Context(), &spoolv1.ExchangeSignInCodeRequest{ApiKey: key.key})
	must(t, err)
	g.withKey(out.GetCredential()).get("/api/sessions").want(t, 200)
	g.withKey(out.GetCredential()).do("DELETE", "/api/signin/session", "").want(t, 200)
	g.withKey(out.GetCredential()).get("/api/sessions").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
}

// TestAttack_CookieWithoutCSRFToken tests that a request with a cookie changes nothing without the token of that session:
// a form of another site, the token of another session, and a request with a key besides the cookie.
func TestAttack_CookieWithoutCSRFToken(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, _ := w.keyOf(g, "admin")
	victim, attacker := g.signIn(byKey(key.key)), g.signIn(byKey(key.key))
	if victim.csrf == attacker.csrf || victim.csrf == "" {
		t.Fatalf("the tokens are %q and %q", victim.csrf, attacker.csrf)
	}
	id := w.session("default")
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "PROPFIND", "get"} {
		for name, token := range map[string]string{"none": "", "of another session": attacker.csrf, "cut": victim.csrf[1:], "longer": victim.csrf + "0", "the cookie": victim.cookie.Value} {
			a := victim.send(method, "/api/sessions/"+id, `{}`, header("X-CSRF-Token", token))
			if a.status != 403 || a.text("code") != "CSRF_REFUSED" || a.text("field") != "X-CSRF-Token" {
				t.Errorf("%s with token %s: got %s", method, name, a)
			}
		}
	}
	victim.send("PUT", "/api/sessions/"+id+"/files/a", "b").wantProblem(t, 403, "CSRF_REFUSED", "X-CSRF-Token")
	victim.send("DELETE", "/api/signin/session", "").wantProblem(t, 403, "CSRF_REFUSED", "X-CSRF-Token")
	victim.send("GET", "/api/sessions/"+id, "").want(t, 200)
	// A request with a key is authenticated by the key alone.
	victim.send("POST", "/api/sessions", `{}`, header("Authorization", "Bearer "+key.key)).want(t, 201)
	victim.send("GET", "/api/sessions", "", header("Authorization", "Bearer x")).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	victim.send("GET", "/api/sessions", "", header("Authorization", "Basic eDp5")).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
}

// TestAttack_CookieFromAnotherSite tests that pages of other origins can neither use a cookie nor get one, not even with
// the CSRF token, and not where allowed-origins is *.
func TestAttack_CookieFromAnotherSite(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: w.root, AllowedOrigins: []string{"*", "https://app.example"}})
	key, _ := w.keyOf(g, "use")
	b := g.signIn(byKey(key.key))
	host := strings.TrimPrefix(g.url, "http://")
	for _, c := range []struct {
		name         string
		origin, site string
		field        string // "" if the request is served
	}{
		{"own page", "http://" + host, "same-origin", ""},
		{"address bar", "", "none", ""},
		{"a program", "", "", ""},
		{"allowed by name", "https://app.example", "cross-site", ""},
		{"allowed by *", "https://evil.example", "cross-site", "Origin"},
		{"allowed by *, old browser", "https://evil.example", "", "Origin"},
		{"sandboxed page", "null", "cross-site", "Origin"},
		{"same host, another scheme", "https://" + host, "cross-site", "Sec-Fetch-Site"},
		{"link or form of another site", "", "cross-site", "Sec-Fetch-Site"},
		{"another host of the domain", "", "same-site", "Sec-Fetch-Site"},
		{"unknown value", "", "x", "Sec-Fetch-Site"},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := func(r *http.Request) {
				for name, value := range map[string]string{"Origin": c.origin, "Sec-Fetch-Site": c.site} {
					if value != "" {
						r.Header.Set(name, value)
					}
				}
			}
			read := b.send("GET", "/api/sessions", "", from)
			write := b.send("POST", "/api/sessions", `{}`, from, header("X-CSRF-Token", b.csrf))
			signIn := g.do("POST", "/api/signin/sessions", `{"cookie":true`+byKey(key.key)+`}`, from)
			conn, err := b.dialWith(t, "/api/ws", from, b.withCookie())
			if c.field == "" {
				read.want(t, 200)
				write.want(t, 201)
				signIn.want(t, 201)
				must(t, err)
				conn.close()
			} else {
				read.wantProblem(t, 403, "ORIGIN_REFUSED", c.field)
				write.wantProblem(t, 403, "ORIGIN_REFUSED", c.field)
				signIn.wantProblem(t, 403, "ORIGIN_REFUSED", c.field)
				if err == nil {
					t.Error("the WebSocket is opened")
				}
			}
			if got := read.header.Get("Access-Control-Allow-Credentials"); (got == "true") != (c.origin == "https://app.example") {
				t.Errorf("Access-Control-Allow-Credentials is %q", got)
			}
		})
	}
}

// dialWith opens a WebSocket with options of the request.
func (s *served) dialWith(t *testing.T, path string, opts ...option) (*ws, error) {
	t.Helper()
	r := &http.Request{Header: http.Header{}}
	for _, o := range opts {
		o(r)
	}
	conn, resp, err := websocket.Dial(t.Context(), s.url+path, &websocket.DialOptions{HTTPHeader: r.Header, HTTPClient: s.client()})
	if err != nil {
		if resp != nil && resp.Body != nil {
			_ = resp.Body.Close()
		}
		return nil, err
	}
	c := &ws{t: t, conn: conn, ctx: t.Context(), cancel: func() {}}
	t.Cleanup(c.close)
	return c, nil
}

// TestAttack_CookieFixation tests that signing in never keeps the cookie that a client has, and ends its session, and that
// a cookie which was set twice is refused.
func TestAttack_CookieFixation(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	mine, _ := w.keyOf(g, "use")
	other := g.withKey(g.withKey(w.root).do("POST", "/api/keys", `{"name":"y","tenant":"other"}`).want(t, 201).text("key"))
	planted := g.signIn(byKey(other.key))
	victim := g.signIn(byKey(mine.key), planted.withCookie())
	if victim.cookie.Value == planted.cookie.Value || victim.csrf == planted.csrf {
		t.Fatal("the session keeps the planted cookie")
	}
	planted.send("GET", "/api/sessions", "").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	again := g.signIn(byKey(other.key))
	two := fmt.Sprintf("spool=%s; spool=%s", victim.cookie.Value, again.cookie.Value)
	g.get("/api/sessions", header("Cookie", two)).wantProblem(t, 401, "UNAUTHENTICATED", "Cookie")
	// A value that no gateway has created is not adopted.
	forged := "spool_sb_" + strings.Repeat("0", 38)
	a := g.do("POST", "/api/signin/sessions", `{"cookie":true`+byKey(mine.key)+`}`, header("Cookie", "spool="+forged)).want(t, 201)
	if a.cookie(t).Value == forged {
		t.Error("a forged cookie is adopted")
	}
}

// TestAttack_CookieOfAnotherTenant tests that a cookie shows nothing of other tenants, also with their CSRF tokens.
func TestAttack_CookieOfAnotherTenant(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	mine, _ := w.keyOf(g, "admin")
	other := g.withKey(g.withKey(w.root).do("POST", "/api/keys", `{"name":"y","tenant":"other"}`).want(t, 201).text("key"))
	a, b := g.signIn(byKey(mine.key)), g.signIn(byKey(other.key))
	id := w.session("default")
	a.send("GET", "/api/sessions/"+id, "").want(t, 200)
	b.send("GET", "/api/sessions/"+id, "").wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	b.send("DELETE", "/api/sessions/"+id, "", header("X-CSRF-Token", a.csrf)).wantProblem(t, 403, "CSRF_REFUSED", "X-CSRF-Token")
	b.send("DELETE", "/api/sessions/"+id, "", header("X-CSRF-Token", b.csrf)).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	if who := b.send("GET", "/api/signin/session", "").want(t, 200); who.text("tenant") != "other" || who.text("csrfToken") != b.csrf {
		t.Errorf("got %s", who)
	}
}

// TestAttack_OversizedCookies tests cookies that are too large, too many or malformed.
func TestAttack_OversizedCookies(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.run()
	key, _ := w.keyOf(g, "use")
	value := g.signIn(byKey(key.key)).cookie.Value
	g.get("/api/sessions", header("Cookie", "spool="+strings.Repeat("a", 64<<10))).wantProblem(t, 400, "INVALID_REQUEST", "Cookie")
	g.get("/api/sessions", header("Cookie", strings.Repeat("a=b; ", 4000)+"spool="+value)).want(t, 401)
	for _, bad := range []string{"spool_sb_" + strings.Repeat("a", 20_000), value + "0", value[:len(value)-1], strings.ToUpper(value), "spool_ss_" + value[9:], "../" + value, "%00"} {
		g.get("/api/sessions", header("Cookie", "spool="+bad)).want(t, 401)
	}
	g.get("/api/sessions", header("Cookie", "Spool="+value)).want(t, 401)
	g.get("/api/sessions", header("Cookie", "a=b; spool="+value+"; c=d")).want(t, 200)
}

// TestCookie_EndsWithItsKey tests that a session with a cookie, and its WebSocket and SSE streams at all gateways, end with
// UNAUTHENTICATED when the key is revoked, and when the session is ended.
func TestCookie_EndsWithItsKey(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"revoked key", "sign-out"} {
		t.Run(end, func(t *testing.T) {
			w := newSignInWorld(t)
			first, second := w.run(), w.run()
			key, id := w.keyOf(first, "use")
			b := first.signIn(byKey(key.key))
			session := w.session("default")
			events := b.at(second).sseWithCookie(session)
			defer events.close()
			socket, err := b.at(second).dialWith(t, "/api/ws", b.withCookie())
			must(t, err)
			socket.send(fmt.Sprintf(`{"type":"session:join","requestId":"j","sessionId":%q}`, session))
			socket.want("session:joined")
			if end == "sign-out" {
				b.send("DELETE", "/api/signin/session", "", header("X-CSRF-Token", b.csrf)).want(t, 200)
			} else {
				first.withKey(w.root).do("DELETE", "/api/keys/"+id, "").want(t, 200)
			}
			wantUnauthenticatedEnd(t, events)
			wantUnauthenticatedEnd(t, socket)
			b.send("GET", "/api/sessions", "").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
			b.send("POST", "/api/sessions", `{}`, header("X-CSRF-Token", b.csrf)).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
		})
	}
}

// sseWithCookie opens a stream of a session with the browser's cookie.
func (b browser) sseWithCookie(session string) *sse {
	b.t.Helper()
	c := *b.served
	c.http = &http.Client{Transport: cookieTransport{b.cookie}}
	return c.sse(session, 0)
}

// cookieTransport sends a cookie with every request.
type cookieTransport struct{ cookie *http.Cookie }

func (c cookieTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.AddCookie(&http.Cookie{Name: c.cookie.Name, Value: c.cookie.Value})
	return client.Transport.RoundTrip(r)
}

// TestCookie_IsRenewedUntilItsLifetimeEnds tests that a session with a cookie ends after 8 hours without a request, that
// requests renew it, and that it ends after signin-lifetime in spite of them.
func TestCookie_IsRenewedUntilItsLifetimeEnds(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	var mu sync.Mutex
	now := time.Now()
	w.now = func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}
	pass := func(d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		now = now.Add(d)
	}
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: w.root, SignInLifetime: 24 * time.Hour})
	key, _ := w.keyOf(g, "use")
	idle := g.signIn(byKey(key.key))
	used := g.signIn(byKey(key.key))
	for range 3 {
		pass(topology.SignInSessionTTL - time.Minute)
		used.send("GET", "/api/sessions", "").want(t, 200)
	}
	idle.send("GET", "/api/sessions", "").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	pass(3*time.Minute - time.Second)
	used.send("GET", "/api/sessions", "").want(t, 200)
	pass(time.Second)
	used.send("GET", "/api/sessions", "").wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
}

// TestCookie_StoresOnlyHashes tests that neither NATS nor the log of the gateway contains keys, codes, cookies and CSRF tokens.
func TestCookie_StoresOnlyHashes(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	var log lockedBuffer
	w.logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	g := w.run()
	key, _ := w.keyOf(g, "use")
	code := key.newCode()
	g.do("POST", "/api/signin/sessions", `{"code":"`+code+`","apiKey":"`+key.key+`"}`).want(t, 400)
	b := g.signIn(byCode(code))
	b = g.signIn(byKey(key.key), b.withCookie())
	b.send("POST", "/api/sessions", `{}`, header("X-CSRF-Token", b.csrf)).want(t, 201)
	for _, message := range []string{`{"type":"authenticate","key":"` + key.key + `","x":1}`, `{"type":"authenticate","key":"` + key.key + `"}`} {
		socket, err := g.dialWith(t, "/api/ws?auth=message")
		must(t, err)
		socket.send(message)
		_, _, err = socket.conn.Read(socket.ctx)
		must(t, err)
	}
	g.stop()
	if !strings.Contains(log.String(), "/api/signin/sessions") {
		t.Fatalf("the log has no request: %s", log.String())
	}
	for _, e := range append(bucketEntries(t, w.js, topology.BucketSignInSessions), log.String()) {
		for _, secret := range []string{key.key, code, b.cookie.Value, b.csrf} {
			if strings.Contains(e, secret[len(secret)-20:]) {
				t.Errorf("%s is in %s", secret, e)
			}
		}
	}
}

// lockedBuffer is a buffer for concurrent use.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// TestAttack_FailedSignInsAreLimited tests that an address with too many refused proofs is refused, with a code, a key and
// a first message, while another address is served.
func TestAttack_FailedSignInsAreLimited(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: w.root, TrustedProxies: []string{"127.0.0.1"}})
	key, _ := w.keyOf(g, "use")
	attacker, other := header("X-Forwarded-For", "2001:db8::1"), header("X-Forwarded-For", "2001:db8:0:1::1")
	for range 20 {
		g.do("POST", "/api/signin/sessions", `{"apiKey":"x"}`, attacker).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	}
	for _, address := range []string{"2001:db8::1", "2001:db8::ffff"} { // a client has a /64
		a := g.do("POST", "/api/signin/sessions", fmt.Sprintf(`{"code":%q}`, key.newCode()), header("X-Forwarded-For", address)).wantProblem(t, 429, "RATE_LIMITED", "")
		if a.header.Get("Retry-After") == "" {
			t.Error("the answer has no Retry-After")
		}
	}
	socket, err := g.dialWith(t, "/api/ws?auth=message", attacker)
	must(t, err)
	socket.send(fmt.Sprintf(`{"type":"authenticate","key":%q}`, key.key))
	socket.wantError("RATE_LIMITED", "")
	g.signIn(byKey(key.key), other)
}

// TestWebSocket_AuthenticatesByItsFirstMessage tests the first message of a connection, and everything that may come in its
// place.
func TestWebSocket_AuthenticatesByItsFirstMessage(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: w.root, ReadTimeout: 2 * time.Second})
	key, id := w.keyOf(g, "use")
	credential := g.exchange(key.newCode()).want(t, 201).text("credential")
	value := g.signIn(byKey(key.key)).cookie.Value
	session := w.session("default")
	open := func(t *testing.T) *ws {
		t.Helper()
		c, err := g.dialWith(t, "/api/ws?auth=message", header("Authorization", "Bearer "+w.root), header("Cookie", "spool="+value))
		must(t, err)
		return c
	}
	join := fmt.Sprintf(`{"type":"session:join","requestId":"j","sessionId":%q}`, session)
	for _, c := range []struct {
		name, message string
		code, field   string
	}{
		{"another message", join, "UNAUTHENTICATED", "type"},
		{"no key", `{"type":"authenticate"}`, "INVALID_REQUEST", "key"},
		{"a malformed key", `{"type":"authenticate","key":"x"}`, "UNAUTHENTICATED", "Authorization"},
		{"the root key", fmt.Sprintf(`{"type":"authenticate","key":%q}`, w.root), "FORBIDDEN", "Authorization"},
		{"the value of a cookie", fmt.Sprintf(`{"type":"authenticate","key":%q}`, value), "UNAUTHENTICATED", "Authorization"},
		{"a number", `{"type":"authenticate","key":1}`, "INVALID_REQUEST", "key"},
		{"another field", `{"type":"authenticate","key":"x","token":"y"}`, "INVALID_REQUEST", "type"},
		{"not JSON", `{`, "INVALID_REQUEST", ""},
		{"nothing", "", "UNAUTHENTICATED", "key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			socket := open(t)
			if c.message != "" {
				socket.send(c.message)
			}
			socket.wantError(c.code, c.field)
			if _, err := socket.receive(); websocket.CloseStatus(err) != websocket.StatusPolicyViolation || !strings.Contains(err.Error(), c.code) {
				t.Errorf("the connection ended with %v", err)
			}
		})
	}
	for _, c := range []struct{ name, proof string }{{"key", key.key}, {"credential", credential}} { // the last one revokes the key
		socket := open(t)
		socket.send(fmt.Sprintf(`{"type":"authenticate","requestId":"a","key":%q}`, c.proof))
		if r := socket.want("authenticated"); r.RequestID != "a" {
			t.Errorf("%s: got %+v", c.name, r)
		}
		socket.send(fmt.Sprintf(`{"type":"authenticate","requestId":"b","key":%q}`, c.proof))
		socket.wantError("INVALID_REQUEST", "type")
		socket.send(join)
		socket.want("session:joined")
		if c.name == "credential" {
			g.withKey(w.root).do("DELETE", "/api/keys/"+id, "").want(t, 200)
			wantUnauthenticatedEnd(t, socket)
		}
	}
	for _, query := range []string{"?auth=", "?auth=key", "?auth=message&auth=message"} {
		g.get("/api/ws"+query).wantProblem(t, 400, "INVALID_REQUEST", "auth")
	}
	g.get("/api/ws?key="+key.key).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
}

// TestPathPrefix_BehindAProxy tests that all protocols work below a path prefix behind a proxy that keeps the prefix, and
// behind one that removes it.
func TestPathPrefix_BehindAProxy(t *testing.T) {
	t.Parallel()
	const prefix = "/tools/spool"
	w := newSignInWorld(t)
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: w.root, PathPrefix: prefix})
	key, _ := w.keyOf(g, "use")
	target, err := url.Parse(g.url)
	must(t, err)
	proxy := httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host
	}, Transport: client.Transport, FlushInterval: -1}
	for name, handler := range map[string]http.Handler{"keeps": &proxy, "removes": http.StripPrefix(prefix, &proxy)} {
		t.Run(name, func(t *testing.T) {
			front := httptest.NewServer(handler)
			defer front.Close()
			p := &served{t: t, url: front.URL + prefix}
			p.get("/healthz").want(t, 200)
			doc := p.get("/api/openapi.json").want(t, 200)
			if doc.text("servers", "0", "url") != prefix || doc.text("openapi") != "3.1.0" {
				t.Errorf("the servers are %v", doc.field("servers"))
			}
			b := p.signIn(byKey(key.key), header("Origin", front.URL))
			if b.cookie.Path != prefix+"/" || b.cookie.Name != "spool" {
				t.Errorf("the cookie is %s", b.cookie)
			}
			id := w.session("default")
			b.send("GET", "/api/sessions/"+id, "").want(t, 200)
			b.send("GET", "/api/sessions/"+id+"/files/a%2Fb", "").wantProblem(t, 404, "NO_SNAPSHOT", "sessionId")
			b.send("POST", "/api/sessions", `{}`, header("Origin", front.URL), header("X-CSRF-Token", b.csrf)).want(t, 201)
			b.send("POST", "/api/sessions", `{}`, header("Origin", front.URL)).wantProblem(t, 403, "CSRF_REFUSED", "X-CSRF-Token")
			stream := b.sseWithCookie(id)
			if e, err := stream.next(); err != nil || e.Seq != 1 {
				t.Errorf("SSE: %v, %v", e, err)
			}
			stream.close()
			socket, err := b.dialWith(t, "/api/ws", b.withCookie(), header("Origin", front.URL))
			must(t, err)
			socket.send(fmt.Sprintf(`{"type":"session:join","requestId":"j","sessionId":%q}`, id))
			socket.want("session:joined")
			socket.close()
			first, err := p.dialWith(t, "/api/ws?auth=message")
			must(t, err)
			first.send(fmt.Sprintf(`{"type":"authenticate","key":%q}`, key.key))
			first.want("authenticated")
			first.close()
			b.send("DELETE", "/api/signin/session", "", header("X-CSRF-Token", b.csrf)).want(t, 200)
		})
	}
	for _, path := range []string{prefix + "x/api/sessions", prefix + prefix + "/api/sessions", "/tools/sp%6Fol/api/sessions", "/tools//spool/api/sessions", "/tools/spool/../api/sessions"} {
		if a := key.get(path); a.status == 200 {
			t.Errorf("%s is served: %s", path, a)
		}
	}
}

// TestAttack_ForgedPrefixAndProtocol tests that headers of a client set neither the path of the cookie and the links nor,
// without a trusted proxy, whether the cookie is secure.
func TestAttack_ForgedPrefixAndProtocol(t *testing.T) {
	t.Parallel()
	w := newSignInWorld(t)
	dir := t.TempDir()
	pool := writeCertificate(t, dir, time.Now(), time.Hour)
	forged := func(r *http.Request) {
		for _, name := range []string{"X-Forwarded-Prefix", "X-Script-Name", "X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Path"} {
			r.Header.Set(name, "/evil/../api/keys")
		}
		r.Header.Set("X-Forwarded-Host", "evil.example")
		r.Header.Set("Forwarded", "host=evil.example;proto=https")
		r.Header.Set("X-Forwarded-Proto", "https")
	}
	base := gateway.Config{Auth: gateway.AuthKeys, RootKey: w.root}
	for _, c := range []struct {
		name         string
		set          func(*gateway.Config)
		cookie, path string
	}{
		{"no proxy", func(*gateway.Config) {}, "spool", "/"},
		{"another proxy", func(c *gateway.Config) { c.TrustedProxies = []string{"192.0.2.1"} }, "spool", "/"},
		{"trusted proxy", func(c *gateway.Config) { c.TrustedProxies = []string{"127.0.0.1"} }, "__Host-spool", "/"},
		{"trusted proxy and prefix", func(c *gateway.Config) { c.TrustedProxies, c.PathPrefix = []string{"127.0.0.1"}, "/p" }, "__Secure-spool", "/p/"},
		{"TLS", func(c *gateway.Config) {
			c.TLSCert, c.TLSKey = filepath.Join(dir, certificate.CertificateFile), filepath.Join(dir, certificate.KeyFile)
		}, "__Host-spool", "/"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := base
			c.set(&cfg)
			g := w.gateway(cfg)
			if cfg.TLSCert != "" {
				g = g.withTrustedPool(pool)
			}
			key, _ := w.keyOf(g, "use")
			b := g.signIn(byKey(key.key), forged)
			if b.cookie.Name != c.cookie || b.cookie.Path != c.path || b.cookie.Secure != (c.cookie != "spool") || b.cookie.Domain != "" {
				t.Errorf("the cookie is %s", b.cookie)
			}
			b.send("GET", "/api/sessions", "", forged).want(t, 200)
			if doc := b.send("GET", "/api/openapi.json", "", forged).want(t, 200); bytes.Contains(doc.body, []byte("evil")) {
				t.Error("the OpenAPI document has the forged prefix")
			}
			// A cookie without the prefix of its name, which another host of the domain could have set, is ignored over TLS.
			if c.cookie != "spool" {
				g.get("/api/sessions", forged, header("Cookie", "spool="+b.cookie.Value)).want(t, 401)
			}
		})
	}
}

// TestCookie_IsIgnoredWithoutKeys tests that a gateway without keys serves a client whose cookie another server has set.
func TestCookie_IsIgnoredWithoutKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	cookie := header("Cookie", "spool=of another server")
	if a := g.get("/api/signin/session", cookie).want(t, 200); a.text("tenant") != "default" || a.text("csrfToken") != "" {
		t.Errorf("got %s", a)
	}
	g.do("POST", "/api/sessions", `{}`, cookie).want(t, 201)
}

func TestSettingPathPrefix_RefusesAmbiguousPaths(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"/", "spool", "/spool/", "//spool", "/a//b", "/..", "/a/../b", "/api", "/api/x", "/health", "/metrics", "/a b", "/a;b", "/a?b", "/%61", "https://x/y", "/é", "/" + strings.Repeat("a", 300)} {
		if _, err := gateway.New(gateway.Config{PathPrefix: bad}, gateway.Deps{}); err == nil || !strings.Contains(err.Error(), "path-prefix") {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
	if _, err := gateway.New(gateway.Config{SignInLifetime: -1}, gateway.Deps{}); err == nil || !strings.Contains(err.Error(), "signin-lifetime") {
		t.Errorf("a lifetime of -1: %v", err)
	}
}
