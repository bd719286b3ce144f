package janitor_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
	"github.com/spoolhq/spool/services/session/janitor"
)

const tenant = "default"

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newID(kind events.IDKind) string { return events.DeriveID(kind, rand.Text()) }

// fixture is an installation with its users and without services. The test sets the clock of its janitor.
type fixture struct {
	t       *testing.T
	srv     *natsserver.Server
	js      jetstream.JetStream // with the rights of admin
	log     eventlog.Log        // with the rights of admin
	url     string              // URL of Postgres
	dirs    []string            // the folders of NATS
	connect func(user string, opts ...nats.Option) (*nats.Conn, error)
	now     time.Time
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return newFixtureAt(t, natsserver.Config{Accounts: true})
}

// newFixtureAt is like newFixture with the given server configuration. On a server without accounts every client has
// all rights.
func newFixtureAt(t *testing.T, cfg natsserver.Config) *fixture {
	t.Helper()
	cfg.StoreDir = t.TempDir()
	srv := natstest.RunConfig(t, cfg)
	b := &fixture{t: t, srv: srv, dirs: []string{cfg.StoreDir}, connect: func(string, ...nats.Option) (*nats.Conn, error) { return srv.Connect() }}
	if cfg.Accounts {
		b.connect = srv.ConnectAs
	}
	b.install(topology.ProvisionConfig{Partitions: topology.DefaultPartitions})
	return b
}

// install creates the streams, the read models, and the log with the rights of admin.
func (b *fixture) install(cfg topology.ProvisionConfig) {
	b.t.Helper()
	t := b.t
	cfg.Partitions = topology.DefaultPartitions
	b.url, b.now = readmodeltest.NewDatabase(t).Projector, time.Now()
	var err error
	b.js, err = jetstream.New(b.conn(topology.UserAdmin))
	must(t, err)
	must(t, topology.Provision(t.Context(), b.js, cfg))
	must(t, readmodel.Migrate(t.Context(), b.url))
	b.log, err = jslog.New(jslog.Config{JetStream: b.js, Shards: 1, Partitions: topology.DefaultPartitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
}

// conn returns a connection with a user's rights. The test fails if the user does something that it may not.
func (b *fixture) conn(user string) *nats.Conn {
	b.t.Helper()
	nc, err := b.connect(user, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		if errors.Is(err, nats.ErrPermissionViolation) {
			b.t.Errorf("%s: %v", user, err)
		}
	}))
	must(b.t, err)
	b.t.Cleanup(nc.Close)
	return nc
}

func (b *fixture) janitor(cfg janitor.Config) *janitor.Janitor {
	b.t.Helper()
	return b.janitorOn(b.url, cfg)
}

func (b *fixture) janitorOn(url string, cfg janitor.Config) *janitor.Janitor {
	b.t.Helper()
	j, _ := b.janitorWithMetrics(url, cfg)
	return j
}

// janitorWithMetrics returns a janitor on a database, with its metrics.
func (b *fixture) janitorWithMetrics(url string, cfg janitor.Config) (*janitor.Janitor, *prometheus.Registry) {
	b.t.Helper()
	registry := prometheus.NewRegistry()
	nc := b.conn(topology.UserJanitor)
	js, err := jetstream.New(nc)
	must(b.t, err)
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Partitions: topology.DefaultPartitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}, Logger: slog.New(slog.DiscardHandler)})
	must(b.t, err)
	cfg.DatabaseURL = url
	j, err := janitor.New(cfg, janitor.Deps{NATS: nc, Log: log, Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return b.now }, Metrics: registry})
	must(b.t, err)
	return j, registry
}

func (b *fixture) store(bucket string) *natsstore.Store {
	b.t.Helper()
	s, err := natsstore.Open(b.t.Context(), b.js, bucket)
	must(b.t, err)
	return s
}

func (b *fixture) putObject(bucket, name, content string) {
	b.t.Helper()
	must(b.t, b.store(bucket).Put(b.t.Context(), name, strings.NewReader(content)))
}

