package gateway_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// longSession creates a session with n times 600,000 bytes of events.
func (w *world) longSession(tenant string, n int) (id string) {
	w.t.Helper()
	id = w.session(tenant)
	for range n {
		var list []events.Event
		for range 10 {
			list = append(list, events.Event{Data: events.Log{Message: strings.Repeat("x", 60_000)}})
		}
		w.emit(tenant, id, list...)
	}
	return id
}

// requestStalled sends a GET request and does not read the response, with a minimal receive buffer.
func (s *served) requestStalled(path string, headers ...string) net.Conn {
	s.t.Helper()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		failed := c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10) })
		return errors.Join(failed, err)
	}}
	c, err := d.DialContext(s.t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	must(s.t, err)
	s.t.Cleanup(func() { _ = c.Close() })
	_, err = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n%s\r\n", path, s.key, strings.Join(append(headers, ""), "\r\n"))
	must(s.t, err)
	return c
}

// joinStalled joins a session from its beginning over one of the transports and does not read. leave closes it.
func (s *served) joinStalled(session string, transport int) (leave func()) {
	s.t.Helper()
	var c net.Conn
	switch transport % 3 {
	case 0:
		c = s.requestStalled("/api/sessions/" + session + "/events/stream")
	case 1:
		c = s.requestStalled("/api/ws", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
		var b [1]byte
		for head := ""; !strings.HasSuffix(head, "\r\n\r\n"); head += string(b[:]) {
			_, err := io.ReadFull(c, b[:])
			must(s.t, err)
		}
		body := fmt.Sprintf(`{"type":"session:join","sessionId":%q}`, session)
		_, err := c.Write(append([]byte{0x81, 0x80 | byte(len(body)), 0, 0, 0, 0}, body...))
		must(s.t, err)
	default:
		r := s.rpc(session, 0)
		s.t.Cleanup(r.close)
		return r.close
	}
	return func() { _ = c.Close() }
}

// TestBytesInFlight_CountUnsentStreamData tests that the unsent data of streams counts as bytes in flight. Clients that join and do
// not read may hold half of the bytes of their tenant. Further joins of the tenant wait, while its requests and other
// tenants are served.
func TestBytesInFlight_CountUnsentStreamData(t *testing.T) {
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxRequest: 8 << 20, MaxTenantBytes: 10 << 20, MaxBytes: 13 << 20, WriteTimeout: time.Hour})
	one, other := g.withNewKey(root, "one"), g.withNewKey(root, "other")
	long, theirs := w.longSession("one", 5), w.longSession("other", 5)
	measure := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse)
	}
	before := measure()
	const clients = 150
	var leave []func()
	for i := range clients {
		leave = append(leave, one.joinStalled(long, i))
	}
	g.withKey(root).wantMetric(t, fmt.Sprintf("spool_gateway_readers %d", clients))
	// Fewer bytes are left than a join needs.
	// A gRPC call holds 16 KiB in addition.
	g.wantHeld(root, func(n float64) bool { return n > 5<<20-2<<20 && n <= 5<<20+clients/3*16<<10 })
	held := measure() - before
	t.Logf("%d joins of clients that do not read hold %d bytes, of gateway and test together", clients, held)
	if held > 150<<20 { // 60 MB were measured, and 400 MB before streams were counted
		t.Errorf("%d joins of clients that do not read hold %d bytes", clients, held)
	}

	one.get("/api/sessions").want(t, 200)
	foreign := newWatcher()
	s := other.sse(theirs, 0)
	defer s.close()
	foreign.until(t, s, func() bool { return foreign.seq == w.tip(theirs) })

	waits := newWatcher()
	c := one.ws(long, 0)
	for _, leave := range leave {
		leave()
	}
	waits.until(t, c, func() bool { return waits.seq == w.tip(long) })
	g.wantHeld(root, func(n float64) bool { return n < 1<<20 })
}

// TestBytesInFlight_StreamWaitsThenEnds tests that a stream that gets no bytes waits for three times
// SPOOL_WRITE_TIMEOUT and then ends with a typed error, and that a client that reconnects with its cursor later
// continues exactly.
func TestBytesInFlight_StreamWaitsThenEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxRequest: 8 << 20, MaxTenantBytes: 10 << 20, ReadTimeout: time.Hour, WriteTimeout: time.Second})
	one := g.withNewKey(root, "one")
	long := w.longSession("one", 1)
	for i := range 20 {
		w.emit("one", long, events.Event{ConversationID: "main", Data: events.BlockComplete{Block: events.Block{ID: fmt.Sprint(i), Kind: events.KindAssistantText, Content: strings.Repeat("x", 60_000)}}})
	}
	bodies := []net.Conn{one.begin("POST", "/api/sessions", 4<<20), one.begin("POST", "/api/sessions", 5<<20)}
	g.wantHeld(root, func(n float64) bool { return n >= 9<<20 })
	for _, tr := range transports {
		s := tr.join(one, long, 0)
		var p errProblem
		if _, err := s.next(); !errors.As(err, &p) || p.code != "TOO_MUCH_IN_FLIGHT" {
			t.Errorf("%s: got %v", tr.name, err)
		}
		s.close()
	}
	ahead := one.dial()
	ahead.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"after":1000}`, long))
	ahead.wantError("CURSOR_AHEAD", "after")
	ahead.wantError("TOO_MUCH_IN_FLIGHT", "") // instead of the blocks, which do not fit
	for _, c := range bodies {
		must(t, c.Close())
	}
	for _, tr := range transports {
		all := newWatcher()
		s := tr.join(one, long, 0)
		all.until(t, s, func() bool { return all.seq == w.tip(long) })
		s.close()
	}
	g.wantHeld(root, func(n float64) bool { return n == 0 })
}
