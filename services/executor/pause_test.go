package executor_test

import (
	"context"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// hooked is a provider that calls functions after a sandbox was paused or resumed, before the executor gets the result.
type hooked struct {
	pausable
	paused, resumed func()
}

func (p hooked) Pause(ctx context.Context, id string) error {
	err := p.pausable.Pause(ctx, id)
	p.paused()
	return err
}

func (p hooked) Resume(ctx context.Context, id string) error {
	frozen := p.isPaused(id)
	err := p.pausable.Resume(ctx, id)
	if frozen {
		p.resumed()
	}
	return err
}

// An executor that is killed between the pause of a sandbox and its event leaves a frozen agent that is running
// according to the log. The next executor finds the same agent, and pauses it again.
func TestPause_KilledBeforeTheLogKnowsKeepsTheSandbox(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, polite)
	var first *runningExecutor
	frozen := make(chan struct{})
	kill := sync.OnceFunc(func() { first.wire.kill(); close(frozen) })
	b.wrap = func(p sandbox.Provider) sandbox.Provider { return hooked{p.(pausable), kill, func() {}} }
	first = b.run()
	s := b.session(short(events.Options{}))
	execution := s.post("go")
	s.untilStarted()
	s.life(pause(execution))
	<-frozen
	if l := s.load(); l.Run.Phase != run.Running {
		t.Fatalf("the log knows already: %s", l.Run.Phase)
	}
	b.run()
	s.until("it stands still", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Paused })
	s.do(resume(execution))
	s.until("it goes on", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	s.interrupt()
	s.untilEnded(execution)
	if starts, made := len(of[events.ExecutionStarted](s)), b.provider.made; starts != 1 || made != 1 {
		t.Errorf("%d starts in %d sandboxes", starts, made)
	}
}

// An executor that is killed during the resume of a sandbox does not leave an agent that runs while the log says that
// it is paused. A further pause would have no effect on such an agent.
func TestResume_KilledBeforeTheAgentGoesOn(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, polite)
	var first *runningExecutor
	thawed := make(chan struct{})
	kill := sync.OnceFunc(func() { first.wire.kill(); close(thawed) })
	b.wrap = func(p sandbox.Provider) sandbox.Provider { return hooked{p.(pausable), func() {}, kill} }
	first = b.run()
	s := b.session(short(events.Options{}))
	execution := s.post("go")
	s.untilStarted()
	s.do(pause(execution))
	s.until("it stands still", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Paused })
	s.do(resume(execution))
	<-thawed
	s.life(pause(execution))
	b.run()
	s.until("it stands still again", func(l *eventlog.SessionState) bool {
		return l.Run.Phase == run.Paused && b.provider.isPaused(l.Run.Sandbox.ID)
	})
	s.do(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestCancel{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
	})
	s.untilEnded(execution)
	if starts, made := len(of[events.ExecutionStarted](s)), b.provider.made; starts != 1 || made != 1 {
		t.Errorf("%d starts in %d sandboxes", starts, made)
	}
}

func pause(execution string) func(session.CommandBase, *eventlog.SessionState) session.Command {
	return func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestPause{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
	}
}

func resume(execution string) func(session.CommandBase, *eventlog.SessionState) session.Command {
	return func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestResume{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
	}
}
