package bus

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// timeout ends the handler's context after d. A handler that does not heed its context keeps its slot, and its message.
func timeout(d time.Duration) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		if d < 0 {
			return next
		}
		return func(msg *message.Message) ([]*message.Message, error) {
			ctx, cancel := context.WithTimeout(msg.Context(), d)
			defer cancel()
			return withContext(msg, ctx, next)
		}
	}
}
