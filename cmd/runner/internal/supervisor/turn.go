package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/launchfiles"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// maxQuoted is the maximum number of bytes of an agent's line that an error quotes.
const maxQuoted = 256

// warmProcess is the process of an agent, during a turn and between turns.
type warmProcess struct {
	architecture string
	sessionID    string
	command      agent.Command
	proc         *process.Process
	session      agent.Session
	gone         chan struct{}
	resume       string       // the agent's own session with which it was started
	fork         *runner.Fork // where that session was cut
	redact       *redact.Set  // all secret values that the process got so far
	used         bool         // it has run a query
	urgent       atomic.Bool  // it must be ended without grace
}

// takes reports whether the process can do the turn of r: it has the same command, and it has the same session or has
// not run a query yet.
func (w *warmProcess) takes(r *run) bool {
	if w == nil || w.architecture != r.query.Architecture || !reflect.DeepEqual(w.command, r.command) {
		return false
	}
	if w.used {
		return w.sessionID == r.query.SessionID && r.launch.Fork == nil // a fork starts at its anchor, with nothing of an earlier attempt
	}
	return (w.sessionID == "" || w.sessionID == r.query.SessionID) && w.resume == r.launch.Resume && reflect.DeepEqual(w.fork, r.launch.Fork)
}

// Run runs queries until ctx ends, and then ends the agent with all of its processes. A turn that is still running
// ends as killed.
func (s *Supervisor) Run(ctx context.Context) error {
	idle := agent.NewTurn(ctx, agent.TurnConfig{Log: s.cfg.Log})
	resume := loadResumes(s.cfg.Folders.State, s.cfg.Log)
	for {
		w := s.current()
		var lines <-chan process.Line
		if w != nil {
			lines = w.proc.Lines()
		}
		select {
		case <-ctx.Done():
			s.mu.Lock()
			s.closed = true
			s.mu.Unlock()
			s.dropWarmUp()
			select {
			case r := <-s.starts:
				s.runTurn(ctx, r, resume)
			default:
			}
			return s.endWarmProcess()
		case r := <-s.starts:
			s.runTurn(ctx, r, resume)
		case m := <-s.warms:
			m.answer <- s.warmUp(m.run, resume)
		case old := <-s.evict:
			if old != w {
				continue // the process was ended meanwhile
			}
			grace := s.cfg.TermGrace
			if w.urgent.Load() {
				grace = 0
			}
			if err := s.endWarmWithin(grace); err != nil {
				s.cfg.Log.Error("end the agent", "err", err)
			}
		case line, ok := <-lines:
			if !ok {
				s.cfg.Log.Warn("the agent's process ended between turns", "pid", w.proc.PID(), "state", w.proc.State(), "stderr", w.redact.String(w.proc.StderrTail()))
				if err := s.endWarmProcess(); err != nil {
					s.cfg.Log.Error("end what the agent left", "err", err)
				}
				continue
			}
			s.feed(w, idle, line)
		}
	}
}

func (s *Supervisor) current() *warmProcess {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.warm
}

// endWarmProcess ends the agent's process, if there is one, with the usual grace time.
func (s *Supervisor) endWarmProcess() error { return s.endWarmWithin(s.cfg.TermGrace) }

func (s *Supervisor) endWarmWithin(grace time.Duration) error {
	w := s.current()
	if w == nil {
		return nil
	}
	err := w.proc.End(grace)
	s.mu.Lock()
	s.warm = nil
	s.mu.Unlock()
	close(w.gone)
	return err
}

// runTurn does the turn of one execution, from its first journal line to its last.
func (s *Supervisor) runTurn(ctx context.Context, r *run, resume *agentSessions) {
	stop := context.AfterFunc(ctx, r.kill) // shutting down ends the turn
	defer stop()
	s.dropWarmUp()
	if r.launch.Resume, r.launch.Fork = r.query.Resume, r.query.Fork; r.launch.Resume == "" {
		r.launch.Resume = resume.get(r.query)
	}
	s.flush() // earlier changes do not belong to this turn
	s.cfg.Journal.SetPace(r.query.Pace)
	defer s.cfg.Journal.SetPace(runner.OutputRate{})
	s.countKilled(r)
	t := s.converse(r)
	if id := t.AgentSession(); id != "" {
		resume.set(r.query, id)
	}
	r.kill() // releases its context
	close(r.done)
}

