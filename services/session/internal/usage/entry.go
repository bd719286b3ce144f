package usage

import (
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// tenantEntry is the JSON value of a tenant in the bucket budgets: the usage, budgets and limits that services read,
// and the data from which they are computed.
type tenantEntry struct {
	budget.Tenant
	// Shards holds the usage by the stream of the shard, as streamID returns it. Entries that the projector of an earlier
	// version wrote have none.
	Shards map[string]*shardUsage `json:"shards"`
}

// shardUsage holds a tenant's usage, budgets and limits from the tenant's commits in one shard of the log, up to the
// stream sequence Seq.
type shardUsage struct {
	Seq     uint64                          `json:"seq"` // sequence of the last commit that changed this value
	Total   budget.Usage                    `json:"total"`
	Months  map[string]budget.Usage         `json:"months,omitempty"` // as 2026-01
	Days    map[string]budget.Usage         `json:"days,omitempty"`   // as 2026-01-31
	Budgets map[events.Period]events.Budget `json:"budgets,omitempty"`
	Limits  *events.TenantLimits            `json:"limits,omitempty"`
}

// Days and months are kept for as long as the window of a budget can include them, with time to spare for clocks that differ.
const (
	dayRetention   = 48 * time.Hour
	monthRetention = 32 * 24 * time.Hour
)

// monthOfDay returns the month of a day, such as 2026-01 for 2026-01-31.
func monthOfDay(day string) string { return day[:len("2006-01")] }

// keptWindow holds the first day and the first month whose usage an entry keeps.
type keptWindow struct{ day, month string }

// keptWindowAt returns the first day and the first month whose usage an entry keeps at a time.
func keptWindowAt(now time.Time) keptWindow {
	now = now.UTC()
	return keptWindow{now.Add(-dayRetention).Format(time.DateOnly), monthOfDay(now.Add(-monthRetention).Format(time.DateOnly))}
}

// applyCommit adds the usage of a commit, by day, to the entry, and applies the budgets and limits that the commit
// sets. It reports whether the entry changed. A commit at or before the shard's position changes nothing, because it
// was applied before.
func (e *tenantEntry) applyCommit(stream string, rec eventlog.Record, usage map[string]budget.Usage, keep keptWindow) bool {
	if s := e.Shards[stream]; s != nil && rec.Position.Seq <= s.Seq {
		return false
	}
	changed := len(usage) > 0
	for _, event := range rec.Events {
		switch event.Data.(type) {
		case events.TenantBudgetSet, events.TenantBudgetRemoved:
			changed = changed || rec.Subject.Aspect == events.TenantBudget
		case events.TenantLimitsSet, events.TenantLimitsRemoved:
			changed = changed || rec.Subject.Aspect == events.LimitsAspect
		}
	}
	if !changed {
		return false
	}
	s := e.shardUsageOf(stream)
	s.Seq = rec.Position.Seq
	for day, u := range usage {
		s.Total = s.Total.Add(u)
		if day >= keep.day {
			s.Days[day] = s.Days[day].Add(u)
		}
		if m := monthOfDay(day); m >= keep.month {
			s.Months[m] = s.Months[m].Add(u)
		}
	}
	for _, event := range rec.Events {
		s.applyEvent(rec.Subject.Aspect, event)
	}
	return true
}

// applyEvent applies an event that sets or removes a budget or limits. Other events change nothing.
func (s *shardUsage) applyEvent(aspect events.Aspect, e events.Event) {
	switch d := e.Data.(type) {
	case events.TenantBudgetSet:
		if aspect == events.TenantBudget {
			s.Budgets[d.Period] = d.Budget
		}
	case events.TenantBudgetRemoved:
		if aspect == events.TenantBudget {
			delete(s.Budgets, d.Period)
		}
	case events.TenantLimitsSet:
		if aspect == events.LimitsAspect {
			s.Limits = &d.Limits
		}
	case events.TenantLimitsRemoved:
		if aspect == events.LimitsAspect {
			s.Limits = nil
		}
	}
}

// shardUsageOf returns the tenant's usage in the shard with the stream id stream, and adds it to the entry if it does
// not exist.
func (e *tenantEntry) shardUsageOf(stream string) *shardUsage {
	if e.Shards == nil {
		e.Shards = map[string]*shardUsage{}
	}
	s := e.Shards[stream]
	if s == nil {
		s = &shardUsage{}
		e.Shards[stream] = s
	}
	if s.Months == nil {
		s.Months = map[string]budget.Usage{}
	}
	if s.Days == nil {
		s.Days = map[string]budget.Usage{}
	}
	if s.Budgets == nil {
		s.Budgets = map[events.Period]events.Budget{}
	}
	return s
}

// hasLimits reports whether the tenant has a budget or limits.
func (e *tenantEntry) hasLimits() bool {
	for _, s := range e.Shards {
		if len(s.Budgets) > 0 || s.Limits != nil {
			return true
		}
	}
	return false
}

// computeFigures computes the budgets and limits, and the usage that counts against them now, which services read from
// the entry. It drops days and months that no budget includes any more, and shards whose stream no longer exists.
// streams and positions are the stream of each shard, and the position up to which the entry includes its commits.
func (e *tenantEntry) computeFigures(streams []string, positions []uint64, now time.Time) {
	keep := keptWindowAt(now)
	shards := map[string]*shardUsage{}
	for _, stream := range streams {
		s := e.Shards[stream]
		if s == nil {
			continue
		}
		shards[stream] = s
		dropBefore(s.Days, keep.day)
		dropBefore(s.Months, keep.month)
	}
	e.Shards, e.Tenant = shards, budget.Tenant{Counted: budget.Positions{}}
	for shard, seq := range positions {
		e.Counted[shard] = seq
	}
	for _, period := range events.Periods() {
		for _, s := range shards {
			limit, ok := s.Budgets[period]
			if !ok {
				continue
			}
			b := budget.Budget{Period: period, Limit: limit}
			b.From, b.Until = period.Bounds(now)
			b.Spent = e.usageSince(period, b.From).BudgetUsage()
			e.Budgets = append(e.Budgets, b)
		}
	}
	for _, s := range shards {
		if s.Limits != nil {
			e.Limits = *s.Limits
		}
	}
	if e.HasDailyEventLimit() {
		e.Used.Day, _ = events.PeriodDay.Bounds(now)
		e.Used.Logged = e.usageSince(events.PeriodDay, e.Used.Day).LogOutput()
	}
}

// usageSince returns the tenant's usage in a period of days, from its first day on. It includes days that the clock has
// not reached yet, because the clock that set an event's time may be ahead.
func (e *tenantEntry) usageSince(period events.Period, from string) budget.Usage {
	var sum budget.Usage
	for _, s := range e.Shards {
		switch period {
		case events.PeriodDay:
			for day, u := range s.Days {
				if day >= from {
					sum = sum.Add(u)
				}
			}
		case events.PeriodMonth:
			for m, u := range s.Months {
				if m >= monthOfDay(from) {
					sum = sum.Add(u)
				}
			}
		default:
			sum = sum.Add(s.Total)
		}
	}
	return sum
}

// dropBefore removes the days or months before first from the map.
func dropBefore(usage map[string]budget.Usage, first string) {
	for k := range usage {
		if k < first {
			delete(usage, k)
		}
	}
}
