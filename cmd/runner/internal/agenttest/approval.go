package agenttest

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// ApprovalRequests returns the requests of the turn that a person decides, in the order in which they were recorded.
func (x Turn) ApprovalRequests() []events.ApprovalRequested {
	x.t.Helper()
	return DataOfType[events.ApprovalRequested](x, events.ApprovalRequested{}.EventType())
}

// Resolutions returns the ends of the requests that somebody decided.
func (x Turn) Resolutions() []events.ApprovalResolved {
	x.t.Helper()
	return DataOfType[events.ApprovalResolved](x, events.ApprovalResolved{}.EventType())
}

// Retractions returns the ends of the requests that nobody decided.
func (x Turn) Retractions() []events.ApprovalRetracted {
	x.t.Helper()
	return DataOfType[events.ApprovalRetracted](x, events.ApprovalRetracted{}.EventType())
}

// DecideRequest decides a request as a person does. The id in d is ignored.
func (b *Harness) DecideRequest(r events.ApprovalRequested, d events.ApprovalDecided) {
	d.ApprovalID = runner.ApprovalID(b.Supervisor.Status().ExecutionID, b.journal.Name(), r.ApprovalID)
	b.Supervisor.ApplyVerdict(runner.Verdict{ApprovalDecided: d})
}

// ReadUntilRequests reads the journal until n requests of the turn so were recorded, and returns so with these lines added.
func (b *Harness) ReadUntilRequests(n int, so Turn) Turn {
	b.t.Helper()
	for len(so.ApprovalRequests()) < n {
		so = b.ReadUntil("approval request", func(l runner.Line) bool { return l.Type == events.ApprovalRequested{}.EventType() }, so)
	}
	return so
}

// ReadToEndDeciding is ReadToEnd for a turn whose requests are decided by decide, each as soon as it is recorded. Requests in so are
// taken as decided.
func (b *Harness) ReadToEndDeciding(so Turn, decide func(events.ApprovalRequested) events.ApprovalDecided) Turn {
	b.t.Helper()
	decided := len(so.ApprovalRequests())
	for {
		so = b.ReadUntil("end", func(l runner.Line) bool {
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

// RunTurnDeciding is RunTurn for a turn whose requests are decided by decide, each as soon as it is recorded.
func (b *Harness) RunTurnDeciding(content string, change func(*runner.Query), decide func(events.ApprovalRequested) events.ApprovalDecided) Turn {
	b.t.Helper()
	return b.ReadToEndDeciding(b.MustStartTurn(content, change), decide)
}

// AlwaysDecide returns the same decision on every request, for ReadToEndDeciding.
func AlwaysDecide(d events.ApprovalDecided) func(events.ApprovalRequested) events.ApprovalDecided {
	return func(events.ApprovalRequested) events.ApprovalDecided { return d }
}
