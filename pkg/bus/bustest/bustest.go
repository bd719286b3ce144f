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

// RequireUnroutedRefused fails the test unless fn, called without the Router, returns bus.ErrNotRouted. Call it for every
// handler of a service, each with a payload that the handler would otherwise process. A handler passes if `if err
// := bus.RequireRouted(ctx); err != nil { return err }` precedes its first effect. bus.Subscriber.Subscribe prevents the
// opposite: reading messages without the Router.
func RequireUnroutedRefused(t testing.TB, fn bus.HandlerFunc, payload []byte) {
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
