package projector_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
)

func TestMain(m *testing.M) {
	if os.Getenv(processNATS) != "" {
		if err := process(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// The Postgres server of pgtest runs until the process ends, and a goroutine waits for it.
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"), goleak.IgnoreAnyFunction("os/exec.(*Cmd).Wait"), goleak.IgnoreAnyFunction("os.(*Process).Wait"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server.init.0.func1"), goleak.IgnoreAnyFunction("os/exec.(*Cmd).Start.func2"))
}

const patience = 30 * time.Second

// world holds a log and a database for one test.
type world struct {
	t   testing.TB
	srv *natsserver.Server
	nc  *nats.Conn
	js  jetstream.JetStream
	log *jslog.Log
	db  readmodeltest.RoleURLs
	url string
}

func newWorld(t testing.TB, shards int) *world {
	t.Helper()
	return newWorldOn(t, shards, natsserver.Config{Relaxed: true})
}

func newWorldOn(t testing.TB, shards int, cfg natsserver.Config) *world {
	t.Helper()
	return newWorldWith(t, topology.Layout{Shards: shards, Partitions: topology.DefaultPartitions}, cfg)
}

func newWorldWith(t testing.TB, layout topology.Layout, cfg natsserver.Config) *world {
	t.Helper()
	srv := natstest.RunConfig(t, cfg)
	nc := natstest.Conn(t, srv)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, installation(layout)); err != nil {
		t.Fatal(err)
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: layout.Shards, Partitions: layout.Partitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}})
	if err != nil {
		t.Fatal(err)
	}
	db := readmodeltest.NewDatabase(t)
	return &world{t: t, srv: srv, nc: nc, js: js, log: log, db: db, url: db.Projector}
}

// installation returns the settings that install a layout.
func installation(l topology.Layout) topology.ProvisionConfig {
	if l.Partitions == 0 {
		return topology.ProvisionConfig{Shards: l.Shards}
	}
	return topology.ProvisionConfig{Shards: l.Shards, Partitions: l.Partitions.PartitionCount()}
}

// migrate creates the tables without a projector.
func (w *world) migrate() {
	w.t.Helper()
	if err := readmodel.Migrate(w.t.Context(), w.url); err != nil {
		w.t.Fatal(err)
	}
}

func logger(t testing.TB) *slog.Logger {
	if os.Getenv("PROJECTOR_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil)).With("test", t.Name())
}

// start runs a projector until the test ends. stop stops it earlier and waits for its end.
func (w *world) start(change ...func(*projector.Config, *projector.Deps)) (stop func()) {
	w.t.Helper()
	cfg := projector.Config{DatabaseURL: w.url, LockRetry: 20 * time.Millisecond}
	deps := projector.Deps{NATS: w.nc, Log: w.log, Logger: logger(w.t)}
	for _, c := range change {
		c(&cfg, &deps)
	}
	p, err := projector.New(cfg, deps)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			select {
			case err := <-done:
				if err != nil {
					w.t.Errorf("run: %v", err)
				}
			case <-time.After(patience):
				w.t.Error("the projector does not stop")
			}
		})
	}
	w.t.Cleanup(stop)
	return stop
}