// objectNames returns the names of the objects in a bucket.
func (b *fixture) objectNames(bucket string) []string {
	b.t.Helper()
	o, err := b.js.ObjectStore(b.t.Context(), bucket)
	must(b.t, err)
	list, err := o.List(b.t.Context())
	if errors.Is(err, jetstream.ErrNoObjectsFound) {
		return nil
	}
	must(b.t, err)
	var names []string
	for _, x := range list {
		names = append(names, x.Name)
	}
	slices.Sort(names)
	return names
}

// pass makes a pass and returns what it found, as "kind name".
func (b *fixture) pass(j *janitor.Janitor, dry bool) []string {
	b.t.Helper()
	report, err := j.RunPass(b.t.Context(), dry)
	must(b.t, err)
	items := []string{}
	for _, i := range report.Items {
		items = append(items, string(i.Kind)+" "+i.Name)
	}
	slices.Sort(items)
	return items
}

// passOnCluster makes a pass, and repeats a pass whose request NATS did not answer in time, as the janitor does. On a busy
// machine the servers of a cluster are late with their heartbeats. A stream then has no leader for a moment, and nobody
// answers requests for it.
func (b *fixture) passOnCluster(j *janitor.Janitor) {
	b.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		_, err := j.RunPass(b.t.Context(), false)
		if err == nil {
			return
		}
		if !errors.Is(err, context.DeadlineExceeded) || time.Now().After(deadline) {
			b.t.Fatal(err)
		}
	}
}

// checkList checks that two lists are equal.
func checkList(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// session creates a session in the log.
func (b *fixture) session(id string) *eventlog.SessionState {
	b.t.Helper()
	return b.sessionWith(id, events.SessionCreated{Agent: "spool", Architecture: "spool", Provider: "local"})
}

func (b *fixture) sessionWith(id string, data events.SessionCreated) *eventlog.SessionState {
	b.t.Helper()
	sessions := eventlog.Sessions{Log: b.log}
	l, err := sessions.Load(b.t.Context(), tenant, id, eventlog.LeaderOnly)
	must(b.t, err)
	command := newID(events.KindCommand)
	list, err := session.Decide(l.Life, session.CreateSession{CommandBase: session.CommandBase{CommandMeta: events.CommandMeta{CommandID: command, Now: b.now}}, SessionCreated: data})
	must(b.t, err)
	must(b.t, sessions.AppendLife(b.t.Context(), l, events.Actor{Kind: "user", ID: "test"}, command, list))
	return l
}

// reload loads a session that the janitor has written to.
func (b *fixture) reload(l *eventlog.SessionState) {
	b.t.Helper()
	now, err := eventlog.Sessions{Log: b.log}.Load(b.t.Context(), l.Tenant, l.ID, eventlog.LeaderOnly)
	must(b.t, err)
	*l = *now
}

// snapshot takes a snapshot like an executor, and commits it.
func (b *fixture) snapshot(l *eventlog.SessionState, box *workspacetest.FakeSandbox) string {
	b.t.Helper()
	r, err := workspace.Snapshot(b.t.Context(), box, b.store(topology.BucketWorkspaces), workspace.Options{Tenant: l.Tenant, Session: l.ID, Previous: l.Run.Snapshot.ID})
	must(b.t, err)
	b.record(l, events.WorkspaceSynced{Snapshot: r.ID, Reason: "requested", Applied: l.Life.Changes, Stored: r.Stored})
	return r.ID
}

// commit records in the log that a snapshot was taken.
func (b *fixture) commit(l *eventlog.SessionState, id string) {
	b.t.Helper()
	b.record(l, events.WorkspaceSynced{Snapshot: id, Reason: "requested"})
}

// record appends an event of an idle session, like an executor.
func (b *fixture) record(l *eventlog.SessionState, p events.Payload) {
	b.t.Helper()
	m := events.NewEventList(events.CommandMeta{CommandID: newID(events.KindCommand), Now: b.now})
	m.Add("", p)
	d, err := run.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch + 1, Events: m.Events()})
	must(b.t, err)
	must(b.t, eventlog.Sessions{Log: b.log}.AppendRun(b.t.Context(), l, events.Actor{Kind: "service", ID: "test"}, newID(events.KindCommit), d))
}

