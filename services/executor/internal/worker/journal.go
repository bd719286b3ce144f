package worker

import (
	"strconv"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// readLines translates journal lines that have arrived and handles the results, until there is no line left or isFull is true.
func (f *follower) readLines() {
	for !f.isFull() {
		it, ok := f.agent.Link.NextItem()
		if !ok {
			return
		}
		now := f.w.deps.Now().UTC()
		if it.Line == nil {
			f.handleResult(f.translator.TranslateGarbage(f.garbageID(), it.Garbage, it.TooLong, now))
			continue
		}
		for _, r := range f.translator.TranslateLine(*it.Line, now) {
			f.handleResult(r)
		}
	}
}

// garbageID returns the id from which the translator derives the ids of events about lines that are not journal lines, and so have no
// number. It contains the journal, the epoch and the attempt, so that lines of different streams have different ids.
func (f *follower) garbageID() string {
	return f.translator.Journal + "/" + strconv.FormatUint(f.Epoch, 10) + "/" + strconv.FormatUint(uint64(f.Session.Run.DiedAttempts), 10)
}

// handleResult handles a result of the translator: it publishes a delta, adds an event to the next commit, or records the end of the turn
// or a gap in f. It drops output that exceeds the output limits.
func (f *follower) handleResult(r translate.LineResult) {
	switch {
	case r.Delta != nil && (!f.keepsText(len(r.Delta.Text)) || f.w.deps.Room.IsLow()): // the complete block will have the text
	case r.Delta != nil:
		if err := f.w.deps.Deltas.Publish(f.Session.Tenant, f.Session.ID, *r.Delta); err != nil {
			f.Log.Debug("text in flight was lost", "error", err)
		}
	case r.Ended != nil:
		f.ended = r.Ended
	case r.Gap != "":
		f.gap = r.Gap
	case r.Event != nil && !f.keepsEvent(*r.Event):
	case r.Event != nil:
		*r.Event = f.checkResolved(*r.Event)
		start, ok := r.Event.Data.(events.BlockStart)
		isOpen := ok && start.Block.Status == events.StatusPending
		if isOpen {
			start.TextAfter = f.w.deps.Deltas.Position()
			r.Event.Data = start
		}
		if err := f.commits.Add(*r.Event); err != nil {
			f.Log.Error("an event cannot be encoded and is dropped", "n", r.Event.N, "error", err)
			return
		}
		if isOpen {
			f.commits.Expedite() // clients show its text only after this event
		}
		f.checkLoops(*r.Event)
	}
}

// startCommit starts a commit of the pending events, if one is due and the NATS store has room. Afterwards the runner may remove the lines
// that the commit has stored.
func (f *follower) startCommit() {
	if !f.commits.IsDue() || f.waitsForRoom() {
		return
	}
	lnk := f.agent.Link
	f.commits.StartCommit(f.ctx, func(line uint64) { f.acknowledgeLines(lnk, line) })
}

// acknowledgeLines allows the runner to remove the journal lines up to line n, which the log has.
func (f *follower) acknowledgeLines(l *link.Link, n uint64) {
	if err := l.Acknowledge(f.Epoch, n); err != nil {
		f.Log.Debug("the journal could not be acknowledged", "error", err)
	}
}

// meterOutput returns a meter that compares the agent's output with the output limits. The meter starts with the output that the log
// already has.
func (t *turn) meterOutput() budgets.OutputMeter {
	limits := budgets.OutputLimits{Execution: t.w.cfg.Output, Session: t.w.cfg.SessionOutput}
	if t.resolved != nil {
		limits = limits.ForAgent(t.resolved.Definition.Limits)
	}
	return budgets.NewOutputMeter(limits, t.Session.Run.OutputBefore, t.Session.Run.Output)
}

// keepsEvent counts an event of the journal, and reports whether it is within the output limits. The first event that exceeds a limit stops
// the turn.
func (f *follower) keepsEvent(e events.Event) bool {
	keep, message := f.output.CountEvent(e, func() bool { return f.stop.IsStopping() && f.w.deps.Room.IsLow() })
	f.cutOutput(message)
	return keep
}

// keepsText counts bytes of text in flight, and reports whether they are within the output limits. The first text that exceeds a limit
// stops the turn.
func (f *follower) keepsText(bytes int) bool {
	keep, message := f.output.CountText(bytes)
	f.cutOutput(message)
	return keep
}

// cutOutput stops the turn because the agent's output exceeds a limit, and records the message in the log. It does nothing if message is
// "".
func (f *follower) cutOutput(message string) {
	if message == "" {
		return
	}
	f.stop.RecordExceeded(budgets.CodeOutput, message, f.w.deps.Now())
	if err := f.commits.Add(f.NewEvents(events.Error{Code: budgets.CodeOutput, Message: message})...); err != nil {
		f.Log.Error("the event about the cut output could not be recorded", "error", err)
	}
}

// codeStorageFull is the code of the error event which says that the agent's output waits until the NATS store has room.
const codeStorageFull = "STORAGE_FULL"

// waitsForRoom reports whether the pending events must wait because only the reserve of the NATS store is left. Before the first wait, it
// stores an error event that says so. While events wait, the follower soon reads no more journal lines, so that the agent waits too. The
// end of a turn does not wait, and neither does the output of a turn that is being stopped.
func (f *follower) waitsForRoom() bool {
	waits := f.mustWaitForRoom()
	switch {
	case waits:
		f.w.admission.RecordStoreFull(f.Session)
	case f.storeFull:
		f.w.deps.Waits.End(f.ID)
	}
	f.storeFull = waits
	return waits
}

// mustWaitForRoom is waitsForRoom without the record of the wait.
func (f *follower) mustWaitForRoom() bool {
	if f.ended != nil || f.stop.IsStopping() || !f.w.deps.Room.IsLow() {
		return false
	}
	if !f.fullRecorded {
		f.fullRecorded = true
		f.commits.AddFirst(f.NewEvents(events.Error{
			Code: codeStorageFull, Message: "only the reserve of the NATS store is left: further output of the agent is stored when there is room again",
		})...)
		return false
	}
	return true
}
