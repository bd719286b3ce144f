package janitor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
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
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session/internal/usage"
	"github.com/spoolhq/spool/services/session/janitor"
)

// exec runs a statement on a database of the read models.
func (b *fixture) exec(url, statement string, args ...any) {
	b.t.Helper()
	conn, err := readmodel.Connect(b.t.Context(), url, readmodel.Schema)
	must(b.t, err)
	_, err = conn.Exec(b.t.Context(), statement, args...)
	must(b.t, errors.Join(err, conn.Close(context.Background())))
}

// appendLog appends a log event with a text to a session.
func (b *fixture) appendLog(l *eventlog.SessionState, text string) {
	b.t.Helper()
	m := events.NewEventList(events.CommandMeta{CommandID: newID(events.KindCommand), Now: b.now})
	m.Add("", events.Log{Level: "info", Message: text})
	d, err := run.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch + 1, Events: m.Events()})
	must(b.t, err)
	must(b.t, eventlog.Sessions{Log: b.log}.AppendRun(b.t.Context(), l, events.Actor{Kind: "service", ID: "test"}, newID(events.KindCommit), d))
}

// createDeleted creates a session with log events of the given texts, and deletes it.
func (b *fixture) createDeleted(id string, texts ...string) *eventlog.SessionState {
	b.t.Helper()
	l := b.session(id)
	for _, text := range texts {
		b.appendLog(l, text)
	}
	b.delete(l)
	return l
}

// delete deletes a session.
func (b *fixture) delete(l *eventlog.SessionState) {
	b.t.Helper()
	command := newID(events.KindCommand)
	list, err := session.Decide(l.Life, session.DeleteSession{CommandBase: session.CommandBase{CommandMeta: events.CommandMeta{CommandID: command, Now: b.now}}})
	must(b.t, err)
	must(b.t, eventlog.Sessions{Log: b.log}.AppendLife(b.t.Context(), l, events.Actor{Kind: "user", ID: "test"}, command, list))
	b.projectDeletion(b.url, l.ID)
	b.catchUp()
	b.now = b.now.Add(2 * time.Minute) // no fork of the session can be under way after this time
}

// projectDeletion adds a deleted session to the read models of a database, like the projector.
func (b *fixture) projectDeletion(url, id string) {
	b.t.Helper()
	b.exec(url, "INSERT INTO deleted_sessions (tenant, id, grp, deleted_at) VALUES ($1, $2, $3, now())", tenant, id, events.Partitioning(0).GroupOfID(id))
}

// catchUp lets the projector and the session service read the whole log.
func (b *fixture) catchUp() {
	b.t.Helper()
	b.setCaughtUp(b.url)
	d := topology.ReactorConsumer(0, topology.DefaultPartitions)
	c, err := b.js.CreateOrUpdateConsumer(b.t.Context(), d.Stream, d.Config)
	must(b.t, err)
	for left := c.CachedInfo().NumPending; left > 0; {
		batch, err := c.Fetch(int(min(left, 500)), jetstream.FetchMaxWait(10*time.Second)) //nolint:gosec // at most 500
		must(b.t, err)
		for m := range batch.Messages() {
			must(b.t, m.DoubleAck(b.t.Context()))
			left--
		}
		must(b.t, batch.Error())
	}
	b.countUsage()
}

// countUsage runs the fold of the tenants' usage up to the end of the log, with the rights of the session service.
func (b *fixture) countUsage() {
	b.t.Helper()
	js, err := jetstream.New(b.conn(topology.UserSession))
	must(b.t, err)
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Partitions: topology.DefaultPartitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}, Logger: slog.New(slog.DiscardHandler)})
	must(b.t, err)
	s, err := b.js.Stream(b.t.Context(), topology.EventsStreamName(0))
	must(b.t, err)
	ctx, stop := context.WithCancel(b.t.Context())
	done := make(chan error, 1)
	go func() {
		done <- usage.New(usage.Config{Log: log, JetStream: js, Now: func() time.Time { return b.now }, Logger: slog.New(slog.DiscardHandler)}).Run(ctx)
	}()
	defer func() {
		stop()
		must(b.t, <-done)
	}()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		passed, err := usage.HasFolded(b.t.Context(), b.js, 0, s.CachedInfo().State.LastSeq)
		must(b.t, err)
		if passed {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatal("the usage of tenants is not counted")
		}
	}
}

