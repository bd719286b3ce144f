package projector_test

import (
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
)

// These variables make the test binary run a projector, which a test can kill.
const (
	processNATS    = "PROJECTOR_TEST_NATS"
	processPG      = "PROJECTOR_TEST_POSTGRES"
	processRebuild = "PROJECTOR_TEST_REBUILD=1" // runs a rebuild instead
)

// process is the main function of the projector's process.
func process() error {
	nc, err := nats.Connect(os.Getenv(processNATS))
	if err != nil {
		return err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Partitions: topology.DefaultPartitions})
	if err != nil {
		return err
	}
	if slices.Contains(os.Environ(), processRebuild) {
		_, err := projector.Rebuild(context.Background(), projector.Config{DatabaseURL: os.Getenv(processPG)}, projector.Deps{Log: log}, false)
		return err
	}
	p, err := projector.New(projector.Config{DatabaseURL: os.Getenv(processPG), LockRetry: 20 * time.Millisecond, BatchCommits: 7}, projector.Deps{NATS: nc, Log: log, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	// The process ends with its parent, which holds the other end of its standard input.
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return p.Run(ctx)
}

type child struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
}

func (w *world) spawn(natsURL string, env ...string) *child {
	w.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), processNATS+"="+natsURL, processPG+"="+w.url), env...)
	if os.Getenv("PROJECTOR_TEST_LOG") != "" {
		cmd.Stderr = os.Stderr
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	c := &child{cmd, stdin}
	w.t.Cleanup(c.kill)
	return c
}

func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}

// checkpointEqualsRows checks that no commit is applied partially: the last event of each group is that of the
// checkpoint.
func (w *world) checkpointEqualsRows() {
	w.t.Helper()
	rows, err := w.conn().Query(w.t.Context(), `SELECT c.grp, c.position, max(split_part(s.tip_position, '-', 2)::bigint), (SELECT count(*) FROM sessions x WHERE x.grp = c.grp AND
		x.tip <> (SELECT count(*) FROM events e WHERE e.tenant = x.tenant AND e.session = x.id))
		FROM checkpoints c JOIN sessions s ON s.grp = c.grp GROUP BY c.grp, c.position`)
	if err != nil {
		w.t.Fatal(err)
	}
	type row struct{ Group, Position, Last, Torn int64 }
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		w.t.Fatal(err)
	}
	for _, r := range list {
		if r.Position != r.Last || r.Torn != 0 {
			w.t.Errorf("group %d: checkpoint %d, last event in %d, %d sessions without all their events", r.Group, r.Position, r.Last, r.Torn)
		}
	}
}

func TestRun_KilledRepeatedlyAppliesEachCommitOnce(t *testing.T) {
	t.Parallel()
	w := newWorldOn(t, 1, natsserver.Config{Relaxed: true, Port: natsserver.RandomPort})
	w.migrate()
	url := fmt.Sprintf("nats://127.0.0.1:%d", w.srv.Port())
	copies := []*child{w.spawn(url), w.spawn(url)}
	var sessions []*session
	for range 12 {
		sessions = append(sessions, w.session(-1).create())
	}
	var load sync.WaitGroup
	load.Go(func() {
		for n := range 12 {
			for _, s := range sessions {
				s.turn(n)
			}
		}
	})
	for i := range 8 {
		eventually(t, "progress", func() error {
			if queryOne[int](w, "SELECT count(*) FROM events") < 60*(i+1) {
				return errNotYet
			}
			return nil
		})
		victim := i % 2
		copies[victim].kill()
		w.checkpointEqualsRows()
		if n := queryOne[int](w, "SELECT count(*) - count(DISTINCT (classid, objid)) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE locktype = 'advisory' AND granted AND d.datname = current_database()"); n != 0 {
			t.Errorf("%d groups have two leaders", n)
		}
		copies[victim] = w.spawn(url)
	}
	load.Wait()
	w.awaitProjected(sessions...)
	w.checkpointEqualsRows()
	w.checkAgainstLog(sessions...)
	w.sameAsRebuilt()
}

// sameAsRebuilt checks that the read models equal a fold of the log.
func (w *world) sameAsRebuilt() projector.RebuildReport {
	w.t.Helper()
	r, err := projector.Rebuild(w.t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log, Logger: logger(w.t)}, true)
	if err != nil {
		w.t.Fatal(err)
	}
	if r.Rows == 0 {
		w.t.Fatal("nothing was compared")
	}
	return r
}