// newTurn returns the agent.Turn of a run, which holds all lines until its Start is called.
func (s *Supervisor) newTurn(r *run) *agent.Turn {
	return agent.NewTurn(r.killed, agent.TurnConfig{
		Journal: s.cfg.Journal, ExecutionID: r.query.ExecutionID, Now: s.cfg.Now, Log: s.cfg.Log, Hold: true, Redact: s.hiddenValues(),
		Policy: r.policy, Approved: r.query.Approved,
		BeforeEnd: func() { s.beforeEnd(r) },
	})
}

// start journals the first line of the run.
func (s *Supervisor) start(r *run, t *agent.Turn, begun runner.TurnStart) {
	t.Start(begun)
	s.record(r)
}

// converse sends the query to the warm process or to a new one, and returns when the turn has ended.
func (s *Supervisor) converse(r *run) *agent.Turn {
	was := warmNone
	if w := s.current(); w.takes(r) && r.killed.Err() == nil {
		w.redact = w.redact.With(r.query.Redact)
		s.hide(w.redact)
		t := s.newTurn(r)
		var first process.Line
		if first, was = s.tryWarmProcess(r, w, t); was == warmTaken {
			s.follow(r, w, t, &first)
			return t
		}
	}
	if err := s.endWarmProcess(); err != nil {
		s.cfg.Log.Error("end the agent before", "err", err)
	}
	s.hide(redact.New(r.query.Redact...))
	t := s.newTurn(r)
	begun := runner.TurnStart{Attempt: r.query.Attempt, Policy: r.query.Policy}
	if r.killed.Err() != nil {
		s.start(r, t, begun)
		s.endKilled(r, t, "ended before the agent was started")
		return t
	}
	w, err := s.launch(r)
	if err != nil {
		s.start(r, t, begun)
		t.End(cannotStart(err))
		return t
	}
	begun.PID = w.proc.PID()
	s.start(r, t, begun)
	if was == warmMute {
		t.Emit(events.MainConversation, events.WatchdogWarned{Watchdog: "after_result", AfterMs: millis(s.cfg.MuteKill), Action: "killed"})
	}
	if s.begin(r, w, t) {
		s.follow(r, w, t, nil)
	}
	return t
}

// launch starts a process for the run, which resumes the agent's own session.
func (s *Supervisor) launch(r *run) (*warmProcess, error) {
	command := r.command
	if r.launch.Resume != "" {
		var err error
		if command, err = r.adapter.Command(r.launch); err != nil {
			return nil, err
		}
		command.Files = slices.Concat(command.Files, r.trusted)
	}
	if err := launchfiles.Write(s.cfg.Folders.State, command.Files); err != nil {
		return nil, err
	}
	proc, err := s.cfg.ProcessGroup.Start(command, s.cfg.Folders.Workspace, runner.MaxLineLength)
	if err != nil {
		return nil, err
	}
	w := &warmProcess{
		architecture: r.query.Architecture, sessionID: r.query.SessionID, command: r.command, proc: proc, gone: make(chan struct{}), resume: r.launch.Resume, fork: r.launch.Fork,
		redact: redact.New(r.query.Redact...),
	}
	w.session = r.adapter.Open(r.launch, proc)
	if s.cfg.Disk != nil {
		s.cfg.Disk.Wake()
	}
	s.mu.Lock()
	s.warm = w
	s.mu.Unlock()
	return w, nil
}

// cannotStart returns the end of a turn whose process could not be started.
func cannotStart(err error) runner.TurnEnd {
	var refusal *runner.CommandError
	switch {
	case errors.As(err, &refusal):
		return failedEnd(refusal.Code, refusal.Message)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return failedEnd("AGENT_NOT_FOUND", err.Error()+": install the agent's program in the sandbox, with the right to run it")
	}
	return failedEnd("INTERNAL", err.Error())
}

// warmResult is what a warm process did with a query.
type warmResult int

const (
	warmNone  warmResult = iota // there is no warm process
	warmTaken                   // the process runs the query
	warmGone                    // the process had ended
	warmMute                    // the process hangs
)