func (b *fixture) setCaughtUp(url string) {
	b.t.Helper()
	s, err := b.js.Stream(b.t.Context(), topology.EventsStreamName(0))
	must(b.t, err)
	b.exec(url, "UPDATE checkpoints SET position = $1, caught_up = true", s.CachedInfo().State.LastSeq)
}

// markRemoved records removals in the read models, like the projector.
func (b *fixture) markRemoved() {
	b.t.Helper()
	conn, err := readmodel.Connect(b.t.Context(), b.url, readmodel.Schema)
	must(b.t, err)
	rows, err := conn.Query(b.t.Context(), "SELECT id FROM deleted_sessions WHERE NOT removed")
	must(b.t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(b.t, errors.Join(err, conn.Close(context.Background())))
	for _, id := range ids {
		if b.isRemoved(id) {
			b.exec(b.url, "UPDATE deleted_sessions SET removed = true WHERE id = $1", id)
		}
	}
}

// isRemoved reports whether the log records that a session's content was removed.
func (b *fixture) isRemoved(id string) bool {
	b.t.Helper()
	sessions := eventlog.Sessions{Log: b.log}
	l, err := sessions.Load(b.t.Context(), tenant, id, eventlog.LeaderOnly)
	must(b.t, err)
	if l.RunHead.Seq == 0 {
		return false
	}
	rec, err := b.log.CommitAt(b.t.Context(), sessions.Position(id, l.RunHead.Seq))
	must(b.t, err)
	return slices.ContainsFunc(rec.Events, func(e events.Event) bool { _, done := e.Data.(events.ContentRemoved); return done })
}

// checkLog checks that the log verifies.
func (b *fixture) checkLog() {
	b.t.Helper()
	report, err := eventlog.Verify(b.t.Context(), b.log, eventlog.VerifyScope{})
	must(b.t, err)
	for _, p := range report.Problems {
		b.t.Errorf("verify: %v", p)
	}
}

// inFiles reports whether the files of any server's streams contain a text.
func (b *fixture) inFiles(text string) bool {
	b.t.Helper()
	for _, dir := range b.dirs {
		if inStreams(b.t, dir, text) {
			return true
		}
	}
	return false
}

// inStreams reports whether the files of a server's streams contain a text.
func inStreams(t *testing.T, dir, text string) bool {
	t.Helper()
	found := false
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && (d.IsDir() || !strings.Contains(filepath.ToSlash(path), "/streams/")) {
			return nil
		}
		if err != nil {
			return err
		}
		raw, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the server has replaced the file
		}
		found = found || bytes.Contains(raw, []byte(text))
		return err
	})
	must(t, err)
	return found
}

// commits returns the number of commits of a session's runs.
func (b *fixture) commits(id string) uint64 {
	b.t.Helper()
	s, err := b.js.Stream(b.t.Context(), topology.EventsStreamName(0))
	must(b.t, err)
	subject := b.log.Partitioning().Subject(events.RunSubject(tenant, id))
	info, err := s.Info(b.t.Context(), jetstream.WithSubjectFilter(subject))
	must(b.t, err)
	return info.State.Subjects[subject]
}

// many returns n texts that contain a marker.
func many(n int, marker string) []string {
	var texts []string
	for range n {
		texts = append(texts, marker+" "+strings.Repeat("x", 500))
	}
	return texts
}

