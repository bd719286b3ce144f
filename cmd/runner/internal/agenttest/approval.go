package agenttest

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// ApprovalRequests returns the requests of the turn that a person decides, in the order in which they were recorded.
func (x Turn) ApprovalRequests() []events.ApprovalRequested {
	x.t.Helper()
	return All[events.ApprovalRequested](x, events.ApprovalRequested{}.EventType())
}

// Resolutions returns the ends of the requests that somebody decided.
func (x Turn) Resolutions() []events.ApprovalResolved {
	x.t.Helper()
	return All[events.ApprovalResolved](x, events.ApprovalResolved{}.EventType())
}

// Retractions returns the ends of the requests that nobody decided.
func (x Turn) Retractions() []events.ApprovalRetracted {
	x.t.Helper()
	return All[events.ApprovalRetracted](x, events.ApprovalRetracted{}.EventType())
}

// Decide decides a request as a person does. The id in d is ignored.
func (b *Bench) Decide(r events.ApprovalRequested, d events.ApprovalDecided) {
	d.ApprovalID = runner.ApprovalID(b.Supervisor.Status().ExecutionID, b.journal.Name(), r.ApprovalID)
	b.Supervisor.Decide(runner.ApprovalDecision{ApprovalDecided: d})
}

// UntilRequests reads the journal until n requests of the turn so were recorded, and returns so with these lines added.
func (b *Bench) UntilRequests(n int, so Turn) Turn {
	b.t.Helper()
	for len(so.ApprovalRequests()) < n {
		so = b.Until("approval request", func(l runner.JournalLine) bool { return l.Type == events.ApprovalRequested{}.EventType() }, so)
	}
	return so
}

// EndDeciding is End for a turn whose requests are decided by decide, each as soon as it is recorded. Requests in so are
// taken as decided.
func (b *Bench) EndDeciding(so Turn, decide func(events.ApprovalRequested) events.ApprovalDecided) Turn {
	b.t.Helper()
	decided := len(so.ApprovalRequests())
	for {
		so = b.Until("end", func(l runner.JournalLine) bool {
			return l.Type == runner.TurnEnded || l.Type == events.ApprovalRequested{}.EventType()
		}, so)
		requests := so.ApprovalRequests()
		if len(requests) == decided {
			return so
		}
		b.Decide(requests[decided], decide(requests[decided]))
		decided++
	}
}

// AskDeciding is Ask for a turn whose requests are decided by decide, each as soon as it is recorded.
func (b *Bench) AskDeciding(content string, change func(*runner.Query), decide func(events.ApprovalRequested) events.ApprovalDecided) Turn {
	b.t.Helper()
	return b.EndDeciding(b.MustStart(content, change), decide)
}

// Always returns the same decision on every request, for EndDeciding.
func Always(d events.ApprovalDecided) func(events.ApprovalRequested) events.ApprovalDecided {
	return func(events.ApprovalRequested) events.ApprovalDecided { return d }
}