func TestRun_OneOfTwoReplicasLeadsEachGroup(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	w.migrate()
	var mu sync.Mutex
	starts := map[string]int{}
	count, err := w.nc.Subscribe(topology.ProjectorStartSubject, func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		starts[string(m.Data)]++
	})
	if err != nil {
		t.Fatal(err)
	}
	defer count.Unsubscribe() //nolint:errcheck // the test has ended
	first := w.start()
	w.start()
	var sessions []*session
	for g := range w.log.Partitioning().GroupCount() {
		sessions = append(sessions, w.session(g).create())
	}
	w.awaitProjected(sessions...)
	mu.Lock()
	for g := range w.log.Partitioning().GroupCount() {
		if n := starts[fmt.Sprintf(`{"group":%d}`, g)]; n != 1 {
			t.Errorf("group %d was started %d times, want 1", g, n)
		}
	}
	mu.Unlock()
	first()
	for _, s := range sessions {
		s.turn(1)
	}
	w.awaitProjected(sessions...)
	w.checkAgainstLog(sessions...)
	w.sameAsRebuilt()
}

// cutConnections ends the database connections of all projectors.
func (w *world) cutConnections() {
	w.exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'spool-projector' AND datname = current_database()")
}

func TestRun_BrokenConnectionsLoseNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	small := func(c *projector.Config, _ *projector.Deps) { c.BatchCommits, c.PresentRows = 3, 5 }
	w.start(small)
	w.start(small)
	var sessions []*session
	for range 6 {
		sessions = append(sessions, w.session(-1).create())
	}
	for n := range 10 {
		for _, s := range sessions {
			s.turn(n)
		}
		w.cutConnections()
	}
	w.awaitProjected(sessions...)
	w.checkAgainstLog(sessions...)
	w.sameAsRebuilt()
}

// repeatingLog is a log that yields every commit twice, and then the preceding commit again.
type repeatingLog struct{ eventlog.Log }

func (l repeatingLog) repeat(seq iter.Seq2[eventlog.Record, error]) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		var before *eventlog.Record
		for rec, err := range seq {
			// the same record twice, on purpose
			//nolint:staticcheck // yields the same record twice on purpose
			if !yield(rec, err) || !yield(rec, err) || before != nil && !yield(*before, nil) {
				return
			}
			before = &rec
		}
	}
}

func (l repeatingLog) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.repeat(l.Log.Read(ctx, after, f))
}

func (l repeatingLog) Tail(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.repeat(l.Log.Tail(ctx, after, f))
}

func TestRun_RepeatedCommitsChangeNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	s := w.session(-1).create()
	s.turn(1)
	w.start(func(_ *projector.Config, d *projector.Deps) { d.Log = repeatingLog{w.log} })
	eventually(t, "the log's end", func() error {
		if !queryOne[bool](w, "SELECT caught_up FROM checkpoints WHERE grp = $1", w.log.Partitioning().GroupOfID(s.id)) {
			return errNotYet
		}
		return nil
	})
	s.turn(2)
	w.awaitProjected(s)
	w.checkAgainstLog(s)
	w.sameAsRebuilt()
}

func TestRun_PostgresOutageLosesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	pg := pgtest.RunRestartable(t)
	w.url = pg.URL()
	w.start()
	s := w.session(-1).create()
	w.awaitProjected(s)
	pg.Stop()
	f := s.follow()
	s.turn(1)
	s.turn(2)
	if n, _, err := f.sub.Pending(); err != nil || n != 0 {
		t.Errorf("%d messages on LIVE about commits that Postgres does not have, error %v", n, err)
	}
	pg.Start()
	w.awaitProjected(s)
	if l := f.next(); l.Events[0].Seq != 2 {
		t.Errorf("LIVE continues at %d, want 2", l.Events[0].Seq)
	}
	w.checkAgainstLog(s)
	w.sameAsRebuilt()
}

// TestLive_AnnouncedEventsSurviveACrashOfPostgres tests that a crash of Postgres never loses an event that was
// announced on LIVE. Otherwise a client could reconnect with a cursor that is ahead of the read models.
func TestLive_AnnouncedEventsSurviveACrashOfPostgres(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	pg := pgtest.RunDurable(t)
	w.url = pg.URL()
	stop := w.start()
	s := w.session(-1)
	f := s.follow()
	s.create()
	s.turn(1)
	var tip uint32
	for tip < 4 {
		tip = f.next().Tip
	}
	pg.Crash()
	stop() // no projector may fold the events again before the rows are read
	pg.Start()
	if got := queryOne[int64](w, "SELECT coalesce(max(tip), 0) FROM sessions WHERE id = $1", s.id); got < int64(tip) {
		t.Errorf("after a crash Postgres has the session up to seq %d, clients received events up to %d", got, tip)
	}
}

