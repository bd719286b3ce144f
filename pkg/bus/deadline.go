package bus

import (
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/topology"
)

// deadline drops a message whose HeaderDeadline has passed: whoever sent it has given it up, and may have sent another. A deadline that
// cannot be read is poison.
func deadline(name string, cfg RouterConfig) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			value := msg.Metadata.Get(topology.HeaderDeadline)
			if value == "" {
				return next(msg)
			}
			until, err := time.Parse(time.RFC3339, value)
			if err != nil {
				return nil, Poison(fmt.Errorf("header %s is not RFC 3339: %w", topology.HeaderDeadline, err))
			}
			if now := cfg.Now(); now.After(until) {
				cfg.Logger.Warn("message dropped, its deadline has passed", "handler", name, "message_uuid", msg.UUID,
					"command_id", msg.Metadata.Get(topology.HeaderCommandID), "deadline", value, "late_by", now.Sub(until))
				return nil, nil
			}
			return next(msg)
		}
	}
}
