package budgets

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// CodeOutput is the code of an execution that ended because its agent exceeded an output limit, and of the error
// event at the position where the output is cut.
const CodeOutput = "OUTPUT_LIMIT"

const (
	// maxEventsAfterCut is the maximum number of events that are stored after an output limit was exceeded. Only events that the
	// next turn or the usage report needs are stored.
	maxEventsAfterCut = 64
	// maxReserveBytes is the number of bytes of the NATS store's reserve that the output of a turn may use while the turn is being
	// stopped.
	maxReserveBytes = 1 << 20
)

// OutputLimits limits the events and bytes that an agent may write; 0 means no limit.
type OutputLimits struct {
	Execution events.OutputSize
	Session   events.OutputSize // all executions of the session
}

// ForAgent returns l, in which each limit that is higher than the limit of an agent's definition is replaced by the latter.
func (l OutputLimits) ForAgent(agent events.Limits) OutputLimits {
	lower := func(limit *uint64, own uint32) {
		if own > 0 && (*limit == 0 || uint64(own) < *limit) {
			*limit = uint64(own)
		}
	}
	lower(&l.Execution.Events, agent.OutputEvents)
	lower(&l.Execution.Bytes, agent.OutputBytes)
	return l
}

// An OutputMeter counts the output of an agent in an execution, and decides which part of it is kept after a limit
// was exceeded. It is not safe for concurrent use.
type OutputMeter struct {
	limits  OutputLimits
	before  events.OutputSize // of the session's earlier executions
	written events.OutputSize // of this execution, including output that is not stored yet
	text    uint64            // bytes of text in flight, which the log does not hold
	stopped events.OutputSize // written while the turn was being stopped and only the reserve of the store was left
	cut     bool
	kept    int // events kept after the cut
}

// NewOutputMeter returns the meter of an execution. written is the output of the execution so far, before is that of
// the session's earlier executions.
func NewOutputMeter(limits OutputLimits, before, written events.OutputSize) OutputMeter {
	return OutputMeter{limits: limits, before: before, written: written}
}

// IsCut reports whether an output limit was exceeded, so that further output is not stored.
func (m *OutputMeter) IsCut() bool { return m.cut }

// CountEvent counts an event of the runner's journal, and reports whether the event is to be stored. onReserve reports whether
// the turn is being stopped while only the reserve of the NATS store is left. For the first event that exceeds a limit, message
// names the limit: the caller must store message in the log before the event, and stop the turn.
func (m *OutputMeter) CountEvent(e events.Event, onReserve func() bool) (keep bool, message string) {
	if e.N == 0 { // of the executor, not of the journal
		return true, ""
	}
	written := m.written.Plus(events.OutputSizeOf(e))
	if !m.cut {
		message = m.limitMessage(written)
		if message == "" && onReserve() {
			message = m.exceedsReserve(e)
		}
		if message == "" {
			m.written = written
			return true, ""
		}
		m.cut = true
	}
	switch e.Data.(type) {
	case events.ExecutionStarted, events.TranscriptWritten, events.MetadataUpdate:
		m.kept++
		return m.kept <= maxEventsAfterCut, message
	}
	return false, message
}

// CountText counts bytes of text in flight. Their limit has the same size as the limit of the bytes of events, but is counted
// separately. The results are those of CountEvent.
func (m *OutputMeter) CountText(bytes int) (keep bool, message string) {
	m.text += uint64(bytes) //nolint:gosec // a length
	if !m.cut {
		message = m.limitMessage(events.OutputSize{Bytes: m.text})
		m.cut = message != ""
	}
	return !m.cut, message
}

// limitMessage returns a message that names the output limit which o exceeds, or "" if o exceeds none.
func (m *OutputMeter) limitMessage(o events.OutputSize) string {
	for _, x := range []struct {
		owner         string
		output, limit events.OutputSize
	}{
		{"execution", o, m.limits.Execution},
		{"session", o.Plus(m.before), m.limits.Session},
	} {
		if x.output.Exceeds(x.limit) {
			return fmt.Sprintf("the output of the %s is cut here: its limit is %d events and %d bytes", x.owner, x.limit.Events, x.limit.Bytes)
		}
	}
	return ""
}

// exceedsReserve counts an event that is stored in the reserve of the NATS store. It returns a message if such events exceed
// maxReserveBytes, else "".
func (m *OutputMeter) exceedsReserve(e events.Event) string {
	if m.stopped = m.stopped.Plus(events.OutputSizeOf(e)); m.stopped.Bytes <= maxReserveBytes {
		return ""
	}
	return "the output of the execution is cut here: it is being stopped, and the store of NATS is full but for its reserve"
}
