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

// maxAgentLine is the maximum length in bytes of a line that an agent's process prints. A line may repeat several messages of a conversation, and
// the services of models accept requests of up to 32 MiB.
const maxAgentLine = 32 << 20

// maxQuotedLine is the maximum number of bytes of an agent's line that an error message quotes.
const maxQuotedLine = 256

// warmProcess is the process of an agent, which stays alive between turns.
type warmProcess struct {
	architecture string
	sessionID    string
	command      agent.Command
	proc         *process.Process
	session      agent.Session
	gone         chan struct{}
	resume       string       // the agent's own session with which it was started
	fork         *runner.Fork // where that session was cut
	continues    bool         // it may have begun a new conversation in place of that session
	redact       *redact.Set  // all secret values that the process got so far
	used         bool         // it has run a query
	urgent       atomic.Bool  // it must be ended without grace
}

// canTake reports whether the process can run the turn of r: it has the same command, and it has the same session or
// has not run a query yet.
func (w *warmProcess) canTake(r *acceptedQuery) bool {
	if w == nil || w.architecture != r.query.Architecture || !reflect.DeepEqual(w.command, r.command) {
		return false
	}
	if w.used {
		return w.sessionID == r.query.SessionID && r.launch.Fork == nil // a fork starts at its anchor, with nothing of an earlier attempt
	}
	return (w.sessionID == "" || w.sessionID == r.query.SessionID) && w.resume == r.launch.Resume && reflect.DeepEqual(w.fork, r.launch.Fork) && w.continues == r.launch.ContinueAfterLoss
}

// Run runs the turns of accepted queries until ctx ends, and then ends the agent with all of its processes. A turn that
// is still running ends as killed.
func (s *Supervisor) Run(ctx context.Context) error {
	defer s.logIdleOutput()
	resume := loadAgentSessions(s.cfg.Folders.State, s.cfg.Log)
	for {
		w := s.currentProcess()
		var lines <-chan process.Line
		if w != nil {
			lines = w.proc.Lines()
		}
		select {
		case <-ctx.Done():
			s.mu.Lock()
			s.closed = true
			s.mu.Unlock()
			s.answerWarmUp()
			select {
			case r := <-s.starts:
				s.runTurn(ctx, r, resume)
			default:
			}
			return s.endWarmProcess()
		case r := <-s.starts:
			s.runTurn(ctx, r, resume)
		case m := <-s.warms:
			m.answer <- s.startWarmProcess(m.run, resume)
		case old := <-s.evict:
			if old != w {
				continue // the process was ended meanwhile
			}
			grace := s.cfg.TermGrace
			if w.urgent.Load() {
				grace = 0
			}
			if err := s.endWarmProcessWithin(grace); err != nil {
				s.cfg.Log.Error("end the agent", "err", err)
			}
		case line, ok := <-lines:
			if !ok {
				s.cfg.Log.Warn("the agent's process ended between turns", "pid", w.proc.PID(), "state", w.proc.ExitState(), "stderr", w.redact.RedactString(w.proc.StderrTail()))
				if err := s.endWarmProcess(); err != nil {
					s.cfg.Log.Error("end the processes that the agent left", "err", err)
				}
				continue
			}
			s.passIdleLine(w, line)
		}
	}
}

// passIdleLine passes a line that the process prints between turns to the agent's session. What the line means is kept for the next turn.
func (s *Supervisor) passIdleLine(w *warmProcess, line process.Line) {
	if s.idle == nil {
		s.idle = agent.NewTurn(context.Background(), agent.TurnConfig{Now: s.cfg.Now, Log: s.cfg.Log, Idle: &s.idleOutput})
	}
	s.idle.SetRedaction(w.redact)
	s.passLineToSession(w, s.idle, line)
	if s.idleOutput.Full() {
		s.idle.AbortBlocks()
	}
}

// takeIdleOutput returns the events for what the agent sent since the last turn, and forgets them.
func (s *Supervisor) takeIdleOutput() []events.Payload {
	if s.idle != nil {
		s.idle.AbortBlocks()
		s.idle = nil
	}
	return s.idleOutput.Take()
}

