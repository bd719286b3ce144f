package session_test

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session"
)

// TestCreateSession_ResolvesOptions tests that each option that a session does not set has the value of the service,
// and keeps it when the service's settings change.
func TestCreateSession_ResolvesOptions(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{SyncInterval: 7 * time.Second, HealthInterval: 8 * time.Second, SandboxMaxAge: 9 * time.Hour})
	sid := id(events.KindSession)
	a := s.send(command.TypeCreateSession, sid, "", command.CreateSession{Architecture: "acp", Provider: "local", Options: events.Options{
		Image: "agents:2", Command: []string{"agent", "--acp"}, Egress: []string{"pypi.org"}, HealthIntervalMs: 1500,
	}})
	if a.Error != nil {
		t.Fatal(a.Error)
	}
	want := events.Options{
		IdleTimeoutMs: 900_000, TurnLimitMs: 3_600_000, SessionLimitMs: 86_400_000, SyncIntervalMs: 7000, HealthIntervalMs: 1500, SandboxMaxAgeMs: 32_400_000,
		Image: "agents:2", Command: []string{"agent", "--acp"}, Egress: []string{"pypi.org"},
	}
	options := func() events.Options {
		t.Helper()
		l, err := s.ses.Load(t.Context(), "default", sid, eventlog.LeaderOnly)
		must(t, err)
		return l.Life.Options
	}
	if got := options(); !reflect.DeepEqual(got, want) {
		t.Errorf("created with %+v, want %+v", got, want)
	}
	a = s.send(command.TypeUpdateSession, sid, "", command.UpdateSession{Options: &events.Options{SyncIntervalMs: 60_000}, Clear: []string{"egress", "healthIntervalMs"}})
	if a.Error != nil {
		t.Fatal(a.Error)
	}
	want.SyncIntervalMs, want.HealthIntervalMs, want.Egress = 60_000, 8000, nil
	if got := options(); !reflect.DeepEqual(got, want) {
		t.Errorf("changed to %+v, want %+v", got, want)
	}
	a = s.send(command.TypeUpdateSession, sid, "", command.UpdateSession{Clear: []string{"command"}})
	if a.Error == nil || a.Error.Field != "sessionOptions.command" {
		t.Errorf("an acp session accepted the removal of its command: %+v", a.Error)
	}
}

// TestPost_StoresFilesBeforeTheirMessage tests that a message and its files are one commit, with the files first, and
// that a redelivered command changes nothing.
func TestPost_StoresFilesBeforeTheirMessage(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid, sum := id(events.KindSession), strings.Repeat("ab", 32)
	start := command.StartExecution{Post: command.PostMessage{Content: "look at a.txt", Files: []command.File{{Path: "a.txt", Size: 3, SHA256: sum}, {Path: "b/c.sh", Size: 3, SHA256: sum, Mode: 0o755}}}}
	cmd, exe := id(events.KindCommand), id(events.KindExecution)
	for range 2 {
		a, err := s.trySend(cmd, command.TypeStartExecution, sid, exe, start)
		must(t, err)
		if a.Error != nil {
			t.Fatal(a.Error)
		}
	}
	put := command.PutFile{File: command.File{Path: "d", Object: "default/" + sid + "/u-1", Size: 9, SHA256: sum, Archive: true}}
	for _, a := range []command.Answer{
		s.send(command.TypePutFile, sid, "", put), s.send(command.TypeRemoveFile, sid, "", command.RemoveFile{Path: "b"}),
	} {
		if a.Error != nil || a.Position == "" {
			t.Fatalf("%+v", a)
		}
	}
	var got []any
	for _, e := range s.history(sid) {
		switch d := e.Data.(type) {
		case events.FilePut, events.FileRemoved:
			got = append(got, d)
		case events.MessageAccepted:
			got = append(got, d.Content)
		}
	}
	object := command.FileObject("default", sid, sum)
	want := []any{
		events.FilePut{N: 1, Path: "a.txt", Object: object, Size: 3, SHA256: sum}, events.FilePut{N: 2, Path: "b/c.sh", Object: object, Size: 3, SHA256: sum, Mode: 0o755},
		"look at a.txt", events.FilePut{N: 3, Path: "d", Object: "default/" + sid + "/u-1", Size: 9, SHA256: sum, Archive: true}, events.FileRemoved{N: 4, Path: "b"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

// TestPost_RefusesTooManyUnsyncedFiles tests that the number of changes that no snapshot contains is limited. A
// message with one file too many is refused with all its files.
func TestPost_RefusesTooManyUnsyncedFiles(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sum := strings.Repeat("ab", 32)
	var files []command.File
	for range 1024 {
		files = append(files, command.File{Path: "a", SHA256: sum})
	}
	sid := id(events.KindSession)
	if a := s.send(command.TypeCreateSession, sid, "", command.CreateSession{Files: files}); a.Error != nil {
		t.Fatal(a.Error)
	}
	before := len(s.history(sid))
	for _, a := range []command.Answer{
		s.send(command.TypePostMessage, sid, id(events.KindExecution), command.PostMessage{Content: "x", Files: files[:1]}),
		s.send(command.TypePutFile, sid, "", command.PutFile{File: files[0]}), s.send(command.TypeRemoveFile, sid, "", command.RemoveFile{Path: "a"}),
	} {
		if a.Error == nil || a.Error.Code != "TOO_MANY_FILES" || !strings.Contains(a.Error.Detail, "tar") {
			t.Errorf("got %+v", a.Error)
		}
	}
	if after := len(s.history(sid)); after != before {
		t.Errorf("%d events were written by refused commands", after-before)
	}
}

func TestControls_RepeatedOnesChangeNothing(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := s.create(events.Options{})
	exe, waits := s.post(sid), s.post(sid)
	do := func(typ command.Type, exe string) {
		t.Helper()
		if a := s.send(typ, sid, exe, nil); a.Error != nil || a.Position == "" {
			t.Errorf("%s %s: %+v", typ, exe, a)
		}
	}
	do(command.TypeSyncWorkspace, "")
	do(command.TypeSyncWorkspace, "")
	do(command.TypePause, exe)
	do(command.TypePause, exe) // a second pause changes nothing
	do(command.TypeResume, exe)
	if a := s.send(command.TypePause, sid, waits, nil); a.Error == nil || a.Error.Code != "EXECUTION_NOT_RUNNING" || a.Error.Field != "executionId" {
		t.Errorf("a queued execution was paused: %+v", a)
	}
	do(command.TypeTerminate, waits) // queued, so it is withdrawn
	do(command.TypeTerminate, "")    // the sandbox, with the execution that runs in it
	list := s.history(sid)
	if n := count[events.SyncRequested](list); n != 2 || last[events.SyncRequested](list).Sync != 2 {
		t.Errorf("%d requests to sync, the last %+v", n, last[events.SyncRequested](list))
	}
	if p, r, x := count[events.PauseRequested](list), count[events.ResumeRequested](list), count[events.TerminateRequested](list); p != 1 || r != 1 || x != 1 {
		t.Errorf("paused %d times, resumed %d times, terminated %d times; want once each", p, r, x)
	}
	if w := last[events.ExecutionWithdrawn](list); w.Reason != "terminated" {
		t.Errorf("the queued execution was withdrawn with %+v", w)
	}
}