// TestPass_DryRunListsWhatItWouldRemove tests that a dry pass lists what a deleted session would lose, exact to the
// commit and the byte, and removes nothing. The next pass removes exactly that.
func TestPass_DryRunListsWhatItWouldRemove(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	large := "curlew-large " + strings.Repeat("y", 300<<10)
	id, object := newID(events.KindSession), "curlew-object"
	b.putObject(topology.BucketWorkspaces, tenant+"/"+id+"/f-1", object)
	b.createDeleted(id, "curlew-text", large)
	j := b.janitor(janitor.Config{Grace: time.Hour})
	items := func(dry bool) []janitor.ReportItem {
		t.Helper()
		report, err := j.RunPass(t.Context(), dry)
		must(t, err)
		return report.Items
	}
	waits := func(dry bool, reason string) {
		t.Helper()
		if list := items(dry); len(list) != 1 || list[0].Name != id || !strings.Contains(list[0].Waits, reason) {
			t.Errorf("found %+v, want the session to be kept because of %q", list, reason)
		}
	}
	waits(true, "not retired")
	if n := b.commits(id); n != 2 {
		t.Errorf("%d commits after a dry pass, want 2", n)
	}
	waits(false, "not retired")
	b.catchUp()
	b.now = b.now.Add(50 * time.Minute)
	waits(false, "its content goes at ")
	b.now = b.now.Add(20 * time.Minute)
	payload, err := json.Marshal(events.Log{Level: "info", Message: large})
	must(t, err)
	// The commits are session_created and the two texts. The objects are the file and the payload.
	want := janitor.ReportItem{Kind: janitor.KindSession, Tenant: tenant, Name: id, Messages: 3, Objects: 2, Bytes: uint64(len(object) + len(payload))}
	for range 2 {
		if list := items(true); len(list) != 1 || list[0] != want {
			t.Errorf("dry: %+v, want %+v", list, want)
		}
	}
	for _, text := range []string{"curlew-text", "curlew-large", "curlew-object"} {
		if !b.inFiles(text) {
			t.Errorf("a dry pass removed %s", text)
		}
	}
	if list := items(false); len(list) != 1 || list[0] != want {
		t.Errorf("found %+v, want %+v", list, want)
	}
	if b.inFiles("curlew") || !b.isRemoved(id) {
		t.Error("the content still exists")
	}
	b.checkLog()
}

// TestPass_RemovesLegacyPayloads tests that a payload that an earlier release stored under its digest alone is erased
// with the session, unless another session refers to it.
func TestPass_RemovesLegacyPayloads(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	own, shared := "dunlin-own "+strings.Repeat("y", 300<<10), "dunlin-shared "+strings.Repeat("z", 300<<10)
	other := b.session(newID(events.KindSession))
	b.appendLog(other, shared)
	gone := b.createDeleted(newID(events.KindSession), own, shared)
	bucket, err := b.js.ObjectStore(t.Context(), topology.BucketPayloads)
	must(t, err)
	for _, name := range b.objectNames(topology.BucketPayloads) {
		data, err := bucket.GetBytes(t.Context(), name)
		must(t, err)
		must(t, bucket.Delete(t.Context(), name))
		_, err = bucket.PutBytes(t.Context(), name[strings.LastIndexByte(name, '/')+1:], data)
		must(t, err)
	}
	if n := len(b.objectNames(topology.BucketPayloads)); n != 2 {
		t.Fatalf("%d payloads are named by their digest, want 2", n)
	}
	j := b.janitor(janitor.Config{Grace: time.Millisecond})
	b.pass(j, false)
	b.catchUp()
	b.now = b.now.Add(time.Minute)
	b.pass(j, false)
	if !b.isRemoved(gone.ID) {
		t.Fatal("the session's content is not removed")
	}
	if n := len(b.objectNames(topology.BucketPayloads)); n != 1 {
		t.Errorf("%d payloads are left, want the other session's", n)
	}
	var kept string
	for rec, err := range b.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{Subject: events.RunSubject(tenant, other.ID)}) {
		must(t, err)
		kept = rec.Events[0].Data.(events.Log).Message
	}
	if kept != shared {
		t.Error("the other session's payload has changed")
	}
	b.checkLog()
}

