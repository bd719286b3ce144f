package budget_test

import (
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// limited returns a tenant with a budget whose usage is counted up to some positions.
func limited(counted budget.Positions) budget.Tenant {
	return budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodTotal, Limit: events.Budget{Turns: 9}}}, Counted: counted}
}

func TestHasCounted_ComparesEachShard(t *testing.T) {
	t.Parallel()
	to := budget.Positions{0: 5, 2: 7}
	for name, c := range map[string]struct {
		tenant budget.Tenant
		want   bool
	}{
		"up to the positions":           {limited(budget.Positions{0: 5, 1: 0, 2: 7}), true},
		"less in one shard":             {limited(budget.Positions{0: 5, 2: 6}), false},
		"nothing of one shard":          {limited(budget.Positions{0: 5}), false},
		"an entry of a former version":  {limited(nil), true},
		"no limit depends on the usage": {budget.Tenant{Limits: events.TenantLimits{Slots: 1}, Counted: budget.Positions{0: 1}}, true},
		"a daily limit of events":       {budget.Tenant{Limits: events.TenantLimits{EventsPerDay: 1}, Counted: budget.Positions{0: 1}}, false},
	} {
		if got := c.tenant.HasCounted(to); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// TestWatch_AwaitCountedReturnsWhenTheBucketChanges tests that AwaitCounted blocks until another service has written the
// positions.
func TestWatch_AwaitCountedReturnsWhenTheBucketChanges(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 1}))
	kv, err := js.KeyValue(t.Context(), topology.BucketBudgets)
	must(t, err)
	put := func(tenant budget.Tenant) {
		t.Helper()
		body, err := json.Marshal(tenant)
		must(t, err)
		_, err = kv.Put(t.Context(), "acme", body)
		must(t, err)
	}
	put(limited(budget.Positions{0: 1}))
	w := budget.NewWatch(js, slog.New(slog.DiscardHandler))
	go func() { _ = w.Run(t.Context()) }() // it ends with the test
	must(t, w.AwaitCounted(t.Context(), "acme", budget.Positions{0: 1}))
	must(t, w.AwaitCounted(t.Context(), "unlimited", budget.Positions{0: 99}))
	done := make(chan error, 1)
	go func() { done <- w.AwaitCounted(t.Context(), "acme", budget.Positions{0: 3}) }()
	for seq := uint64(2); seq <= 3; seq++ {
		select {
		case err := <-done:
			t.Fatalf("AwaitCounted returned %v before position 3 was counted", err)
		default:
		}
		put(limited(budget.Positions{0: seq}))
	}
	must(t, <-done)
	if got, err := w.Get(t.Context(), "acme"); err != nil || got.Counted[0] != 3 {
		t.Errorf("counted up to %v, error %v", got.Counted, err)
	}
}

func TestCheckStart_ReturnsTheFirstExceededLimit(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 5, 6, 12, 0, 0, 0, time.UTC)
	used := &eventlog.SessionState{Tenant: "acme"}
	used.Life.Options.Budget = events.Budget{Tokens: 10}
	used.Run.Before.Tokens = 10
	left := &eventlog.SessionState{Tenant: "acme"}
	left.Life.Options.Budget = events.Budget{Tokens: 11}
	left.Run.Before.Tokens = 10
	exceeded := limited(nil)
	exceeded.Budgets[0].Spent.Turns = 9
	atLimit := budget.Tenant{Limits: events.TenantLimits{EventsPerDay: 1}, Used: budget.DailyOutput{Day: "2026-05-06", Logged: events.OutputSize{Events: 1}}}
	for name, c := range map[string]struct {
		session *eventlog.SessionState
		tenant  budget.Tenant
		want    *events.ExecutionFailed
	}{
		"nothing is used up": {left, limited(nil), nil},
		"the session":        {used, exceeded, &events.ExecutionFailed{Code: "BUDGET_EXCEEDED", Message: "the session has used 10 tokens, and its budget is 10"}},
		"the tenant":         {left, exceeded, &events.ExecutionFailed{Code: "BUDGET_EXCEEDED", Message: "tenant acme has had 9 turns, and its budget is 9"}},
		"the tenant's events": {left, atLimit, &events.ExecutionFailed{
			Code: "TENANT_EVENTS", Message: "tenant acme has added 1 events to the log on 2026-05-06, and its limit is 1",
		}},
	} {
		got := budget.CheckStart(c.session, c.tenant, now)
		if (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
