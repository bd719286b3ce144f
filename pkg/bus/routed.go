package bus

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

// routerKey marks the context with which a Router subscribes, routedKey the context with which it calls handlers.
// They differ because messages inherit the first before any middleware has run.
type (
	routerKey struct{}
	routedKey struct{}
)

// Routed returns ErrNotRouted unless ctx is a context with which a Router called a handler, inside all its
// middleware. A handler whose effects depend on the middleware calls Routed first; bustest.RefusesUnrouted checks
// that it does.
func Routed(ctx context.Context) error {
	if ctx.Value(routedKey{}) == nil {
		return ErrNotRouted
	}
	return nil
}

// fromRouter reports whether ctx is one with which a Router subscribes.
func fromRouter(ctx context.Context) bool { return ctx.Value(routerKey{}) != nil }

// routedMiddleware returns the innermost middleware. It marks the context of a message, so that Routed returns nil in the
// handler.
func routedMiddleware() message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			return withContext(msg, context.WithValue(msg.Context(), routedKey{}, true), next)
		}
	}
}

// withContext calls next with ctx on msg and then restores the former context for the outer middleware.
func withContext(msg *message.Message, ctx context.Context, next message.HandlerFunc) ([]*message.Message, error) {
	former := msg.Context()
	msg.SetContext(ctx)
	defer msg.SetContext(former)
	return next(msg)
}
