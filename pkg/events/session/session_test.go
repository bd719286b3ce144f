package session_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(d time.Duration) time.Time { return t0.Add(d) }

// given folds a history. Each argument is one commit.
func given(commits ...[]events.Event) session.State {
	var s session.State
	for i, list := range commits {
		s = session.Fold(s, fmt.Sprintf("cmt%d", i), list).WithCommitSeq(uint64(i + 1))
	}
	return s
}

func fact(execution string, when time.Time, data events.Payload) events.Event {
	return events.Event{ID: "evt-" + string(data.EventType()) + execution, Time: when, ExecutionID: execution, Source: events.FromServer, Data: data}
}

func commit(list ...events.Event) []events.Event { return list }

var (
	options = events.Options{IdleTimeoutMs: 60_000, TurnLimitMs: 600_000, SessionLimitMs: 3_600_000}
	created = commit(fact("", t0, events.SessionCreated{Agent: "default", Architecture: "spool", Provider: "local", Options: options}))
	posted  = func(x string) []events.Event {
		return commit(fact(x, at(1), events.MessageAccepted{Content: x}), fact(x, at(1), events.ExecutionDispatched{}))
	}
	queued = func(x string) []events.Event {
		return commit(fact(x, at(2), events.MessageAccepted{Content: x}), fact(x, at(2), events.ExecutionQueued{Ahead: 1}))
	}
	deleted = commit(fact("", at(3), events.SessionDeleted{}))
	closed  = commit(fact("", at(3), events.SessionClosed{Reason: "limit"}))
	meta    = func(d time.Duration) session.CommandBase {
		return session.CommandBase{CommandMeta: events.CommandMeta{CommandID: "cmd", Now: at(d)}}
	}
	rested   = session.RunView{ActiveEnded: true, EndedAt: at(time.Second), HasSandbox: true}
	interrup = commit(fact("A", at(2), events.InterruptRequested{Control: 1}))
	canceled = commit(fact("A", at(2), events.CancelRequested{Control: 1, Reason: "cancelled"}))
)

// TestEvolve_DeletionDropsWhatPeopleWrote tests that the state after session_deleted no longer contains the texts
// that users wrote into the options. It keeps the limits and the path of the host folder.
func TestEvolve_DeletionDropsWhatPeopleWrote(t *testing.T) {
	t.Parallel()
	o := options
	o.Model, o.HostPath = "known-model", "/home/user/project"
	kept := o
	o.Image, o.Command, o.Egress = "heron/image", []string{"heron"}, []string{"heron.example.com"}
	o.ModelSettings = events.ModelSettings{Preset: "qwen", Env: map[string]string{"A": "heron"}, Args: []string{"heron"}}
	s := session.Fold(session.State{}, "a", commit(fact("", t0, events.SessionCreated{Options: o})))
	if s.Options.Image != o.Image {
		t.Fatalf("the options before are %+v", s.Options)
	}
	s = session.Fold(s, "b", deleted)
	if !reflect.DeepEqual(s.Options, kept) {
		t.Errorf("the options are %+v, want %+v", s.Options, kept)
	}
}

