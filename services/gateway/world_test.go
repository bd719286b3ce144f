package gateway_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// world has the dependencies of a gateway. Its methods write rows and messages in place of the session service and
// the projector.
type world struct {
	t    *testing.T
	url  string             // URL of the read models, for the gateway's role
	pool *pgxpool.Pool      // connects as the projector's role
	nats *natsserver.Server // nil if the test has its own server
	nc   *nats.Conn         // the test's connection, with all rights
	js   jetstream.JetStream

	projector *nats.Conn // connection of the projector's user, if the server has users
	executor  *nats.Conn // connection of the executor's user, if the server has users

	budgetsUnpublished atomic.Bool // budgets are not published to the services

	mu          sync.Mutex
	position    int64
	sessions    map[string]*fakeSession
	entries     map[string]*versions.State // catalogue entries by id
	sealer      gateway.Sealer             // the gateways' Sealer; nil for none
	localKey    string                     // of the gateways that are started next
	now         func() time.Time           // the gateways' clock; nil for time.Now
	unannounced bool                       // commits rows and stores text without announcing them
	frames      map[int]uint64             // number of the last frame, by partition
}

// fakeSession is a session in the state that the projector would have folded.
type fakeSession struct {
	tenant, id string
	agent      string
	seq        uint32
	position   string
	blocks     map[string]*events.Block
	first      map[string]uint32 // first seq by block
	ord        map[string]int    // order by execution
	text       map[string]int    // bytes of text by open block
}

func newWorld(t *testing.T) *world {
	t.Helper()
	srv := natstest.RunConfig(t, natsserver.Config{Relaxed: true, MaxPayload: 8 << 20, Accounts: true})
	nc, err := srv.ConnectAs(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	w := newWorldOn(t, nc)
	w.nats = srv
	w.projector, err = srv.ConnectAs(topology.UserProjector)
	must(t, err)
	t.Cleanup(w.projector.Close)
	w.executor, err = srv.ConnectAs(topology.UserExecutor)
	must(t, err)
	t.Cleanup(w.executor.Close)
	return w
}

func newWorldOn(t *testing.T, nc *nats.Conn) *world {
	t.Helper()
	js, err := jetstream.New(nc)
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{Partitions: topology.DefaultPartitions}))
	db := readmodeltest.NewDatabase(t)
	w := &world{t: t, url: db.Gateway, nc: nc, projector: nc, executor: nc, js: js, frames: map[int]uint64{}, sessions: map[string]*fakeSession{}, entries: map[string]*versions.State{}}
	must(t, readmodel.Migrate(t.Context(), db.Projector))
	w.pool = w.openPool(db.Projector)
	w.exec("UPDATE checkpoints SET caught_up = true")
	return w
}

func (w *world) openPool(url string) *pgxpool.Pool {
	w.t.Helper()
	pool, err := readmodel.Open(w.t.Context(), url)
	must(w.t, err)
	w.t.Cleanup(pool.Close)
	return pool
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	_, err := w.pool.Exec(w.t.Context(), sql, args...)
	must(w.t, err)
}

// gateway runs a gateway until the test ends, as the gateway's own NATS user.
func (w *world) gateway(cfg gateway.Config) *served {
	w.t.Helper()
	nc, err := w.nats.ConnectAs(topology.UserGateway)
	must(w.t, err)
	w.t.Cleanup(nc.Close)
	return w.gatewayOn(cfg, nc, w.openPool(w.url))
}

// served is a running gateway, and a client of it.
type served struct {
	t    *testing.T
	url  string
	grpc string
	stop func()
	key  string // sent with every request
	http *http.Client
	tls  *tls.Config // TLS configuration of clients; nil without TLS
}

// client returns the HTTP client: a separate one with TLS.
func (s *served) client() *http.Client {
	if s.http == nil {
		return client
	}
	return s.http
}

func (w *world) gatewayOn(cfg gateway.Config, nc *nats.Conn, pool *pgxpool.Pool) *served {
	w.t.Helper()
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.GRPCListen == "" {
		cfg.GRPCListen = "127.0.0.1:0"
	}
	g, err := gateway.New(cfg, gateway.Deps{NATS: nc, Pool: pool, Partitions: topology.DefaultPartitions, Logger: natstest.Logger(w.t), Sealer: w.sealer, Now: w.now, LocalKey: w.localKey})
	must(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	var once sync.Once
	stop := func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Errorf("the gateway ended with %v", err)
			}
		})
	}
	w.t.Cleanup(stop)
	select {
	case <-g.Ready():
	case err := <-done:
		w.t.Fatalf("the gateway did not start: %v", err)
	}
	return &served{t: w.t, url: g.URL(), grpc: g.GRPCAddr().String(), stop: stop}
}