// TestPass_FinishesAfterKill tests that a janitor that is killed during a removal leaves a sound log, and that the
// next pass finishes the removal.
func TestPass_FinishesAfterKill(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "janitor")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "../cmd/janitor").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b := newFixtureAt(t, natsserver.Config{Port: natsserver.RandomPort, Relaxed: true}) // syncing each commit would take minutes
	id := newID(events.KindSession)
	const texts = 2000
	b.createDeleted(id, many(texts, "plover")...)
	j := b.janitor(janitor.Config{Grace: time.Millisecond})
	b.pass(j, false) // this pass retires the session
	b.catchUp()
	var logs bytes.Buffer
	process := exec.CommandContext(t.Context(), binary, "--metrics-listen=127.0.0.1:0")
	process.Stderr = &logs
	process.Env = append(os.Environ(), "SPOOL_NATS_URL="+b.srv.ClientURL(), "SPOOL_DATABASE_URL="+b.url, "SPOOL_GC_GRACE=1ms", "SPOOL_GC_INTERVAL=10ms")
	must(t, process.Start())
	ended := make(chan struct{})
	go func() { _ = process.Wait(); close(ended) }() // the process is killed
	for deadline := time.Now().Add(time.Minute); b.commits(id) > texts-100; {
		select {
		case <-ended:
			t.Fatalf("the janitor ended by itself:\n%s", &logs)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing was removed within a minute")
		}
	}
	must(t, process.Process.Kill())
	<-ended
	if left := b.commits(id); left < 2 || b.isRemoved(id) {
		t.Fatalf("the removal was faster than the kill: %d commits are left", left)
	}
	b.checkLog()
	b.now = time.Now().Add(time.Minute)
	b.pass(j, false)
	if !b.isRemoved(id) || b.inFiles("plover") {
		t.Error("the next pass did not finish the removal")
	}
	b.checkLog()
}

// TestPass_TwoAtOnce tests that two janitors that run at the same time, without a common lock, remove a session's
// content once and leave a sound log. Of two janitors on one database, one waits.
func TestPass_TwoAtOnce(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	id := newID(events.KindSession)
	b.createDeleted(id, many(300, "knot")...)
	first := b.janitor(janitor.Config{Grace: time.Millisecond})
	other := pgtest.NewDatabase(t) // a lock is per database
	must(t, readmodel.Migrate(t.Context(), other))
	b.projectDeletion(other, id)
	b.setCaughtUp(other)
	second := b.janitorOn(other, janitor.Config{Grace: time.Millisecond})
	both := func() {
		var group sync.WaitGroup
		for _, j := range []*janitor.Janitor{first, second} {
			group.Go(func() {
				if _, err := j.RunPass(t.Context(), false); err != nil {
					t.Errorf("pass: %v", err)
				}
			})
		}
		group.Wait()
	}
	both()
	b.catchUp()
	b.setCaughtUp(other)
	b.now = b.now.Add(time.Minute)
	both()
	if !b.isRemoved(id) || b.inFiles("knot") {
		t.Error("the content still exists")
	}
	if n := b.commits(id); n != 2 {
		t.Errorf("the runs have %d commits, want run_retired and content_removed", n)
	}
	b.checkLog()
	conn, err := readmodel.Connect(t.Context(), b.url, readmodel.Schema)
	must(t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the connection only holds the lock
	_, err = conn.Exec(t.Context(), "SELECT pg_advisory_lock($1)", int64(0x73706f6f6c6a616e))
	must(t, err)
	if _, err := first.RunPass(t.Context(), false); !errors.Is(err, janitor.ErrPassRunning) {
		t.Errorf("a pass while another janitor holds the lock: %v", err)
	}
}

// TestCommands_LeaveTheFilesOnceAcknowledged tests that the text of commands leaves the files of COMMANDS when all
// messages are acknowledged, as docs/security.md states, and that a command that no service handles has a maximum
// age.
func TestCommands_LeaveTheFilesOnceAcknowledged(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	d := topology.SessionCommandsConsumer()
	c, err := b.js.CreateConsumer(t.Context(), d.Stream, d.Config)
	must(t, err)
	if age := streamConfig(t, b, d.Stream).MaxAge; age != 24*time.Hour {
		t.Errorf("the maximum age is %s", age)
	}
	var waiting []jetstream.Msg
	for _, text := range []string{"dotterel-first", "dotterel-second"} {
		_, err := b.js.Publish(t.Context(), topology.CommandSubject(topology.ServiceSession, tenant, newID(events.KindSession)), []byte(text))
		must(t, err)
		m, err := c.Next()
		must(t, err)
		waiting = append(waiting, m)
	}
	must(t, waiting[0].DoubleAck(t.Context()))
	if !b.inFiles("dotterel-second") {
		t.Error("the text of a waiting command is not in the files, so this test proves nothing")
	}
	must(t, waiting[1].DoubleAck(t.Context()))
	for deadline := time.Now().Add(time.Minute); b.inFiles("dotterel"); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the text is still in the files a minute after the last acknowledgement")
		}
	}
}

