package run_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

// jobs is a work queue that drops every message id that it has seen, with the one executor that takes jobs from it.
type jobs struct {
	w       *world
	seen    map[string]bool
	waiting int
	taken   int
}

// publish stores the job that is due, like the reactor.
func (j *jobs) publish() {
	l := j.w.load(false)
	if id := run.JobID(&l.life, &l.run); id != "" && !j.seen[id] {
		j.seen[id] = true
		j.waiting++
	}
}

// work does one step of the job, and acknowledges the job when nothing is due.
func (j *jobs) work() {
	if j.taken == 0 {
		if j.waiting == 0 {
			return
		}
		j.waiting, j.taken = j.waiting-1, 1
	}
	w, l := j.w, j.w.load(false)
	m := events.NewEventList(w.base().CommandMeta)
	record := run.RecordEvents{Epoch: l.run.Epoch + 1}
	var d run.Decision
	var err error
	switch run.DueWork(&l.life, &l.run) {
	case run.EndUnstarted:
		return // the reactor ends the execution
	case run.NoWork:
		j.taken = 0
		return
	case run.ReleaseSandbox:
		m.Add("", events.SandboxTerminated{SandboxID: l.run.Sandbox.ID})
	case run.SyncWorkspace:
		m.Add("", events.FilesApplied{N: l.life.Changes})
		m.Add("", events.WorkspaceSynced{Snapshot: w.id("s"), Applied: l.life.Changes, Request: l.life.Syncs})
	case run.ExecuteTurn:
		record.Epoch = l.run.Epoch
		active := l.life.Active
		meta := w.base().CommandMeta
		switch what := rapid.IntRange(0, 4).Draw(w.t, "turn"); {
		case l.run.Execution != active.ExecutionID:
			d, err = run.Decide(l.run, run.ClaimExecution{CommandMeta: meta, ExecutionID: active.ExecutionID, Turn: active.Turn, Executor: "x"})
			w.must(err)
			w.must(w.appendRun(l, d))
			return
		case l.run.Phase == run.Paused:
			m.Add(active.ExecutionID, events.ExecutionResumed{})
		case l.life.ShouldBePaused(active.ExecutionID):
			m.Add(active.ExecutionID, events.ExecutionPaused{})
		case l.run.Sandbox.ID == "" && what > 0:
			m.Add("", events.SandboxReady{SandboxID: w.id("sbx"), Journal: "j"})
		case what == 1:
			m.Add(active.ExecutionID, events.AttemptFailed{WaitMs: 1000})
		case what == 2:
			return
		default:
			d, err = run.Decide(l.run, run.EndExecution{CommandMeta: meta, Epoch: l.run.Epoch, ExecutionID: active.ExecutionID, Outcome: events.ExecutionCompleted{}})
			w.must(err)
			w.must(w.appendRun(l, d))
			return
		}
	}
	record.Events = m.Events()
	d, err = run.Decide(l.run, record)
	w.must(err)
	w.must(w.appendRun(l, d))
}

// TestJobID_IsNewWheneverSomethingIsDueAgain interleaves commands, the reactor and an executor that acknowledges its
// job when nothing is due, on a queue that drops every id that it has seen. Whenever something is due at the end, the
// queue must hold a job for it.
func TestJobID_IsNewWheneverSomethingIsDueAgain(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		j := &jobs{w: w, seen: map[string]bool{}}
		for range rapid.IntRange(20, 200).Draw(t, "steps") {
			if len(w.life.list) == 1 || run.DueWork(w.life.current(), w.run.current()) == run.NoWork && !w.life.state().Pause.Wanted {
				w.send(session.PostQuery{CommandBase: w.base(), ExecutionID: w.id("exe"), Content: "hello"})
				j.publish()
			}
			switch rapid.SampledFrom([]string{"command", "command", "command", "work", "work", "settle", "settle", "sync"}).Draw(t, "step") {
			case "command":
				w.jobCommand()
			case "sync":
				w.send(session.RequestSync{CommandBase: w.base()})
			case "settle":
				w.react()
				j.publish()
			case "work":
				j.work()
			}
		}
		for range 10_000 {
			before := w.seq
			w.react()
			j.publish()
			if w.seq == before && j.waiting+j.taken == 0 {
				break
			}
			j.work()
		}
		l := w.load(false)
		if due := run.DueWork(&l.life, &l.run); due != run.NoWork {
			t.Fatalf("%s is due and the queue is empty: job id %q was used before", due, run.JobID(&l.life, &l.run))
		}
	})
}

func (w *world) jobCommand() {
	active := w.load(false).life.Active.ExecutionID
	w.send(rapid.SampledFrom([]session.Command{
		session.PostQuery{CommandBase: w.base(), ExecutionID: w.id("exe"), Content: "hello"},
		session.RequestPause{CommandBase: w.base(), ExecutionID: active},
		session.RequestPause{CommandBase: w.base(), ExecutionID: active},
		session.RequestResume{CommandBase: w.base(), ExecutionID: active},
		session.RequestResume{CommandBase: w.base(), ExecutionID: active},
		session.RequestCancel{CommandBase: w.base(), ExecutionID: active},
		session.RequestTerminate{CommandBase: w.base(), ExecutionID: active},
		session.PutFile{CommandBase: w.base(), FileUpload: session.FileUpload{Path: "f"}},
	}).Draw(w.t, "command"))
}