// session creates a session and returns its id.
func (w *world) session(tenant string) string { return w.sessionOf(tenant, "default") }

// sessionOf creates a session of an agent.
func (w *world) sessionOf(tenant, agent string) string {
	w.t.Helper()
	id := newID(w.t, events.KindSession)
	w.emit(tenant, id, events.Event{Data: events.SessionCreated{Agent: agent, AgentVersion: "1", Architecture: "spool", Provider: "local",
		Options: events.Options{IdleTimeoutMs: 900000, TurnLimitMs: 3600000, SessionLimitMs: 86400000}}})
	return id
}

// emit commits events and announces them, like the projector.
func (w *world) emit(tenant, session string, list ...events.Event) {
	w.t.Helper()
	w.commit(tenant, session, list)
}

// emitText publishes text in flight, like an executor: the next piece of an open block.
func (w *world) emitText(tenant, session, block, text string) {
	w.t.Helper()
	w.mu.Lock()
	f := w.sessions[session]
	d := events.Delta{BlockID: block, ConversationID: events.MainConversation, Epoch: 1, Offset: uint32(f.text[block]), Text: text, Time: time.Now().UTC()}
	if b := f.blocks[block]; b != nil {
		d.ExecutionID = b.ExecutionID
	}
	f.text[block] += len(text)
	w.mu.Unlock()
	w.emitDelta(tenant, session, d)
}

// emitDelta publishes a delta in a frame of its own, and waits until DELTAS has it, unless NATS is away. Without
// announcements only DELTAS has it, and the frame is missing in the sequence of frames.
func (w *world) emitDelta(tenant, session string, d events.Delta) {
	w.t.Helper()
	const partitions = events.Partitioning(topology.DefaultPartitions)
	p := partitions.PartitionOf(session)
	w.mu.Lock()
	w.frames[p]++
	number, unannounced := w.frames[p], w.unannounced
	w.mu.Unlock()
	raw := encode(w.t, d)
	nc, subject := w.executor, events.FrameSubject(p, "xtr_test")
	data := events.AppendFrameDelta(events.AppendFrameHeader(nil, number), events.FrameSessionKey(tenant, session), raw)
	if unannounced {
		nc, subject, data = w.nc, "dl."+events.PartitionToken(p)+"."+tenant+"."+session, raw
	}
	if nc.IsConnected() {
		if _, err := nc.Request(subject, data, 2*time.Second); err == nil {
			return
		}
	}
	must(w.t, nc.Publish(subject, data))
}

func (w *world) commit(tenant, session string, list []events.Event) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.sessions[session]
	if f == nil {
		f = &fakeSession{tenant: tenant, id: session, blocks: map[string]*events.Block{}, first: map[string]uint32{}, ord: map[string]int{}, text: map[string]int{}}
		w.sessions[session] = f
	}
	ctx := context.Background()
	tx, err := w.pool.Begin(ctx)
	must(w.t, err)
	p := projection{w: w, tx: tx, f: f}
	live := readmodel.LiveMessage{Session: session}
	w.position++
	f.position = "0-" + strconv.FormatInt(w.position, 10)
	for i, e := range list {
		live.Events = append(live.Events, p.event(e, i))
	}
	p.do("UPDATE sessions SET tip = $3, tip_position = $4, updated_at = now(), changed_at = $5 WHERE tenant = $1 AND id = $2", tenant, session, int64(f.seq), f.position, w.position)
	p.do("UPDATE checkpoints SET position = $2 WHERE grp = $1", events.Partitioning(topology.DefaultPartitions).GroupOfID(session), w.position)
	if err := tx.Commit(ctx); err != nil {
		w.t.Error(err) // not Fatal, because another goroutine may have called
	}
	live.Tip = f.seq
	if !w.unannounced {
		w.announce(tenant, live)
		must(w.t, w.projector.Publish(events.LiveSubject(tenant, readmodel.ChangesToken), nil))
	}
}

func (w *world) announce(tenant string, live readmodel.LiveMessage) {
	w.t.Helper()
	must(w.t, w.projector.Publish(events.LiveSubject(tenant, live.Session), encode(w.t, live)))
}

