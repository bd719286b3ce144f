package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/truncate"
)

// maxReasonBytes is the maximum size in bytes of a dead letter's reason, which is stored in a header and in the server's
// advisory.
const maxReasonBytes = 500

// deadLetterMiddleware returns the middleware that moves a message to DEAD if its handler returns Poison, or after MaxDeliveries deliveries. The
// message is acknowledged only after DEAD has stored the copy; until then it is redelivered. Watermill's PoisonQueue publishes the
// message itself, to one topic and with the error's text as it is, see TestWatermillPoisonQueue_CannotStoreDeadLetters.
func deadLetterMiddleware(name string, cfg RouterConfig) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			delivered := DeliveryCount(msg)
			bounded := cfg.MaxDeliveries > 0
			bound := uint64(max(cfg.MaxDeliveries, 0))
			if bounded && delivered > bound {
				// No delivery has ended so far: each may have killed its process, and another one may kill this process.
				err := fmt.Errorf("delivered %d times, the limit is %d, and no delivery has ended", delivered, bound)
				return nil, storeDeadLetter(name, cfg, msg, err)
			}
			out, err := next(msg)
			var panicked middleware.RecoveredPanicError
			if errors.As(err, &panicked) {
				cfg.Logger.Error("handler panicked", "handler", name, "message_uuid", msg.UUID, "panic", panicked.V, "stack", panicked.Stacktrace)
				err = fmt.Errorf("handler panicked: %v", panicked.V) // without the stack, for the dead letter's header
			}
			switch {
			case err == nil:
				return out, nil
			case IsPoison(err):
				return nil, storeDeadLetter(name, cfg, msg, err)
			case bounded && delivered >= bound && !isSubscriberDraining(msg):
				return nil, storeDeadLetter(name, cfg, msg, fmt.Errorf("failed in delivery %d of %d: %w", delivered, bound, err))
			}
			return out, err
		}
	}
}

// isSubscriberDraining reports whether the Subscriber that delivered msg is shutting down, so that an error of the
// handler may be caused by the shutdown alone.
func isSubscriberDraining(msg *message.Message) bool {
	select {
	case <-Draining(msg.Context()):
		return true
	default:
		return false
	}
}

// storeDeadLetter stores the message in DEAD. It returns nil if DEAD has the message.
func storeDeadLetter(name string, cfg RouterConfig, msg *message.Message, cause error) error {
	origin := Subject(msg)
	if origin == "" {
		origin = message.SubscribeTopicFromCtx(msg.Context())
	}
	reason := oneLine(cause.Error())
	dead := msg.Copy()
	// The id is the same for every copy of a message, so that a second burial after a lost acknowledgement is
	// recognised as a duplicate.
	if Stream(msg) != "" {
		dead.UUID = fmt.Sprintf("dead-%s-%d", Stream(msg), Sequence(msg))
	}
	for key, value := range map[string]string{
		topology.HeaderDeadReason:    reason,
		topology.HeaderDeadSubject:   origin,
		topology.HeaderDeadMessageID: msg.UUID,
		topology.HeaderDeadStream:    Stream(msg),
		topology.HeaderDeadSequence:  strconv.FormatUint(Sequence(msg), 10),
		topology.HeaderDeadDelivered: strconv.FormatUint(DeliveryCount(msg), 10),
		topology.HeaderDeadHandler:   name,
		topology.HeaderDeadTime:      cfg.Now().UTC().Format(time.RFC3339Nano),
	} {
		dead.Metadata.Set(key, value)
	}
	// The handler's context may have ended, but the letter must still be stored, with its correlation id.
	dead.SetContext(context.WithoutCancel(msg.Context()))
	if err := cfg.DeadLetter.Publish(topology.DeadSubject(origin), dead); err != nil {
		return fmt.Errorf("move to %s: %w; reason: %w", topology.DeadSubject(origin), err, cause)
	}
	cfg.Logger.Warn("message moved to DEAD", "handler", name, "message_uuid", msg.UUID, "subject", origin,
		"sequence", Sequence(msg), "delivered", DeliveryCount(msg), "reason", reason)
	setTermReason(msg, reason)
	return nil
}

// oneLine returns s as the value of the header for the reason of a dead letter: one line of valid UTF-8 and at most
// maxReasonBytes, which is never empty.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", " "), "?")), " ")
	s = truncate.Text(s, maxReasonBytes)
	if s == "" {
		return "no reason given"
	}
	return s
}
