package bus

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Metadata keys with this prefix describe one delivery. The Subscriber sets them; they are never sent and never
// taken from a received message.
const localPrefix = "bus-"

const (
	keyDelivered = localPrefix + "delivered"
	keySequence  = localPrefix + "sequence"
	keyStream    = localPrefix + "stream"
	keySubject   = localPrefix + "subject"
	keyStored    = localPrefix + "stored"
	keyNakDelay  = localPrefix + "nak-delay"
	keyTerm      = localPrefix + "term"
)

// natsPrefix is the prefix of NATS's own headers. They are sent if set as metadata (Nats-Msg-Id, Nats-Schedule),
// but not taken from a received message: if it were sent on, an expected sequence or a message id would make the
// stream reject or drop the copy.
const natsPrefix = "Nats-"

// Delivered returns how often JetStream has delivered msg, from 1; 0 if it did not come from a Subscriber.
func Delivered(msg *message.Message) uint64 { return metadataNumber(msg, keyDelivered) }

// Sequence returns msg's sequence in its stream; 0 if it did not come from a Subscriber.
func Sequence(msg *message.Message) uint64 { return metadataNumber(msg, keySequence) }

// Stream returns the name of the stream that msg came from, or "".
func Stream(msg *message.Message) string { return msg.Metadata.Get(keyStream) }

// Subject returns the subject that msg was published to, or "". With a wildcard topic it is the concrete subject.
func Subject(msg *message.Message) string { return msg.Metadata.Get(keySubject) }

// Stored returns when the stream stored msg, or the zero time if msg did not come from a Subscriber.
func Stored(msg *message.Message) time.Time {
	t, err := time.Parse(time.RFC3339Nano, msg.Metadata.Get(keyStored))
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

// setTerm turns the acknowledgement of msg into a termination, for which the server publishes an advisory.
func setTerm(msg *message.Message, reason string) { setMetadata(msg, keyTerm, reason) }

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
