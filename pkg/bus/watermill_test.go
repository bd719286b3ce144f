package bus_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/topology"
)

// The tests of this file show why the Router has middleware of its own in place of watermill's. If one fails after an
// update of watermill, its middleware may do the job.

func TestWatermillRetry_LosesTheErrorAndSkipsPauses(t *testing.T) {
	t.Parallel()
	busy := errors.New("the database is down")
	synctest.Test(t, func(t *testing.T) {
		retry := middleware.Retry{
			MaxRetries: 2, InitialInterval: 100 * time.Millisecond, MaxInterval: 5 * time.Second, Multiplier: 2,
			ShouldRetry: func(p middleware.RetryParams) bool { return bus.IsTransient(p.Err) },
		}
		began := time.Now()
		var runs []time.Duration
		handler := retry.Middleware(func(*message.Message) ([]*message.Message, error) {
			runs = append(runs, time.Since(began))
			return nil, bus.Transient(busy)
		})
		if _, err := handler(message.NewMessage("1", nil)); !errors.Is(err, busy) {
			t.Errorf("after the last retry: got %v", err)
		}
		ours := []time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond}
		if slices.Equal(runs, ours) {
			t.Errorf("watermill's Retry ran the handler at %v: it no longer skips pauses", runs)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := handler(message.NewMessageWithContext(ctx, "2", nil)); errors.Is(err, busy) {
			t.Errorf("watermill's Retry returns the handler's error when the context ends: %v", err)
		}
	})
}

func TestRouterRetry_KeepsTheErrorAtTheTimeout(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	cfg := bus.RouterConfig{Timeout: 50 * time.Millisecond, RetryInterval: time.Hour, MaxDeliveries: 1}
	b.route(t, cfg, b.quick(t), "work.a", func(context.Context, *message.Message) error {
		return bus.Transient(errors.New("the database is down"))
	})
	b.publish(t, "work.a", message.NewMessage("1", nil))
	if reason := b.deadLetter(t).Metadata.Get(topology.HeaderDeadReason); !strings.Contains(reason, "the database is down") {
		t.Errorf("reason is %q", reason)
	}
}

// The middleware of watermill publishes a dead letter with the id of its message. DEAD drops a second dead letter
// with the same id as a duplicate.
func TestWatermillPoisonQueue_CannotStoreDeadLetters(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	dead, err := bus.NewPublisher(bus.PublisherConfig{JetStream: b.js, Deduplicate: true})
	if err != nil {
		t.Fatal(err)
	}
	poison, err := middleware.PoisonQueue(dead, "dead.work")
	if err != nil {
		t.Fatal(err)
	}
	for _, cause := range []string{"first", "second", "third:\ntwo lines"} {
		handler := poison(func(*message.Message) ([]*message.Message, error) { return nil, errors.New(cause) })
		_, err := handler(message.NewMessage("same", nil))
		if refused := errors.Is(err, bus.ErrInvalidMessage); refused != strings.Contains(cause, "\n") {
			t.Errorf("%q: got %v", cause, err)
		}
	}
	if n := b.messagesIn(t, "DEAD"); n != 1 {
		t.Errorf("DEAD has %d messages: watermill's PoisonQueue gives copies ids of their own", n)
	}
}

func TestWatermillCorrelationID_MissesWhatTheHandlerPublishes(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	out := newPublisher(t, b.js)
	msg := message.NewMessage("1", nil)
	middleware.SetCorrelationID("cause", msg)
	msg.Metadata.Set(topology.HeaderCorrelation, "cause")
	handler := middleware.CorrelationID(func(msg *message.Message) ([]*message.Message, error) {
		return nil, out.Publish("dead.x", bus.NewMessage(msg.Context(), "2", nil))
	})
	if _, err := handler(msg); err != nil {
		t.Fatal(err)
	}
	got := b.deadLetter(t).Metadata
	if got.Get(topology.HeaderCorrelation) != "" || got.Get(middleware.CorrelationIDMetadataKey) != "" {
		t.Errorf("the published message has metadata %v: watermill's CorrelationID reaches it", got)
	}
}
