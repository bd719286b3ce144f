package agenttest

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// ApprovalRequests returns the approval requests of the turn, on which a person decides, in the order in which they
// were journaled.
func (x Turn) ApprovalRequests() []events.ApprovalRequested {
	x.t.Helper()
	return DataOfType[events.ApprovalRequested](x, events.ApprovalRequested{}.EventType())
}

// ApprovalResolutions returns the events with which approval requests of the turn ended by a decision.
func (x Turn) ApprovalResolutions() []events.ApprovalResolved {
	x.t.Helper()
	return DataOfType[events.ApprovalResolved](x, events.ApprovalResolved{}.EventType())
}

// ApprovalRetractions returns the events with which approval requests of the turn ended without a decision.
func (x Turn) ApprovalRetractions() []events.ApprovalRetracted {
	x.t.Helper()
	return DataOfType[events.ApprovalRetracted](x, events.ApprovalRetracted{}.EventType())
}

// DecideRequest sends the decision d on the approval request r to the supervisor, as a person's decision. The id in d
// is ignored.
func (b *Harness) DecideRequest(r events.ApprovalRequested, d events.ApprovalDecided) {
	d.ApprovalID = runner.ApprovalID(b.Supervisor.Status().ExecutionID, b.journal.Name(), r.ApprovalID)
	b.Supervisor.ApplyVerdict(runner.ApprovalDecision{ApprovalDecided: d})
}

// ReadUntilRequests reads the journal until the turn has n approval requests. so is the turn as read so far; the result
// is the turn with the lines that were read added.
func (b *Harness) ReadUntilRequests(n int, so Turn) Turn {
	b.t.Helper()
	for len(so.ApprovalRequests()) < n {
		so = b.ReadUntil("approval request", func(l runner.JournalLine) bool { return l.Type == events.ApprovalRequested{}.EventType() }, so)
	}
	return so
}

// ReadToEndDeciding is ReadToEnd for a turn with approval requests: it calls decide for each as soon as it is
// journaled, and sends the decision. Requests in so count as decided.
func (b *Harness) ReadToEndDeciding(so Turn, decide func(events.ApprovalRequested) events.ApprovalDecided) Turn {
	b.t.Helper()
	decided := len(so.ApprovalRequests())
	for {
		so = b.ReadUntil("end", func(l runner.JournalLine) bool {
			return l.Type == runner.TurnEnded || l.Type == events.ApprovalRequested{}.EventType()
		}, so)
		requests := so.ApprovalRequests()
		if len(requests) == decided {
			return so
		}
		b.DecideRequest(requests[decided], decide(requests[decided]))
		decided++
	}
}

// RunTurnDeciding is RunTurn for a turn with approval requests: it calls decide for each as soon as it is journaled,
// and sends the decision.
func (b *Harness) RunTurnDeciding(content string, change func(*runner.Query), decide func(events.ApprovalRequested) events.ApprovalDecided) Turn {
	b.t.Helper()
	return b.ReadToEndDeciding(b.MustStartTurn(content, change), decide)
}

// AlwaysDecide returns a function for ReadToEndDeciding that makes the decision d on every request.
func AlwaysDecide(d events.ApprovalDecided) func(events.ApprovalRequested) events.ApprovalDecided {
	return func(events.ApprovalRequested) events.ApprovalDecided { return d }
}
