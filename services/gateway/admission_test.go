package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway"
)

// withNewKey returns a client of the gateway with a new key of the tenant.
func (s *served) withNewKey(root, tenant string) *served {
	s.t.Helper()
	return s.withKey(s.withKey(root).do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","tenant":%q}`, tenant)).want(s.t, 201).text("key"))
}

// dialFrom connects to the gateway from the given address of this machine.
func dialFrom(t *testing.T, from, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(t.Context(), "tcp", strings.TrimPrefix(to, "http://"))
	must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// begin sends a request with n bytes of its body and without the end.
func (s *served) begin(method, path string, n int) net.Conn {
	s.t.Helper()
	c := dialFrom(s.t, "127.0.0.1", s.url)
	_, err := fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", method, path, s.key, n+1, strings.Repeat("x", n))
	must(s.t, err)
	return c
}

// answerOn reads an HTTP/1.1 response.
func answerOn(t *testing.T, c net.Conn) answer {
	t.Helper()
	must(t, c.SetReadDeadline(time.Now().Add(patience)))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	must(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(t, err)
	return answer{resp.StatusCode, resp.Header, b}
}

func (a answer) wantRetryAfter(t *testing.T) {
	t.Helper()
	if a.header.Get("Retry-After") == "" {
		t.Errorf("%s: no Retry-After", a)
	}
}

// TestBytesInFlight_LimitTenantsAndTotal tests that the bodies of one tenant's requests in flight may have SPOOL_MAX_TENANT_BYTES, and
// those of all tenants SPOOL_MAX_BYTES, and that a refused request is accepted after others have ended.
func TestBytesInFlight_LimitTenantsAndTotal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxRequest: 8 << 20, MaxTenantBytes: 10 << 20, MaxBytes: 13 << 20, ReadTimeout: time.Hour})
	one, other := g.withNewKey(root, "one"), g.withNewKey(root, "other")
	held := []net.Conn{one.begin("POST", "/api/sessions", 4<<20), one.begin("POST", "/api/sessions", 4<<20)}
	g.wantHeld(root, func(n float64) bool { return n >= 8<<20 })

	body := func(n int) string { return `{"metadata":"` + strings.Repeat("x", n) + `"}` }
	one.do("POST", "/api/sessions", body(3<<20)).wantProblem(t, 429, "TOO_MUCH_IN_FLIGHT", "").wantRetryAfter(t)
	_, err := spoolv1.NewSessionsClient(one.conn()).CreateSession(one.context(t.Context()), &spoolv1.CreateSessionRequest{Metadata: &spoolv1.Json{Text: body(3 << 20)}})
	wantCode(t, err, codes.ResourceExhausted, "TOO_MUCH_IN_FLIGHT", "")
	other.do("POST", "/api/sessions", `{}`).want(t, 201)
	other.do("POST", "/api/sessions", body(3<<20)).wantProblem(t, 413, "PAYLOAD_TOO_LARGE", "metadata") // its body was read completely
	other.do("POST", "/api/sessions", body(5<<20)).wantProblem(t, 503, "OVERLOADED", "").wantRetryAfter(t)
	_, err = spoolv1.NewSessionsClient(other.conn()).CreateSession(other.context(t.Context()), &spoolv1.CreateSessionRequest{Metadata: &spoolv1.Json{Text: body(5 << 20)}})
	wantCode(t, err, codes.ResourceExhausted, "OVERLOADED", "")
	one.do("POST", "/api/sessions", `{}`).want(t, 201)

	for _, c := range held {
		must(t, c.Close())
	}
	g.wantHeld(root, func(n float64) bool { return n < 1<<20 })
	one.do("POST", "/api/sessions", body(3<<20)).wantProblem(t, 413, "PAYLOAD_TOO_LARGE", "metadata")
}

// TestBytesInFlight_CountWebSocketMessages tests that messages of a WebSocket count too, and that the connection is closed with
// code 1013.
func TestBytesInFlight_CountWebSocketMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxRequest: 8 << 20, MaxTenantBytes: 10 << 20, ReadTimeout: time.Hour})
	one := g.withNewKey(root, "one")
	c := one.dial()
	// Each connection holds 16 KiB, the pieces of 64 KiB that arrived, and the next piece. The remaining bytes are
	// fewer than a message takes.
	for _, n := range append(slices.Repeat([]int{1}, 23), 4<<20, 4<<20) {
		one.begin("POST", "/api/sessions", n)
	}
	g.wantHeld(root, func(n float64) bool { return n == 10<<20-48<<10 })
	c.send(`{"type":"session:leave"}`)
	c.wantError("TOO_MUCH_IN_FLIGHT", "")
	if _, err := c.receive(); websocket.CloseStatus(err) != websocket.StatusTryAgainLater {
		t.Errorf("the WebSocket ended with %v", err)
	}
}