func streamConfig(t *testing.T, b *fixture, name string) jetstream.StreamConfig {
	t.Helper()
	s, err := b.js.Stream(t.Context(), name)
	must(t, err)
	return s.CachedInfo().Config
}

// TestPass_RemovesFromEveryReplica tests that, with three replicas, the streams of every server lose the content.
// docs/security.md states what the Raft logs of the servers may hold meanwhile.
func TestPass_RemovesFromEveryReplica(t *testing.T) {
	t.Parallel()
	cluster := natstest.RunCluster(t)
	b := &fixture{t: t, dirs: cluster.Dirs, connect: func(_ string, opts ...nats.Option) (*nats.Conn, error) { return nats.Connect(cluster.URL, opts...) }}
	b.install(topology.ProvisionConfig{Replicas: 3})
	id, other := newID(events.KindSession), b.session(newID(events.KindSession))
	b.appendLog(other, "sanderling-kept")
	b.putObject(topology.BucketWorkspaces, tenant+"/"+id+"/f-1", "sanderling-gone-object")
	b.createDeleted(id, append(many(50, "sanderling-gone"), "sanderling-gone-large "+strings.Repeat("y", 300<<10))...)
	everywhere := func(text string, want bool) {
		t.Helper()
		for _, dir := range cluster.Dirs {
			for deadline := time.Now().Add(time.Minute); inStreams(t, dir, text) != want; time.Sleep(50 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("%s is in the streams of %s: %v", text, dir, !want)
				}
			}
		}
	}
	for _, text := range []string{"sanderling-gone", "sanderling-gone-large", "sanderling-gone-object", "sanderling-kept"} {
		everywhere(text, true)
	}
	j := b.janitor(janitor.Config{Grace: time.Millisecond})
	b.passOnCluster(j)
	b.catchUp()
	b.now = b.now.Add(time.Minute)
	b.passOnCluster(j)
	if !b.isRemoved(id) {
		t.Fatal("the content is not removed")
	}
	everywhere("sanderling-gone", false)
	everywhere("sanderling-kept", true)
	b.checkLog()
}

