package gateway_test

import (
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

func TestIdempotencyKey_RepeatsHaveOneEffect(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	one, other := w.gateway(gateway.Config{}), w.gateway(gateway.Config{})
	id := w.session("default")
	post := func(g *served, key, body string) answer {
		return g.do("POST", "/api/sessions/"+id+"/messages", body, header("Idempotency-Key", key))
	}
	first := post(one, "k", `{"content":"x","metadata":{"a":1}}`).want(t, 202)
	again := post(other, "k", ` {"metadata": {"a":1},  "content":"x"} `).want(t, 202)
	if string(first.body) != string(again.body) {
		t.Errorf("the repeat was answered %s, the first %s", again, first)
	}
	post(other, "k", `{"content":"y"}`).wantProblem(t, 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key")
	one.do("POST", "/api/executions", `{"content":"x","metadata":{"a":1}}`, header("Idempotency-Key", "k")).
		wantProblem(t, 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key")
	if second := post(one, "k2", `{"content":"x","metadata":{"a":1}}`).want(t, 202); second.text("executionId") == first.text("executionId") {
		t.Error("another key is another message")
	}
	for _, bad := range []string{"a b", strings.Repeat("x", 256), strings.Repeat("x", 1<<20), "é", ""} {
		post(one, bad, `{"content":"x"}`).wantProblem(t, 400, "INVALID_REQUEST", "Idempotency-Key")
	}
	if n := len(s.commands(t)); n != 2 {
		t.Errorf("%d commands were sent for 2 messages", n)
	}
	// A refused request had no effect, so its key may be used for the corrected request.
	s.mu.Lock()
	s.refuse = func(command.Command) *command.Error {
		return &command.Error{Code: "INVALID_REQUEST", Field: "architecture", Detail: "there is no such architecture"}
	}
	s.mu.Unlock()
	one.do("POST", "/api/sessions", `{"architecture":"x"}`, header("Idempotency-Key", "r")).wantProblem(t, 400, "INVALID_REQUEST", "architecture")
	s.mu.Lock()
	s.refuse = nil
	s.mu.Unlock()
	one.do("POST", "/api/sessions", `{"architecture":"spool"}`, header("Idempotency-Key", "r")).want(t, 201)
}

// TestOutcomeUnknown_RetryHasOneEffect tests that a command without an answer yields an unknown outcome, and that a retry with the
// returned key has a single effect.
func TestOutcomeUnknown_RetryHasOneEffect(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	// The timeout of a command bounds all its work. The gateway that never gets an answer has a short one; the other
	// has the default.
	brief, g := w.gateway(gateway.Config{CommandTimeout: 3 * time.Second}), w.gateway(gateway.Config{})
	for _, key := range []string{"", "mine"} {
		s.mu.Lock()
		s.silence = true
		s.mu.Unlock()
		var opts []option
		if key != "" {
			opts = append(opts, header("Idempotency-Key", key))
		}
		lost := brief.do("POST", "/api/sessions", `{"metadata":7}`, opts...).wantProblem(t, 503, "UNAVAILABLE", "")
		named := lost.text("idempotencyKey")
		if named == "" || key != "" && named != key || !strings.Contains(lost.text("detail"), named) || lost.header.Get("Retry-After") == "" {
			t.Fatalf("got %s", lost)
		}
		s.mu.Lock()
		s.silence = false
		s.mu.Unlock()
		a := g.do("POST", "/api/sessions", `{"metadata":7}`, header("Idempotency-Key", named)).want(t, 201)
		b := g.do("POST", "/api/sessions", `{"metadata":7}`, header("Idempotency-Key", named)).want(t, 201)
		if a.text("sessionId") != b.text("sessionId") {
			t.Errorf("a retry made %s, then %s", a, b)
		}
		g.do("POST", "/api/sessions", `{"metadata":8}`, header("Idempotency-Key", named)).wantProblem(t, 409, "IDEMPOTENCY_MISMATCH", "Idempotency-Key")
	}
	ids := map[string]bool{}
	for _, c := range s.commands(t) {
		ids[c.SessionID] = true
	}
	if len(ids) != 2 {
		t.Errorf("2 requests with their retries made %d sessions", len(ids))
	}
}

// TestCommand_IsRetriedAfterACrash tests that a session service that dies with a command costs one try and not the request.
func TestCommand_IsRetriedAfterACrash(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	s.silence = true
	g := w.gateway(gateway.Config{})
	answered := make(chan answer, 1)
	go func() { answered <- g.do("POST", "/api/sessions", `{}`) }()
	for len(s.commands(t)) == 0 {
		time.Sleep(5 * time.Millisecond)
	}
	s.mu.Lock()
	s.silence = false
	s.mu.Unlock()
	a := (<-answered).want(t, 201)
	list := s.commands(t)
	if len(list) != 2 || list[0].ID != list[1].ID || list[1].SessionID != a.text("sessionId") {
		t.Errorf("got %+v", list)
	}
}

// TestReadModelsBehind_EndsTheWait tests that a read that waits for a position that is not reached returns an error in time.
func TestReadModelsBehind_EndsTheWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{LagAfter: 200 * time.Millisecond})
	id := w.session("default")
	t.Run("minPosition", func(t *testing.T) {
		t.Parallel()
		began := time.Now()
		g.get("/api/sessions/"+id+"?minPosition=0-999999").wantProblem(t, 503, "READ_MODEL_BEHIND", "minPosition")
		if took := time.Since(began); took < 4*time.Second || took > 10*time.Second {
			t.Errorf("it took %s", took)
		}
	})
	t.Run("streams are notified", func(t *testing.T) {
		t.Parallel()
		c := g.ws(id, 1)
		w.exec("UPDATE checkpoints SET lag_ms = 5000 WHERE grp = $1", events.Partitioning(topology.DefaultPartitions).GroupOfID(id))
		if r := c.want("session:lag"); !r.Lagging || r.SessionID != id {
			t.Errorf("got %+v", r)
		}
		w.exec("UPDATE checkpoints SET lag_ms = 0 WHERE grp = $1", events.Partitioning(topology.DefaultPartitions).GroupOfID(id))
		if r := c.want("session:lag"); r.Lagging {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("the read models are folded again", func(t *testing.T) {
		id := oldID(t, events.KindSession)
		w.exec("UPDATE checkpoints SET caught_up = false WHERE grp = $1", events.Partitioning(topology.DefaultPartitions).GroupOfID(id))
		g.get("/api/sessions/"+id).wantProblem(t, 503, "UNAVAILABLE", "")
		w.exec("UPDATE checkpoints SET caught_up = true")
		g.get("/api/sessions/"+id).wantProblem(t, 404, "SESSION_NOT_FOUND", "sessionId")
	})
}

// TestLag_IsReportedWithoutAProjector tests that clients are notified if no projector folds what was written through this gateway.
func TestLag_IsReportedWithoutAProjector(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{LagAfter: 500 * time.Millisecond})
	id := w.session("default")
	c := g.ws(id, 1)
	ahead := command.Answer{SessionID: id, ExecutionID: newID(t, events.KindExecution), Position: "0-5000"}
	s.mu.Lock()
	s.answer = &ahead
	s.mu.Unlock()
	g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"x"}`).want(t, 202)
	if r := c.want("session:lag"); !r.Lagging {
		t.Errorf("got %+v", r)
	}
	w.exec("UPDATE checkpoints SET position = 5000 WHERE grp = $1", events.Partitioning(topology.DefaultPartitions).GroupOfID(id))
	if r := c.want("session:lag"); r.Lagging {
		t.Errorf("got %+v", r)
	}
}

// TestNATSOutage_NeedsNoRestart tests that, while NATS is not available, requests answer 503, readiness names NATS and
// streams continue from Postgres, and that no restart is needed.
func TestNATSOutage_NeedsNoRestart(t *testing.T) {
	t.Parallel()
	srv := natstest.RunRestartable(t)
	w := newWorldOn(t, srv.Conn())
	w.serveCommands()
	g := w.gatewayOn(gateway.Config{CommandTimeout: time.Second}, srv.Conn(), w.openPool(w.url))
	id := w.session("default")
	one, s := newWatcher(), g.ws(id, 0)
	one.until(t, s, func() bool { return one.seq == 1 })

	srv.Stop()
	a := g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"x"}`).wantProblem(t, 503, "UNAVAILABLE", "")
	if a.header.Get("Retry-After") == "" {
		t.Errorf("got %s", a)
	}
	g.do("POST", "/api/sessions", `{}`, header("Idempotency-Key", "k")).wantProblem(t, 503, "UNAVAILABLE", "")
	if r := g.get("/readyz").want(t, 503); r.text("checks", "nats") == "ok" || r.text("checks", "postgres") != "ok" {
		t.Errorf("got %s", r)
	}
	g.get("/api/sessions/"+id).want(t, 200)
	w.mu.Lock()
	w.unannounced = true
	w.mu.Unlock()
	w.emit("default", id, events.Event{Data: events.Log{Message: "while NATS is away"}})
	one.until(t, s, func() bool { return one.seq == 2 })

	srv.Start()
	w.mu.Lock()
	w.unannounced = false
	w.mu.Unlock()
	g.eventually(t, "/readyz", 200)
	for deadline := time.Now().Add(patience); ; {
		if a := g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"x"}`); a.status == 202 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("got %s", a)
		}
	}
	one.until(t, s, func() bool { return one.seq >= 3 })
}

// TestPostgresOutage_NeedsNoRestart tests that, while Postgres is not available, reads answer 503, readiness names Postgres,
// commands are accepted and streams continue from LIVE, and that no restart is needed.
func TestPostgresOutage_NeedsNoRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	l := newLink(t, w.url)
	nc, err := w.nats.ConnectAs(topology.UserGateway)
	must(t, err)
	t.Cleanup(nc.Close)
	g := w.gatewayOn(gateway.Config{}, nc, w.openPool(l.url))
	id := w.session("default")
	one, s := newWatcher(), g.ws(id, 0)
	one.until(t, s, func() bool { return one.seq == 1 })

	l.set(false)
	for _, path := range []string{"/api/sessions/" + id, "/api/sessions", "/api/sessions/" + id + "/events/stream?after=0"} {
		if a := g.get(path).wantProblem(t, 503, "UNAVAILABLE", ""); a.header.Get("Retry-After") == "" {
			t.Errorf("got %s", a)
		}
	}
	if r := g.get("/readyz").want(t, 503); r.text("checks", "postgres") == "ok" || r.text("checks", "nats") != "ok" {
		t.Errorf("got %s", r)
	}
	g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"x"}`).want(t, 202) // writes need only NATS
	one.until(t, s, func() bool { return one.seq == 2 })                          // and so do live events
	w.mu.Lock()
	w.unannounced = true
	w.mu.Unlock()
	w.emit("default", id, events.Event{Data: events.Log{Message: "missed"}})
	l.set(true)
	g.eventually(t, "/readyz", 200)
	one.until(t, s, func() bool { return one.seq == 3 })
	g.get("/api/sessions/"+id).want(t, 200)
}