// wantHeld waits until right accepts the number of bytes in flight.
func (s *served) wantHeld(root string, right func(float64) bool) {
	s.t.Helper()
	var last string
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		for line := range strings.Lines(string(s.withKey(root).get("/metrics").body)) {
			if text, ok := strings.CutPrefix(line, "spool_gateway_held_bytes "); ok {
				var n float64
				_, err := fmt.Sscan(text, &n)
				must(s.t, err)
				if last = text; right(n) {
					return
				}
			}
		}
	}
	s.t.Fatalf("requests hold %s bytes", last)
}

// TestMaxTenantStreams_BoundsOneTenant tests that a tenant may have SPOOL_MAX_TENANT_STREAMS streams of all kinds together, and that
// other tenants are not affected.
func TestMaxTenantStreams_BoundsOneTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantStreams: 3})
	one, other := g.withNewKey(root, "one"), g.withNewKey(root, "other")
	id, theirs := w.session("one"), w.session("other")
	ws, s, r := one.ws(id, 1), one.sse(id, 1), one.rpc(id, 1)
	defer r.close()
	_ = ws
	g.wantStreams(root, 3)
	one.get("/api/sessions/"+id+"/events/stream").wantProblem(t, 429, "TOO_MANY_STREAMS", "").wantRetryAfter(t)
	one.get("/api/ws", header("Upgrade", "websocket")).wantProblem(t, 429, "TOO_MANY_STREAMS", "")
	more := one.rpc(id, 1)
	defer more.close()
	var p errProblem
	if _, err := more.next(); !errors.As(err, &p) || p.code != "TOO_MANY_STREAMS" {
		t.Errorf("got %v", err)
	}
	defer other.sse(theirs, 1).close()
	s.close()
	g.wantStreams(root, 3) // including the other tenant's
	defer one.sse(id, 1).close()
}

func (s *served) wantStreams(root string, n int) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		sum := 0
		for line := range strings.Lines(string(s.withKey(root).get("/metrics").body)) {
			if strings.HasPrefix(line, "spool_gateway_streams{") {
				var one int
				_, err := fmt.Sscan(line[strings.LastIndex(line, " "):], &one)
				must(s.t, err)
				sum += one
			}
		}
		if sum == n {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%d streams are open, want %d", sum, n)
		}
	}
}

// TestMaxConnections_BoundsAddressesAndTotal tests that SPOOL_MAX_ADDRESS_CONNECTIONS bounds the connections of one address and
// SPOOL_MAX_CONNECTIONS those of all, and that a connection above a limit is answered and closed.
func TestMaxConnections_BoundsAddressesAndTotal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{MaxConnections: 3, MaxAddressConns: 2})
	ask := func(from string) answer {
		c := dialFrom(t, from, g.url)
		_, err := io.WriteString(c, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
		must(t, err)
		return answerOn(t, c)
	}
	idle := func(from string) net.Conn {
		c := dialFrom(t, from, g.url)
		_, err := io.WriteString(c, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
		must(t, err)
		answerOn(t, c).want(t, 200)
		return c
	}
	idle("127.0.0.1")
	first := idle("127.0.0.1")
	ask("127.0.0.1").wantProblem(t, 503, "OVERLOADED", "").wantRetryAfter(t)
	idle("127.0.0.2")
	ask("127.0.0.3").wantProblem(t, 503, "OVERLOADED", "")
	must(t, first.Close())
	for deadline := time.Now().Add(patience); ask("127.0.0.1").status != 200; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a connection that was closed is still counted")
		}
	}

	// gRPC connections are counted separately. A refused client is not served, and clients that are connected stay
	// so.
	conn := g.conn()
	list := func(conn *grpc.ClientConn, ctx context.Context) error {
		_, err := spoolv1.NewSessionsClient(conn).ListSessions(ctx, &spoolv1.ListSessionsRequest{})
		return err
	}
	must(t, list(conn, t.Context()))
	must(t, list(g.conn(), t.Context()))
	if err := list(g.conn(), t.Context()); err == nil {
		t.Error("a third connection of one address is served")
	}
	must(t, list(conn, t.Context()))
}

