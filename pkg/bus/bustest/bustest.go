// Package bustest checks the handlers that services run on package bus.
package bustest

import (
	"context"
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/bus"
)

// RefusesUnrouted fails the test unless fn, called past the Router, returns bus.ErrNotRouted. Give it every handler of a service, each with a
// payload that it would otherwise carry out; a handler passes when `if err := bus.Routed(ctx); err != nil { return err }` comes
// before its first effect. The other way round the Router, reading the messages oneself, is closed by bus.Subscriber.Subscribe.
func RefusesUnrouted(t testing.TB, fn bus.HandlerFunc, payload []byte) {
	t.Helper()
	defer func() {
		if value := recover(); value != nil {
			t.Errorf("the handler panicked past the Router, instead of returning bus.ErrNotRouted: %v", value)
		}
	}()
	ctx := context.Background()
	err := fn(ctx, message.NewMessageWithContext(ctx, watermill.NewUUID(), payload))
	if !errors.Is(err, bus.ErrNotRouted) {
		t.Errorf("the handler ran past the Router and returned %v, want bus.ErrNotRouted", err)
	}
}