// copyDatabase copies a database and returns the URL of the copy. No client may be connected to the original
// meanwhile.
func copyDatabase(t *testing.T, url string) string {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	name := cfg.Database
	cfg.Database = "postgres"
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background()) //nolint:errcheck // the test has ended
	backup := name + "_backup"
	eventually(t, "backup", func() error {
		_, err := conn.Exec(t.Context(), "CREATE DATABASE "+backup+" TEMPLATE "+name)
		return err
	})
	t.Cleanup(func() {
		c, err := pgx.ConnectConfig(context.Background(), cfg)
		if err == nil {
			_, err = c.Exec(context.Background(), "DROP DATABASE "+backup+" WITH (FORCE)")
			_ = c.Close(context.Background())
		}
		if err != nil {
			t.Errorf("drop the backup: %v", err)
		}
	})
	return strings.Replace(url, name, backup, 1)
}

func TestRun_FoldsAnOlderBackupForward(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	stop := w.start()
	s := w.session(-1).create()
	s.turn(1)
	eventually(t, "tables", func() error { return readmodel.Migrate(t.Context(), w.url) })
	w.awaitProjected(s)
	stop()
	backup := readmodeltest.CreateRoles(t, copyDatabase(t, w.db.Superuser)).Projector
	stop = w.start()
	s.turn(2)
	w.awaitProjected(s)
	stop()
	want := w.dump()
	w.url = backup
	w.start()
	w.awaitProjected(s)
	if got := w.dump(); got != want {
		t.Errorf("from the backup:\n%s\nbefore:\n%s", got, want)
	}
}

func TestRun_FoldsAgainIfPostgresIsAheadOfTheLog(t *testing.T) {
	t.Parallel()
	old := newWorld(t, 1)
	stop := old.start()
	lost := old.session(2).create()
	lost.turn(1)
	lost.turn(2)
	old.migrate()
	old.awaitProjected(lost)
	stop()

	for name, shards := range map[string]int{"another commit, or none, at the checkpoint": 1, "another number of shards": 8} {
		w := newWorld(t, shards)
		w.url = old.url
		s := w.session(2).create()
		s.turn(1)
		stop := w.start()
		eventually(t, name, func() error {
			if queryOne[int](w, "SELECT count(*) FROM sessions WHERE id = $1", s.id) == 0 || queryOne[int64](w, "SELECT position FROM checkpoints WHERE grp = 2") != int64(s.run.Seq) {
				return errNotYet
			}
			return nil
		})
		w.checkAgainstLog(s)
		eventually(t, "caught up", func() error {
			if !queryOne[bool](w, "SELECT caught_up FROM checkpoints WHERE grp = 2") {
				return errNotYet
			}
			return nil
		})
		if n := queryOne[int](w, "SELECT (SELECT count(*) FROM sessions WHERE id <> $1) + (SELECT count(*) FROM events WHERE session <> $1)", s.id); n != 0 {
			t.Errorf("%s: %d rows of the former log are left", name, n)
		}
		stop()
	}
}

// TestRun_AcceptsAPurgedCheckpoint tests that the janitor may purge the commit of a checkpoint without causing a new
// fold.
func TestRun_AcceptsAPurgedCheckpoint(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	stop := w.start()
	s := w.session(1).create()
	s.turn(1)
	kept := w.session(1).create()
	s.append(&s.life, "", events.SessionDeleted{})
	w.awaitProjected(s, kept)
	stop()
	stream, err := w.js.Stream(t.Context(), topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	for _, subject := range []events.Subject{s.life.Subject, s.run.Subject} {
		if err := stream.Purge(t.Context(), jetstream.WithPurgeSubject(w.log.Partitioning().Subject(subject))); err != nil {
			t.Fatal(err)
		}
	}
	w.exec("UPDATE events SET type = 'mark'")
	w.start()
	kept.turn(1)
	w.awaitProjected(kept)
	if n := queryOne[int](w, "SELECT count(*) FROM events WHERE type = 'mark' AND session = $1", kept.id); n != 1 {
		t.Errorf("%d rows are as they were, want 1: the group was folded again", n)
	}
}