// checkRestores checks that a snapshot has the given content in file a.
func (b *fixture) checkRestores(l *eventlog.SessionState, id, content string) {
	b.t.Helper()
	box := &workspacetest.FakeSandbox{}
	if _, err := workspace.Restore(b.t.Context(), box, b.store(topology.BucketWorkspaces), l.Tenant, l.ID, id); err != nil || box.Tree["workspace/a"] != content {
		b.t.Errorf("restore %s: %v", id, err)
	}
}

// TestPass_RemovesSnapshotsBeyondTheRetention tests that a session keeps the configured number of newest snapshots
// with all objects that they need, and that the objects of older ones are erased.
func TestPass_RemovesSnapshotsBeyondTheRetention(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	l := b.session(newID(events.KindSession))
	box := &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/kept": strings.Repeat("the same in all", 1000)}}
	var ids []string
	content := func(i int) string { return strings.Repeat(fmt.Sprintf("content-%d ", i), 1000) }
	for i := range 5 {
		box.Tree["workspace/a"] = content(i)
		ids = append(ids, b.snapshot(l, box))
	}
	// The session returns to its first snapshot, so that the snapshot with the first name is the newest.
	box.Tree["workspace/a"] = content(0)
	if id := b.snapshot(l, box); id != ids[0] {
		t.Fatalf("the same files are snapshots %s and %s", ids[0], id)
	}
	keep2, keep500 := b.janitor(janitor.Config{Snapshots: 2}), b.janitor(janitor.Config{})
	checkList(t, "when all snapshots are new", b.pass(keep2, false))
	b.now = b.now.Add(2 * time.Hour)
	if found := b.pass(keep500, false); slices.Contains(found, "snapshots "+l.ID) {
		t.Errorf("the default retention found %q", found)
	}
	before := b.objectNames(topology.BucketWorkspaces)
	checkList(t, "dry", b.pass(keep2, true), "snapshots "+l.ID)
	checkList(t, "objects after a dry pass", b.objectNames(topology.BucketWorkspaces), before...)
	checkList(t, "found", b.pass(keep2, false), "snapshots "+l.ID)
	checkList(t, "found again", b.pass(keep2, false))
	b.checkRestores(l, ids[0], content(0))
	b.checkRestores(l, ids[4], content(4))
	for _, id := range ids[1:4] {
		if _, err := workspace.Open(t.Context(), b.store(topology.BucketWorkspaces), tenant, l.ID, id); !errors.Is(err, workspace.ErrNotFound) {
			t.Errorf("snapshot %s is still there: %v", id, err)
		}
	}
	if left := b.objectNames(topology.BucketWorkspaces); len(left) >= len(before)-3 {
		t.Errorf("no pack was removed: before %q, now %q", before, left)
	}
	b.reload(l)
	box.Tree["workspace/a"] = content(9)
	b.checkRestores(l, b.snapshot(l, box), content(9))
}

// TestPass_LeavesASnapshotThatIsBeingTaken tests that a snapshot that an executor takes while the janitor removes
// others is complete.
func TestPass_LeavesASnapshotThatIsBeingTaken(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	l := b.session(newID(events.KindSession))
	box := &workspacetest.FakeSandbox{Tree: map[string]string{}}
	take := func(content string) string {
		box.Tree["workspace/a"] = content
		return b.snapshot(l, box)
	}
	first := take("first")
	take("second")
	take("third")
	b.now = b.now.Add(2 * time.Hour)
	// The executor stores the files of the first snapshot again, and the janitor runs before the commit.
	box.Tree["workspace/a"] = "first"
	r, err := workspace.Snapshot(t.Context(), box, b.store(topology.BucketWorkspaces), workspace.Options{Tenant: l.Tenant, Session: l.ID, Previous: l.Run.Snapshot.ID})
	must(t, err)
	if r.ID != first {
		t.Fatalf("the same files are snapshots %s and %s", first, r.ID)
	}
	if found := b.pass(b.janitor(janitor.Config{Snapshots: 2}), false); !slices.Contains(found, "snapshots "+l.ID) {
		t.Errorf("found %q", found)
	}
	b.reload(l)
	b.commit(l, r.ID)
	b.checkRestores(l, r.ID, "first")
}

