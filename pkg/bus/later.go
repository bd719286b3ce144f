package bus

import (
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

type laterError struct {
	err   error
	delay time.Duration
}

func (e *laterError) Error() string { return fmt.Sprintf("again in %s: %v", e.delay, e.err) }
func (e *laterError) Unwrap() error { return e.err }

// Later makes err one that is no failure: this is not the time, or the place, for the message. It is given back, to be delivered again
// after d, and logged on Debug only. It counts as a delivery, so a handler that says so often wants WithMaxDeliveries(-1). Later(nil, d) is nil.
func Later(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &laterError{err: err, delay: d}
}

// later is the outermost middleware. It answers the message itself, because watermill's Router would log every error as one.
func later(name string, cfg RouterConfig) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			out, err := next(msg)
			var wanted *laterError
			if !errors.As(err, &wanted) {
				return out, err
			}
			SetNakDelay(msg, wanted.delay)
			cfg.Logger.Debug("message given back", "handler", name, "message_uuid", msg.UUID, "delay", wanted.delay, "reason", wanted.err)
			// The Router's Ack, which follows, does nothing after this.
			msg.Nack()
			return nil, nil
		}
	}
}
