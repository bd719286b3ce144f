package session_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session"
)

// setBudget sets a budget of the default tenant and waits until dispatch uses it.
func (s *stack) setBudget(p events.Period, limit events.Budget) {
	s.t.Helper()
	if a := s.send(command.TypeSetBudget, "", "", command.SetBudget{Period: p, Budget: limit}); a.Error != nil {
		s.t.Fatal(a.Error)
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), within)
	defer cancel()
	must(s.t, budget.AwaitBudget(ctx, s.js, "default", p, limit))
}

// setTenantEntry replaces what dispatch reads about the default tenant. The position of the new entry is past the end
// of the log, so the service adds nothing to it.
func (s *stack) setTenantEntry(entryOfTenant budget.Tenant) {
	s.t.Helper()
	kv, err := s.js.KeyValue(s.t.Context(), topology.BucketBudgets)
	must(s.t, err)
	s.until("the entry of the tenant is replaced", func() bool {
		have, err := kv.Get(s.t.Context(), "default")
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			return false
		}
		must(s.t, err)
		entry := struct {
			budget.Tenant
			Shards map[string]map[string]any `json:"shards"`
		}{}
		must(s.t, json.Unmarshal(have.Value(), &entry))
		entry.Tenant, entry.Counted = entryOfTenant, budget.Positions{}
		for i, shard := range slices.Collect(maps.Values(entry.Shards)) {
			shard["seq"], entry.Counted[i] = uint64(1)<<62, 1<<62
		}
		body, err := json.Marshal(entry)
		must(s.t, err)
		_, err = kv.Update(s.t.Context(), "default", body, have.Revision())
		return err == nil && len(entry.Shards) > 0
	})
}

// TestTenantBudget_HoldsWithoutAProjector tests that a tenant's budget applies while no projector runs, and includes
// what was used before it was set.
func TestTenantBudget_HoldsWithoutAProjector(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	s.executors(1)
	sid := s.create(events.Options{})
	for range 3 {
		s.awaitEnd(sid, s.post(sid))
	}
	s.setBudget(events.PeriodTotal, events.Budget{Turns: 4})
	s.awaitEnd(sid, s.post(sid))
	for deadline := time.Now().Add(within); ; {
		exe := s.post(sid)
		list := s.awaitEnd(sid, exe)
		if _, failed := list[len(list)-1].Data.(events.ExecutionFailed); failed {
			s.failedWith(sid, exe, "and its budget is 4")
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the budget is not applied")
		}
	}
}
