package bus

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/topology"
)

// deadlineMiddleware returns the middleware that drops a command whose time to live has passed since the stream stored
// it: the sender has given up, and may have sent the command again. A message with an invalid header of a deadline is
// poison.
func deadlineMiddleware(name string, cfg RouterConfig) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			until, err := expiryOf(msg)
			if err != nil {
				return nil, Poison(err)
			}
			if until.IsZero() {
				return next(msg)
			}
			late, err := cfg.hasPassed(msg.Context(), until)
			if err != nil {
				return nil, Transient(err)
			}
			if late {
				cfg.Logger.Warn("message dropped, its time to live has passed", "handler", name, "message_uuid", msg.UUID,
					"command_id", msg.Metadata.Get(topology.HeaderCommandID), "until", until)
				return nil, nil
			}
			return next(msg)
		}
	}
}

// expiryOf returns the server's time until which msg must be handled, or the zero time if there is no limit.
func expiryOf(msg *message.Message) (time.Time, error) {
	if value := msg.Metadata.Get(topology.HeaderTimeToLive); value != "" {
		ttl, err := time.ParseDuration(value)
		if err != nil || StoredTime(msg).IsZero() {
			return time.Time{}, fmt.Errorf("header %s of a message stored at %q is not a duration: %.64q", topology.HeaderTimeToLive, msg.Metadata.Get(keyStoredTime), value)
		}
		return StoredTime(msg).Add(ttl), nil
	}
	if value := msg.Metadata.Get(topology.HeaderDeadline); value != "" { // from a build that sends the time of its own clock
		until, err := time.Parse(time.RFC3339, value)
		if err != nil {
			return time.Time{}, fmt.Errorf("header %s is not RFC 3339: %w", topology.HeaderDeadline, err)
		}
		return until, nil
	}
	return time.Time{}, nil
}

// hasPassed reports whether a time has passed by the clock of the NATS server, or by the host's clock if the Router has
// no Clock.
func (c *RouterConfig) hasPassed(ctx context.Context, until time.Time) (bool, error) {
	if c.Clock == nil {
		return c.Now().After(until), nil
	}
	return c.Clock.hasPassed(ctx, until)
}
