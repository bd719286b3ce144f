package bus_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

func subscribe(t *testing.T, sub *bus.Subscriber, topic string) <-chan *message.Message {
	t.Helper()
	messages, err := sub.Subscribe(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sub.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return messages
}

func TestNewSubscriber_RefusesInvalidConfigs(t *testing.T) {
	t.Parallel()
	js := newFixture(t).js
	good := bus.SubscriberConfig{JetStream: js, Stream: "WORK", Durable: "d"}
	for field, change := range map[string]func(*bus.SubscriberConfig){
		"JetStream":      func(c *bus.SubscriberConfig) { c.JetStream = nil },
		"Stream":         func(c *bus.SubscriberConfig) { c.Stream = "" },
		"Durable":        func(c *bus.SubscriberConfig) { c.Durable = "" },
		"DurableFor":     func(c *bus.SubscriberConfig) { c.DurableFor = func(string) string { return "x" } },
		"FilterSubjects": func(c *bus.SubscriberConfig) { c.FilterSubjects = []string{"a..b"} },
		"AckWait":        func(c *bus.SubscriberConfig) { c.AckWait = -1 },
		"HeartBeat":      func(c *bus.SubscriberConfig) { c.AckWait, c.HeartBeat = time.Second, time.Second },
		"NakDelay":       func(c *bus.SubscriberConfig) { c.NakDelay = -1 },
		"CloseTimeout":   func(c *bus.SubscriberConfig) { c.CloseTimeout = -1 },
		"Concurrency":    func(c *bus.SubscriberConfig) { c.Concurrency = -1 },
		"MaxDeliver":     func(c *bus.SubscriberConfig) { c.MaxDeliver = -1 },
		"MaxAckPending":  func(c *bus.SubscriberConfig) { c.MaxAckPending, c.Concurrency = 2, 3 },
	} {
		cfg := good
		change(&cfg)
		if _, err := bus.NewSubscriber(cfg); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: got error %v, want one that names the field", field, err)
		}
	}
	if _, err := bus.NewSubscriber(good); err != nil {
		t.Errorf("the smallest configuration: %v", err)
	}
}

// TestSubscriber_SendsItsConfigToTheServer tests that every setting reaches the consumer, and that the consumer does
// not expire.
func TestSubscriber_SendsItsConfigToTheServer(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	sub := b.subscriber(t, bus.SubscriberConfig{
		Durable: "set", FilterSubjects: []string{"work.b.*"}, AckWait: 7 * time.Second, MaxAckPending: 9, MaxDeliver: 4, Concurrency: 3, Unrouted: true,
	})
	subscribe(t, sub, "work.a.>")
	consumer, err := b.js.Consumer(t.Context(), "WORK", "set")
	if err != nil {
		t.Fatal(err)
	}
	got := consumer.CachedInfo().Config
	if fmt.Sprint(got.FilterSubjects) != "[work.a.> work.b.*]" || got.AckWait != 7*time.Second || got.MaxAckPending != 9 || got.MaxDeliver != 4 {
		t.Errorf("consumer is %+v", got)
	}
	if got.InactiveThreshold != 0 || got.Durable != "set" || got.AckPolicy != jetstream.AckExplicitPolicy {
		t.Errorf("consumer may vanish or lose messages: %+v", got)
	}
	if _, err := sub.Subscribe(t.Context(), "work.c"); err == nil || !strings.Contains(err.Error(), "durable set serves topic work.a.> already") {
		t.Errorf("a second topic on one durable: got %v", err)
	}

	subscribe(t, b.subscriber(t, bus.SubscriberConfig{Durable: "zero", Unrouted: true}), "work.z")
	consumer, err = b.js.Consumer(t.Context(), "WORK", "zero")
	if err != nil {
		t.Fatal(err)
	}
	if got := consumer.CachedInfo().Config; got.MaxAckPending != -1 || got.MaxDeliver != -1 || got.AckWait != 30*time.Second {
		t.Errorf("zero configuration: got %+v, want no bounds and 30 s", got)
	}
}

func TestSubscribe_RefusesInvalidTopics(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	sub := b.subscriber(t, bus.SubscriberConfig{Unrouted: true})
	for _, topic := range []string{"", "a..b", ".a", "a b", "a.>.b", "a*", "a\x00"} {
		if _, err := sub.Subscribe(t.Context(), topic); !errors.Is(err, bus.ErrInvalidMessage) {
			t.Errorf("topic %q: got %v, want ErrInvalidMessage", topic, err)
		}
	}
	if err := sub.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := sub.Subscribe(t.Context(), "work.a"); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("closed: got %v, want ErrClosed", err)
	}
}

