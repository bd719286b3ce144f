package executor_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
)

// An executor is slow to put a file into a workspace at rest, and does not learn that the session has a new turn.
// Another executor runs that turn only after the file is in place.
func TestSyncAtRest_DoesNotOverwriteANewTurn(t *testing.T) {
	t.Parallel()
	var b *bench
	b = newStoreBench(t, func(f *fakeTurn) {
		if f.Query.Content == "edit" {
			if err := b.provider.onlyBox().files.Put(b.ctx, "a.txt", strings.NewReader("edited")); err != nil {
				t.Error(err)
			}
		}
		answers(f)
	})
	slow := b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	b.noJobs()
	close(b.store.blockSnapshots()) // so that began is signalled for the put alone
	put := make(chan struct{})
	b.store.puts <- put
	s.put("a.txt", "uploaded")
	<-b.store.began
	slow.log.setAway(true)
	b.run()
	execution := mint(t, events.KindExecution)
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.PostQuery{CommandBase: base, ExecutionID: execution, Content: "edit", ActiveEnded: l.RunView().ActiveEnded}
	})
	asked, err := b.nc.SubscribeSync(topology.ExecutorCtlSubject(slow.ID()))
	if err != nil {
		t.Fatal(err)
	}
	b.until("the other executor has run the turn, or has asked whether it may", func() bool {
		s.job() // the slow one takes some of them
		n, _, err := asked.Pending()
		return err != nil || n > 0 || s.load().Run.HasEnded(execution)
	})
	close(put)
	slow.log.setAway(false)
	s.untilEnded(execution)
	b.noJobs()
	if got := b.provider.onlyBox().files.all(); got != "a.txt=edited" {
		t.Errorf("after the turn the workspace has %q", got)
	}
	s.check()
}

// An executor that was killed while it put a file leaves its announcement in the log, and nothing else waits for it.
func TestSyncAtRest_OfALostExecutorHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, answers)
	first := b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	b.noJobs()
	close(b.store.blockSnapshots()) // as above
	put := make(chan struct{})
	defer close(put)
	b.store.puts <- put
	s.put("a.txt", "A")
	<-b.store.began
	first.wire.kill()
	b.run()
	s.untilEnded(s.post("two"))
	s.until("the file is in place", func(l *eventlog.SessionState) bool { return l.Run.Applied == 1 })
	b.noJobs()
	s.check()
}

// An executor is frozen while it puts a file, for longer than its lease. Another one runs the session's next turn
// meanwhile. When the first continues, it does not put its file in place.
func TestSyncAtRest_AfterAStandstillOverwritesNothing(t *testing.T) {
	t.Parallel()
	var b *bench
	b = newStoreBench(t, func(f *fakeTurn) {
		if f.Query.Content == "edit" {
			if err := b.provider.onlyBox().files.Put(b.ctx, "a.txt", strings.NewReader("edited")); err != nil {
				t.Error(err)
			}
		}
		answers(f)
	})
	frozen := b.run()
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	b.noJobs()
	close(b.store.blockSnapshots()) // so that began is signalled for the put alone
	put := make(chan struct{})
	b.store.puts <- put
	s.put("a.txt", "uploaded")
	<-b.store.began
	frozen.wire.freeze()
	b.run()
	s.untilEnded(s.post("edit"))
	close(put)
	frozen.wire.thaw()
	<-b.store.returned
	if got := b.provider.onlyBox().files.all(); got != "a.txt=edited" {
		t.Errorf("the workspace has %q", got)
	}
	b.noJobs()
	s.check()
}
