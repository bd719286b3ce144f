package registry

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

func chargesOf(turns ...uint32) ChargedBudgets {
	c := ChargedBudgets{unpriced: &unpricedModel{}}
	for _, n := range turns {
		c.list = append(c.list, chargedBudget{api.Budget{Account: "a", Whose: "the execution", Limit: events.Budget{Turns: n}}, &budgetAccount{}})
	}
	return c
}

// Concurrent requests do not exceed a limit of turns together, and a request without an answer frees its turn for
// another one.
func TestChargesBegin_HoldsTheLimitOfTurns(t *testing.T) {
	t.Parallel()
	c := chargesOf(5, 3, 0)
	var asked, answered, refused atomic.Int32
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			end, why, err := c.ReserveTurns(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if why != "" {
				refused.Add(1)
				if !strings.Contains(why, "3 turns, and its budget is 3") {
					t.Error(why)
				}
				return
			}
			if asked.Add(1)%2 == 0 { // every second request is answered
				answered.Add(1)
				c.ChargeUsage("m", events.BudgetUsage{Turns: 1}, true)
			}
			end()
		})
	}
	all.Wait()
	if answered.Load() != 3 || asked.Load()+refused.Load() != 50 {
		t.Errorf("%d were answered, %d were refused", answered.Load(), refused.Load())
	}
}

// A request that waits for its turn ends when its context does.
func TestChargesBegin_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	c := chargesOf(1)
	end, why, err := c.ReserveTurns(t.Context())
	if err != nil || why != "" {
		t.Fatal(why, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, why, err := c.ReserveTurns(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%q, %v", why, err)
	}
	end()
	if end, why, err = c.ReserveTurns(t.Context()); err != nil || why != "" {
		t.Fatal(why, err)
	}
	end()
}
