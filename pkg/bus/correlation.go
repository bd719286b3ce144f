package bus

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/topology"
)

// correlationKey is the key under which a context holds a correlation id.
type correlationKey struct{}

// WithCorrelationID returns a context whose messages (NewMessage, Request) carry id.
func WithCorrelationID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, correlationKey{}, id)
}

// CorrelationID returns the id that ctx carries, or "".
func CorrelationID(ctx context.Context) string {
	id, _ := ctx.Value(correlationKey{}).(string)
	return id
}

// correlationMiddleware returns the middleware that passes a message's correlation id to the messages that its handler publishes with the
// handler's context. If the message has none, the chain starts with its command id, or else its own id. Watermill's CorrelationID only
// knows the messages that a handler returns: see TestWatermillCorrelationID_MissesWhatTheHandlerPublishes.
func correlationMiddleware() message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			id := msg.UUID
			for _, key := range []string{topology.HeaderCommandID, topology.HeaderCorrelation} {
				if value := msg.Metadata.Get(key); value != "" {
					id = value
				}
			}
			return callWithContext(msg, WithCorrelationID(msg.Context(), id), next)
		}
	}
}