// tryWarmProcess sends the query to a warm process and waits for the first line that the process prints. If the process
// hangs or has ended instead, it has not used the query, and the caller sends the query to another process.
func (s *Supervisor) tryWarmProcess(r *run, w *warmProcess, t *agent.Turn) (first process.Line, f warmResult) {
	w.used, w.sessionID = true, r.query.SessionID
	if err := w.session.Begin(r.query, t); err != nil {
		s.cfg.Log.Warn("give a query to the warm agent", "err", err)
		return first, warmGone
	}
	timer := time.NewTimer(s.cfg.MuteKill)
	defer timer.Stop()
	select {
	case line, ok := <-w.proc.Lines():
		if !ok {
			return first, warmGone
		}
		first = line
	case <-r.killed.Done():
	case <-timer.C:
		s.cfg.Log.Warn("the warm agent does not take a query", "pid", w.proc.PID(), "after", s.cfg.MuteKill)
		return first, warmMute
	}
	s.start(r, t, runner.TurnStart{Attempt: r.query.Attempt, Warm: true, PID: w.proc.PID(), Policy: r.query.Policy})
	return first, warmTaken
}

// begin sends the query to a new process. It returns false if that ended the turn.
func (s *Supervisor) begin(r *run, w *warmProcess, t *agent.Turn) bool {
	w.used = true
	if err := w.session.Begin(r.query, t); err != nil {
		s.abandon(t, failedEnd("AGENT_PROTOCOL", "the query cannot be given to the agent: "+err.Error()))
		return false
	}
	return true
}

// follow passes the lines of the process to the session until the turn has ended. It ends the process if it cannot
// take another turn.
func (s *Supervisor) follow(r *run, w *warmProcess, t *agent.Turn, first *process.Line) {
	r.mu.Lock()
	r.session = w.session
	interrupted := r.interrupted
	r.mu.Unlock()
	if interrupted {
		s.interrupt(w.session)
	}
	if first != nil && r.killed.Err() == nil {
		s.feed(w, t, *first)
	}
	silence := time.NewTimer(s.cfg.SilenceWarn)
	defer silence.Stop()
	warned := s.cfg.SilenceWarn == s.cfg.SilenceKill
	memory := time.NewTicker(memoryEvery)
	defer memory.Stop()
	for t.Ended() == nil {
		select {
		case <-r.killed.Done():
			s.endKilled(r, t, "the agent's processes were ended")
		case line, ok := <-w.proc.Lines():
			if !ok {
				s.endExited(r, w, t)
				return
			}
			s.feed(w, t, line)
			if s.cfg.Journal.Slowed() {
				t.Emit(events.MainConversation, events.Error{Code: codeOutputSlowed, Message: slowedMessage(r.query.Pace)})
			}
			silence.Reset(s.cfg.SilenceWarn)
			warned = s.cfg.SilenceWarn == s.cfg.SilenceKill
		case <-memory.C:
			s.reportKilled(r.killed, r)
		case <-r.decided:
			for _, v := range r.takeVerdicts() {
				if len(v.Redact) > 0 {
					w.redact = w.redact.With(v.Redact)
					s.hide(w.redact)
					t.Hide(w.redact)
				}
				t.Verdict(v)
			}
			silence.Reset(s.cfg.SilenceWarn)
			warned = s.cfg.SilenceWarn == s.cfg.SilenceKill
		case <-silence.C:
			if t.Waiting() {
				silence.Reset(s.cfg.SilenceWarn) // the agent waits for a person
				continue
			}
			if !warned {
				warned = true
				t.Emit(events.MainConversation, events.WatchdogWarned{Watchdog: "silence", AfterMs: millis(s.cfg.SilenceWarn), Action: "none"})
				silence.Reset(s.cfg.SilenceKill - s.cfg.SilenceWarn)
				continue
			}
			t.Emit(events.MainConversation, events.WatchdogWarned{Watchdog: "silence", AfterMs: millis(s.cfg.SilenceKill), Action: "killed"})
			s.abandon(t, failedEnd("AGENT_SILENT", fmt.Sprintf("the agent printed nothing for %s and was ended", s.cfg.SilenceKill)))
		}
	}
}

// codeOutputSlowed is the code of the error event for an agent whose output is faster than its pace allows.
const codeOutputSlowed = "OUTPUT_SLOWED"