// TestSubscriber_AcceptsForeignMessages tests messages of another publisher: all headers may be missing, and headers
// that describe a delivery may be forged.
func TestSubscriber_AcceptsForeignMessages(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	messages := subscribe(t, b.subscriber(t, bus.SubscriberConfig{Unrouted: true}), "work.>")
	for _, m := range []*nats.Msg{
		{Subject: "work.bare"},
		{Subject: "work.id", Header: nats.Header{"Nats-Msg-Id": {"mine"}, "Empty": {}, "bus-delivered": {"99"}, "bus-nak-delay": {"x"}}, Data: []byte{0xff, 0}},
	} {
		if _, err := b.js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	bare := wait(t, messages, "the bare message")
	if bare.UUID != "WORK-1" || bus.DeliveryCount(bare) != 1 || bus.Sequence(bare) != 1 || bus.Stream(bare) != "WORK" || bus.Subject(bare) != "work.bare" {
		t.Errorf("bare message: %s %v", bare.UUID, bare.Metadata)
	}
	if age := time.Since(bus.StoredTime(bare)); age < 0 || age > time.Minute {
		t.Errorf("stored %s ago", age)
	}
	bare.Ack()
	other := wait(t, messages, "the second message")
	if other.UUID != "mine" || bus.DeliveryCount(other) != 1 || other.Metadata.Get("Nats-Msg-Id") != "" || string(other.Payload) != "\xff\x00" {
		t.Errorf("foreign message: %s %v", other.UUID, other.Metadata)
	}
	other.Ack()
}

// TestHeartbeat_KeepsTheMessage tests that a handler that takes three times AckWait keeps its message.
func TestHeartbeat_KeepsTheMessage(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	const ackWait = 2 * time.Second
	messages := subscribe(t, b.subscriber(t, bus.SubscriberConfig{AckWait: ackWait, Concurrency: 2, Unrouted: true}), "work.job")
	b.publish(t, "work.job", message.NewMessage("job", nil))
	job := wait(t, messages, "the job")
	select {
	case again := <-messages:
		t.Fatalf("delivered again, delivery %d, while its handler was at work", bus.DeliveryCount(again))
	case <-job.Context().Done():
		t.Fatal("context ended before the answer")
	case <-time.After(3 * ackWait):
	}
	job.Ack()
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
	<-job.Context().Done()
}

// TestSubscriber_DeliversAgainAfterLoss shows that TestHeartbeat_KeepsTheMessage depends on the heartbeat: the
// process is gone here, and after the same wait the message is delivered again.
func TestSubscriber_DeliversAgainAfterLoss(t *testing.T) {
	t.Parallel()
	srv := natstest.Run(t)
	b := newFixtureOn(t, natstest.Conn(t, srv))
	gone := natstest.Conn(t, srv)
	dying, err := bus.NewSubscriber(bus.SubscriberConfig{
		JetStream: jetStream(t, gone), Stream: "WORK", Durable: "worker", AckWait: 300 * time.Millisecond, CloseTimeout: time.Millisecond, Unrouted: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	messages, err := dying.Subscribe(t.Context(), "work.job")
	if err != nil {
		t.Fatal(err)
	}
	b.publish(t, "work.job", message.NewMessage("job", nil))
	first := wait(t, messages, "the job")
	gone.Close()

	second := wait(t, subscribe(t, b.subscriber(t, bus.SubscriberConfig{AckWait: 300 * time.Millisecond, Unrouted: true}), "work.job"), "the job elsewhere")
	if second.UUID != "job" || bus.DeliveryCount(second) < 2 {
		t.Errorf("got %s in delivery %d, want the job again", second.UUID, bus.DeliveryCount(second))
	}
	second.Ack()
	first.Ack()
	if _, open := <-messages; open {
		t.Error("a message was delivered on a closed connection")
	}
	if err := dying.Close(); err != nil {
		t.Error(err)
	}
}

func TestSubscriber_DelaysTheNextDelivery(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	messages := subscribe(t, b.subscriber(t, bus.SubscriberConfig{NakDelay: 400 * time.Millisecond, Unrouted: true}), "work.job")
	b.publish(t, "work.job", message.NewMessage("job", nil))
	msg := wait(t, messages, "the job")
	for i, tc := range []struct{ own, min, max time.Duration }{
		{0, 400 * time.Millisecond, 5 * time.Second},
		{900 * time.Millisecond, 900 * time.Millisecond, 5 * time.Second},
		{-1, 0, 300 * time.Millisecond},
	} {
		if got := bus.DeliveryCount(msg); got != uint64(i+1) {
			t.Fatalf("bus.DeliveryCount of delivery %d returned %d", i+1, got)
		}
		if tc.own != 0 {
			bus.SetNakDelay(msg, tc.own)
		}
		start := time.Now()
		msg.Nack()
		msg = wait(t, messages, "the job again")
		if took := time.Since(start); took < tc.min || took > tc.max {
			t.Errorf("case %d: delivered again after %s, want %s to %s", i, took, tc.min, tc.max)
		}
	}
	msg.Ack()
}

func TestSubscriber_DeliversInOrder(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	messages := subscribe(t, b.subscriber(t, bus.SubscriberConfig{Unrouted: true}), "work.job")
	const count = 200
	for i := range count {
		b.publish(t, "work.job", message.NewMessage(fmt.Sprint(i), nil))
	}
	for i := range count {
		msg := wait(t, messages, "a message")
		if msg.UUID != fmt.Sprint(i) {
			t.Fatalf("message %d is %s", i, msg.UUID)
		}
		msg.Ack()
	}
}

// TestSubscriber_FetchesOnlyWhatItHandles tests that as many messages as Concurrency are delivered and that the client
// buffers none. The other messages stay on the server.
func TestSubscriber_FetchesOnlyWhatItHandles(t *testing.T) {
	t.Parallel()
	for _, concurrency := range []int{3, 40} {
		t.Run(fmt.Sprint(concurrency), func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			messages := subscribe(t, b.subscriber(t, bus.SubscriberConfig{Concurrency: concurrency, Unrouted: true}), "work.job")
			for i := range concurrency + 7 {
				b.publish(t, "work.job", message.NewMessage(fmt.Sprint(i), nil))
			}
			var out []*message.Message
			for range concurrency {
				out = append(out, wait(t, messages, "a message"))
			}
			consumer, err := b.js.Consumer(t.Context(), "WORK", "worker")
			if err != nil {
				t.Fatal(err)
			}
			info := func() *jetstream.ConsumerInfo {
				info, err := consumer.Info(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				return info
			}
			// The server updates the number of pending messages a moment after it stores a message.
			eventually(t, "the server to have counted the rest", func() bool { return info().NumPending == 7 })
			if i := info(); i.NumAckPending != concurrency || i.NumWaiting != 0 {
				t.Errorf("%d messages are unacknowledged and %d pull requests wait, want %d and 0", i.NumAckPending, i.NumWaiting, concurrency)
			}
			select {
			case <-messages:
				t.Errorf("a message more was delivered with Concurrency %d", concurrency)
			case <-time.After(100 * time.Millisecond):
			}
			for _, msg := range out {
				msg.Ack()
			}
			for range 7 {
				wait(t, messages, "the rest").Ack()
			}
			eventually(t, "requests for further messages", func() bool { return info().NumWaiting == min(concurrency, 16) })
			for i := range concurrency { // all slots still work
				b.publish(t, "work.job", message.NewMessage(fmt.Sprint("again", i), nil))
			}
			for range concurrency {
				defer wait(t, messages, "a message of the second round").Ack()
			}
		})
	}
}

// TestClose_DrainsRunningHandlers tests that Close tells a running handler to stop, waits for it, and returns
// messages that no handler took.
func TestClose_DrainsRunningHandlers(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	sub := b.subscriber(t, bus.SubscriberConfig{Concurrency: 2, AckWait: time.Minute, Unrouted: true})
	messages := subscribe(t, sub, "work.job")
	b.publish(t, "work.job", message.NewMessage("1", nil), message.NewMessage("2", nil))
	taken := wait(t, messages, "a message")

	var returned atomic.Bool
	closed := make(chan error, 1)
	go func() {
		err := sub.Close()
		returned.Store(true)
		closed <- err
	}()
	wait(t, bus.Draining(taken.Context()), "the handler to be told")
	if returned.Load() || taken.Context().Err() != nil {
		t.Fatal("Close did not wait for the handler")
	}
	other := wait(t, subscribe(t, b.subscriber(t, bus.SubscriberConfig{Unrouted: true}), "work.job"), "the message that nobody took, well before AckWait")
	if other.UUID == taken.UUID {
		t.Fatal("the message at work was delivered again")
	}
	other.Ack()
	taken.Ack()
	if err := wait(t, closed, "Close"); err != nil {
		t.Error(err)
	}
	if _, open := <-messages; open {
		t.Error("the channel delivered a message after Close")
	}
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
}

// TestClose_EndsHandlersAfterCloseTimeout tests a handler that runs longer than CloseTimeout: its context ends, Close
// returns, and the message is delivered again.
func TestClose_EndsHandlersAfterCloseTimeout(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	sub := b.subscriber(t, bus.SubscriberConfig{AckWait: 500 * time.Millisecond, CloseTimeout: 50 * time.Millisecond, Unrouted: true})
	messages := subscribe(t, sub, "work.job")
	b.publish(t, "work.job", message.NewMessage("1", nil))
	taken := wait(t, messages, "the message")
	if err := sub.Close(); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(taken.Context().Err(), context.Canceled) {
		t.Error("the handler's context goes on after Close")
	}
	again := wait(t, subscribe(t, b.subscriber(t, bus.SubscriberConfig{AckWait: 500 * time.Millisecond, Unrouted: true}), "work.job"), "the message again")
	again.Ack()
}

// TestSubscriber_RecreatesADeletedConsumer tests that a subscriber that waits for messages creates its durable again
// after another client deleted it.
func TestSubscriber_RecreatesADeletedConsumer(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	messages := subscribe(t, b.subscriber(t, bus.SubscriberConfig{Unrouted: true}), "work.job")
	b.publish(t, "work.job", message.NewMessage("1", nil))
	wait(t, messages, "the first message").Ack()
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
	if err := b.js.DeleteConsumer(t.Context(), "WORK", "worker"); err != nil {
		t.Fatal(err)
	}
	b.publish(t, "work.job", message.NewMessage("2", nil))
	if msg := wait(t, messages, "the second message"); msg.UUID != "2" {
		t.Errorf("got %s", msg.UUID)
	} else {
		msg.Ack()
	}
}

// TestReleaseSlot_NextMessageIsDelivered tests that a handler that released its slot keeps its message, and that
// another message is delivered. After the handler returns, the subscription has as many slots as before.
func TestReleaseSlot_NextMessageIsDelivered(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	const ackWait = time.Second
	messages := subscribe(t, b.subscriber(t, bus.SubscriberConfig{AckWait: ackWait, Concurrency: 1, Unrouted: true}), "work.job")
	b.publish(t, "work.job", message.NewMessage("long", nil), message.NewMessage("short", nil))
	long := wait(t, messages, "the first job")
	bus.ReleaseSlot(long.Context())
	bus.ReleaseSlot(long.Context())
	short := wait(t, messages, "the second job")
	if long.UUID != "long" || short.UUID != "short" {
		t.Errorf("delivered %s, then %s", long.UUID, short.UUID)
	}
	short.Ack()
	select {
	case again := <-messages:
		t.Fatalf("%s is delivered again, delivery %d, while its handler was at work", again.UUID, bus.DeliveryCount(again))
	case <-time.After(3 * ackWait):
	}
	long.Ack()
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
	eventually(t, "one pull request to wait", func() bool {
		consumer, err := b.js.Consumer(t.Context(), "WORK", "worker")
		if err != nil {
			t.Fatal(err)
		}
		return consumer.CachedInfo().NumWaiting == 1
	})
}

// TestReleaseSlot_DrainWaitsForTheHandler tests that Close blocks until a handler that released its slot has
// returned.
func TestReleaseSlot_DrainWaitsForTheHandler(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	sub := b.subscriber(t, bus.SubscriberConfig{Concurrency: 1, Unrouted: true})
	messages, err := sub.Subscribe(t.Context(), "work.job")
	if err != nil {
		t.Fatal(err)
	}
	b.publish(t, "work.job", message.NewMessage("job", nil))
	job := wait(t, messages, "the job")
	bus.ReleaseSlot(job.Context())
	closed := make(chan error, 1)
	go func() { closed <- sub.Close() }()
	wait(t, bus.Draining(job.Context()), "the handler to be told of the drain")
	select {
	case err := <-closed:
		t.Fatalf("Close returned %v before the handler", err)
	default:
	}
	job.Ack()
	if err := wait(t, closed, "Close"); err != nil {
		t.Error(err)
	}
	if n := b.messagesIn(t, "WORK"); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}
