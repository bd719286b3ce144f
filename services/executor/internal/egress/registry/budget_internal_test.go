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

func billOf(turns ...uint32) Bill {
	b := Bill{unpriced: &unpriced{}}
	for _, n := range turns {
		b.charges = append(b.charges, charge{api.Budget{Account: "a", Whose: "the execution", Limit: events.Budget{Turns: n}}, &account{}})
	}
	return b
}

// Requests that are made at once do not pass a limit of turns together, and one that is not answered leaves its turn to another.
func TestBillBegin_HoldsTheLimitOfTurns(t *testing.T) {
	t.Parallel()
	b := billOf(5, 3, 0)
	var asked, answered, refused atomic.Int32
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			end, why, err := b.Begin(t.Context())
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
				b.Spend("m", events.Spent{Turns: 1}, true)
			}
			end()
		})
	}
	all.Wait()
	if answered.Load() != 3 || asked.Load()+refused.Load() != 50 {
		t.Errorf("%d were answered, %d were refused", answered.Load(), refused.Load())
	}
}

// A request that waits for its turn ends with its sandbox.
func TestBillBegin_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := billOf(1)
	end, why, err := b.Begin(t.Context())
	if err != nil || why != "" {
		t.Fatal(why, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, why, err := b.Begin(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%q, %v", why, err)
	}
	end()
	if end, why, err = b.Begin(t.Context()); err != nil || why != "" {
		t.Fatal(why, err)
	}
	end()
}
