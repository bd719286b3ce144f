package run

import (
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Rate is what the sandboxes of a provider cost.
type Rate struct {
	Provider     string  // whose sandboxes are metered; "" for none
	USDPerSecond float64 // 0 for an unknown price: the time alone is recorded
}

// Meter returns a decision on s with the sandbox_usage events that belong to it. Before an execution's end, and before the sandbox's,
// it adds the time that the sandbox ran and that is not in the log yet. What is in the log is known from s alone, and a decision
// is stored only on the state that it was made for. So no time is recorded twice, and what an executor that died did not record is
// recorded by the next one.
func Meter(s State, d Decision, r Rate) Decision {
	if r.Provider == "" || !slices.ContainsFunc(d.Events, endsStretch) {
		return d
	}
	out := Decision{Epoch: d.Epoch, Whole: d.Whole}
	whole := len(d.Events) - d.Whole
	for i, e := range d.Events {
		if endsStretch(e) {
			for _, u := range s.stretches(e, r) {
				if i >= whole {
					out.Whole++
				}
				out.Events = append(out.Events, u)
				s = Evolve(s, u)
			}
		}
		out.Events = append(out.Events, e)
		s = Evolve(s, e)
	}
	return out
}

// endsStretch reports whether the time that the sandbox ran is recorded before an event.
func endsStretch(e events.Event) bool {
	switch e.Data.(type) {
	case events.SandboxReplaced, events.SandboxTerminated, events.SandboxFailed:
		return true
	}
	return events.Terminal(e.Type())
}

// stretches returns the time of the sandbox that is not in the log, up to an event: first what lies before the execution, which is
// the session's, then what lies within it.
func (s State) stretches(until events.Event, r Rate) []events.Event {
	sb := s.Sandbox
	if sb.Provider != r.Provider || sb.ReadyAt.IsZero() {
		return nil
	}
	from := sb.ReadyAt
	if sb.MeteredAt.After(from) {
		from = sb.MeteredAt
	}
	var list []events.Event
	add := func(execution string, to time.Time) {
		ms := to.Sub(from).Milliseconds()
		if ms <= 0 {
			return
		}
		list = append(list, events.Event{
			ID: events.Derive(events.KindEvent, until.ID, "sandbox_usage", execution), Time: to, ExecutionID: execution, Source: events.FromServer,
			Data: events.SandboxUsage{
				SandboxID: sb.ID, Provider: sb.Provider, DurationMs: uint64(ms), //nolint:gosec // positive
				CostUSD: r.USDPerSecond * float64(ms) / 1000,
			},
		})
		from = to
	}
	if s.Over() || until.ExecutionID != s.Execution {
		add("", until.Time)
		return list
	}
	before := s.ClaimedAt
	if until.Time.Before(before) { // clocks of two machines
		before = until.Time
	}
	add("", before)
	add(s.Execution, until.Time)
	return list
}
