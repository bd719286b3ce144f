package run

import (
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// SandboxRate is the price of the running time of a provider's sandboxes.
type SandboxRate struct {
	Provider     string  // provider whose sandboxes are metered; "" for none
	USDPerSecond float64 // 0 if the price is unknown: then only the time is recorded
}

// AddSandboxUsage returns decision d on state s with sandbox_usage events added. It inserts them before the end of an
// execution and before the end of the sandbox, for the running time of the sandbox that the log does not contain yet.
// The recorded time is derived from s only, and a decision is appended only to the state that it was made for.
// Therefore no time is recorded twice, and the next executor records the time that a lost one did not.
func AddSandboxUsage(s State, d Decision, r SandboxRate) Decision {
	if r.Provider == "" || !slices.ContainsFunc(d.Events, endsUsagePeriod) {
		return d
	}
	out := Decision{Epoch: d.Epoch, Whole: d.Whole}
	whole := len(d.Events) - d.Whole
	for i, e := range d.Events {
		if endsUsagePeriod(e) {
			for _, u := range s.unrecordedUsage(e, r) {
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

// endsUsagePeriod reports whether the running time of the sandbox must be recorded before the event e.
func endsUsagePeriod(e events.Event) bool {
	switch e.Data.(type) {
	case events.SandboxReplaced, events.SandboxTerminated, events.SandboxFailed:
		return true
	}
	return events.IsTerminal(e.Type())
}

// unrecordedUsage returns the sandbox_usage events for the unrecorded time up to an event: first the time before the
// execution, which belongs to the session, then the time within it.
func (s State) unrecordedUsage(until events.Event, r SandboxRate) []events.Event {
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
			ID: events.DeriveID(events.KindEvent, until.ID, "sandbox_usage", execution), Time: to, ExecutionID: execution, Source: events.FromServer,
			Data: events.SandboxUsage{
				SandboxID: sb.ID, Provider: sb.Provider, DurationMs: uint64(ms), //nolint:gosec // positive
				CostUSD: r.USDPerSecond * float64(ms) / 1000,
			},
		})
		from = to
	}
	if s.IsIdle() || until.ExecutionID != s.Execution {
		add("", until.Time)
		return list
	}
	before := s.ClaimedAt
	if until.Time.Before(before) { // the clocks of two machines may differ
		before = until.Time
	}
	add("", before)
	add(s.Execution, until.Time)
	return list
}
