package contents_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/executor/internal/agents/agentstest"
	"github.com/spoolhq/spool/services/executor/internal/contents"
)

// store records what is restored, and fails with err.
type store struct {
	contents.Store
	err      error
	restored []string
}

func (s *store) Restore(_ context.Context, _ sandbox.Sandbox, ref topology.SessionRef, id string, trees ...workspace.TreeName) (uint32, error) {
	what := ref.Session + "/" + id
	for _, tree := range trees {
		what += " " + string(tree)
	}
	s.restored = append(s.restored, what)
	return 3, s.err
}

func (s *store) Snapshot(_ context.Context, _ sandbox.Sandbox, _ topology.SessionRef, previous string, _ bool) (contents.Snapshot, error) {
	return contents.Snapshot{ID: "after " + previous, NewBytes: 7}, s.err
}

func newMover(s *store, measured func(uint64, error)) *contents.Manager {
	return &contents.Manager{Store: s, Now: time.Now, Measured: func(_ context.Context, _ time.Duration, s contents.Snapshot, err error) { measured(s.NewBytes, err) }}
}

// loaded returns a session whose sandbox is new, after some changes.
func loaded(change func(*eventlog.SessionState)) *eventlog.SessionState {
	l := &eventlog.SessionState{Tenant: "default", ID: "ses_own"}
	l.Run.Sandbox.Empty = true
	change(l)
	return l
}

// TestSources: a workspace is filled once, from the session's own snapshot or else from those that the fork began with.
func TestSources(t *testing.T) {
	t.Parallel()
	fork := func(files, records string) *events.SessionForked {
		return &events.SessionForked{Parent: "ses_from", Snapshot: files, Records: records}
	}
	for name, c := range map[string]struct {
		change func(*eventlog.SessionState)
		want   []string
	}{
		"new session":           {change: func(*eventlog.SessionState) {}},
		"own snapshot":          {func(l *eventlog.SessionState) { l.Run.Snapshot.ID = "s1" }, []string{"ses_own/s1"}},
		"kept workspace":        {change: func(l *eventlog.SessionState) { l.Run.Snapshot.ID, l.Run.Sandbox.Empty = "s1", false }},
		"folder of the host":    {change: func(l *eventlog.SessionState) { l.Run.Snapshot.ID, l.Life.Options.HostPath = "s1", "/home" }},
		"fork of one snapshot":  {func(l *eventlog.SessionState) { l.Life.Fork = fork("s2", "s2") }, []string{"ses_from/s2"}},
		"fork of two snapshots": {func(l *eventlog.SessionState) { l.Life.Fork = fork("s2", "s3") }, []string{"ses_from/s2 " + string(workspace.TreeFiles), "ses_from/s3 " + string(workspace.TreeRecords)}},
		"fork that was filled": {change: func(l *eventlog.SessionState) {
			l.Life.Fork, l.Run.Filled, l.Run.Sandbox.Empty = fork("s2", "s2"), true, false
		}},
		"fork that was not filled":   {func(l *eventlog.SessionState) { l.Life.Fork, l.Run.Sandbox.Empty = fork("s2", "s2"), false }, []string{"ses_from/s2"}},
		"fork with its own snapshot": {func(l *eventlog.SessionState) { l.Life.Fork, l.Run.Snapshot.ID = fork("s2", "s2"), "s1" }, []string{"ses_own/s1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := loaded(c.change)
			from := contents.RestoreSources(l)
			if len(from) == 0 {
				if len(c.want) > 0 {
					t.Error("no sources")
				}
				return
			}
			s := &store{}
			e, err := newMover(s, nil).RestoreWorkspace(t.Context(), l, agentstest.NewFakeSandbox("box", 1), from)
			if err != nil || !slices.Equal(s.restored, c.want) || int(e.Files) != 3*len(c.want) {
				t.Errorf("restored %v, want %v; %d files, %v", s.restored, c.want, e.Files, err)
			}
			if forked := l.Run.Snapshot.ID == ""; forked != (e.Session == "ses_from") {
				t.Errorf("the event names session %q", e.Session)
			}
		})
	}
}

// TestRestore_SnapshotGone: a snapshot that is not in the store any more has a code.
func TestRestore_SnapshotGone(t *testing.T) {
	t.Parallel()
	l := loaded(func(l *eventlog.SessionState) { l.Run.Snapshot.ID = "s1" })
	_, err := newMover(&store{err: workspace.ErrNotFound}, nil).RestoreWorkspace(t.Context(), l, agentstest.NewFakeSandbox("box", 1), contents.RestoreSources(l))
	var typed *sandbox.Error
	if !errors.As(err, &typed) || typed.Code != command.CodeSnapshotGone {
		t.Errorf("error %v", err)
	}
}

// TestSnapshot: it builds on the last one, names the reason and the applied changes, and is measured also when it fails.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	l := loaded(func(l *eventlog.SessionState) { l.Run.Snapshot.ID, l.Run.Applied, l.Life.Syncs = "s1", 4, 2 })
	var bytes uint64
	var failed error
	s := &store{}
	m := newMover(s, func(n uint64, err error) { bytes, failed = n, err })
	e, err := m.TakeSnapshot(t.Context(), l, agentstest.NewFakeSandbox("box", 1), "turn")
	if err != nil || e.Snapshot != "after s1" || e.Reason != "turn" || e.Applied != 4 || e.Request != 2 || bytes != 7 {
		t.Errorf("%+v, %v; measured %d bytes", e, err, bytes)
	}
	s.err = errors.New("the store is full")
	if _, err := m.TakeSnapshot(t.Context(), l, agentstest.NewFakeSandbox("box", 1), "turn"); !errors.Is(err, s.err) || !errors.Is(failed, s.err) {
		t.Errorf("error %v, measured %v", err, failed)
	}
}