// TestMaxHeader_BoundsHeadersThatNeverEnd tests that headers that never end hold at most 16 MiB together while other clients are served, and
// that a header that is too large is refused with the name of its largest field.
func TestMaxHeader_BoundsHeadersThatNeverEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	const attackers = 40
	ends := make(chan error, attackers)
	for range attackers {
		c := dialFrom(t, "127.0.0.2", g.url)
		go func() {
			_, err := io.WriteString(c, "GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: "+strings.Repeat("x", 1<<20))
			_ = c.SetReadDeadline(time.Now().Add(patience))
			resp, readErr := http.ReadResponse(bufio.NewReader(c), nil)
			if readErr == nil {
				_ = resp.Body.Close()
				readErr = fmt.Errorf("status %d", resp.StatusCode)
			}
			ends <- errors.Join(err, readErr)
		}()
	}
	// 15 headers of 1 MiB fit, and the first 32 KiB of each. The others are answered and closed while they are being
	// sent, so the client may see either. A connection that reaches the timeout for headers is closed without an
	// answer.
	for range attackers - 16 {
		if err := <-ends; err.Error() != "status 503" && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("a connection beyond the limit ended with: %v", err)
		}
		g.do("GET", "/api/sessions", "").want(t, 200)
	}
	for _, large := range []struct{ url, header, field string }{
		{"/api/sessions", "Idempotency-Key: " + strings.Repeat("x", 1<<20), "Idempotency-Key"},
		{"/api/sessions", "X-Large: " + strings.Repeat("x", 33<<10), "X-Large"},
		{"/health?" + strings.Repeat("x", 33<<10), "X-Small: x", ""},
	} {
		// The attackers' headers time out 10 s after their beginning, and their bytes are returned.
		for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
			c := dialFrom(t, "127.0.0.1", g.url)
			_, _ = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n", large.url, large.header)
			_ = c.SetReadDeadline(time.Now().Add(patience))
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err == nil && resp.StatusCode != 503 {
				body, err := io.ReadAll(resp.Body)
				must(t, errors.Join(err, resp.Body.Close()))
				answer{resp.StatusCode, resp.Header, body}.wantProblem(t, 400, "INVALID_REQUEST", large.field)
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: %v", large.field, err)
			}
		}
	}
}

// TestReadTimeout_EndsSlowBodies tests that a body or message that does not arrive within SPOOL_READ_TIMEOUT is refused, and that
// its bytes are returned.
func TestReadTimeout_EndsSlowBodies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{ReadTimeout: time.Second})
	id := w.session("default")
	body := func() net.Conn {
		c := dialFrom(t, "127.0.0.1", g.url)
		_, err := io.WriteString(c, "POST /api/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
		must(t, err)
		return c
	}()
	answerOn(t, body).wantProblem(t, 400, "INVALID_REQUEST", "")

	// A file that arrives slowly but steadily does not stall, and is refused because of its low rate.
	file := dialFrom(t, "127.0.0.1", g.url)
	_, err := fmt.Fprintf(file, "PUT /api/sessions/%s/files/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n", id)
	must(t, err)
	go func() {
		for {
			if _, err := file.Write([]byte("x")); err != nil {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	answerOn(t, file).wantProblem(t, 400, "INVALID_REQUEST", "")

	// A fragmented WebSocket message, with pings between the fragments.
	c := g.dial()
	wr, err := c.conn.Writer(c.ctx, websocket.MessageText)
	must(t, err)
	_, err = wr.Write(make([]byte, 20<<10))
	must(t, err)
	if _, err := c.receive(); err == nil {
		t.Error("a message that never ends is waited for")
	}
	g.wantMetric(t, "spool_gateway_held_bytes 0")
}

// TestReceive_RefusesBombs tests that a message that is compressed, or that is small on the wire and large in memory,
// is refused before it is decoded.
func TestReceive_RefusesBombs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	sessions := spoolv1.NewSessionsClient(g.conn())
	many := &spoolv1.CreateSessionRequest{}
	for range 30_000 {
		many.WorkspaceFiles = append(many.WorkspaceFiles, &spoolv1.WorkspaceFile{})
	}
	_, err := sessions.CreateSession(t.Context(), many)
	wantCode(t, err, codes.InvalidArgument, "PAYLOAD_TOO_LARGE", "")
	_, err = sessions.GetSession(t.Context(), &spoolv1.GetSessionRequest{SessionId: strings.Repeat("x", 1<<20)})
	wantCode(t, err, codes.InvalidArgument, "PAYLOAD_TOO_LARGE", "")
	if _, err = sessions.CreateSession(t.Context(), &spoolv1.CreateSessionRequest{Metadata: &spoolv1.Json{Text: `{"a":1}`}}, grpc.UseCompressor(gzip.Name)); err == nil {
		t.Error("a compressed message was taken")
	}
	g.do("POST", "/api/sessions", `{"workspaceFiles":[{}`+strings.Repeat(",{}", 30_000)+`]}`).wantProblem(t, 400, "INVALID_REQUEST", "workspaceFiles")
	if n := len(s.commands(t)); n != 0 {
		t.Errorf("%d commands were sent", n)
	}
	large := &spoolv1.CreateSessionRequest{WorkspaceFiles: []*spoolv1.WorkspaceFile{{Path: "a", Content: new(strings.Repeat("x", 12<<20))}}}
	if _, err := sessions.CreateSession(t.Context(), large); err != nil {
		t.Errorf("a message with a file of 12 MiB: %v", err)
	}
}
