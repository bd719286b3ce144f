package command

import (
	"context"
	"encoding/json"
	"iter"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
)

// logged returns a log with one session, whose only query has not ended.
func logged(t *testing.T) eventlog.Log {
	t.Helper()
	log, err := memlog.New(memlog.Config{})
	if err != nil {
		t.Fatal(err)
	}
	head, err := log.Last(t.Context(), events.LifeSubject("default", ses), eventlog.AnyReplica)
	if err != nil {
		t.Fatal(err)
	}
	var list []events.Event
	for i, p := range []events.Payload{events.SessionCreated{Agent: "default", Architecture: "spool", Provider: "local"}, accepted} {
		list = append(list, events.Event{ID: events.DeriveID(events.KindEvent, ses, string(rune('a'+i))), Time: time.Unix(1, 0), ExecutionID: []string{"", exe}[i], Source: events.FromServer, Data: p})
	}
	if _, err := log.Append(t.Context(), head, events.Draft{ID: events.DeriveID(events.KindCommit, ses), Events: list}); err != nil {
		t.Fatal(err)
	}
	return log
}

// broken is a log with a stored event that was changed.
type broken struct{ eventlog.Log }

func (b broken) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		for rec, err := range b.Log.Read(ctx, after, f) {
			rec.Commit.Events = json.RawMessage(strings.Replace(string(rec.Commit.Events), "hello", "hallo", 1))
			if !yield(rec, err) {
				return
			}
		}
	}
}

func TestVerify_PrintsTheReport(t *testing.T) {
	t.Parallel()
	open := func(log eventlog.Log, closed *int) *fakeLocal {
		return &fakeLocal{dir: "/d", open: func() (Installation, error) {
			return Installation{Log: log, Close: func() error { *closed++; return nil }}, nil
		}}
	}
	other := strings.Replace(ses, "V", "W", 1)
	for name, c := range map[string]struct {
		log  eventlog.Log
		args []string
		code int
		out  string
		err  string
	}{
		"sound":    {logged(t), nil, ExitDone, "open: " + exe + " of " + ses + ", accepted at 0-1, has no end yet\nsound: 1 sessions, 1 commits, 2 events, 1 queries without an end\n", ""},
		"one":      {logged(t), []string{ses, "--json"}, ExitDone, `{"ok":true,"sessions":1,"commits":1,"events":2,"open":[{"tenant":"default","sessionId":"` + ses + `","executionId":"` + exe + `","position":"0-1","deleted":false}]}` + "\n", ""},
		"unknown":  {logged(t), []string{other}, ExitFailed, "", "spool: session: the log has no session " + other + " of tenant default\n"},
		"stranger": {logged(t), []string{ses, "--tenant", "other"}, ExitFailed, "", "spool: session: the log has no session " + ses + " of tenant other\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			closed := 0
			w := testIO(t)
			w.Local = open(c.log, &closed)
			got := spool(t, w, append([]string{"verify"}, c.args...)...)
			if got.code != c.code || got.out != c.out || !strings.HasPrefix(got.err, c.err) || c.err == "" && got.err != "" || closed != 1 {
				t.Errorf("got %+v, closed %d times", got, closed)
			}
		})
	}
}