// projection folds events into rows in one transaction.
type projection struct {
	w  *world
	tx pgx.Tx
	f  *fakeSession
}

func (p projection) do(sql string, args ...any) {
	p.w.t.Helper()
	if _, err := p.tx.Exec(context.Background(), sql, args...); err != nil {
		p.w.t.Errorf("%s: %v", sql, err)
	}
}

// stored adds to the bytes that a tenant stores.
func (p projection) stored(tenant string, bytes int64) {
	p.do(`INSERT INTO tenant_usage (tenant, id, grp, day, turns, tokens, cost_usd, time_ms, stored_bytes) VALUES ($1, '/0', 0, '', 0, 0, 0, 0, $2)
		ON CONFLICT (tenant, id) DO UPDATE SET stored_bytes = tenant_usage.stored_bytes + $2`, tenant, bytes)
}

func (p projection) event(e events.Event, i int) events.WireEvent {
	f := p.f
	f.seq++
	e.ID = events.DeriveID(events.KindEvent, f.position, strconv.Itoa(i))
	if e.Source == "" {
		e.Source = events.FromServer
	}
	if e.Time.IsZero() {
		e.Time = time.Date(2026, 1, 2, 3, 4, 5, int(f.seq)*1000, time.UTC)
	}
	wire, err := e.ToWire(f.id, f.seq, f.position)
	must(p.w.t, err)
	p.do("INSERT INTO events VALUES ($1, $2, $3, $4, $5)", f.tenant, f.id, int64(f.seq), string(wire.Type), string(encode(p.w.t, wire)))
	if _, first := e.Data.(events.MessageAccepted); first {
		f.ord[e.ExecutionID] = len(f.ord)
	}
	p.block(e)
	switch d := e.Data.(type) {
	case events.SessionCreated:
		f.agent = d.Agent
		p.do(`INSERT INTO sessions (tenant, id, grp, status, agent, agent_version, architecture, provider, options, metadata, created_at, updated_at, tip, tip_position)
			VALUES ($1, $2, $3, 'open', $4, $5, $6, $7, $8, $9, $10, $10, 0, '')`, f.tenant, f.id, events.Partitioning(topology.DefaultPartitions).GroupOfID(f.id), d.Agent, d.AgentVersion, d.Architecture,
			d.Provider, string(encode(p.w.t, d.Options)), text(d.Metadata), e.Time)
		p.do("UPDATE sessions SET agent_ref = $3, instance = $4, environments = $5 WHERE tenant = $1 AND id = $2", f.tenant, f.id, d.AgentRef.String(), d.Instance.String(),
			string(encode(p.w.t, texts(d.Environments))))
	case events.SessionForked:
		p.do("UPDATE sessions SET parent = $3, forked = $4 WHERE tenant = $1 AND id = $2", f.tenant, f.id, d.Parent, string(encode(p.w.t, d)))
	case events.SessionOptionsUpdated:
		p.do("UPDATE sessions SET options = $3, metadata = coalesce($4, metadata) WHERE tenant = $1 AND id = $2", f.tenant, f.id, string(encode(p.w.t, d.Options)), text(d.Metadata))
	case events.MessageAccepted:
		p.do(`INSERT INTO executions (tenant, session, id, ord, phase, metadata, queued_at, first_seq, query, recovered_from) VALUES ($1, $2, $3, $4, 'queued', $5, $6, $7, $8, $9)`,
			f.tenant, f.id, e.ExecutionID, f.ord[e.ExecutionID], text(d.Metadata), e.Time, int64(f.seq), d.Content, d.RecoveredFrom)
		p.do("UPDATE sessions SET executions = executions + 1, title = CASE WHEN executions = 0 THEN $3 ELSE title END WHERE tenant = $1 AND id = $2", f.tenant, f.id, d.Content)
	case events.ExecutionResolved:
		p.do("UPDATE executions SET resolved = $4 WHERE tenant = $1 AND session = $2 AND id = $3", f.tenant, f.id, e.ExecutionID, string(encode(p.w.t, d)))
	case events.FilePut:
		p.stored(f.tenant, int64(d.Size))
	case events.WorkspaceSynced:
		p.do("UPDATE sessions SET snapshot = $3, snapshot_at = $4, workspace_files = $5, workspace_bytes = $6 WHERE tenant = $1 AND id = $2",
			f.tenant, f.id, d.Snapshot, e.Time, int64(d.Files), int64(d.Bytes))
	case events.FileModified:
		p.do(`INSERT INTO files VALUES ($1, $2, $3, $3, $4, false, false, $5, $6, $7)`, f.tenant, f.id, d.Path, int64(d.Size), e.ExecutionID, e.Time, int64(f.seq))
	case events.ExecutionCompleted:
		p.do("UPDATE executions SET phase = 'completed', result = $4, ended_at = $5, duration_ms = $6 WHERE tenant = $1 AND session = $2 AND id = $3",
			f.tenant, f.id, e.ExecutionID, d.Result, e.Time, int64(d.DurationMs))
	case events.ExecutionFailed:
		p.do("UPDATE executions SET phase = 'failed', code = $4, message = $5, ended_at = $6 WHERE tenant = $1 AND session = $2 AND id = $3", f.tenant, f.id, e.ExecutionID, d.Code, d.Message, e.Time)
	case events.ExecutionCancelled:
		p.cancelled(e, d.Reason)
	case events.ExecutionWithdrawn:
		p.cancelled(e, d.Reason)
	case events.SubagentSpawned:
		p.do(`INSERT INTO conversations VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 'running', $9, NULL, 0, $10)`, f.tenant, f.id, d.Conversation, d.Parent,
			e.ExecutionID, d.SubagentID, d.ToolUseID, d.Name, e.Time, int64(f.seq))
	case events.ApprovalRequested, events.ApprovalDecided, events.ApprovalResolved, events.ApprovalRetracted:
		p.approval(e)
	case events.SessionDeleted:
		p.do("INSERT INTO deleted_sessions (tenant, id, grp, deleted_at, parent, forked, agent, changed_at) SELECT tenant, id, grp, now(), parent, forked, agent, $3 FROM sessions WHERE tenant = $1 AND id = $2", f.tenant, f.id, p.w.position)
		for _, table := range []string{"sessions WHERE tenant = $1 AND id", "executions WHERE tenant = $1 AND session", "approvals WHERE tenant = $1 AND session"} {
			p.do("DELETE FROM "+table+" = $2", f.tenant, f.id)
		}
	}
	return wire
}

