package session_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session"
)

// TestCommand_CommitNamesActorOfTheCommand tests that a commit has the key, user and address of its command, and the
// name of the service copy that wrote it, whatever service the command names. If another copy receives the command
// again, nothing changes. A command of an earlier release names the key in a single field.
func TestCommand_CommitNamesActorOfTheCommand(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	a := s.startCopy("a", session.Config{})
	key := id(events.KindKey)
	carry := func(c command.Command) {
		t.Helper()
		answer, err := s.request(c, c.SessionID)
		must(t, err)
		if answer.Error != nil {
			t.Fatal(answer.Error)
		}
	}
	create := func(actor events.Actor) command.Command {
		return command.Command{Type: command.TypeCreateSession, ID: id(events.KindCommand), Tenant: "default", SessionID: id(events.KindSession), Actor: actor, Body: []byte("{}")}
	}
	head := func(c command.Command) eventlog.Head {
		t.Helper()
		h, err := s.log.Last(t.Context(), events.LifeSubject("default", c.SessionID), eventlog.LeaderOnly)
		must(t, err)
		return h
	}
	now := create(events.Actor{Kind: "key", ID: key, Key: key, User: "ann", Address: "192.0.2.1", Service: "executor/forged"})
	carry(now)
	want := events.Actor{Kind: "key", ID: key, Key: key, User: "ann", Address: "192.0.2.1", Service: "session/a"}
	first := head(now)
	if first.Commit.V != 2 || first.Commit.Actor != want {
		t.Errorf("the commit has version %d by %+v, want %+v", first.Commit.V, first.Commit.Actor, want)
	}
	a.stop()
	s.startCopy("b", session.Config{})
	carry(now)
	if again := head(now); again.Seq != first.Seq || again.Hash != first.Hash {
		t.Errorf("a repeat wrote commit %d by %+v", again.Seq, again.Commit.Actor)
	}
	before := create(events.Actor{Kind: "key", ID: key})
	carry(before)
	if got, want := head(before).Commit.Actor, (events.Actor{Kind: "key", ID: key, Key: key, Service: "session/b"}); got != want {
		t.Errorf("the commit is by %+v, want %+v", got, want)
	}
}