// logIdleOutput logs what the agent sent after the last turn. It is called when no turn will follow.
func (s *Supervisor) logIdleOutput() {
	for _, p := range s.takeIdleOutput() {
		s.cfg.Log.Warn("the agent sent this after its last turn", "type", p.EventType(), "data", p)
	}
}

// currentProcess returns the agent's process, or nil if there is none.
func (s *Supervisor) currentProcess() *warmProcess {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.warm
}

// endWarmProcess ends the agent's process, if there is one, with the usual grace time.
func (s *Supervisor) endWarmProcess() error { return s.endWarmProcessWithin(s.cfg.TermGrace) }

// endWarmProcessWithin ends the agent's process, if there is one. The process may run for grace after SIGTERM.
func (s *Supervisor) endWarmProcessWithin(grace time.Duration) error {
	w := s.currentProcess()
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

// runTurn runs the turn of one execution, from its first journal line to its last.
func (s *Supervisor) runTurn(ctx context.Context, r *acceptedQuery, resume *agentSessions) {
	stop := context.AfterFunc(ctx, r.kill) // shutting down ends the turn
	defer stop()
	s.answerWarmUp()
	if r.launch.Resume, r.launch.Fork = r.query.Resume, r.query.Fork; r.launch.Resume == "" {
		r.launch.Resume = resume.agentSessionOf(r.query)
	}
	s.flushWatcher() // earlier changes do not belong to this turn
	s.cfg.Journal.SetPace(r.query.Pace)
	defer s.cfg.Journal.SetPace(runner.OutputRate{})
	s.storeOOMKills(r)
	t := s.runOnProcess(r)
	if id := t.AgentSession(); id != "" {
		resume.setAgentSession(r.query, id)
	}
	r.kill() // releases its context
	close(r.done)
}

// newTurn returns the agent.Turn that journals the turn of r. It holds all lines until its Start is called.
func (s *Supervisor) newTurn(r *acceptedQuery) *agent.Turn {
	return agent.NewTurn(r.killed, agent.TurnConfig{
		Journal: s.cfg.Journal, ExecutionID: r.query.ExecutionID, Now: s.cfg.Now, Log: s.cfg.Log, Hold: true, Redact: s.redactedValues(),
		Policy: r.policy, Approved: r.query.Approved, AnswerTimeout: s.cfg.MuteKill, Idle: &s.idleOutput,
		Workspace: s.cfg.Folders.Workspace, BeforeEnd: func() { s.journalLastEvents(r) },
	})
}

// journalStart journals the first line of the execution, what the agent sent since the turn before, and the lines that the turn has held.
func (s *Supervisor) journalStart(r *acceptedQuery, t *agent.Turn, begun runner.TurnStart) {
	for _, p := range s.takeIdleOutput() {
		t.Emit(events.MainConversation, p)
	}
	t.Start(begun)
	s.startJournalingEvents(r)
}

// runOnProcess sends the query to the warm process or to a new one, and returns when the turn has ended.
func (s *Supervisor) runOnProcess(r *acceptedQuery) *agent.Turn {
	was := warmResultNoProcess
	if w := s.currentProcess(); w.canTake(r) && r.killed.Err() == nil {
		w.redact = w.redact.WithValues(r.query.Redact)
		s.setRedaction(w.redact)
		t := s.newTurn(r)
		var first process.Line
		if first, was = s.tryWarmProcess(r, w, t); was == warmResultTaken {
			s.passLinesUntilEnd(r, w, t, &first)
			return t
		}
	}
	if err := s.endWarmProcess(); err != nil {
		s.cfg.Log.Error("end the previous process of the agent", "err", err)
	}
	s.setRedaction(redact.New(r.query.Redact...))
	t := s.newTurn(r)
	begun := runner.TurnStart{Attempt: r.query.Attempt, Policy: r.query.PolicyName()}
	if r.killed.Err() != nil {
		s.journalStart(r, t, begun)
		s.endKilledTurn(r, t, "ended before the agent was started")
		return t
	}
	w, err := s.launchProcess(r)
	if err != nil {
		s.journalStart(r, t, begun)
		t.End(startFailureOutcome(err))
		return t
	}
	begun.PID = w.proc.PID()
	s.journalStart(r, t, begun)
	if was == warmResultHangs {
		t.Emit(events.MainConversation, events.WatchdogWarned{Watchdog: "after_result", AfterMs: milliseconds(s.cfg.MuteKill), Action: "killed"})
	}
	if s.sendFirstQuery(r, w, t) {
		s.passLinesUntilEnd(r, w, t, nil)
	}
	return t
}

// launchProcess starts a process of the agent for the query, which resumes the agent's own session if there is one.
func (s *Supervisor) launchProcess(r *acceptedQuery) (*warmProcess, error) {
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
	proc, err := s.cfg.ProcessGroup.Start(command, s.cfg.Folders.Workspace, maxAgentLine)
	if err != nil {
		return nil, err
	}
	w := &warmProcess{
		architecture: r.query.Architecture, sessionID: r.query.SessionID, command: r.command, proc: proc, gone: make(chan struct{}), resume: r.launch.Resume, fork: r.launch.Fork, continues: r.launch.ContinueAfterLoss,
		redact: redact.New(r.query.Redact...),
	}
	w.session = r.adapter.OpenSession(r.launch, proc)
	if s.cfg.Disk != nil {
		s.cfg.Disk.CheckNow()
	}
	s.mu.Lock()
	s.warm = w
	s.mu.Unlock()
	return w, nil
}

// startFailureOutcome returns the outcome of a turn whose process could not be started.
func startFailureOutcome(err error) runner.TurnEnd {
	var refusal *runner.CommandError
	switch {
	case errors.As(err, &refusal):
		return failedOutcome(refusal.Code, refusal.Message)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return failedOutcome("AGENT_NOT_FOUND", err.Error()+": install the agent's program in the sandbox, with the right to run it")
	}
	return failedOutcome("INTERNAL", err.Error())
}

// warmResult is the outcome of an attempt to run a query in a warm process.
type warmResult int

const (
	warmResultNoProcess warmResult = iota // there is no warm process
	warmResultTaken                       // the process runs the query
	warmResultExited                      // the process had ended
	warmResultHangs                       // the process hangs
)

// tryWarmProcess sends the query to a warm process and waits for the first line that the process prints. If the process
// hangs or has ended instead, it has not used the query, and the caller sends the query to a new process.
func (s *Supervisor) tryWarmProcess(r *acceptedQuery, w *warmProcess, t *agent.Turn) (first process.Line, f warmResult) {
	w.used, w.sessionID = true, r.query.SessionID
	if err := w.session.BeginTurn(r.query, t); err != nil {
		s.cfg.Log.Warn("send a query to the warm agent", "err", err)
		return first, warmResultExited
	}
	timer := time.NewTimer(s.cfg.MuteKill)
	defer timer.Stop()
	select {
	case line, ok := <-w.proc.Lines():
		if !ok {
			return first, warmResultExited
		}
		first = line
	case <-r.killed.Done():
	case <-timer.C:
		s.cfg.Log.Warn("the warm agent does not take a query", "pid", w.proc.PID(), "after", s.cfg.MuteKill)
		return first, warmResultHangs
	}
	s.journalStart(r, t, runner.TurnStart{Attempt: r.query.Attempt, Warm: true, PID: w.proc.PID(), Policy: r.query.PolicyName()})
	return first, warmResultTaken
}

// sendFirstQuery sends the query to a new process. It returns false if that failed and has ended the turn.
func (s *Supervisor) sendFirstQuery(r *acceptedQuery, w *warmProcess, t *agent.Turn) bool {
	w.used = true
	if err := w.session.BeginTurn(r.query, t); err != nil {
		end := failedOutcome("AGENT_PROTOCOL", "the query cannot be sent to the agent: "+err.Error())
		var refusal *runner.CommandError
		if errors.As(err, &refusal) {
			end = failedOutcome(refusal.Code, refusal.Message)
		}
		s.abandonTurn(t, end)
		return false
	}
	return true
}

// passLinesUntilEnd passes the lines that the process prints to the agent's session until the turn has ended. It ends
// the process if the process cannot run another turn. first is a line that was read already, nil for none.
func (s *Supervisor) passLinesUntilEnd(r *acceptedQuery, w *warmProcess, t *agent.Turn, first *process.Line) {
	r.mu.Lock()
	r.session = w.session
	interrupted := r.interrupted
	r.mu.Unlock()
	if interrupted {
		s.interruptSession(w.session)
	}
	if first != nil && r.killed.Err() == nil {
		s.passLineToSession(w, t, *first)
	}
	silence := time.NewTimer(s.cfg.SilenceWarn)
	defer silence.Stop()
	warned := s.cfg.SilenceWarn == s.cfg.SilenceKill
	memory := time.NewTicker(memoryCheckInterval)
	defer memory.Stop()
	for t.Ended() == nil {
		select {
		case <-r.killed.Done():
			s.endKilledTurn(r, t, "the agent's processes were ended")
		case line, ok := <-w.proc.Lines():
			if !ok {
				s.endTurnOfExitedProcess(r, w, t)
				return
			}
			s.passLineToSession(w, t, line)
			if s.cfg.Journal.TakeSlowed() {
				t.Emit(events.MainConversation, events.Error{Code: codeOutputSlowed, Message: outputSlowedMessage(r.query.Pace)})
			}
			silence.Reset(s.cfg.SilenceWarn)
			warned = s.cfg.SilenceWarn == s.cfg.SilenceKill
		case <-t.Alarm():
			t.RunAlarm()
		case <-memory.C:
			s.reportOOMKills(r.killed, r)
		case <-r.decided:
			for _, v := range r.takeVerdicts() {
				if len(v.Redact) > 0 {
					w.redact = w.redact.WithValues(v.Redact)
					s.setRedaction(w.redact)
					t.SetRedaction(w.redact)
				}
				t.ApplyVerdict(v)
			}
			silence.Reset(s.cfg.SilenceWarn)
			warned = s.cfg.SilenceWarn == s.cfg.SilenceKill
		case <-silence.C:
			if t.HasOpenRequest() {
				silence.Reset(s.cfg.SilenceWarn) // the agent waits for a person
				continue
			}
			if !warned {
				warned = true
				t.Emit(events.MainConversation, events.WatchdogWarned{Watchdog: "silence", AfterMs: milliseconds(s.cfg.SilenceWarn), Action: "none"})
				silence.Reset(s.cfg.SilenceKill - s.cfg.SilenceWarn)
				continue
			}
			t.Emit(events.MainConversation, events.WatchdogWarned{Watchdog: "silence", AfterMs: milliseconds(s.cfg.SilenceKill), Action: "killed"})
			s.abandonTurn(t, failedOutcome("AGENT_SILENT", fmt.Sprintf("the agent printed nothing for %s and was ended", s.cfg.SilenceKill)))
		}
	}
}

// codeOutputSlowed is the code of the error event for an agent whose output is faster than its pace allows.
const codeOutputSlowed = "OUTPUT_SLOWED"

// outputSlowedMessage returns the message of the error event OUTPUT_SLOWED for the given pace.
func outputSlowedMessage(p runner.OutputRate) string {
	return fmt.Sprintf("the agent says more than %d events or %d bytes a second and has to wait", p.EventsPerSecond, p.BytesPerSecond)
}

// endKilledTurn ends the agent's processes and then the turn, which was killed by a request or by KillForResource.
func (s *Supervisor) endKilledTurn(r *acceptedQuery, t *agent.Turn, message string) {
	r.mu.Lock()
	exhausted := r.exhausted
	r.mu.Unlock()
	if exhausted == nil {
		s.abandonTurn(t, runner.TurnEnd{Outcome: runner.OutcomeKilled, Message: message})
		return
	}
	t.Emit(events.MainConversation, events.Error{Code: exhausted.Code, Message: exhausted.Message})
	s.abandonTurnWithin(0, t, *exhausted)
}

// abandonTurn ends the agent's process and then the turn, so that no process of the turn runs when its end is in the
// journal.
func (s *Supervisor) abandonTurn(t *agent.Turn, e runner.TurnEnd) {
	s.abandonTurnWithin(s.cfg.TermGrace, t, e)
}

// abandonTurnWithin is abandonTurn with a grace time for the agent's process.
func (s *Supervisor) abandonTurnWithin(grace time.Duration, t *agent.Turn, e runner.TurnEnd) {
	if t.HasOpenRequest() {
		grace = 0 // the end of its stdin would be a denial for the agent
	}
	if err := s.endWarmProcessWithin(grace); err != nil {
		s.cfg.Log.Error("end the agent", "err", err)
		t.Emit(events.MainConversation, events.Error{Code: "INTERNAL", Message: err.Error()})
	}
	t.End(e)
}

// endTurnOfExitedProcess ends the turn of a process that has exited before it completed the turn.
func (s *Supervisor) endTurnOfExitedProcess(r *acceptedQuery, w *warmProcess, t *agent.Turn) {
	message := fmt.Sprintf("the agent's process ended in the middle of the turn (%s)", w.proc.ExitState())
	if tail := w.proc.StderrTail(); tail != "" {
		message += "; it last said: " + tail
	}
	r.mu.Lock()
	interrupted := r.interrupted
	r.mu.Unlock()
	switch {
	case r.killed.Err() != nil:
		s.endKilledTurn(r, t, message)
	case w.proc.KilledBySystem() && s.wasKilledForMemory(r):
		s.abandonTurn(t, failedOutcome(CodeOutOfMemory, "the kernel ended the agent's process, as the sandbox has no memory left; "+message))
	case interrupted:
		s.abandonTurn(t, runner.TurnEnd{Outcome: runner.OutcomeInterrupted, Message: message})
	default:
		s.abandonTurn(t, failedOutcome("AGENT_EXITED", message))
	}
}

// passLineToSession passes a line that the process has printed to the agent's session. If the line is not a message of the
// agent's protocol, passLineToSession journals it as an event.
func (s *Supervisor) passLineToSession(w *warmProcess, t *agent.Turn, line process.Line) {
	defer func() {
		if p := recover(); p != nil {
			// A bug in a session must not end the runner.
			s.cfg.Log.Error("panic while reading the agent's output", "panic", p)
			s.abandonTurn(t, failedOutcome("INTERNAL", fmt.Sprintf("panic while reading the agent's output: %v", p)))
		}
	}()
	quoted := func() string { return agent.Truncate(w.redact.RedactString(string(line.Data)), maxQuotedLine) }
	switch {
	case line.IsCut():
		t.Emit(events.MainConversation, events.Error{
			Code:    "LINE_TOO_LONG",
			Message: fmt.Sprintf("the agent printed a line of %d bytes on %s, more than %d; it begins: %s", line.Size, line.Stream, maxAgentLine, quoted()),
		})
	case len(bytes.TrimSpace(line.Data)) == 0:
	case line.Stream == process.Stderr:
		t.Emit(events.MainConversation, events.Log{Level: "info", Stream: string(process.Stderr), Message: string(line.Data)})
	case !json.Valid(line.Data):
		t.Emit(events.MainConversation, events.Log{Level: "info", Stream: string(process.Stdout), Message: string(line.Data)})
	default:
		if err := w.session.HandleLine(line.Data, t); err != nil {
			t.Emit(events.MainConversation, events.Error{Code: "AGENT_PROTOCOL", Message: err.Error() + ": " + quoted()})
		}
	}
}

// failedOutcome returns the outcome of a turn that has failed with an error code and a message.
func failedOutcome(code, message string) runner.TurnEnd {
	return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: code, Message: message}
}

// milliseconds returns a duration in milliseconds.
func milliseconds(d time.Duration) uint32 { return uint32(d.Milliseconds()) } //nolint:gosec // minutes

// adapterNames returns the names of the architectures that have an adapter, sorted.
func adapterNames(m map[string]agent.Adapter) []string { return slices.Sorted(maps.Keys(m)) }
