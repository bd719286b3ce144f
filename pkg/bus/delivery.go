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

type deliveryKey struct{}

// delivery is one message on its way through a handler.
type delivery struct {
	draining <-chan struct{}
	lost     chan struct{}
	ackWait  time.Duration

	releasing sync.Once
	released  chan struct{} // closed by ReleaseSlot

	mu        sync.Mutex
	confirmed time.Time // when the last sign of life was sent that the server has confirmed; at first, when the message was asked for
	gap       bool      // the server may have waited for a sign of life for AckWait
}

// confirm notes a heartbeat, sent at a time, that the server has confirmed by now.
func (d *delivery) confirm(sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.note()
	d.confirmed = sent
}

// note needs the lock.
func (d *delivery) note() { d.gap = d.gap || time.Since(d.confirmed) >= d.ackWait }

func (d *delivery) held() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.note()
	return !d.gap
}

// Draining returns a channel that is closed when the Subscriber wants to end: a handler that can hand its work over should do so and
// return. Its context goes on for CloseTimeout. It is nil, which never closes, when ctx is not a handler's.
func Draining(ctx context.Context) <-chan struct{} {
	if d, ok := ctx.Value(deliveryKey{}).(*delivery); ok {
		return d.draining
	}
	return nil
}

// Lost returns a channel that is closed when the server has confirmed no heartbeat for AckWait, or the connection is closed: by now
// the message may have been delivered to someone else. The handler's context goes on, since only it knows whether that matters. It is
// nil, which never closes, when ctx is not a handler's.
func Lost(ctx context.Context) <-chan struct{} {
	if d, ok := ctx.Value(deliveryKey{}).(*delivery); ok {
		return d.lost
	}
	return nil
}

// Held reports whether the message is this handler's alone for now: at no time since it was asked for did AckWait pass between two
// signs of life that the server confirmed. Only then can the server not have delivered it to another, who may have acknowledged it.
// Unlike Lost it is exact after the process was frozen. A PullExpiry that is not well below AckWait makes it false more often than
// needed. It is false when ctx is not a handler's.
func Held(ctx context.Context) bool {
	d, ok := ctx.Value(deliveryKey{}).(*delivery)
	return ok && d.held()
}

// ReleaseSlot frees the handler's place among the Concurrency of its Subscriber: the subscription asks for another message while the
// handler goes on. The message stays the handler's, with its heartbeat, and a drain waits for it as for others. Handlers that outlast
// others by far call it once they hold a limit of their own. Further calls do nothing, as do those with a ctx that is not a handler's.
func ReleaseSlot(ctx context.Context) {
	if d, ok := ctx.Value(deliveryKey{}).(*delivery); ok {
		d.releasing.Do(func() { close(d.released) })
	}
}

// deliver hands one message out, which was asked for at a time, and returns when it is answered. It reports whether the caller still
// has its slot: if not, another goroutine has taken it over.
func (u *subscription) deliver(m *nats.Msg, asked time.Time) (slot bool) {
	meta, err := m.Metadata()
	if err != nil {
		// It did not come from a consumer, so there is nobody to answer.
		u.logger.Error("message without JetStream metadata dropped", "subject", m.Subject, "error", err)
		return true
	}
	msg := unmarshal(m, meta)
	d := &delivery{draining: u.draining.Done(), lost: make(chan struct{}), ackWait: u.s.cfg.AckWait, released: make(chan struct{}), confirmed: asked}
	ctx, cancel := context.WithCancel(context.WithValue(u.base, deliveryKey{}, d))
	msg.SetContext(ctx)
	beating := u.startHeartbeat(m, d)
	defer func() {
		cancel()
		beating()
	}()

	select {
	case u.out <- msg:
	case <-u.draining.Done():
		u.giveBack(m)
		return true
	}
	select {
	case <-d.released:
		// The goroutine of the caller is one of the slots that the subscription waits for until this delivery is answered.
		u.slots.Go(u.slot)
		u.settle(m, msg)
		return false
	case <-msg.Acked():
	case <-msg.Nacked():
	case <-u.abandon:
	}
	u.settle(m, msg)
	return true
}

// settle waits for a message's answer and passes it on to the server.
func (u *subscription) settle(m *nats.Msg, msg *message.Message) {
	select {
	case <-msg.Acked():
		u.acknowledge(m, msg)
	case <-msg.Nacked():
		delay := u.s.cfg.NakDelay
		if own, err := time.ParseDuration(msg.Metadata.Get(keyNakDelay)); err == nil {
			delay = own
		}
		if err := m.NakWithDelay(delay); err != nil {
			u.logger.Warn("message could not be given back, it comes again after AckWait", "message_uuid", msg.UUID, "error", err)
		}
	case <-u.abandon:
		u.logger.Warn("handler has not returned in time, its message comes again after AckWait", "message_uuid", msg.UUID, "subject", m.Subject, "sequence", Sequence(msg))
	}
}

func (u *subscription) acknowledge(m *nats.Msg, msg *message.Message) {
	var err error
	switch reason := msg.Metadata.Get(keyTerm); {
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
		u.logger.Warn("acknowledgement failed, the message comes again after AckWait", "message_uuid", msg.UUID, "error", err)
	}
}

// giveBack returns a message that no handler has seen.
func (u *subscription) giveBack(m *nats.Msg) {
	if err := m.NakWithDelay(minNakDelay); err != nil {
		u.logger.Warn("message could not be given back, it comes again after AckWait", "subject", m.Subject, "error", err)
	}
}

// unmarshal takes whatever comes: a message that another program published has no id of ours, perhaps no headers at all.
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
		if len(values) == 0 || key == topology.HeaderMessageID || strings.HasPrefix(key, natsPrefix) || strings.HasPrefix(key, localPrefix) {
			continue
		}
		msg.Metadata.Set(key, values[0])
	}
	msg.Metadata.Set(keyDelivered, strconv.FormatUint(meta.NumDelivered, 10))
	msg.Metadata.Set(keySequence, sequence)
	msg.Metadata.Set(keyStream, meta.Stream)
	msg.Metadata.Set(keySubject, m.Subject)
	msg.Metadata.Set(keyStored, meta.Timestamp.UTC().Format(time.RFC3339Nano))
	return msg
}
