package bus

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/topology"
)

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

// correlation hands a message's correlation id on to what its handler publishes with the handler's context. A message without one is
// itself the cause: its command id, else its own id, is where the chain begins.
func correlation() message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			id := msg.UUID
			for _, key := range []string{topology.HeaderCommandID, topology.HeaderCorrelation} {
				if value := msg.Metadata.Get(key); value != "" {
					id = value
				}
			}
			return withContext(msg, WithCorrelationID(msg.Context(), id), next)
		}
	}
}
