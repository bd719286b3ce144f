package session_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

func TestDecide_ChangesOfTheSandbox(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	base := func(id string) session.CommandBase {
		return session.CommandBase{CommandMeta: events.CommandMeta{CommandID: id, Now: now}}
	}
	open := session.State{Status: session.Open}
	running := open
	running.Active, running.Turns = session.QueryRef{ExecutionID: "A", Turn: 1}, 1
	paused, cancelled, waiting, full, closed := running, running, running, open, open
	paused.Pause = session.PauseState{ExecutionID: "A", Wanted: true}
	cancelled.Control = session.Control{N: 1, Kind: session.Cancel, ExecutionID: "A"}
	waiting.Queue = []session.QueryRef{{ExecutionID: "B"}}
	for i := range session.MaxPendingChanges {
		full.Pending = append(full.Pending, session.FileChange{N: uint32(i + 1)})
	}
	closed.Status = session.Closed
	for _, c := range []struct {
		name  string
		given session.State
		when  session.Command
		then  string
		code  string
	}{
		{"pause", running, session.RequestPause{CommandBase: base("c"), ExecutionID: "A"}, "pause_requested/A", ""},
		{"pause twice", paused, session.RequestPause{CommandBase: base("c"), ExecutionID: "A"}, "", ""},
		{"pause after the end", running, session.RequestPause{CommandBase: base("c"), ExecutionID: "A", ActiveEnded: true}, "", ""},
		{"pause what is being cancelled", cancelled, session.RequestPause{CommandBase: base("c"), ExecutionID: "A"}, "", ""},
		{"pause what waits", waiting, session.RequestPause{CommandBase: base("c"), ExecutionID: "B"}, "", session.CodeNotRunning},
		{"resume", paused, session.RequestResume{CommandBase: base("c"), ExecutionID: "A"}, "resume_requested/A", ""},
		{"resume what runs", running, session.RequestResume{CommandBase: base("c"), ExecutionID: "A"}, "", ""},
		{"terminate an execution", running, session.RequestTerminate{CommandBase: base("c"), ExecutionID: "A"}, "terminate_requested/A", ""},
		{"terminate what is being cancelled", cancelled, session.RequestTerminate{CommandBase: base("c"), ExecutionID: "A"}, "terminate_requested/A", ""},
		{"terminate what waits", waiting, session.RequestTerminate{CommandBase: base("c"), ExecutionID: "B"}, "execution_withdrawn/B", ""},
		{"terminate the environment of a turn", running, session.RequestTerminate{CommandBase: base("c")}, "terminate_requested/A", ""},
		{"terminate the environment at rest", running, session.RequestTerminate{CommandBase: base("c"), ActiveEnded: true, HasSandbox: true}, "terminate_requested", ""},
		{"terminate no environment", open, session.RequestTerminate{CommandBase: base("c")}, "", ""},
		{"sync", open, session.RequestSync{CommandBase: base("c")}, "sync_requested", ""},
		{"put", open, session.PutFile{CommandBase: base("c"), FileUpload: session.FileUpload{Path: "a"}}, "file_put", ""},
		{"put into a closed session", closed, session.PutFile{CommandBase: base("c"), FileUpload: session.FileUpload{Path: "a"}}, "", session.CodeClosed},
		{"one too many", full, session.PutFile{CommandBase: base("c"), FileUpload: session.FileUpload{Path: "a"}}, "", session.CodeTooManyFiles},
		{"room after a snapshot", full, session.PutFile{CommandBase: base("c"), FileUpload: session.FileUpload{Path: "a"}, Held: 1}, "file_put", ""},
		{"remove", open, session.RemoveFile{CommandBase: base("c"), Path: "a"}, "file_removed", ""},
		{"create with files", session.State{}, session.CreateSession{CommandBase: base("c"), Files: []session.FileUpload{{Path: "a"}, {Path: "b"}}}, "session_created file_put file_put", ""},
		{"a message with files", open, session.PostQuery{CommandBase: base("c"), ExecutionID: "A", Files: []session.FileUpload{{Path: "a"}}}, "file_put message_accepted/A execution_dispatched/A", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			list, err := session.Decide(c.given, c.when)
			var refused *session.Error
			if errors.As(err, &refused) != (c.code != "") || refused != nil && refused.Code != c.code {
				t.Fatalf("error %v, want %q", err, c.code)
			}
			var got []string
			for _, e := range list {
				s := string(e.Type())
				if e.ExecutionID != "" {
					s += "/" + e.ExecutionID
				}
				got = append(got, s)
			}
			if strings.Join(got, " ") != c.then {
				t.Fatalf("%q, want %q", got, c.then)
			}
		})
	}
}

// TestEvolve_NumbersFileChanges tests that file changes are numbered, and dropped when a snapshot contains them.
func TestEvolve_NumbersFileChanges(t *testing.T) {
	t.Parallel()
	s := session.State{Status: session.Open}
	for i, held := range []uint32{0, 0, 0, 2} {
		list, err := session.Decide(s, session.PutFile{CommandBase: session.CommandBase{CommandMeta: events.CommandMeta{CommandID: string(rune('a' + i))}}, FileUpload: session.FileUpload{Path: "f"}, Held: held})
		if err != nil {
			t.Fatal(err)
		}
		s = session.Fold(s, session.CommitID(string(rune('a'+i))), list).WithCommitSeq(uint64(10 + i))
	}
	if len(s.Pending) != 2 || s.Pending[0] != (session.FileChange{N: 3, At: 12}) || s.Pending[1] != (session.FileChange{N: 4, At: 13}) {
		t.Fatalf("pending %+v", s.Pending)
	}
	if got := s.ChangesAfter(3); len(got) != 1 || got[0].N != 4 {
		t.Fatalf("after 3: %+v", got)
	}
}

// TestDeadline_PausedExecutionHasNone tests that a paused execution has no turn deadline, and that the duration of
// the pause extends the deadline later.
func TestDeadline_PausedExecutionHasNone(t *testing.T) {
	t.Parallel()
	s := session.State{Status: session.Open, Active: session.QueryRef{ExecutionID: "A"}, Options: events.Options{TurnLimitMs: 1000}}
	at, ok := s.TurnDeadline(session.RunView{ActiveClaimed: true, PausedFor: time.Minute})
	if !ok || at != s.Active.At.Add(time.Second+time.Minute+session.TurnGracePeriod) {
		t.Fatalf("%s %v", at, ok)
	}
	s.Pause = session.PauseState{ExecutionID: "A", Wanted: true}
	if _, ok := s.TurnDeadline(session.RunView{ActiveClaimed: true, Paused: true}); ok {
		t.Fatal("a paused execution has a deadline")
	}
	if _, ok := s.TurnDeadline(session.RunView{ActiveClaimed: true}); !ok {
		t.Fatal("an execution that is not paused yet has no deadline")
	}
}
