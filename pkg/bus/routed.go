package bus

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

type (
	// routerKey is the key of the context with which a Router subscribes. Messages inherit this context before any
	// middleware has run, so handlers are marked with inHandlerKey instead.
	routerKey struct{}
	// inHandlerKey is the key of the context with which a Router calls a handler, after all middleware.
	inHandlerKey struct{}
)

// RequireRouted returns ErrNotRouted unless ctx is a context with which a Router called a handler, inside all its
// middleware. A handler whose effects depend on the middleware calls RequireRouted first;
// bustest.RequireUnroutedRefused checks that a handler does.
func RequireRouted(ctx context.Context) error {
	if ctx.Value(inHandlerKey{}) == nil {
		return ErrNotRouted
	}
	return nil
}

// isRouterContext reports whether a Router subscribes with ctx.
func isRouterContext(ctx context.Context) bool { return ctx.Value(routerKey{}) != nil }

// markRoutedMiddleware returns the innermost middleware. It marks the context of a message, so that RequireRouted
// returns nil in the handler.
func markRoutedMiddleware() message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			return callWithContext(msg, context.WithValue(msg.Context(), inHandlerKey{}, true), next)
		}
	}
}

// callWithContext calls next with ctx as the context of msg, and then restores the former context for the outer
// middleware.
func callWithContext(msg *message.Message, ctx context.Context, next message.HandlerFunc) ([]*message.Message, error) {
	former := msg.Context()
	msg.SetContext(ctx)
	defer msg.SetContext(former)
	return next(msg)
}
