package bus

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

// routerKey marks the context that a Router subscribes with, routedKey the one that it calls handlers with. They differ because the
// first is inherited by messages before any middleware has run.
type (
	routerKey struct{}
	routedKey struct{}
)

// Routed returns ErrNotRouted unless ctx is the one a Router called a handler with, behind all its middleware. A handler whose effects
// depend on that asks first; bustest.RefusesUnrouted checks that it does.
func Routed(ctx context.Context) error {
	if ctx.Value(routedKey{}) == nil {
		return ErrNotRouted
	}
	return nil
}

func fromRouter(ctx context.Context) bool { return ctx.Value(routerKey{}) != nil }

// routed is the innermost middleware.
func routed() message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			return withContext(msg, context.WithValue(msg.Context(), routedKey{}, true), next)
		}
	}
}

// withContext calls next with ctx on msg and puts the former context back, for the middleware further out.
func withContext(msg *message.Message, ctx context.Context, next message.HandlerFunc) ([]*message.Message, error) {
	former := msg.Context()
	msg.SetContext(ctx)
	defer msg.SetContext(former)
	return next(msg)
}
