package budget

import (
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Usage is the amount that sessions have used of a tenant's budgets and limits. A difference of two Usages may be negative.
type Usage struct {
	Turns      int64   `json:"turns,omitempty"`   // executions that were started
	Tokens     int64   `json:"tokens,omitempty"`  // input and output tokens, including those of caches
	CostUSD    float64 `json:"costUsd,omitempty"` // dollars
	TimeMs     int64   `json:"timeMs,omitempty"`  // milliseconds that executions ran
	Events     int64   `json:"events,omitempty"`  // that sessions added to the log
	EventBytes int64   `json:"eventBytes,omitempty"`
}

// Add returns the sum of u and o. It changes neither of them.
func (u Usage) Add(o Usage) Usage {
	return Usage{
		u.Turns + o.Turns, u.Tokens + o.Tokens, clampToFinite(u.CostUSD + o.CostUSD), u.TimeMs + o.TimeMs, u.Events + o.Events, u.EventBytes + o.EventBytes,
	}
}

// subtract returns u minus o.
func (u Usage) subtract(o Usage) Usage {
	return Usage{
		u.Turns - o.Turns, u.Tokens - o.Tokens, clampToFinite(u.CostUSD - o.CostUSD), u.TimeMs - o.TimeMs, u.Events - o.Events, u.EventBytes - o.EventBytes,
	}
}

// BudgetUsage returns those parts of the usage that budgets limit. Negative values count as zero.
func (u Usage) BudgetUsage() events.BudgetUsage {
	turns := min(max(u.Turns, 0), math.MaxUint32)
	return events.BudgetUsage{
		Turns: uint32(turns), Tokens: uint64(max(u.Tokens, 0)), CostUSD: max(u.CostUSD, 0), TimeMs: uint64(max(u.TimeMs, 0)), //nolint:gosec // bounded here
	}
}

// LogOutput returns the number of events and bytes that sessions have appended to the log. Negative values count as
// zero.
func (u Usage) LogOutput() events.OutputSize {
	return events.OutputSize{Events: uint64(max(u.Events, 0)), Bytes: uint64(max(u.EventBytes, 0))} //nolint:gosec // bounded here
}

// clampToFinite returns usd, or the largest or smallest number that JSON can express if usd is infinite.
func clampToFinite(usd float64) float64 { return max(-math.MaxFloat64, min(usd, math.MaxFloat64)) }

// toInt64 converts a count to a signed number; a larger count becomes the largest int64.
func toInt64(n uint64) int64 { return int64(min(n, math.MaxInt64)) } //nolint:gosec // bounded here

// SessionUsage folds the commits of one session, in the order of the log, into the usage of its tenant. The zero value
// is a session without commits. It is not safe for concurrent use.
type SessionUsage struct {
	deleted    bool
	days       map[string]Usage // what the session has added to each day
	executions map[string]*executionUsage
}

// executionUsage holds those facts about an execution that determine how later events of the execution count.
type executionUsage struct {
	started bool
	ended   bool
	metered bool    // the egress proxy has reported a request to a model before the end
	tokens  int64   // that the agent reported
	costUSD float64 // that the agent reported
}

// EntryCount returns the number of entries that the fold keeps in memory.
func (s *SessionUsage) EntryCount() int { return 1 + len(s.days) + len(s.executions) }

// AddCommit folds a commit and returns what the commit adds to the usage of the tenant, by the day in UTC, as 2026-01-31.
// Each event counts on the day of its own time. After session_deleted only the cost of sandboxes counts. run_retired
// states the total usage of the session: if some of its commits were erased before they were folded, AddCommit returns the
// difference.
func (s *SessionUsage) AddCommit(rec eventlog.Record) map[string]Usage {
	added := map[string]Usage{}
	add := func(day string, u Usage) {
		if s.days == nil {
			s.days = map[string]Usage{}
		}
		s.days[day], added[day] = s.days[day].Add(u), added[day].Add(u)
	}
	for _, e := range rec.Events {
		day := dayOf(e.Time)
		if s.deleted {
			s.addAfterDeletion(day, e, add)
			continue
		}
		size := events.OutputSizeOf(e)
		add(day, Usage{Events: toInt64(size.Events), EventBytes: toInt64(size.Bytes)})
		if _, deletes := e.Data.(events.SessionDeleted); deletes {
			s.deleted, s.executions = true, nil
			continue
		}
		add(day, s.usageOf(e))
	}
	for day, u := range added {
		if u == (Usage{}) {
			delete(added, day)
		}
	}
	return added
}

func (s *SessionUsage) addAfterDeletion(day string, e events.Event, add func(string, Usage)) {
	switch d := e.Data.(type) {
	case events.SandboxUsage:
		add(day, Usage{CostUSD: d.CostUSD})
	case events.RunRetired:
		for _, u := range d.Usage {
			total := Usage{
				Turns: int64(u.Spent.Turns), Tokens: toInt64(u.Spent.Tokens), CostUSD: u.Spent.CostUSD, TimeMs: toInt64(u.Spent.TimeMs),
				Events: toInt64(u.Logged.Events), EventBytes: toInt64(u.Logged.Bytes),
			}
			add(u.Day, total.subtract(s.days[u.Day]))
			s.days[u.Day] = total
		}
	}
}

// usageOf returns the usage that an event reports. Requests that the egress proxy metered count when the proxy reports
// them. If the proxy metered no request of an execution, the usage that the agent reported counts at the end of the
// execution.
func (s *SessionUsage) usageOf(e events.Event) Usage {
	var x *executionUsage
	if e.ExecutionID != "" {
		if x = s.executions[e.ExecutionID]; x == nil {
			x = &executionUsage{}
			if s.executions == nil {
				s.executions = map[string]*executionUsage{}
			}
			s.executions[e.ExecutionID] = x
		}
	}
	switch d := e.Data.(type) {
	case events.SandboxUsage:
		return Usage{CostUSD: d.CostUSD}
	case events.ModelCalled:
		if x != nil && x.ended && !x.metered && x.tokens > 0 {
			return Usage{} // the agent's report was already counted at the end
		}
		if x != nil && !x.ended {
			x.metered = true
		}
		return Usage{Tokens: toInt64(d.Usage.Tokens()), CostUSD: d.CostUSD}
	case events.ExecutionStarted:
		if x == nil || x.ended || x.started {
			return Usage{}
		}
		x.started = true
		return Usage{Turns: 1}
	case events.MetadataUpdate:
		if x != nil && !x.ended {
			x.tokens, x.costUSD = toInt64(d.Usage.Tokens()), d.CostUSD
		}
		return Usage{}
	}
	if x != nil && !x.ended && events.IsTerminal(e.Type()) {
		return x.usageAtEnd(e)
	}
	return Usage{}
}

// usageAtEnd returns the usage that counts at the end of an execution. An end whose data could not be decoded counts nothing.
func (x *executionUsage) usageAtEnd(e events.Event) Usage {
	x.ended = true
	var took Usage
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		took.TimeMs, x.tokens = int64(d.DurationMs), toInt64(d.Usage.Tokens())
		if d.CostUSD != 0 {
			x.costUSD = d.CostUSD
		}
	case events.ExecutionFailed:
		took.TimeMs, x.tokens = int64(d.DurationMs), toInt64(d.Usage.Tokens())
	case events.ExecutionCancelled:
		took.TimeMs, x.tokens = int64(d.DurationMs), toInt64(d.Usage.Tokens())
	}
	if !x.started {
		return Usage{}
	}
	if !x.metered {
		took.Tokens, took.CostUSD = x.tokens, x.costUSD
	}
	return took
}

// dayOf returns the day of a time in UTC, as 2026-01-31. Years outside of the range of JSON times are replaced by the
// nearest valid year.
func dayOf(t time.Time) string {
	t = t.UTC()
	switch {
	case t.Year() < 1:
		t = time.Time{}
	case t.Year() > 9999:
		t = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	}
	return t.Format(time.DateOnly)
}