func (p projection) approval(e events.Event) {
	const where = " WHERE tenant = $1 AND session = $2 AND id = $3"
	f := p.f
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		p.do(`INSERT INTO approvals (tenant, session, id, execution, conversation, kind, tool_name, tool_use_id, title, status, request, requested_seq, requested_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'pending', $10, $11, $12)`, f.tenant, f.id, d.ApprovalID, e.ExecutionID, e.ConversationID, string(d.Kind), d.ToolName, d.ToolUseID, d.Title,
			string(encode(p.w.t, d)), int64(f.seq), e.Time)
	case events.ApprovalDecided:
		p.do("UPDATE approvals SET status = 'decided', verdict = $4, decision = $5, actor = $6, decided_seq = $7, decided_at = $8"+where, f.tenant, f.id, d.ApprovalID,
			d.Decision, string(encode(p.w.t, d)), `{"kind":"key","id":"key_1","key":"key_1","user":"ann"}`, int64(f.seq), e.Time)
	case events.ApprovalResolved:
		p.do("UPDATE approvals SET status = $4, cause = $5, ended_seq = $6, ended_at = $7"+where, f.tenant, f.id, d.ApprovalID, d.Outcome, d.Cause, int64(f.seq), e.Time)
	case events.ApprovalRetracted:
		p.do("UPDATE approvals SET status = 'retracted', cause = $4, ended_seq = $5, ended_at = $6"+where, f.tenant, f.id, d.ApprovalID, d.Reason, int64(f.seq), e.Time)
	}
}

func (p projection) cancelled(e events.Event, reason string) {
	p.do("UPDATE executions SET phase = 'cancelled', reason = $4, ended_at = $5 WHERE tenant = $1 AND session = $2 AND id = $3", p.f.tenant, p.f.id, e.ExecutionID, reason, e.Time)
}

func (p projection) block(e events.Event) {
	f := p.f
	id := blocks.ChangedBlockID(e)
	if id == "" {
		return
	}
	b := blocks.Reduce(f.blocks[id], e)
	f.blocks[id] = b
	if f.first[id] == 0 {
		f.first[id] = f.seq
	}
	p.do(`INSERT INTO blocks VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
		ON CONFLICT (tenant, session, id) DO UPDATE SET status = $7, last_seq = $10, block = $11`, f.tenant, f.id, id, b.ExecutionID, b.ConversationID,
		string(b.Kind), string(b.Status), f.ord[b.ExecutionID], int64(f.first[id]), int64(f.seq), string(encode(p.w.t, b)))
	if b.Status != events.StatusPending {
		delete(f.text, id)
	}
}