// conn returns a connection whose search path contains the read models.
func (w *world) conn() *pgx.Conn {
	w.t.Helper()
	conn, err := readmodel.Connect(w.t.Context(), w.url, readmodel.Schema)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// withConn calls use with a connection, which it closes afterwards: a test that polls would exhaust the connections of
// the server.
func (w *world) withConn(use func(*pgx.Conn) error) {
	w.t.Helper()
	conn, err := readmodel.Connect(w.t.Context(), w.url, readmodel.Schema)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	if err := use(conn); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	w.withConn(func(conn *pgx.Conn) error {
		_, err := conn.Exec(w.t.Context(), sql, args...)
		return err
	})
}

// queryOne returns the only value of a query.
func queryOne[T any](w *world, sql string, args ...any) (v T) {
	w.t.Helper()
	w.withConn(func(conn *pgx.Conn) error {
		if err := conn.QueryRow(w.t.Context(), sql, args...).Scan(&v); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
		return nil
	})
	return v
}

// eventually waits until check returns nil.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// awaitProjected waits until Postgres has all commits of the sessions.
func (w *world) awaitProjected(sessions ...*session) {
	w.t.Helper()
	for _, s := range sessions {
		eventually(w.t, "projected "+s.id, func() error {
			conn, err := readmodel.Connect(w.t.Context(), w.url, readmodel.Schema)
			if err != nil {
				return err
			}
			defer conn.Close(context.Background()) //nolint:errcheck // the test has ended
			var position int64
			if err := conn.QueryRow(w.t.Context(), "SELECT position FROM checkpoints WHERE grp = $1", w.log.Partitioning().GroupOfID(s.id)).Scan(&position); err != nil {
				return err
			}
			if want := int64(max(s.life.Seq, s.run.Seq)); position < want {
				return fmt.Errorf("checkpoint is %d, want %d", position, want)
			}
			return nil
		})
	}
}

// session appends events of one session.
type session struct {
	w         *world
	tenant    string
	id        string
	life, run eventlog.Head
	n         int
}

var (
	serial   int
	serialMu sync.Mutex
)

// session returns a writer for a session in a group; -1 means any group.
func (w *world) session(group int) *session {
	serialMu.Lock()
	defer serialMu.Unlock()
	for {
		serial++
		id := events.DeriveID(events.KindSession, w.t.Name(), fmt.Sprint(serial))
		if group < 0 || w.log.Partitioning().GroupOfID(id) == group {
			return &session{w: w, tenant: "default", id: id,
				life: eventlog.Head{Subject: events.LifeSubject("default", id)}, run: eventlog.Head{Subject: events.RunSubject("default", id)}}
		}
	}
}

var testTime = time.Date(2026, 5, 6, 7, 8, 9, 123456789, time.UTC)

func (s *session) event(execution string, data events.Payload) events.Event {
	s.n++
	e := events.Event{
		ID: events.DeriveID(events.KindEvent, s.id, fmt.Sprint(s.n)), Time: testTime.Add(time.Duration(s.n) * time.Millisecond),
		ExecutionID: execution, Source: events.FromServer, Data: data,
	}
	switch data.(type) {
	case events.BlockStart, events.BlockComplete, events.BlockUpdate:
		e.ConversationID, e.Source = events.MainConversation, events.FromRunner
	}
	return e
}

func (s *session) append(head *eventlog.Head, execution string, list ...events.Payload) eventlog.Head {
	s.w.t.Helper()
	d := events.Draft{Actor: events.Actor{Kind: "service", ID: "test"}}
	for _, p := range list {
		d.Events = append(d.Events, s.event(execution, p))
	}
	d.ID = events.DeriveID(events.KindCommit, s.id, fmt.Sprint(s.n))
	next, err := s.w.log.Append(context.Background(), *head, d)
	if err != nil {
		s.w.t.Fatal(err)
	}
	*head = next
	return next
}

func (s *session) create() *session {
	s.w.t.Helper()
	s.append(&s.life, "", events.SessionCreated{
		Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local", Metadata: json.RawMessage(`{"b":1,"a":[true, null]}`),
	})
	return s
}

func (s *session) execution(n int) string {
	return events.DeriveID(events.KindExecution, s.id, fmt.Sprint(n))
}
func (s *session) blockID(name string) string {
	return events.DeriveID(events.KindBlock, s.id, name)
}

// post accepts, dispatches and starts a query.
func (s *session) post(n int) string {
	s.w.t.Helper()
	x := s.execution(n)
	s.append(&s.life, x, events.MessageAccepted{BlockID: s.blockID(x + "message"), Content: "do <it> & more"}, events.ExecutionDispatched{})
	s.append(&s.run, x, events.ExecutionClaimed{Epoch: 1, Executor: "xtr_test"}, events.ExecutionStarted{Attempt: 1})
	return x
}

func (s *session) open(x, name string) string {
	id := s.blockID(name)
	s.append(&s.run, x, events.BlockStart{Block: events.Block{ID: id, Kind: events.KindAssistantText, Status: events.StatusPending}})
	return id
}

func (s *session) complete(x, id, text string) {
	s.append(&s.run, x, events.BlockComplete{Block: events.Block{ID: id, Kind: events.KindAssistantText, Content: text}})
}

// turn appends a whole execution with a tool call.
func (s *session) turn(n int) {
	s.w.t.Helper()
	x := s.post(n)
	id := s.open(x, x+"text")
	s.complete(x, id, "the whole text")
	call, result := s.blockID(x+"call"), s.blockID(x+"result")
	s.append(&s.run, x,
		events.BlockStart{Block: events.Block{ID: call, Kind: events.KindToolUse, Status: events.StatusPending, ToolName: "bash", ToolUseID: "toolu_" + x}},
		events.BlockComplete{Block: events.Block{ID: call, Kind: events.KindToolUse, ToolName: "bash", ToolUseID: "toolu_" + x, Input: json.RawMessage(`{"command":"ls"}`)}},
		events.BlockStart{Block: events.Block{ID: result, Kind: events.KindToolResult, Status: events.StatusComplete, ToolUseID: "toolu_" + x, Output: "a\x00b\n", DurationMs: 3}})
	s.append(&s.run, x, events.MetadataUpdate{Usage: events.Usage{InputTokens: 10, OutputTokens: 20}, CostUSD: 0.25, Model: "m"},
		events.ExecutionCompleted{DurationMs: 1234, Usage: events.Usage{InputTokens: 10, OutputTokens: 20}, Result: "done"})
}

// follower receives the messages of LIVE about a session.
type follower struct {
	t   testing.TB
	sub *nats.Subscription
}

func (s *session) follow() *follower {
	s.w.t.Helper()
	sub, err := s.w.nc.SubscribeSync(events.LiveSubject(s.tenant, s.id))
	if err != nil {
		s.w.t.Fatal(err)
	}
	if err := s.w.nc.Flush(); err != nil {
		s.w.t.Fatal(err)
	}
	return &follower{s.w.t, sub}
}

func (f *follower) next() readmodel.LiveMessage {
	f.t.Helper()
	m, err := f.sub.NextMsg(patience)
	if err != nil {
		f.t.Fatalf("no message on LIVE: %v", err)
	}
	var l readmodel.LiveMessage
	if err := json.Unmarshal(m.Data, &l); err != nil {
		f.t.Fatalf("LIVE: %v: %s", err, m.Data)
	}
	return l
}

// tables are the read models that a rebuild must reproduce.
var tables = []string{
	readmodel.TableSessions, readmodel.TableDeletedSessions, readmodel.TableExecutions, readmodel.TableBlocks, readmodel.TableEvents, readmodel.TableToolCalls,
	readmodel.TableConversations, readmodel.TableApprovals, readmodel.TableSandboxes, readmodel.TableFiles, readmodel.TableUsage, readmodel.TableKeys, readmodel.TablePoison, readmodel.TableCatalogueEntries, readmodel.TableCatalogueVersions,
	readmodel.TableTenantUsage, readmodel.TableTenantBudgets, readmodel.TableTenantLimits, readmodel.TableAudit, readmodel.TableSessionStates,
}

// dump returns all rows of the read models.
func (w *world) dump() string {
	w.t.Helper()
	conn := w.conn()
	var out strings.Builder
	for _, table := range tables {
		rows, err := conn.Query(w.t.Context(), "SELECT t::text FROM "+table+" t ORDER BY 1")
		if err != nil {
			w.t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			w.t.Fatal(err)
		}
		fmt.Fprintf(&out, "%s\n%s\n", table, strings.Join(lines, "\n"))
	}
	return out.String()
}

// checkAgainstLog checks that the rows of events equal those of the log, with the same seqs.
func (w *world) checkAgainstLog(sessions ...*session) {
	w.t.Helper()
	conn := w.conn()
	for _, s := range sessions {
		rows, err := conn.Query(w.t.Context(), "SELECT seq, event FROM events WHERE tenant = $1 AND session = $2 ORDER BY seq", s.tenant, s.id)
		if err != nil {
			w.t.Fatal(err)
		}
		type row struct {
			Seq   int64
			Event string
		}
		have, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			w.t.Fatal(err)
		}
		i := 0
		for n, err := range eventlog.SessionEvents(w.t.Context(), w.log, s.tenant, s.id) {
			if err != nil {
				w.t.Fatal(err)
			}
			if i >= len(have) {
				w.t.Fatalf("%s: Postgres has %d events, the log more", s.id, len(have))
			}
			var wire events.WireEvent
			if err := json.Unmarshal([]byte(have[i].Event), &wire); err != nil {
				w.t.Fatal(err)
			}
			if have[i].Seq != int64(n.Seq) || wire.Seq != n.Seq || wire.ID != n.Event.ID || wire.Position != n.Position.String() || wire.Type != n.Event.Type() {
				w.t.Fatalf("%s: event %d is %+v in Postgres, %+v in the log", s.id, i, wire, n)
			}
			i++
		}
		if i != len(have) {
			w.t.Fatalf("%s: Postgres has %d events, the log %d", s.id, len(have), i)
		}
	}
}

var errNotYet = errors.New("not yet")
