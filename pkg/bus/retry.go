package bus

import (
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/retry"
)

// retryTransientMiddleware returns the middleware that runs the handler again while its error is Transient. The pause ends early with the
// message's context; the handler's error is returned then too, because it becomes the reason of a dead letter. Watermill's Retry returns
// the context's error instead, and omits every second pause if it may not retry all errors: see
// TestWatermillRetry_LosesTheErrorAndSkipsPauses.
func retryTransientMiddleware(name string, cfg RouterConfig) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			pauses := retry.NewDoubling(cfg.RetryInterval, cfg.RetryMax)
			for retries := 0; ; retries++ {
				out, err := next(msg)
				if !IsTransient(err) || IsPoison(err) || retries >= cfg.MaxRetries {
					return out, err
				}
				pause := pauses.NextBackOff()
				cfg.Logger.Debug("retry handler", "handler", name, "message_uuid", msg.UUID, "retry", retries+1, "pause", pause, "error", err)
				if retry.Pause(msg.Context(), pause) != nil {
					return out, err
				}
			}
		}
	}
}