// TestVerify_ShowsEveryFault tests that a fault in the log fails the command until the fault is accepted at its
// position.
func TestVerify_ShowsEveryFault(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args     []string
		code     int
		out, err string
	}{
		"not accepted":         {nil, ExitFailed, "\nfault: 0-1 on ", "spool: the log is broken at 0-1 on "},
		"accepted":             {[]string{"--accept", "0-1"}, ExitDone, "\naccepted fault: 0-1 on ", ""},
		"another one accepted": {[]string{"--accept", "0-2"}, ExitFailed, "\nfault: 0-1 on ", "spool: the log is broken at 0-1 on "},
		"as JSON":              {[]string{"--accept", "0-1", "--json"}, ExitDone, `"problems":[{"position":"0-1"`, ""},
		"at no position":       {[]string{"--accept", "there"}, ExitUsage, "", `spool: accept: position: "there" is not <shard>-<sequence>`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := testIO(t)
			w.Local = &fakeLocal{dir: "/d", open: func() (Installation, error) {
				return Installation{Log: broken{logged(t)}, Close: func() error { return nil }}, nil
			}}
			got := spool(t, w, append([]string{"verify"}, c.args...)...)
			if got.code != c.code || !strings.Contains(got.out, c.out) || !strings.HasPrefix(got.err, c.err) || c.err == "" && got.err != "" {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// withoutContent is a log of a deleted session without the commits before its deletion.
type withoutContent struct{ eventlog.Log }

func (l withoutContent) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		for rec, err := range l.Log.Read(ctx, after, f) {
			if rec.Position.Seq > 2 && !yield(rec, err) {
				return
			}
		}
	}
}

// TestVerify_SaysWhichMissingCommitsAreUndecided tests that the report names deletions with impossible counts, and the
// missing commits that only signed heads can explain.
func TestVerify_SaysWhichMissingCommitsAreUndecided(t *testing.T) {
	t.Parallel()
	log := logged(t)
	for i, p := range []events.Payload{events.SessionOptionsUpdated{}, events.SessionDeleted{}, events.RunRetired{Life: 1<<32 - 1}, events.ContentRemoved{Messages: 1}} {
		subject := events.LifeSubject("default", ses)
		if i > 1 {
			subject = events.RunSubject("default", ses)
		}
		head, err := log.Last(t.Context(), subject, eventlog.AnyReplica)
		if err != nil {
			t.Fatal(err)
		}
		id := ses + string(rune('c'+i))
		event := events.Event{ID: events.DeriveID(events.KindEvent, id), Time: time.Unix(1, 0), Source: events.FromServer, Data: p}
		if _, err := log.Append(t.Context(), head, events.Draft{ID: events.DeriveID(events.KindCommit, id), Events: []events.Event{event}}); err != nil {
			t.Fatal(err)
		}
	}
	for args, want := range map[string]string{
		"": "unknown: 1 deleted sessions have a count of commits that cannot be true, which an earlier build wrote; the first is at 0-4\n" +
			"undecided: 1 commits are missing that these sessions may have had; compare the log with its signed heads (--public-key)\n" +
			"sound except for 1 missing commits, which are undecided: ",
		"--json": `"uncounted":["0-4"],"undecided":1}`,
	} {
		w := testIO(t)
		w.Local = &fakeLocal{dir: "/d", open: func() (Installation, error) {
			return Installation{Log: withoutContent{log}, Close: func() error { return nil }}, nil
		}}
		if got := spool(t, w, append([]string{"verify"}, strings.Fields(args)...)...); got.code != ExitDone || !strings.Contains(got.out, want) {
			t.Errorf("verify %s: %+v, want %s", args, got, want)
		}
	}
}

func TestInstallation_ReportsWhatIsUnreachable(t *testing.T) {
	t.Parallel()
	got := spool(t, testIO(t), "verify", "--nats-url", "nats://127.0.0.1:1")
	if got.code != ExitFailed || !strings.HasPrefix(got.err, "spool: nats-url: cannot reach NATS") || strings.Count(got.err, "\n") != 1 {
		t.Errorf("got %+v", got)
	}
	w := testIO(t)
	w.Local = &fakeLocal{dir: "/d", open: func() (Installation, error) { return Installation{}, ErrDataFolderLocked }}
	if got := spool(t, w, "rebuild"); got.code != ExitFailed || !strings.Contains(got.err, "is not ready yet") {
		t.Errorf("busy: %+v", got)
	}
}

func TestDoctor_ChecksTheMachine(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = taken.Close() })
	runner := filepath.Join(t.TempDir(), "runner")
	if err := os.WriteFile(runner, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	f := serve(t)
	db := readmodeltest.CreateRoles(t, pgtest.StartServer(t, pgserver.Config{Fast: true}).URL())
	private := "private Postgres of a stack"
	good := []string{"--data", t.TempDir(), "--runner", runner, "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--url", f.URL}
	for name, c := range map[string]struct {
		change []string // flags that replace the good ones
		check  string
		status string
		says   string
	}{
		"folder is a file":        {[]string{"--data", file}, "data folder", "failed", "choose another folder with --data"},
		"folder":                  {nil, "data folder", "ok", "can be written"},
		"port in use":             {[]string{"--listen", taken.Addr().String()}, "port of REST", "failed", "choose another address with --listen"},
		"port free":               {nil, "port of gRPC", "ok", "is free"},
		"no runner":               {[]string{"--runner", file}, "runner", "failed", "is not an executable program"},
		"database gone":           {[]string{"--database-url", "postgres://127.0.0.1:1/x?connect_timeout=2"}, "Postgres", "failed", "check that Postgres is running"},
		"database nothing":        {[]string{"--database-url", "://"}, "Postgres", "failed", "write it like postgres://"},
		"database of a superuser": {[]string{"--database-url", db.Superuser}, "Postgres", "note", "role spool may run programs"},
		"database of one role":    {[]string{"--database-url", db.Projector}, "Postgres", "note", "one role, spool_projector, serves every service"},
		"database of the gateway": {[]string{"--database-url", db.Gateway}, "Postgres", "ok", "as role spool_gateway"},
		private:                   {nil, "Postgres", "ok", "as role spool_projector"},
		"local sandboxes":         {nil, "disk limits", "ok", "local sandboxes have no disk limits"},
		"no engine":               {[]string{"--sandbox", "docker", "--docker-host", "unix:///nowhere"}, "disk limits", "failed", "does not answer"},
		"no such limit":           {[]string{"--sandbox", "docker", "--sandbox-disk-limit", "hope"}, "disk limits", "failed", "sandbox-disk-limit"},
		"server":                  {nil, "server", "ok", "nats ok, postgres ok"},
		"server gone":             {[]string{"--url", nowhere}, "server", "failed", "cannot reach " + nowhere},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := testIO(t)
			if name == private {
				w.Local = &fakeLocal{dir: "/d", found: &StackConnection{DatabaseURL: db.Projector}}
			}
			got := spool(t, w, append(append([]string{"doctor", "--json"}, good...), c.change...)...)
			var found finding
			for line := range strings.Lines(got.out) {
				var one finding
				if err := json.Unmarshal([]byte(line), &one); err != nil {
					t.Fatal(err)
				}
				if one.Check == c.check {
					found = one
				}
			}
			if found.Status != c.status || !strings.Contains(found.Detail+" "+found.Remedy, c.says) {
				t.Errorf("found %+v", found)
			}
			if c.status == "failed" && got.code != ExitFailed {
				t.Errorf("exit code %d, %s", got.code, got.err)
			}
		})
	}
}