// TestPass_RemovesFilesOfRefusedRequests tests that files of refused requests are erased when they are old, for a
// session that was never created and for one that exists. Files that an event refers to stay, even if the read models
// do not have the event.
func TestPass_RemovesFilesOfRefusedRequests(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	absent := newID(events.KindSession)
	l := b.session(newID(events.KindSession))
	there := l.ID
	objects := map[string]string{}
	for _, name := range []string{absent + "/f-1", there + "/f-refused", there + "/u-refused", there + "/u-accepted"} {
		objects[name] = tenant + "/" + name
		b.putObject(topology.BucketWorkspaces, objects[name], name)
	}
	b.putFile(l, objects[there+"/u-accepted"])
	j := b.janitor(janitor.Config{Uploads: time.Second})
	b.now = b.now.Add(10 * time.Minute)
	checkList(t, "found while they are new, with any setting", b.pass(j, false))
	b.now = b.now.Add(time.Hour)
	items := []string{"uploads " + absent, "uploads " + there}
	slices.Sort(items)
	checkList(t, "dry", b.pass(j, true), items...)
	checkList(t, "found", b.pass(j, false), items...)
	checkList(t, "left", b.objectNames(topology.BucketWorkspaces), objects[there+"/u-accepted"])
	checkList(t, "found again", b.pass(j, false))
	if n := j.RememberedFiles(); n != 1 {
		t.Errorf("the janitor remembers %d files, want the accepted one", n)
	}
	b.snapshot(l, &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a": "content"}})
	b.now = b.now.Add(time.Hour)
	checkList(t, "found after a snapshot that contains the file", b.pass(j, false), "files "+there)
	checkList(t, "found after the file is gone", b.pass(j, false))
	if n := j.RememberedFiles(); n != 0 {
		t.Errorf("the janitor remembers %d files that are gone", n)
	}
}

// TestPass_KeepsTheTranscriptOfASession tests that a transcript with which a session began stays as long as the
// session. A transcript with which no session was created is removed, together with what was extracted from it.
func TestPass_KeepsTheTranscriptOfASession(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	absent, there := newID(events.KindSession), newID(events.KindSession)
	object := command.TranscriptObject(tenant, there)
	l := b.sessionWith(there, events.SessionCreated{Agent: "spool", Architecture: "codex", Provider: "local", Transcript: &events.Transcript{Architecture: "codex", Object: object}})
	for _, name := range []string{object, object + "-found", command.TranscriptObject(tenant, absent), command.TranscriptObject(tenant, absent) + "-found"} {
		b.putObject(topology.BucketWorkspaces, name, "x")
	}
	b.snapshot(l, &workspacetest.FakeSandbox{})
	b.now = b.now.Add(2 * time.Hour)
	j := b.janitor(janitor.Config{})
	items := []string{"uploads " + absent, "uploads " + there}
	slices.Sort(items)
	checkList(t, "found", b.pass(j, false), items...)
	if names := b.objectNames(topology.BucketWorkspaces); !slices.Contains(names, object) || slices.ContainsFunc(names, func(n string) bool { return n != object && strings.Contains(n, "/u-") }) {
		t.Errorf("remaining objects: %v", names)
	}
	checkList(t, "found again", b.pass(j, false))
}

// putFile records that an object belongs into the workspace.
func (b *fixture) putFile(l *eventlog.SessionState, object string) {
	b.t.Helper()
	command := newID(events.KindCommand)
	list, err := session.Decide(l.Life, session.PutFile{
		CommandBase: session.CommandBase{CommandMeta: events.CommandMeta{CommandID: command, Now: b.now}}, FileUpload: session.FileUpload{Path: "a", Object: object, SHA256: digest("a")},
	})
	must(b.t, err)
	must(b.t, eventlog.Sessions{Log: b.log}.AppendLife(b.t.Context(), l, events.Actor{Kind: "user", ID: "test"}, command, list))
}

// trimmed returns the sum of what the log records as removed from a session's workspace.
func (b *fixture) trimmed(l *eventlog.SessionState) (sum events.WorkspaceTrimmed) {
	b.t.Helper()
	for rec, err := range b.log.Read(b.t.Context(), eventlog.Position{}, eventlog.Filter{Subject: events.RunSubject(l.Tenant, l.ID)}) {
		must(b.t, err)
		for _, e := range rec.Events {
			if d, ok := e.Data.(events.WorkspaceTrimmed); ok {
				sum.Objects += d.Objects
				sum.Bytes += d.Bytes
			}
		}
	}
	return sum
}

// size returns the number and the total size of the objects in bucket workspaces.
func (b *fixture) size() (objects uint32, bytes uint64) {
	b.t.Helper()
	o, err := b.js.ObjectStore(b.t.Context(), topology.BucketWorkspaces)
	must(b.t, err)
	list, err := o.List(b.t.Context())
	must(b.t, err)
	for _, x := range list {
		objects++
		bytes += x.Size
	}
	return objects, bytes
}

// TestPass_ReportsWhatItTrims tests that uploaded files that a snapshot contains, and snapshots beyond the retention,
// are removed, and that the log records their size: the size that earlier events had added. Files that no snapshot
// contains stay. The report waits for the end of a turn.
func TestPass_ReportsWhatItTrims(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	l := b.session(newID(events.KindSession))
	prefix := tenant + "/" + l.ID + "/"
	for _, name := range []string{"f-again", "u-held"} {
		b.putObject(topology.BucketWorkspaces, prefix+name, "content of "+name)
		b.putFile(l, prefix+name)
	}
	box := &workspacetest.FakeSandbox{Tree: map[string]string{}}
	stored := uint64(len("content of f-again") + len("content of u-held"))
	for i := range 4 {
		box.Tree["workspace/a"] = strings.Repeat(fmt.Sprintf("content-%d ", i), 1000)
		b.snapshot(l, box)
		_, bytes := b.size()
		if counted := stored + b.addedBytes(l); counted != bytes {
			t.Fatalf("the bucket holds %d bytes, and the events say %d", bytes, counted)
		}
	}
	// The first file is uploaded again, and no snapshot contains this upload yet.
	b.putFile(l, prefix+"f-again")
	b.putObject(topology.BucketWorkspaces, prefix+"u-waits", "content of u-waits")
	b.putFile(l, prefix+"u-waits")
	exe := newID(events.KindExecution)
	d, err := run.Decide(l.Run, run.ClaimExecution{CommandMeta: events.CommandMeta{CommandID: newID(events.KindCommand), Now: b.now}, ExecutionID: exe, Turn: 1, Executor: "x"})
	must(t, err)
	must(t, eventlog.Sessions{Log: b.log}.AppendRun(t.Context(), l, actorOfTest, newID(events.KindCommit), d))
	b.now = b.now.Add(2 * time.Hour)
	objects, bytes := b.size()
	j := b.janitor(janitor.Config{Snapshots: 2})
	checkList(t, "found", b.pass(j, false), "files "+l.ID, "snapshots "+l.ID)
	for name, want := range map[string]bool{"f-again": true, "u-waits": true, "u-held": false} {
		if slices.Contains(b.objectNames(topology.BucketWorkspaces), prefix+name) != want {
			t.Errorf("%s exists: %v", name, !want)
		}
	}
	left, leftBytes := b.size()
	checkList(t, "found while the turn runs", b.pass(j, false))
	if got := b.trimmed(l); got.Objects != 0 {
		t.Errorf("during a turn the janitor recorded %+v", got)
	}
	d, err = run.Decide(l.Run, run.EndExecution{CommandMeta: events.CommandMeta{CommandID: newID(events.KindCommand), Now: b.now}, Epoch: l.Run.Epoch, ExecutionID: exe, Outcome: events.ExecutionCompleted{}})
	must(t, err)
	must(t, eventlog.Sessions{Log: b.log}.AppendRun(t.Context(), l, actorOfTest, newID(events.KindCommit), d))
	checkList(t, "found before the snapshot of the turn", b.pass(j, false))
	if got := b.trimmed(l); got.Objects != 0 {
		t.Errorf("before the snapshot of the turn the janitor recorded %+v", got)
	}
	b.record(l, events.WorkspaceSynced{Snapshot: l.Run.Snapshot.ID, Reason: "turn"}) // the workspace did not change
	b.pass(j, false)
	if got, want := b.trimmed(l), (events.WorkspaceTrimmed{Objects: objects - left, Bytes: bytes - leftBytes}); got != want || want.Objects < 3 {
		t.Errorf("the log records %+v as removed, want %+v", got, want)
	}
	b.pass(j, false)
	if got := b.trimmed(l); got.Objects != objects-left {
		t.Errorf("the log records the removal twice: %+v", got)
	}
}

var actorOfTest = events.Actor{Kind: "executor", ID: "test"}

// addedBytes returns the sum of the sizes that the snapshots of a session report as added.
func (b *fixture) addedBytes(l *eventlog.SessionState) (sum uint64) {
	b.t.Helper()
	for rec, err := range b.log.Read(b.t.Context(), eventlog.Position{}, eventlog.Filter{Subject: events.RunSubject(l.Tenant, l.ID)}) {
		must(b.t, err)
		for _, e := range rec.Events {
			if d, ok := e.Data.(events.WorkspaceSynced); ok {
				sum += d.Stored
			}
		}
	}
	return sum
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// entry changes an entry of the catalogue.
func (b *fixture) entry(kind events.Aspect, ref events.Reference, decide func(versions.State, events.CommandMeta) ([]events.Event, error)) {
	b.t.Helper()
	entries := eventlog.Catalogue{Log: b.log}
	e, err := entries.Load(b.t.Context(), ref.Subject(kind, tenant), eventlog.LeaderOnly)
	must(b.t, err)
	command := newID(events.KindCommand)
	list, err := decide(e.State, events.CommandMeta{CommandID: command, Now: b.now})
	must(b.t, err)
	must(b.t, entries.Append(b.t.Context(), &e, events.Actor{Kind: "user", ID: "test"}, command, list))
}

// pushSkill adds a version of a skill whose ZIP has the given content, and stores the ZIP.
func (b *fixture) pushSkill(slug, zip string) {
	b.t.Helper()
	b.putObject(topology.BucketSkills, digest(zip), zip)
	ref := events.Reference{Slug: slug, Version: digest(zip)}
	b.entry(events.Skill, events.Reference{Slug: slug}, func(s versions.State, meta events.CommandMeta) ([]events.Event, error) {
		return versions.Decide(s, versions.ApplyVersion{CommandMeta: meta, Version: ref.Version, Data: events.SkillPushed{Ref: ref, Name: slug}})
	})
}

// removeSkillVersion removes a version.
func (b *fixture) removeSkillVersion(slug, zip string) {
	b.t.Helper()
	ref := events.Reference{Slug: slug, Version: digest(zip)}
	b.entry(events.Skill, events.Reference{Slug: slug}, func(s versions.State, meta events.CommandMeta) ([]events.Event, error) {
		return versions.Decide(s, versions.RemoveEntry{CommandMeta: meta, Version: ref.Version, Data: events.SkillRemoved{Ref: ref}})
	})
}

// TestPass_RemovesSkillObjectsWithoutVersion tests that old uploads of skills, ZIPs that never became a version, and
// ZIPs whose versions were all removed are erased.
func TestPass_RemovesSkillObjectsWithoutVersion(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	upload := "upload/" + tenant + "/" + newID(events.KindCommand)
	b.putObject(topology.BucketSkills, upload, "uploaded")
	b.putObject(topology.BucketSkills, digest("never a version"), "never a version")
	b.pushSkill("one", "kept")
	b.pushSkill("one", "removed")
	b.pushSkill("one", "removed from one")
	b.pushSkill("two", "removed from one")
	b.pushSkill("entry", "removed with its entry") // sessions that pinned the version can still load it
	b.removeSkillVersion("one", "removed")
	b.removeSkillVersion("one", "removed from one")
	b.entry(events.Skill, events.Reference{Slug: "entry"}, func(s versions.State, meta events.CommandMeta) ([]events.Event, error) {
		return versions.Decide(s, versions.RemoveEntry{CommandMeta: meta, Data: events.SkillRemoved{Ref: events.Reference{Slug: "entry"}}})
	})
	j := b.janitor(janitor.Config{Uploads: time.Second})
	skills := func(items []string) []string {
		return slices.DeleteFunc(items, func(i string) bool { return !strings.HasPrefix(i, "skill ") })
	}
	b.now = b.now.Add(10 * time.Minute)
	checkList(t, "found while they are new, with any setting", skills(b.pass(j, false)))
	b.now = b.now.Add(time.Hour)
	gone := []string{"skill " + digest("never a version"), "skill " + digest("removed"), "skill " + upload}
	slices.Sort(gone)
	before := b.objectNames(topology.BucketSkills)
	checkList(t, "dry", skills(b.pass(j, true)), gone...)
	checkList(t, "objects after a dry pass", b.objectNames(topology.BucketSkills), before...)
	checkList(t, "found", skills(b.pass(j, false)), gone...)
	left := []string{digest("kept"), digest("removed from one"), digest("removed with its entry")}
	slices.Sort(left)
	checkList(t, "left", b.objectNames(topology.BucketSkills), left...)
	checkList(t, "found again", skills(b.pass(j, false)))
}

// TestPass_RemovesSecretsOfRefusedRequests tests that old values of secrets that no commit refers to, which are those
// of refused requests, are removed. The read models have none of the referring commits here.
func TestPass_RemovesSecretsOfRefusedRequests(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	kv, err := secret.OpenBucket(t.Context(), b.js)
	must(t, err)
	identity, err := age.GenerateX25519Identity()
	must(t, err)
	sealer, err := secret.NewSealer(kv, identity.Recipient())
	must(t, err)
	seal := func(execution string) string {
		t.Helper()
		key, err := sealer.Seal(t.Context(), tenant, execution, []byte("some-value"))
		must(t, err)
		return key
	}
	accepted, refused := newID(events.KindExecution), newID(events.KindExecution)
	ofAccepted, ofRefused, ofEnvironment, ofRefusedEnvironment := seal(accepted), seal(refused), seal(""), seal("")
	l := b.session(newID(events.KindSession))
	command := newID(events.KindCommand)
	list, err := session.Decide(l.Life, session.PostQuery{CommandBase: session.CommandBase{CommandMeta: events.CommandMeta{CommandID: command, Now: b.now}}, ExecutionID: accepted, Content: "hello"})
	must(t, err)
	must(t, eventlog.Sessions{Log: b.log}.AppendLife(t.Context(), l, events.Actor{Kind: "user", ID: "test"}, command, list))
	// so large that the log stores its data as an object
	spec := events.EnvironmentSpec{Variables: map[string]events.Variable{"TOKEN": {Secret: true, Sealed: ofEnvironment}, "A": {Value: strings.Repeat("x", 300<<10)}}}
	ref := events.Reference{Slug: "env"}
	b.entry(events.Environment, ref, func(s versions.State, meta events.CommandMeta) ([]events.Event, error) {
		at := events.Reference{Slug: "env", Version: digest("env")}
		return versions.Decide(s, versions.ApplyVersion{CommandMeta: meta, Version: at.Version, Data: events.EnvironmentApplied{Ref: at, Spec: spec}})
	})
	j := b.janitor(janitor.Config{Uploads: time.Second})
	b.now = b.now.Add(10 * time.Minute)
	checkList(t, "found while they are new, with any setting", b.pass(j, false))
	b.now = b.now.Add(time.Hour)
	gone := []string{"secret " + ofRefused, "secret " + ofRefusedEnvironment}
	slices.Sort(gone)
	checkList(t, "dry", b.pass(j, true), gone...)
	checkList(t, "found", b.pass(j, false), gone...)
	checkList(t, "found again", b.pass(j, false))
	for key, want := range map[string]bool{ofAccepted: true, ofEnvironment: true, ofRefused: false, ofRefusedEnvironment: false} {
		if _, err := kv.Get(t.Context(), key); (err == nil) != want || err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
			t.Errorf("%s: %v, want it there: %v", key, err, want)
		}
	}
}

// TestPass_ErasesUploadsThatFailed tests that old content that belongs to no object is erased, and that the content
// of objects stays.
func TestPass_ErasesUploadsThatFailed(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	js, store := b.js, b.store(topology.BucketWorkspaces)
	named := tenant + "/" + b.session(newID(events.KindSession)).ID + "/named"
	must(t, store.Put(t.Context(), named, bytes.NewReader([]byte("named"))))
	const orphan = "$O." + topology.BucketWorkspaces + ".C.ORPHAN"
	for range 3 {
		_, err := js.Publish(t.Context(), orphan, []byte("abandoned"))
		must(t, err)
	}
	j := b.janitor(janitor.Config{Uploads: time.Hour})
	left := func() uint64 {
		t.Helper()
		s, err := js.Stream(t.Context(), "OBJ_"+topology.BucketWorkspaces)
		must(t, err)
		info, err := s.Info(t.Context(), jetstream.WithSubjectFilter("$O.>"))
		must(t, err)
		return info.State.Subjects[orphan]
	}
	pass := func(dry bool, items int) {
		t.Helper()
		report, err := j.RunPass(t.Context(), dry)
		must(t, err)
		if len(report.Items) != items {
			t.Errorf("the pass found %+v, want %d items", report.Items, items)
		}
	}
	pass(false, 0) // an upload may still be running
	b.now = b.now.Add(2 * time.Hour)
	pass(true, 1)
	if n := left(); n != 3 {
		t.Errorf("%d chunks are left after a dry run, want 3", n)
	}
	pass(false, 1)
	if n := left(); n != 0 {
		t.Errorf("%d chunks are left", n)
	}
	if has, err := store.Has(t.Context(), named); err != nil || !has {
		t.Errorf("the content of the object was removed: %v", err)
	}
	pass(false, 0)
}

// TestPass_OfAHostWhoseClockIsAheadKeepsUploads tests that a janitor on a host whose clock is hours ahead keeps the
// chunks of a running upload.
func TestPass_OfAHostWhoseClockIsAheadKeepsUploads(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{Partitions: topology.DefaultPartitions}))
	url := pgtest.NewDatabase(t)
	must(t, readmodel.Migrate(t.Context(), url))
	_, err = js.Publish(t.Context(), "$O."+topology.BucketWorkspaces+".C.UPLOAD", []byte("under way"))
	must(t, err)
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Partitions: topology.DefaultPartitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	ahead := bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.EventsStreamName(0), Host: func() time.Time { return time.Now().Add(3 * time.Hour) }})
	j, err := janitor.New(janitor.Config{DatabaseURL: url, Uploads: time.Hour}, janitor.Deps{NATS: nc, Log: log, Logger: slog.New(slog.DiscardHandler), Clock: ahead})
	must(t, err)
	report, err := j.RunPass(t.Context(), false)
	must(t, err)
	if len(report.Items) != 0 {
		t.Errorf("the pass removed %+v", report.Items)
	}
}
