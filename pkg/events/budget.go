package events

import (
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/truncate"
)

// Budget limits what a session or a tenant may use. 0 means no limit.
type Budget struct {
	Turns   uint32  `json:"turns,omitempty"`   // executions that were started
	Tokens  uint64  `json:"tokens,omitempty"`  // input and output tokens, cached ones included
	CostUSD float64 `json:"costUsd,omitempty"` // US dollars
	TimeMs  uint64  `json:"timeMs,omitempty"`  // milliseconds of execution time
}

// BudgetUsage is the usage that a Budget limits, in the same units.
type BudgetUsage struct {
	Turns   uint32  `json:"turns,omitempty"`
	Tokens  uint64  `json:"tokens,omitempty"`
	CostUSD float64 `json:"costUsd,omitempty"`
	TimeMs  uint64  `json:"timeMs,omitempty"`
}

// Plus returns the sum of s and o.
func (s BudgetUsage) Plus(o BudgetUsage) BudgetUsage {
	return BudgetUsage{s.Turns + o.Turns, s.Tokens + o.Tokens, s.CostUSD + o.CostUSD, s.TimeMs + o.TimeMs}
}

// Max returns the greater value of each field.
func (s BudgetUsage) Max(o BudgetUsage) BudgetUsage {
	return BudgetUsage{max(s.Turns, o.Turns), max(s.Tokens, o.Tokens), max(s.CostUSD, o.CostUSD), max(s.TimeMs, o.TimeMs)}
}

// ExceededLimit returns a sentence that names the first exhausted limit of the budget, or "" if no limit is exhausted.
// whose is the subject of the sentence, for example "the session".
func (b Budget) ExceededLimit(s BudgetUsage, whose string) string {
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

// Period is the kind of time that a tenant's budget covers: a day, a month, or all time.
type Period string

// The periods: a calendar day or month in UTC, or all time.
const (
	PeriodDay   Period = "day"
	PeriodMonth Period = "month"
	PeriodTotal Period = "total"
)

// Periods returns all periods.
func Periods() []Period { return []Period{PeriodDay, PeriodMonth, PeriodTotal} }

// CheckPeriod returns an error that begins with field if p is not a period.
func CheckPeriod(field string, p Period) error {
	switch p {
	case PeriodDay, PeriodMonth, PeriodTotal:
		return nil
	}
	return fmt.Errorf("%s: %q is not one of day, month and total", field, truncate.Text(string(p), 64))
}

// Bounds returns the first day and the end of the period that contains now. from has the form 2026-01-31, or is "" for
// PeriodTotal. until is the start of the next period, or the zero time for PeriodTotal.
func (p Period) Bounds(now time.Time) (from string, until time.Time) {
	y, m, d := now.UTC().Date()
	switch p {
	case PeriodDay:
		return time.Date(y, m, d, 0, 0, 0, 0, time.UTC).Format(time.DateOnly), time.Date(y, m, d+1, 0, 0, 0, 0, time.UTC)
	case PeriodMonth:
		return time.Date(y, m, 1, 0, 0, 0, 0, time.UTC).Format(time.DateOnly), time.Date(y, m+1, 1, 0, 0, 0, 0, time.UTC)
	}
	return "", time.Time{}
}

// BudgetSubject returns the log subject of a tenant's budget for a period.
func BudgetSubject(tenant string, p Period) Subject {
	return Subject{Tenant: tenant, ID: CatalogueID(TenantBudget, tenant, "", "", string(p)), Aspect: TenantBudget}
}

// TenantBudgetSet sets a tenant's budget for a period and replaces the previous one.
type TenantBudgetSet struct {
	Tenant string `json:"tenant"`
	Period Period `json:"period"` // day, month or total
	Budget Budget `json:"budget"`
}

// TenantBudgetRemoved removes a tenant's budget for a period.
type TenantBudgetRemoved struct {
	Tenant string `json:"tenant"`
	Period Period `json:"period"`
}