func TestDecide_AppendsTheExpectedEvents(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		given session.State
		when  session.Command
		then  string // types and executions of the events, in order
		code  string // code of the error
	}{
		{"create", given(), session.CreateSession{CommandBase: meta(0)}, "session_created", ""},
		{"create again", given(created), session.CreateSession{CommandBase: meta(0)}, "", session.CodeExists},
		{"start", given(), session.StartSession{CommandBase: meta(0), Post: session.PostQuery{ExecutionID: "A"}}, "session_created message_accepted/A execution_dispatched/A", ""},
		{"start on one that exists", given(created), session.StartSession{CommandBase: meta(0)}, "", session.CodeExists},
		{"post to nobody", given(), session.PostQuery{CommandBase: meta(0), ExecutionID: "A"}, "", session.CodeNotFound},
		{"post to the deleted", given(created, deleted), session.PostQuery{CommandBase: meta(0), ExecutionID: "A"}, "", session.CodeNotFound},
		{"post to the closed", given(created, closed), session.PostQuery{CommandBase: meta(0), ExecutionID: "A"}, "", session.CodeClosed},
		{"first message is dispatched at once", given(created), session.PostQuery{CommandBase: meta(0), ExecutionID: "A"}, "message_accepted/A execution_dispatched/A", ""},
		{"second waits", given(created, posted("A")), session.PostQuery{CommandBase: meta(0), ExecutionID: "B"}, "message_accepted/B execution_queued/B", ""},
		{"second goes at once after the end", given(created, posted("A")), session.PostQuery{CommandBase: meta(0), ExecutionID: "B", ActiveEnded: true}, "message_accepted/B execution_dispatched/B", ""},
		{"third does not overtake", given(created, posted("A"), queued("B")), session.PostQuery{CommandBase: meta(0), ExecutionID: "C", ActiveEnded: true}, "message_accepted/C execution_queued/C", ""},
		{"the same execution again", given(created, posted("A")), session.PostQuery{CommandBase: meta(0), ExecutionID: "A"}, "", ""},
		{"advance while it runs", given(created, posted("A"), queued("B")), session.DispatchNext{CommandBase: meta(0)}, "", ""},
		{"advance", given(created, posted("A"), queued("B")), session.DispatchNext{CommandBase: meta(0), ActiveEnded: true}, "execution_dispatched/B", ""},
		{"advance with nothing", given(created, posted("A")), session.DispatchNext{CommandBase: meta(0), ActiveEnded: true}, "", ""},
		{"interrupt", given(created, posted("A")), session.RequestInterrupt{CommandBase: meta(0)}, "interrupt_requested/A", ""},
		{"interrupt twice", given(created, posted("A"), interrup), session.RequestInterrupt{CommandBase: meta(0)}, "", ""},
		{"interrupt after the end", given(created, posted("A")), session.RequestInterrupt{CommandBase: meta(0), ActiveEnded: true}, "", ""},
		{"cancel after interrupt", given(created, posted("A"), interrup), session.RequestCancel{CommandBase: meta(0), ExecutionID: "A"}, "cancel_requested/A", ""},
		{"interrupt after cancel", given(created, posted("A"), canceled), session.RequestInterrupt{CommandBase: meta(0)}, "", ""},
		{"cancel what waits", given(created, posted("A"), queued("B")), session.RequestCancel{CommandBase: meta(0), ExecutionID: "B"}, "execution_withdrawn/B", ""},
		{"cancel after the end", given(created, posted("A")), session.RequestCancel{CommandBase: meta(0), ExecutionID: "A", ActiveEnded: true}, "", ""},
		{"cancel the unknown", given(created, posted("A")), session.RequestCancel{CommandBase: meta(0), ExecutionID: "Z"}, "", ""},
		{"delete", given(created, posted("A"), queued("B")), session.DeleteSession{CommandBase: meta(0)}, "execution_withdrawn/B cancel_requested/A session_deleted", ""},
		{"delete at rest", given(created, posted("A")), session.DeleteSession{CommandBase: meta(0), ActiveEnded: true}, "session_deleted", ""},
		{"delete twice", given(created, deleted), session.DeleteSession{CommandBase: meta(0)}, "", session.CodeNotFound},
		{"idle too early", given(created, posted("A")), session.HandleDeadline{CommandBase: meta(50 * time.Second), Run: rested}, "", ""},
		{"idle", given(created, posted("A")), session.HandleDeadline{CommandBase: meta(61 * time.Second), Run: rested}, "session_idle", ""},
		{"idle without a sandbox", given(created, posted("A")), session.HandleDeadline{CommandBase: meta(61 * time.Second), Run: session.RunView{ActiveEnded: true}}, "", ""},
		{"idle while it runs", given(created, posted("A")), session.HandleDeadline{CommandBase: meta(61 * time.Second), Run: session.RunView{HasSandbox: true}}, "", ""},
		{"idle while one waits", given(created, posted("A"), queued("B")), session.HandleDeadline{CommandBase: meta(61 * time.Second), Run: rested}, "", ""},
		{"session limit", given(created, posted("A"), queued("B")), session.HandleDeadline{CommandBase: meta(time.Hour)}, "execution_withdrawn/B cancel_requested/A session_closed", ""},
		{"session limit once", given(created, closed), session.HandleDeadline{CommandBase: meta(2 * time.Hour)}, "", ""},
		{"options", given(created), session.UpdateOptions{CommandBase: meta(0), Options: options}, "session_options_updated", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			list, err := session.Decide(c.given, c.when)
			var refused *session.Error
			if errors.As(err, &refused) != (c.code != "") || refused != nil && refused.Code != c.code {
				t.Fatalf("error %v, want code %q", err, c.code)
			}
			if got := describe(list); got != c.then {
				t.Fatalf("decided %q, want %q", got, c.then)
			}
		})
	}
}

