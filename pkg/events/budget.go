package events

import (
	"fmt"
	"time"
)

// Budget bounds what a session or a tenant may take; 0 is no bound.
type Budget struct {
	Turns   uint32  `json:"turns,omitempty"`   // executions that are started
	Tokens  uint64  `json:"tokens,omitempty"`  // in and out, those of caches too
	CostUSD float64 `json:"costUsd,omitempty"` // dollars
	TimeMs  uint64  `json:"timeMs,omitempty"`  // milliseconds that executions run
}

// Spent is what was taken, of the same measures.
type Spent struct {
	Turns   uint32  `json:"turns,omitempty"`
	Tokens  uint64  `json:"tokens,omitempty"`
	CostUSD float64 `json:"costUsd,omitempty"`
	TimeMs  uint64  `json:"timeMs,omitempty"`
}

// Plus adds.
func (s Spent) Plus(o Spent) Spent {
	return Spent{s.Turns + o.Turns, s.Tokens + o.Tokens, s.CostUSD + o.CostUSD, s.TimeMs + o.TimeMs}
}

// Max is the greater of each measure.
func (s Spent) Max(o Spent) Spent {
	return Spent{max(s.Turns, o.Turns), max(s.Tokens, o.Tokens), max(s.CostUSD, o.CostUSD), max(s.TimeMs, o.TimeMs)}
}

// Exceeded says in a sentence what of the budget is used up, "" for nothing;
// whose names who has it: "the session".
func (b Budget) Exceeded(s Spent, whose string) string {
	switch {
	case b.Turns > 0 && s.Turns >= b.Turns:
		return fmt.Sprintf("%s has had %d turns, and its budget is %d", whose, s.Turns, b.Turns)
	case b.Tokens > 0 && s.Tokens >= b.Tokens:
		return fmt.Sprintf("%s has used %d tokens, and its budget is %d", whose, s.Tokens, b.Tokens)
	case b.CostUSD > 0 && s.CostUSD >= b.CostUSD:
		return fmt.Sprintf("%s has cost $%.4f, and its budget is $%.4f", whose, s.CostUSD, b.CostUSD)
	case b.TimeMs > 0 && s.TimeMs >= b.TimeMs:
		return fmt.Sprintf("%s has run for %d ms, and its budget is %d ms", whose, s.TimeMs, b.TimeMs)
	}
	return ""
}

// Period is what a tenant's budget is for.
type Period string

// The periods: of the calendar in UTC, or for ever.
const (
	PeriodDay   Period = "day"
	PeriodMonth Period = "month"
	PeriodTotal Period = "total"
)

// Periods lists them.
func Periods() []Period { return []Period{PeriodDay, PeriodMonth, PeriodTotal} }

// CheckPeriod reports an error that begins with the field's name unless p is a period.
func CheckPeriod(field string, p Period) error {
	switch p {
	case PeriodDay, PeriodMonth, PeriodTotal:
		return nil
	}
	return fmt.Errorf("%s: %q is none of day, month and total", field, clip(string(p), 64))
}

// Span is the period that holds a time: from is its first day, as 2026-01-31 and
// "" for ever; until is when the next one begins, zero for never.
func (p Period) Span(now time.Time) (from string, until time.Time) {
	y, m, d := now.UTC().Date()
	switch p {
	case PeriodDay:
		return time.Date(y, m, d, 0, 0, 0, 0, time.UTC).Format(time.DateOnly), time.Date(y, m, d+1, 0, 0, 0, 0, time.UTC)
	case PeriodMonth:
		return time.Date(y, m, 1, 0, 0, 0, 0, time.UTC).Format(time.DateOnly), time.Date(y, m+1, 1, 0, 0, 0, 0, time.UTC)
	}
	return "", time.Time{}
}

// BudgetOf is the subject of a tenant's budget for a period.
func BudgetOf(tenant string, p Period) Subject {
	return Subject{Tenant: tenant, ID: CatalogueID(TenantBudget, tenant, "", "", string(p)), Aspect: TenantBudget}
}

// TenantBudgetSet gives a tenant a budget for a period, in place of the former.
type TenantBudgetSet struct {
	Tenant string `json:"tenant"`
	Period Period `json:"period"` // day, month or total
	Budget Budget `json:"budget"`
}

// TenantBudgetRemoved ends a tenant's budget for a period.
type TenantBudgetRemoved struct {
	Tenant string `json:"tenant"`
	Period Period `json:"period"`
}