// link is a proxy to Postgres that can be cut.
type link struct {
	url    string
	socket string

	mu    sync.Mutex
	up    bool
	conns map[net.Conn]bool
}

func newLink(t *testing.T, pg string) *link {
	t.Helper()
	u, err := url.Parse(pg)
	must(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	l := &link{up: true, conns: map[net.Conn]bool{}, socket: u.Query().Get("host") + "/.s.PGSQL." + u.Query().Get("port")}
	l.url = fmt.Sprintf("postgres://%s@%s%s?sslmode=disable", u.User, listener.Addr(), u.Path)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { l.carry(c) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		l.set(false)
		wg.Wait()
	})
	return l
}

func (l *link) carry(c net.Conn) {
	defer c.Close()
	pg, err := net.Dial("unix", l.socket)
	if err != nil || !l.add(c, pg) {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(pg, c)
		_ = pg.Close()
	}()
	_, _ = io.Copy(c, pg)
	_ = c.Close()
	<-done
}

func (l *link) add(list ...net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range list {
		if !l.up {
			_ = c.Close()
			continue
		}
		l.conns[c] = true
	}
	return l.up
}

// set cuts or restores the link.
func (l *link) set(up bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.up = up
	for c := range l.conns {
		_ = c.Close()
		delete(l.conns, c)
	}
}

// eventually repeats a request until it has the status.
func (s *served) eventually(t *testing.T, path string, status int) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		a := s.get(path)
		if a.status == status {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s answers %s", path, a)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