// addKey stores an API key, like the projector.
func (w *world) addKey(tenant string, d events.KeyCreated) {
	w.t.Helper()
	var expires *time.Time
	if !d.Rights.ExpiresAt.IsZero() {
		expires = &d.Rights.ExpiresAt
	}
	w.exec("INSERT INTO keys VALUES ($1, $2, $3, $4, $5, $6, now(), NULL, $7, $8, $9, $10)", tenant, d.KeyID, events.Partitioning(topology.DefaultPartitions).GroupOfID(d.KeyID), d.Name, d.Prefix, d.SHA256,
		string(d.Rights.Role), strings.Join(d.Rights.Agents, ","), expires, d.CreatedBy)
}

func text(raw json.RawMessage) *string {
	if raw == nil {
		return nil
	}
	s := string(raw)
	return &s
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	must(t, enc.Encode(v))
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

func newID(t testing.TB, kind events.IDKind) string {
	t.Helper()
	id, err := events.NewID(kind, time.Now(), rand.Reader)
	must(t, err)
	return id
}

// oldID returns an id from the past, for which reads do not wait.
func oldID(t testing.TB, kind events.IDKind) string {
	t.Helper()
	id, err := events.NewID(kind, time.Now().Add(-time.Hour), rand.Reader)
	must(t, err)
	return id
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// answer is an HTTP response.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// field returns the value at a path of the JSON body.
func (a answer) field(path ...string) any {
	var v any
	dec := json.NewDecoder(bytes.NewReader(a.body))
	dec.UseNumber()
	if dec.Decode(&v) != nil {
		return nil
	}
	for _, p := range path {
		switch m := v.(type) {
		case map[string]any:
			v = m[p]
		case []any:
			i, err := strconv.Atoi(p)
			if err != nil || i >= len(m) {
				return nil
			}
			v = m[i]
		default:
			return nil
		}
	}
	return v
}

func (a answer) number(path ...string) float64 {
	n, _ := a.field(path...).(json.Number)
	f, _ := n.Float64()
	return f
}

func (a answer) text(path ...string) string {
	s, _ := a.field(path...).(string)
	return s
}

func (a answer) String() string { return fmt.Sprintf("%d %s", a.status, a.body) }

type option func(*http.Request)

func header(name, value string) option { return func(r *http.Request) { r.Header.Set(name, value) } }

func (s *served) do(method, path, body string, opts ...option) answer {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, bytes.NewReader([]byte(body)))
	must(s.t, err)
	if s.key != "" {
		req.Header.Set("Authorization", "Bearer "+s.key)
	}
	for _, o := range opts {
		o(req)
	}
	resp, err := s.client().Do(req)
	must(s.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(s.t, err)
	return answer{resp.StatusCode, resp.Header, b}
}

func (s *served) get(path string, opts ...option) answer {
	s.t.Helper()
	return s.do("GET", path, "", opts...)
}

// want fails the test unless the response has the status.
func (a answer) want(t testing.TB, status int) answer {
	t.Helper()
	if a.status != status {
		t.Fatalf("got %s, want %d", a, status)
	}
	return a
}

// wantProblem fails the test unless the response is a problem with that code and field.
func (a answer) wantProblem(t testing.TB, status int, code, field string) answer {
	t.Helper()
	if a.status != status || a.text("code") != code || a.text("field") != field || a.text("detail") == "" ||
		a.header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("got %s (%s), want %d %s field %q", a, a.header.Get("Content-Type"), status, code, field)
	}
	return a
}

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func TestMain(m *testing.M) {
	// The tests' Postgres is started once and outlives the tests.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("os/exec.(*Cmd).Start.func2"), goleak.IgnoreAnyFunction("os/exec.(*Cmd).Wait"),
		// The tests store objects with the ObjectStore of nats.go. Its Put removes its listener at the end; if the listener's
		// goroutine has not begun by then, the goroutine waits on a nil channel forever (nats.go 1.55).
		goleak.IgnoreTopFunction("github.com/nats-io/nats.go/jetstream.(*jetStream).resetPendingAcksOnReconnect"))
}
