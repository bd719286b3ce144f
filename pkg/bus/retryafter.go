package bus

import (
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// retryAfterError is an error that RetryAfter has marked, with the delay.
type retryAfterError struct {
	err   error
	delay time.Duration
}

func (e *retryAfterError) Error() string { return fmt.Sprintf("retry in %s: %v", e.delay, e.err) }
func (e *retryAfterError) Unwrap() error { return e.err }

// RetryAfter marks err as a delay and not a failure: the message cannot be processed now, or not by this process. The
// message is redelivered after d, and err is only logged at level Debug. The redelivery counts, so a handler that
// returns RetryAfter often needs WithMaxDeliveries(-1). RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err: err, delay: d}
}

// retryAfterMiddleware returns the outermost middleware, which naks a message whose handler returned RetryAfter. It does so itself, because
// watermill's Router would log every error at level Error.
func retryAfterMiddleware(name string, cfg RouterConfig) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			out, err := next(msg)
			var wanted *retryAfterError
			if !errors.As(err, &wanted) {
				return out, err
			}
			SetNakDelay(msg, wanted.delay)
			cfg.Logger.Debug("redeliver a message later", "handler", name, "message_uuid", msg.UUID, "delay", wanted.delay, "reason", wanted.err)
			// The Router's following Ack has no effect.
			msg.Nack()
			return nil, nil
		}
	}
}
