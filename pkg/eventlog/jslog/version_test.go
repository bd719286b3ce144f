package jslog_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestAppend_VersionOfTheLog tests that a writer writes the version that the log records, or the newer version of the
// subject's last commit: a copy that started before the log was raised does not take a chain back to the older
// version. Verify reports a commit whose actor was changed and a commit of an unknown version, and still checks all
// others.
func TestAppend_VersionOfTheLog(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	started := func(version int) *jslog.Log {
		t.Helper()
		if err := topology.Provision(ctx, js, topology.ProvisionConfig{CommitVersion: version}); err != nil {
			t.Fatal(err)
		}
		signing, err := jslog.CheckSigning(ctx, js, 1, eventlog.Keys{}, jslog.RoleWriter)
		if err != nil {
			t.Fatal(err)
		}
		return openConfig(t, jslog.Config{JetStream: js, Signing: signing})
	}
	before, raised := started(1), started(0)
	life, other := eventlogtest.SessionSubject(0, 1, "raised"), eventlogtest.SessionSubject(0, 1, "other")
	draft := func(name string) events.Draft {
		d := eventlogtest.Draft(name, name)
		d.Actor = events.Actor{Kind: "key", ID: "key_1", Key: "key_1", User: "ann", Service: "session/1", Address: "192.0.2.1"}
		return d
	}
	head := eventlog.Head{Subject: life}
	for i, step := range []struct {
		log *jslog.Log
		v   int
	}{{before, 1}, {raised, 2}, {before, 2}} {
		if head, err = step.log.Append(ctx, head, draft(string(rune('a'+i)))); err != nil {
			t.Fatal(err)
		}
		if head, err = before.Last(ctx, life, eventlog.LeaderOnly); err != nil || head.Commit.V != step.v || (head.Commit.Actor.User == "ann") != (step.v == 2) {
			t.Errorf("commit %d has version %d by %+v, %v; want version %d", i, head.Commit.V, head.Commit.Actor, err, step.v)
		}
	}
	flipped := eventlogtest.SessionSubject(0, 1, "flipped")
	c, err := draft("flipped").Seal(flipped, "")
	if err != nil {
		t.Fatal(err)
	}
	whole, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, flipped.String(), bytes.Replace(whole, []byte(`"ann"`), []byte(`"anm"`), 1)); err != nil {
		t.Fatal(err)
	}
	if c, err = draft("to come").Seal(other, ""); err != nil {
		t.Fatal(err)
	}
	c.V = 3
	c = c.WithStoredEvents(other, c.Events)
	msg, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(msg, []byte(`{"v":3,`)) {
		t.Fatalf("the commit begins with %.20s", msg)
	}
	if _, err := js.Publish(ctx, other.String(), msg); err != nil {
		t.Fatal(err)
	}
	if _, err := raised.Append(ctx, head, draft("after")); err != nil {
		t.Fatal(err)
	}
	r, err := eventlog.Verify(ctx, raised, eventlog.VerifyScope{})
	if err != nil || len(r.Problems) != 2 || r.Commits != 5 || r.Problem.Position.Seq != 4 || !strings.Contains(r.Problem.Why, "contents hash to") ||
		r.Problems[1].Position.Seq != 5 || !strings.Contains(r.Problems[1].Why, "has version 3, newest known version is 2") {
		t.Errorf("verify found %d commits, %v: %v", r.Commits, r.Problems, err)
	}
}