func slowedMessage(p runner.OutputRate) string {
	return fmt.Sprintf("the agent says more than %d events or %d bytes a second and has to wait", p.EventsPerSecond, p.BytesPerSecond)
}

// endKilled ends the agent's processes and then the turn of a run that was killed, by a request or because of Exhaust.
func (s *Supervisor) endKilled(r *run, t *agent.Turn, message string) {
	r.mu.Lock()
	exhausted := r.exhausted
	r.mu.Unlock()
	if exhausted == nil {
		s.abandon(t, runner.TurnEnd{Outcome: runner.OutcomeKilled, Message: message})
		return
	}
	t.Emit(events.MainConversation, events.Error{Code: exhausted.Code, Message: exhausted.Message})
	s.abandonWithin(0, t, *exhausted)
}

// abandon ends the agent's process and then the turn, so that no process of the turn runs when its end is in the
// journal.
func (s *Supervisor) abandon(t *agent.Turn, e runner.TurnEnd) { s.abandonWithin(s.cfg.TermGrace, t, e) }

func (s *Supervisor) abandonWithin(grace time.Duration, t *agent.Turn, e runner.TurnEnd) {
	if t.Waiting() {
		grace = 0 // the end of its stdin would be a denial for the agent
	}
	if err := s.endWarmWithin(grace); err != nil {
		s.cfg.Log.Error("end the agent", "err", err)
		t.Emit(events.MainConversation, events.Error{Code: "INTERNAL", Message: err.Error()})
	}
	t.End(e)
}

// endExited ends the turn of a process that has ended before it completed the turn.
func (s *Supervisor) endExited(r *run, w *warmProcess, t *agent.Turn) {
	message := fmt.Sprintf("the agent's process ended in the middle of the turn (%s)", w.proc.State())
	if tail := w.proc.StderrTail(); tail != "" {
		message += "; it last said: " + tail
	}
	r.mu.Lock()
	interrupted := r.interrupted
	r.mu.Unlock()
	switch {
	case r.killed.Err() != nil:
		s.endKilled(r, t, message)
	case w.proc.KilledBySystem() && s.killedForMemory(r):
		s.abandon(t, failedEnd(CodeOutOfMemory, "the kernel ended the agent's process, as the sandbox has no memory left; "+message))
	case interrupted:
		s.abandon(t, runner.TurnEnd{Outcome: runner.OutcomeInterrupted, Message: message})
	default:
		s.abandon(t, failedEnd("AGENT_EXITED", message))
	}
}

// feed passes a line that the process has printed to the agent's session. A line that is not a message of the agent's
// protocol is journaled as an event.
func (s *Supervisor) feed(w *warmProcess, t *agent.Turn, line process.Line) {
	defer func() {
		if p := recover(); p != nil {
			// A bug in a session must not end the runner.
			s.cfg.Log.Error("panic while reading the agent's output", "panic", p)
			s.abandon(t, failedEnd("INTERNAL", fmt.Sprintf("panic while reading the agent's output: %v", p)))
		}
	}()
	quoted := func() string { return agent.Beginning(w.redact.String(string(line.Data)), maxQuoted) }
	switch {
	case line.Cut():
		t.Emit(events.MainConversation, events.Error{
			Code:    "LINE_TOO_LONG",
			Message: fmt.Sprintf("the agent printed a line of %d bytes on %s, more than %d; it begins: %s", line.Size, line.Stream, runner.MaxLineLength, quoted()),
		})
	case len(bytes.TrimSpace(line.Data)) == 0:
	case line.Stream == process.Stderr:
		t.Emit(events.MainConversation, events.Log{Level: "info", Stream: string(process.Stderr), Message: string(line.Data)})
	case !json.Valid(line.Data):
		t.Emit(events.MainConversation, events.Log{Level: "info", Stream: string(process.Stdout), Message: string(line.Data)})
	default:
		if err := w.session.Line(line.Data, t); err != nil {
			t.Emit(events.MainConversation, events.Error{Code: "AGENT_PROTOCOL", Message: err.Error() + ": " + quoted()})
		}
	}
}

func failedEnd(code, message string) runner.TurnEnd {
	return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: code, Message: message}
}

func millis(d time.Duration) uint32 { return uint32(d.Milliseconds()) } //nolint:gosec // minutes

func names(m map[string]agent.Adapter) []string { return slices.Sorted(maps.Keys(m)) }