// TestPass_KeepsTheAuditInRunRetired tests that run_retired keeps the audit of a session, including commits whose
// payload is lost.
func TestPass_KeepsTheAuditInRunRetired(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	id := newID(events.KindSession)
	l := b.session(id)
	ann := events.Actor{Kind: "key", ID: "key_1", Key: "key_1", User: "ann", Service: "session/test", Address: "192.0.2.1"}
	large, err := json.Marshal(strings.Repeat("x", events.MaxInlineBytes))
	must(t, err)
	for i, metadata := range []json.RawMessage{large, json.RawMessage(`"small"`)} {
		m := events.NewEventList(events.CommandMeta{CommandID: newID(events.KindCommand), Now: b.now})
		m.Add("", events.SessionOptionsUpdated{Metadata: metadata})
		actor := ann
		if i == 1 {
			actor.User = "bob"
		}
		must(t, eventlog.Sessions{Log: b.log}.AppendLife(t.Context(), l, actor, newID(events.KindCommand), m.Events()))
	}
	bucket, err := b.js.ObjectStore(t.Context(), topology.BucketPayloads)
	must(t, err)
	for _, name := range b.objectNames(topology.BucketPayloads) {
		must(t, bucket.Delete(t.Context(), name))
	}
	b.delete(l)
	j := b.janitor(janitor.Config{})
	b.pass(j, false)
	l, err = eventlog.Sessions{Log: b.log}.Load(t.Context(), tenant, id, eventlog.LeaderOnly)
	must(t, err)
	rec, err := b.log.CommitAt(t.Context(), eventlog.Position{Seq: l.RunHead.Seq})
	must(t, err)
	retired, ok := rec.Events[0].Data.(events.RunRetired)
	if !ok || len(retired.Audit) != 3 {
		t.Fatalf("the session's runs end with %+v", rec.Events)
	}
	for i, want := range []string{"session_created by ", "session_options_updated by ann", "session_options_updated by bob"} {
		if a := retired.Audit[i]; string(a.Types[0])+" by "+a.Actor.User != want || len(a.Types) != 1 || a.Seq == 0 || a.Time.IsZero() {
			t.Errorf("entry %d is %+v, want %s", i, a, want)
		}
	}
	if rec.Commit.Actor != (events.Actor{Kind: "service", ID: "janitor", Service: "janitor"}) {
		t.Errorf("retired by %+v", rec.Commit.Actor)
	}
	b.catchUp()
	b.now = b.now.Add(time.Hour)
	report, err := j.RunPass(t.Context(), true)
	must(t, err)
	if len(report.Items) != 1 || report.Items[0].Messages != 3 {
		t.Errorf("found %+v, want 3 commits to remove", report.Items)
	}
}

// TestPass_CountsTheCommitsOfEverySubjectInRunRetired tests that run_retired has the number of commits of each subject,
// whatever the partition of the session, so that they explain what the pass removes and nothing else: Verify reports a
// living session whose commits are missing.
func TestPass_CountsTheCommitsOfEverySubjectInRunRetired(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	living := b.session(newID(events.KindSession))
	var deleted []*eventlog.SessionState
	for partition := 4; partition < events.MaxPartitions; partition += 20 { // the log has fewer partitions than an id
		id := newID(events.KindSession)
		for events.Partition(id) != partition {
			id = newID(events.KindSession)
		}
		deleted = append(deleted, b.createDeleted(id, many(3, "plover")...))
	}
	j := b.janitor(janitor.Config{Grace: time.Millisecond})
	b.pass(j, false)
	for _, l := range deleted {
		b.reload(l)
		rec, err := b.log.CommitAt(t.Context(), eventlog.Position{Seq: l.RunHead.Seq})
		must(t, err)
		if d, ok := rec.Events[0].Data.(events.RunRetired); !ok || d.Life != 1 || d.Runs != 3 {
			t.Errorf("the runs of a session in partition %d end with %+v, want 1 commit of life and 3 of runs", events.Partition(l.ID), rec.Events)
		}
	}
	b.catchUp()
	b.now = b.now.Add(time.Hour)
	b.pass(j, false)
	for _, l := range deleted {
		if !b.isRemoved(l.ID) {
			t.Errorf("the content of session %s is not removed", l.ID)
		}
	}
	b.checkLog()
	s, err := b.js.Stream(t.Context(), topology.EventsStreamName(0))
	must(t, err)
	must(t, s.Purge(t.Context(), jetstream.WithPurgeSubject(b.log.Partitioning().Subject(living.LifeHead.Subject))))
	report, err := eventlog.Verify(t.Context(), b.log, eventlog.VerifyScope{})
	must(t, err)
	if p := report.Problem; p == nil || !strings.Contains(p.Why, "13 sequences of the log are missing, of which deleted sessions explain 12") {
		t.Errorf("verify reports %v of a log without the commits of a living session", p)
	}
}
