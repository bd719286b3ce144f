package janitor_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
	"github.com/spoolhq/spool/services/session/janitor"
)

// createFork creates a fork in the log.
func (b *fixture) createFork(f events.SessionForked) *eventlog.SessionState {
	b.t.Helper()
	l := &eventlog.SessionState{Tenant: tenant, ID: newID(events.KindSession)}
	l.LifeHead.Subject, l.RunHead.Subject = events.LifeSubject(tenant, l.ID), events.RunSubject(tenant, l.ID)
	b.decide(l, func(base session.CommandBase) session.Command {
		return session.ForkSession{CommandBase: base, Create: events.SessionCreated{Agent: "spool", Architecture: "spool", Provider: "local"}, Forked: f}
	})
	return l
}

func (b *fixture) decide(l *eventlog.SessionState, command func(session.CommandBase) session.Command) {
	b.t.Helper()
	id := newID(events.KindCommand)
	list, err := session.Decide(l.Life, command(session.CommandBase{CommandMeta: events.CommandMeta{CommandID: id, Now: b.now}}))
	must(b.t, err)
	must(b.t, eventlog.Sessions{Log: b.log}.AppendLife(b.t.Context(), l, events.Actor{Kind: "user", ID: "test"}, id, list))
}

// projectFork adds a fork to the read models, like the projector.
func (b *fixture) projectFork(l *eventlog.SessionState, f events.SessionForked, snapshot string) {
	b.t.Helper()
	text, err := json.Marshal(f)
	must(b.t, err)
	b.exec(b.url, `INSERT INTO sessions (tenant, id, grp, status, agent, agent_version, architecture, provider, options, created_at, updated_at, tip, tip_position, parent, forked, snapshot)
		VALUES ($1, $2, $3, 'open', '', '', '', '', '{}', now(), now(), 2, '0-1', $4, $5, $6)`, tenant, l.ID, events.Partitioning(0).GroupOfID(l.ID), f.Parent, string(text), snapshot)
	b.catchUp()
}

// deleteFork deletes a session in the log and in the read models.
func (b *fixture) deleteFork(l *eventlog.SessionState, f events.SessionForked) {
	b.t.Helper()
	b.decide(l, func(base session.CommandBase) session.Command { return session.DeleteSession{CommandBase: base} })
	text, err := json.Marshal(f)
	must(b.t, err)
	b.exec(b.url, "DELETE FROM sessions WHERE id = $1", l.ID)
	b.projectDeletion(b.url, l.ID)
	b.exec(b.url, "UPDATE deleted_sessions SET parent = $2, forked = $3 WHERE id = $1", l.ID, f.Parent, string(text))
	b.catchUp()
	b.now = b.now.Add(2 * time.Minute)
}

// TestPass_KeepsADeletedSessionWithForks tests that a deleted session stays as long as a fork of it exists, or a fork
// of a deleted fork. This holds also while the read models do not have the fork yet.
func TestPass_KeepsADeletedSessionWithForks(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	parent := b.createDeleted(newID(events.KindSession), "heron-text")
	ofParent := events.SessionForked{Parent: parent.ID, Asked: 1, Effective: 1}
	child := b.createFork(ofParent)
	ofChild := events.SessionForked{Parent: child.ID, Asked: 1, Effective: 1}
	grandchild := b.createFork(ofChild)
	j := b.janitor(janitor.Config{Grace: time.Millisecond})
	waits := func(what string, l *eventlog.SessionState, fork string) {
		t.Helper()
		report, err := j.RunPass(t.Context(), false)
		must(t, err)
		i := slices.IndexFunc(report.Items, func(i janitor.ReportItem) bool { return i.Name == l.ID })
		if i < 0 || !strings.Contains(report.Items[i].Waits, "session "+fork+" was forked from it") {
			t.Errorf("%s: found %+v", what, report.Items)
		}
		if now, err := (eventlog.Sessions{Log: b.log}).Load(t.Context(), tenant, l.ID, eventlog.LeaderOnly); err != nil || now.Run.Retired {
			t.Errorf("%s: the parent is retired: %v, %v", what, now.Run.Retired, err)
		}
	}
	waits("while the read models have no fork", parent, child.ID)
	b.projectFork(child, ofParent, "")
	b.projectFork(grandchild, ofChild, "")
	waits("once they have", parent, child.ID)
	b.deleteFork(child, ofParent)
	waits("while a fork of a deleted fork is there", parent, grandchild.ID)
	waits("while a fork of it is there", child, grandchild.ID)
	b.deleteFork(grandchild, ofChild)
	for range 3 {
		b.pass(j, false)
		b.catchUp()
		b.markRemoved()
		b.now = b.now.Add(time.Minute)
	}
	for what, l := range map[string]*eventlog.SessionState{"parent": parent, "child": child, "grandchild": grandchild} {
		if !b.isRemoved(l.ID) {
			t.Errorf("the content of the %s still exists", what)
		}
	}
	if b.inFiles("heron") {
		t.Error("the parent's text still exists")
	}
	b.checkLog()
}

// TestPass_KeepsASessionWhoseForkMayBeUnderWay tests that a session that was deleted a moment ago is not retired,
// because the session service may be creating a fork of it.
func TestPass_KeepsASessionWhoseForkMayBeUnderWay(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	l := b.createDeleted(newID(events.KindSession))
	b.now = time.Now().Add(30 * time.Second)
	report, err := b.janitor(janitor.Config{}).RunPass(t.Context(), false)
	if err != nil || len(report.Items) != 1 || !strings.Contains(report.Items[0].Waits, "under way") {
		t.Errorf("found %+v, %v", report.Items, err)
	}
	if now, err := (eventlog.Sessions{Log: b.log}).Load(t.Context(), tenant, l.ID, eventlog.LeaderOnly); err != nil || now.Run.Retired {
		t.Errorf("retired %v, %v", now.Run.Retired, err)
	}
}

// TestPass_KeepsSnapshotsThatForksBeginWith tests that snapshots beyond the retention stay while a fork has none of
// its own, even if the read models do not have the fork yet.
func TestPass_KeepsSnapshotsThatForksBeginWith(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	l := b.session(newID(events.KindSession))
	var ids []string
	for _, content := range []string{"one", "two", "three", "four", "five", "six"} {
		ids = append(ids, b.snapshot(l, &workspacetest.FakeSandbox{Tree: map[string]string{"workspace/a": content}}))
	}
	b.catchUp()
	folded, unfolded := events.SessionForked{Parent: l.ID, Snapshot: ids[0], Records: ids[1]}, events.SessionForked{Parent: newID(events.KindSession), RecordsSession: l.ID, Records: ids[2]}
	child := b.createFork(folded)
	b.projectFork(child, folded, "")
	b.createFork(unfolded)
	b.now = b.now.Add(2 * time.Hour)
	j := b.janitor(janitor.Config{Snapshots: 2})
	there := func(want ...bool) {
		t.Helper()
		b.pass(j, false)
		for i, id := range ids {
			_, err := workspace.Open(t.Context(), b.store(topology.BucketWorkspaces), tenant, l.ID, id)
			if err != nil && !errors.Is(err, workspace.ErrNotFound) || (err == nil) != want[i] {
				t.Errorf("snapshot %d exists: %v, want %v", i, err, want[i])
			}
		}
	}
	there(true, true, true, false, true, true)
	b.checkRestores(l, ids[0], "one")
	b.exec(b.url, "UPDATE sessions SET snapshot = 'm-own' WHERE id = $1", child.ID)
	there(false, false, true, false, true, true)
}
