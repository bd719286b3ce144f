package bus

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// deliveryKeyPrefix is the prefix of the metadata keys that describe one delivery of a message. The Subscriber sets
// these keys. A Publisher does not send them, and the Subscriber ignores them in the headers of a received message.
const deliveryKeyPrefix = "bus-"

const (
	keyDeliveryCount = deliveryKeyPrefix + "delivered"
	keySequence      = deliveryKeyPrefix + "sequence"
	keyStream        = deliveryKeyPrefix + "stream"
	keySubject       = deliveryKeyPrefix + "subject"
	keyStoredTime    = deliveryKeyPrefix + "stored"
	keyNakDelay      = deliveryKeyPrefix + "nak-delay"
	keyTermReason    = deliveryKeyPrefix + "term"
)

// natsPrefix is the prefix of NATS's own headers. A Publisher sends the headers that a caller sets as metadata
// (Nats-Msg-Id, Nats-Schedule). The Subscriber drops them from a received message: if a handler sent them on, an
// expected sequence or a message id would make the stream reject or drop the copy.
const natsPrefix = "Nats-"

// DeliveryCount returns how often JetStream has delivered msg, from 1; 0 if it did not come from a Subscriber.
func DeliveryCount(msg *message.Message) uint64 { return metadataNumber(msg, keyDeliveryCount) }

// Sequence returns msg's sequence in its stream; 0 if it did not come from a Subscriber.
func Sequence(msg *message.Message) uint64 { return metadataNumber(msg, keySequence) }

// Stream returns the name of the stream that msg came from, or "".
func Stream(msg *message.Message) string { return msg.Metadata.Get(keyStream) }

// Subject returns the subject that msg was published to, or "". With a wildcard topic it is the concrete subject.
func Subject(msg *message.Message) string { return msg.Metadata.Get(keySubject) }

// StoredTime returns when the stream stored msg, or the zero time if msg did not come from a Subscriber.
func StoredTime(msg *message.Message) time.Time {
	t, err := time.Parse(time.RFC3339Nano, msg.Metadata.Get(keyStoredTime))
	if err != nil {
		return time.Time{}
	}
	return t
}

// SetNakDelay sets the delay after which msg is redelivered if its handler fails, instead of the Subscriber's
// NakDelay. The minimum is a millisecond: redelivery without a delay would spin.
func SetNakDelay(msg *message.Message, d time.Duration) {
	setMetadata(msg, keyNakDelay, max(d, minNakDelay).String())
}

// setTermReason makes the acknowledgement of msg a termination with a reason (+TERM), for which the server publishes an
// advisory.
func setTermReason(msg *message.Message, reason string) { setMetadata(msg, keyTermReason, reason) }

// setMetadata sets a metadata value, also of a message without metadata.
func setMetadata(msg *message.Message, key, value string) {
	if msg.Metadata == nil {
		msg.Metadata = message.Metadata{}
	}
	msg.Metadata.Set(key, value)
}

// metadataNumber returns a metadata value as a number, or 0 if the message does not have it.
func metadataNumber(msg *message.Message, key string) uint64 {
	n, err := strconv.ParseUint(msg.Metadata.Get(key), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// checkHeader returns an error for a header that NATS would alter or reject.
func checkHeader(key, value string) error {
	for _, r := range key {
		if r <= ' ' || r >= 0x7f || r == ':' {
			return fmt.Errorf("%w: metadata key %q: only printable ASCII without spaces and colons is allowed", ErrInvalidMessage, key)
		}
	}
	if key == "" {
		return fmt.Errorf("%w: a metadata key is empty", ErrInvalidMessage)
	}
	if strings.ContainsAny(value, "\r\n\x00") {
		return fmt.Errorf("%w: metadata %q: the value has a line break or NUL", ErrInvalidMessage, key)
	}
	if value != strings.Trim(value, " \t") {
		return fmt.Errorf("%w: metadata %q: the value begins or ends with a space, which NATS would cut off", ErrInvalidMessage, key)
	}
	return nil
}
