package bus

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// deliveryKey is the key under which the context of a handler holds its *delivery.
type deliveryKey struct{}

// delivery is a message while a handler processes it.
type delivery struct {
	draining <-chan struct{}
	release  func() // releases the slot; further calls do nothing
}

// Draining returns a channel that is closed when the Subscriber is shutting down: a handler that can hand over its
// work should do so and return. The handler's context stays valid for CloseTimeout. Draining returns nil, which
// never closes, if ctx is not a handler's.
func Draining(ctx context.Context) <-chan struct{} {
	if d, ok := ctx.Value(deliveryKey{}).(*delivery); ok {
		return d.draining
	}
	return nil
}

// ReleaseSlot releases the handler's slot, one of the Concurrency slots of its Subscriber: the subscription requests
// another message while the handler continues. The message still belongs to the handler, with its heartbeat, and a
// drain waits for it as for others. A handler that runs much longer than others calls ReleaseSlot when it has acquired
// a limit of its own. Further calls do nothing, as do calls with a ctx that does not belong to a handler.
func ReleaseSlot(ctx context.Context) {
	if d, ok := ctx.Value(deliveryKey{}).(*delivery); ok {
		d.release()
	}
}

// deliver passes one message to the handler, and returns when the message is answered. It calls releaseSlot then, or
// earlier if the handler calls ReleaseSlot.
func (u *subscription) deliver(m *nats.Msg, releaseSlot func()) {
	release := sync.OnceFunc(releaseSlot)
	defer release()
	meta, err := m.Metadata()
	if err != nil {
		// The message did not come from a consumer, so it cannot be acknowledged.
		u.logger.Error("drop a message without JetStream metadata", "subject", m.Subject, "error", err)
		return
	}
	msg := unmarshal(m, meta)
	ctx, cancel := context.WithCancel(context.WithValue(u.base, deliveryKey{}, &delivery{draining: u.draining.Done(), release: release}))
	msg.SetContext(ctx)
	stopHeartbeat := u.startHeartbeat(m)
	defer func() {
		cancel()
		stopHeartbeat()
	}()
	select {
	case u.out <- msg:
		u.sendHandlerResult(m, msg)
	case <-u.draining.Done():
		u.requeue(m)
	}
}

// sendHandlerResult waits for the handler's result and sends it to the server.
func (u *subscription) sendHandlerResult(m *nats.Msg, msg *message.Message) {
	select {
	case <-msg.Acked():
		u.acknowledge(m, msg)
	case <-msg.Nacked():
		delay := u.s.cfg.NakDelay
		if own, err := time.ParseDuration(msg.Metadata.Get(keyNakDelay)); err == nil {
			delay = own
		}
		if err := m.NakWithDelay(delay); err != nil {
			u.logger.Warn("nak failed; the message is redelivered after AckWait", "message_uuid", msg.UUID, "error", err)
		}
	case <-u.abandon:
		u.logger.Warn("handler did not return in time; the message is redelivered after AckWait", "message_uuid", msg.UUID, "subject", m.Subject, "sequence", Sequence(msg))
	}
}

// acknowledge acknowledges a message, or terminates it if its handler called setTermReason. A failure is only logged: the server then
// redelivers the message.
func (u *subscription) acknowledge(m *nats.Msg, msg *message.Message) {
	var err error
	switch reason := msg.Metadata.Get(keyTermReason); {
	case reason != "":
		err = m.Respond([]byte("+TERM " + reason))
	case u.s.cfg.DoubleAck:
		ctx, cancel := context.WithTimeout(context.Background(), u.s.cfg.AckWait)
		defer cancel()
		err = m.AckSync(nats.Context(ctx))
	default:
		err = m.Ack()
	}
	if err != nil {
		u.logger.Warn("acknowledgement failed; the message is redelivered after AckWait", "message_uuid", msg.UUID, "error", err)
	}
}

// requeue returns a message that no handler has received to the stream, with a negative acknowledgement.
func (u *subscription) requeue(m *nats.Msg) {
	if err := m.NakWithDelay(minNakDelay); err != nil {
		u.logger.Warn("nak failed; the message is redelivered after AckWait", "subject", m.Subject, "error", err)
	}
}

// unmarshal converts a message of NATS to one of watermill. A message that another program published may have no
// watermill id and no headers.
func unmarshal(m *nats.Msg, meta *nats.MsgMetadata) *message.Message {
	headers := m.Header
	sequence := strconv.FormatUint(meta.Sequence.Stream, 10)
	id := headers.Get(topology.HeaderMessageID)
	if id == "" {
		id = headers.Get(jetstream.MsgIDHeader)
	}
	if id == "" {
		id = meta.Stream + "-" + sequence
	}
	msg := message.NewMessage(id, m.Data)
	for key, values := range headers {
		if len(values) == 0 || key == topology.HeaderMessageID || strings.HasPrefix(key, natsPrefix) || strings.HasPrefix(key, deliveryKeyPrefix) {
			continue
		}
		msg.Metadata.Set(key, values[0])
	}
	msg.Metadata.Set(keyDeliveryCount, strconv.FormatUint(meta.NumDelivered, 10))
	msg.Metadata.Set(keySequence, sequence)
	msg.Metadata.Set(keyStream, meta.Stream)
	msg.Metadata.Set(keySubject, m.Subject)
	msg.Metadata.Set(keyStoredTime, meta.Timestamp.UTC().Format(time.RFC3339Nano))
	return msg
}