func describe(list []events.Event) string {
	var out []string
	for _, e := range list {
		s := string(e.Type())
		if e.ExecutionID != "" {
			s += "/" + e.ExecutionID
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

func TestDecide_RefusesPostsToAFullQueue(t *testing.T) {
	t.Parallel()
	s := given(created, posted("A"))
	for i := range session.MaxQueuedExecutions {
		s = session.Fold(s, "c", queued(fmt.Sprint("B", i)))
	}
	_, err := session.Decide(s, session.PostQuery{CommandBase: meta(0), ExecutionID: "Z"})
	var refused *session.Error
	if !errors.As(err, &refused) || refused.Code != session.CodeQueueFull {
		t.Fatalf("error %v, want %s", err, session.CodeQueueFull)
	}
}

// TestDecide_RedeliveredCommandChangesNothing tests that a command that was executed decides no further events, and
// that the state returns the sequence of its commit.
func TestDecide_RedeliveredCommandChangesNothing(t *testing.T) {
	t.Parallel()
	post := session.PostQuery{CommandBase: meta(0), ExecutionID: "A"}
	s := given(created)
	list, err := session.Decide(s, post)
	if err != nil {
		t.Fatal(err)
	}
	s = session.Fold(s, session.CommitID("cmd"), list).WithCommitSeq(7)
	again, err := session.Decide(s, post)
	if err != nil || len(again) != 0 {
		t.Fatalf("decided %s, %v", describe(again), err)
	}
	if seq, ok := s.CommandSeq("cmd"); !ok || seq != 7 {
		t.Fatalf("did at %d, %v", seq, ok)
	}
	for i := range 63 {
		s = session.Fold(s, fmt.Sprint("other", i), queued(fmt.Sprint("B", i))).WithCommitSeq(uint64(8 + i))
	}
	if _, ok := s.CommandSeq("cmd"); !ok {
		t.Fatal("forgotten after 63 further commands")
	}
}

// TestMayHaveForgotten_ComparesWithDroppedCommands tests that the id of a command is compared with the ids that were dropped from the state,
// independent of clocks. For commits that do not name their command, the time of their events counts, with a margin
// of one hour.
func TestMayHaveForgotten_ComparesWithDroppedCommands(t *testing.T) {
	t.Parallel()
	command := func(at time.Time, n byte) string {
		id, err := events.NewID(events.KindCommand, at, bytes.NewReader(bytes.Repeat([]byte{n}, 10)))
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	s := given(created)
	for i := range 70 {
		s = session.Fold(s, command(at(time.Duration(i)*time.Millisecond), 1), queued(fmt.Sprint("B", i))).WithCommitSeq(uint64(8 + i))
	}
	old := at(time.Hour + time.Millisecond) // the commits of given do not name their commands
	for _, c := range []struct {
		what string
		id   string
		want bool
	}{
		{"forgotten", command(at(5*time.Millisecond), 1), true},
		{"of a build that did not record commands", command(old.Add(-time.Minute), 1), true},
		{"new", command(old.Add(time.Second), 1), false},
	} {
		if got := s.MayHaveDropped(c.id); got != c.want {
			t.Errorf("a command that is %s: may have been forgotten is %v", c.what, got)
		}
	}
	ahead := command(at(48*time.Hour), 9) // from a gateway whose clock is ahead
	s = session.Fold(s, ahead, queued("C"))
	for i := range 64 {
		if s.MayHaveDropped(command(at(47*time.Hour), 1)) {
			t.Fatalf("forgotten after %d commands", i)
		}
		s = session.Fold(s, command(at(time.Duration(100+i)*time.Millisecond), 1), queued(fmt.Sprint("D", i)))
	}
	if _, done := s.CommandSeq(ahead); done || !s.MayHaveDropped(ahead) || !s.MayHaveDropped(command(at(47*time.Hour), 1)) {
		t.Fatal("a command of a clock that is ahead was forgotten, and a lower id counts as new")
	}
}

// TestDeadline_IsTheEarliest tests that the state has one deadline, the earliest.
func TestDeadline_IsTheEarliest(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		s    session.State
		run  session.RunView
		want time.Time
	}{
		{"new: the session limit", given(created), session.RunView{}, at(time.Hour)},
		{"running: the turn limit and grace", given(created, posted("A")), session.RunView{HasSandbox: true}, at(1 + 10*time.Minute + session.TurnGracePeriod)},
		{"rested: idle", given(created, posted("A")), rested, at(61 * time.Second)},
		{"idle already", given(created, posted("A"), commit(fact("", at(9), events.SessionIdle{}))), rested, at(time.Hour)},
		{"closed at rest: none", given(created, closed), session.RunView{ActiveEnded: true}, time.Time{}},
		{"closed while it runs: the turn limit", given(created, posted("A"), closed), session.RunView{}, at(1 + 10*time.Minute + session.TurnGracePeriod)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got, ok := c.s.NextDeadline(c.run)
			if ok == c.want.IsZero() || !got.Equal(c.want) {
				t.Fatalf("deadline %v, want %v", got, c.want)
			}
		})
	}
}

// TestState_IsCompact tests that the state of a session with a full queue stays small, because each commit stores the
// state.
func TestState_IsCompact(t *testing.T) {
	t.Parallel()
	s := given(created, posted(events.DeriveID(events.KindExecution, "a")))
	for i := range session.MaxQueuedExecutions {
		s = session.Fold(s, events.DeriveID(events.KindCommit, fmt.Sprint(i)), queued(events.DeriveID(events.KindExecution, fmt.Sprint(i))))
	}
	b, err := json.Marshal(s)
	if err != nil || len(b) > 64<<10 {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
}
