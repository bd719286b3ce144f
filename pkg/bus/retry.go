package bus

import (
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// retry runs the handler again while its error is Transient. The pause ends early with the message's context.
func retry(name string, cfg RouterConfig) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			pause := cfg.RetryInterval
			for retries := 0; ; retries++ {
				out, err := next(msg)
				if !IsTransient(err) || IsPoison(err) || retries >= cfg.MaxRetries {
					return out, err
				}
				cfg.Logger.Debug("retry handler", "handler", name, "message_uuid", msg.UUID, "retry", retries+1, "pause", pause, "error", err)
				timer := time.NewTimer(pause)
				select {
				case <-timer.C:
				case <-msg.Context().Done():
					timer.Stop()
					return out, err
				}
				pause = min(2*pause, cfg.RetryMax)
			}
		}
	}
}
