package worker

import (
	"cmp"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// codeOutputLimit is the code of an execution that ended since its agent said more than it may, and of the event that says where its
// output is cut.
const codeOutputLimit = "OUTPUT_LIMIT"

// cutAllowance is how many further events are kept of an execution whose output is cut: those that the next turn or the bill needs.
const cutAllowance = 64

// output counts what the agent said, and cuts it.
type output struct {
	said   events.Output // in the execution, with what is not stored yet
	text   uint64        // bytes of text in flight, which the log does not hold
	late   events.Output // of a turn that is being stopped, while only the reserve of the store is left
	cut    bool
	needed int // events that were kept after the cut
}

// outputLimit is what the agent may say in the execution: the executor's setting, or less if its definition says so.
func (t *turn) outputLimit() events.Output {
	limit := t.w.cfg.Output
	if t.is == nil {
		return limit
	}
	lower := func(bound *uint64, own uint32) {
		if own > 0 && (*bound == 0 || uint64(own) < *bound) {
			*bound = uint64(own)
		}
	}
	lower(&limit.Events, t.is.agent.Limits.OutputEvents)
	lower(&limit.Bytes, t.is.agent.Limits.OutputBytes)
	return limit
}

// exceeded says in a sentence which limit an output is over, "" for none. The output is of this execution.
func (f *follower) exceeded(o events.Output) string {
	for _, x := range []struct {
		whose string
		said  events.Output
		limit events.Output
	}{
		{"execution", o, f.outputLimit()},
		{"session", o.Plus(f.l.Run.OutputBefore), f.w.cfg.SessionOutput},
	} {
		if x.said.Exceeds(x.limit) {
			return fmt.Sprintf("the output of the %s is cut here: its limit is %d events and %d bytes", x.whose, x.limit.Events, x.limit.Bytes)
		}
	}
	return ""
}

// takes counts an event of the journal and reports whether it is kept. The first one over a limit stops the turn, and the log says so in
// its place.
func (f *follower) takes(e events.Event) bool {
	if e.N == 0 {
		return true
	}
	said := f.output.said.Plus(events.OutputOf(e))
	if !f.output.cut {
		why := cmp.Or(f.exceeded(said), f.lateOutput(e))
		if why == "" {
			f.output.said = said
			return true
		}
		f.cutOutput(why)
	}
	switch e.Data.(type) {
	case events.ExecutionStarted, events.TranscriptWritten, events.MetadataUpdate:
		f.output.needed++
		return f.output.needed <= cutAllowance
	}
	return false
}

// lateBytes is how much of the reserve of the store the output of a turn may take that is being stopped.
const lateBytes = 1 << 20

// lateOutput counts the output of a turn that is being stopped while only the reserve of the store is left, and says in a sentence that it
// is too much.
func (f *follower) lateOutput(e events.Event) string {
	if !f.stop.stopping() || !f.w.d.Room.Low() {
		return ""
	}
	if f.output.late = f.output.late.Plus(events.OutputOf(e)); f.output.late.Bytes <= lateBytes {
		return ""
	}
	return "the output of the execution is cut here: it is being stopped, and the store of NATS is full but for its reserve"
}

// takesText does the same for text in flight, which has the bytes of one more execution.
func (f *follower) takesText(bytes int) bool {
	f.output.text += uint64(bytes) //nolint:gosec // a length
	if why := f.exceeded(events.Output{Bytes: f.output.text}); why != "" && !f.output.cut {
		f.cutOutput(why)
	}
	return !f.output.cut
}

func (f *follower) cutOutput(why string) {
	f.output.cut = true
	f.stop.exhaust(codeOutputLimit, why, f.w.d.Now())
	f.pending = append(f.pending, f.facts([]events.Payload{events.Error{Code: codeOutputLimit, Message: why}})...)
}
