package executor_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// atRest returns a session at rest: its turn has ended, its snapshot is stored, and nothing runs in its sandbox.
func (b *bench) atRest(o events.Options) (s *talk, sandbox string) {
	b.t.Helper()
	s = b.session(short(o))
	s.untilEnded(s.post("one"))
	s.until("the turn's snapshot is there", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.ID != "" })
	b.noJobs()
	return s, s.load().Run.Sandbox.ID
}

// untilReleased waits until the session's sandbox has ended, and checks that the log records that once.
func (s *talk) untilReleased(sandbox, reason string, kept bool) {
	s.b.t.Helper()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	s.b.until("the sandbox is ended", func() bool { _, ended := s.b.provider.wiped(sandbox); return ended })
	if wiped, _ := s.b.provider.wiped(sandbox); wiped == kept {
		s.b.t.Errorf("the workspace is wiped: %t", wiped)
	}
	list := of[events.SandboxTerminated](s)
	if len(list) != 1 || list[0].SandboxID != sandbox || list[0].Reason != reason || list[0].Kept != kept {
		s.b.t.Errorf("the log says %+v", list)
	}
	s.check()
}

func (s *talk) terminate() {
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestTerminate{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded, HasSandbox: true}
	})
}

// TestRelease_GivesWayWhileItsSnapshotRuns: the snapshot before an idle sandbox is given up delays neither a delete nor a turn,
// nor the end of an execution that is cancelled before it is claimed.
func TestRelease_GivesWayWhileItsSnapshotRuns(t *testing.T) {
	t.Parallel()
	for name, check := range map[string]func(s *talk, sandbox string){
		"to a delete": func(s *talk, sandbox string) {
			s.remove()
			s.job()
			s.untilReleased(sandbox, "session_deleted", false)
		},
		"to a turn": func(s *talk, sandbox string) {
			l := s.untilEnded(s.post("two"))
			if l.Run.Phase != run.Completed || l.Run.Sandbox.ID != sandbox {
				s.b.t.Errorf("the turn ended as %s in sandbox %s, want %s", l.Run.Phase, l.Run.Sandbox.ID, sandbox)
			}
		},
		"to a cancel": func(s *talk, sandbox string) {
			execution := mint(s.b.t, events.KindExecution)
			s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
				return session.PostQuery{CommandBase: base, ExecutionID: execution, Content: "two", ActiveEnded: l.RunView().ActiveEnded}
			})
			s.cancel(execution)
			s.job()
			if l := s.untilEnded(execution); l.Run.Sandbox.ID != sandbox {
				s.b.t.Errorf("the session's sandbox is %q", l.Run.Sandbox.ID)
			}
			if _, ok := s.last(execution).(events.ExecutionCancelled); !ok {
				s.b.t.Errorf("the end is %+v", s.last(execution))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, quick)
			b.run()
			s, sandbox := b.atRest(events.Options{})
			block := b.store.blockSnapshots()
			t.Cleanup(func() { close(block) })
			s.idle()
			<-b.store.began
			check(s, sandbox)
		})
	}
}

// TestRelease_TerminateDuringASnapshotAtRest: a terminate ends a snapshot that runs, takes one of its own, and gives the
// sandbox up once. A second terminate meanwhile changes nothing.
func TestRelease_TerminateDuringASnapshotAtRest(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.run()
	s, sandbox := b.atRest(events.Options{})
	block := b.store.blockSnapshots()
	s.put("a.txt", "A")
	<-b.store.began
	s.terminate()
	<-b.store.began // the snapshot of the release
	s.terminate()
	close(block)
	s.untilReleased(sandbox, "terminated", false)
	if got := of[events.WorkspaceSynced](s); got[len(got)-1].Reason != "terminated" {
		t.Errorf("snapshots %+v", got)
	}
	b.noJobs()
}

// TestSyncAtRest_GivesWayToADelete: a snapshot of a session at rest does not delay the session's end.
func TestSyncAtRest_GivesWayToADelete(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.run()
	s, sandbox := b.atRest(events.Options{})
	block := b.store.blockSnapshots()
	t.Cleanup(func() { close(block) })
	s.put("a.txt", "A")
	<-b.store.began
	s.remove()
	s.job()
	s.untilReleased(sandbox, "session_deleted", false)
	b.noJobs()
}

// TestTurn_ControlDuringTheSnapshotOfAnOldSandbox: a turn that replaces a sandbox that is too old obeys a control while
// the sandbox's last snapshot runs.
func TestTurn_ControlDuringTheSnapshotOfAnOldSandbox(t *testing.T) {
	t.Parallel()
	for name, stop := range map[string]func(s *talk, execution string){
		"cancel": func(s *talk, execution string) { s.cancel(execution) },
		"delete": func(s *talk, _ string) { s.remove() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, quick)
			b.run()
			s, _ := b.atRest(events.Options{SandboxMaxAgeMs: 1})
			block := b.store.blockSnapshots()
			t.Cleanup(func() { close(block) })
			execution := s.post("two")
			<-b.store.began
			stop(s, execution)
			s.job()
			s.untilEnded(execution)
			if _, ok := s.last(execution).(events.ExecutionCancelled); !ok {
				t.Errorf("the end is %+v", s.last(execution))
			}
		})
	}
}

// TestTurn_ControlDuringARestore: a turn obeys a cancel while its workspace is restored, and the next turn has all files.
func TestTurn_ControlDuringARestore(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, quick)
	b.run()
	s, _ := b.atRest(events.Options{})
	s.put("a.txt", "A")
	s.until("the file is in a snapshot", func(l *eventlog.SessionState) bool { return l.Run.Snapshot.Applied == 1 })
	s.idle()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	b.noJobs()
	restore := b.store.blockRestores()
	execution := s.post("two")
	<-restore.began
	s.cancel(execution)
	s.job()
	s.untilEnded(execution)
	if _, ok := s.last(execution).(events.ExecutionCancelled); !ok {
		t.Errorf("the end is %+v", s.last(execution))
	}
	close(restore.block)
	if l := s.untilEnded(s.post("three")); l.Run.Phase != run.Completed {
		t.Errorf("the next turn ended as %s", l.Run.Phase)
	}
	if got := b.provider.onlyBox().files.all(); got != "a.txt=A" {
		t.Errorf("the workspace has %q", got)
	}
}
