package bus_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/bus/bustest"
	"github.com/spoolhq/spool/pkg/topology"
)

// quick returns a subscriber with a short NakDelay, so that tests see many deliveries.
func (b *fixture) quick(t *testing.T) *bus.Subscriber {
	t.Helper()
	return b.subscriber(t, bus.SubscriberConfig{NakDelay: time.Millisecond, AckWait: 2 * time.Second})
}

func (b *fixture) deadLetter(t *testing.T) *message.Message {
	t.Helper()
	sub, err := bus.NewSubscriber(bus.SubscriberConfig{JetStream: b.js, Stream: "DEAD", Durable: "reader", Unrouted: true})
	if err != nil {
		t.Fatal(err)
	}
	msg := wait(t, subscribe(t, sub, "dead.>"), "the dead letter")
	msg.Ack()
	return msg
}

func TestNewRouter_RefusesIncompleteConfigs(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	dead := newPublisher(t, b.js)
	for field, cfg := range map[string]bus.RouterConfig{
		"DeadLetter":    {},
		"RetryInterval": {DeadLetter: dead, RetryInterval: -1},
		"RetryMax":      {DeadLetter: dead, RetryInterval: time.Second, RetryMax: time.Millisecond},
		"CloseTimeout":  {DeadLetter: dead, CloseTimeout: -1},
	} {
		if _, err := bus.NewRouter(cfg); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: got error %v, want one that names the field", field, err)
		}
	}
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: dead})
	if err != nil {
		t.Fatal(err)
	}
	if err := router.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no handlers") {
		t.Errorf("a router without handlers: got %v", err)
	}
	fn := func(context.Context, *message.Message) error { return nil }
	if err := router.Handle("a", "work.a", b.quick(t), fn); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"same name":     router.Handle("a", "work.b", b.quick(t), fn),
		"no name":       router.Handle("", "work.b", b.quick(t), fn),
		"bad topic":     router.Handle("b", "work..b", b.quick(t), fn),
		"no subscriber": router.Handle("b", "work.b", nil, fn),
		"no function":   router.Handle("b", "work.b", b.quick(t), nil),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// closeOnWrite closes a channel at the first write.
type closeOnWrite struct{ first func() }

func (c closeOnWrite) Write(b []byte) (int, error) {
	c.first()
	return len(b), nil
}

// TestRouterRun_WaitsForMissingStreams tests that Run waits for a stream that is not installed yet, and then handles its
// messages.
func TestRouterRun_WaitsForMissingStreams(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	asked, handled := make(chan struct{}), make(chan struct{})
	logger := slog.New(slog.NewTextHandler(closeOnWrite{sync.OnceFunc(func() { close(asked) })}, nil))
	later, err := bus.NewSubscriber(bus.SubscriberConfig{JetStream: b.js, Stream: "LATER", Durable: "d", Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	created := make(chan error, 1)
	go func() {
		<-asked
		_, err := b.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "LATER", Subjects: []string{"later.>"}})
		created <- err
	}()
	b.route(t, bus.RouterConfig{}, later, "later.a", func(context.Context, *message.Message) error {
		close(handled)
		return nil
	})
	if err := wait(t, created, "the stream"); err != nil {
		t.Fatal(err)
	}
	b.publish(t, "later.a", message.NewMessage("1", nil))
	wait(t, handled, "the message")
}

// TestRouter_IsTheOnlyWayToHandleMessages tests that neither Subscribe nor a handler works without the Router.
func TestRouter_IsTheOnlyWayToHandleMessages(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	if _, err := b.quick(t).Subscribe(t.Context(), "work.a"); !errors.Is(err, bus.ErrNotRouted) {
		t.Errorf("Subscribe without a Router: got %v, want ErrNotRouted", err)
	}
	handled := make(chan *message.Message, 1)
	handler := func(ctx context.Context, msg *message.Message) error {
		if err := bus.RequireRouted(ctx); err != nil {
			return err
		}
		handled <- msg
		return nil
	}
	bustest.RequireUnroutedRefused(t, handler, []byte("{}"))
	reckless := &recorder{TB: t}
	bustest.RequireUnroutedRefused(reckless, func(context.Context, *message.Message) error { return nil }, nil)
	if !reckless.failed {
		t.Error("RequireUnroutedRefused accepts a handler that does not check bus.RequireRouted")
	}
	panicking := &recorder{TB: t}
	bustest.RequireUnroutedRefused(panicking, func(context.Context, *message.Message) error { panic("no state") }, nil)
	if !panicking.failed {
		t.Error("RequireUnroutedRefused accepts a handler that panics")
	}
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.a", handler)
	b.publish(t, "work.a", message.NewMessage("1", nil))
	wait(t, handled, "the handler on the Router")
}

// recorder is a testing.TB that records whether the test failed.
type recorder struct {
	testing.TB
	failed bool
}

func (r *recorder) Errorf(string, ...any) { r.failed = true }

func TestRouter_DeadLettersPoisonedMessages(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	start := time.Now()
	terminated, err := b.nc.SubscribeSync("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.WORK.>")
	if err != nil {
		t.Fatal(err)
	}
	var calls atomic.Int64
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.>", func(context.Context, *message.Message) error {
		calls.Add(1)
		return bus.Transient(bus.Poison(errors.New("not\na command\x00")))
	})
	msg := message.NewMessage("1", []byte("body"))
	msg.Metadata.Set("Own", "value")
	msg.Metadata.Set(topology.HeaderCommandID, "cmd-7")
	b.publish(t, "work.first", message.NewMessage("ok", nil)) // so that the sequence of the next message is not 1
	b.publish(t, "work.bad", msg)
	eventually(t, "both to be dead", func() bool { return b.messagesIn(t, "DEAD") == 2 && b.messagesIn(t, "WORK") == 0 })
	if calls.Load() != 2 {
		t.Errorf("handler ran %d times for two poisoned messages", calls.Load())
	}
	sub, err := bus.NewSubscriber(bus.SubscriberConfig{JetStream: b.js, Stream: "DEAD", Durable: "reader", Unrouted: true})
	if err != nil {
		t.Fatal(err)
	}
	dead := wait(t, subscribe(t, sub, "dead.work.bad"), "the dead letter")
	dead.Ack()
	for key, want := range map[string]string{
		topology.HeaderDeadReason: "not a command", topology.HeaderDeadSubject: "work.bad", topology.HeaderDeadStream: "WORK",
		topology.HeaderDeadSequence: "2", topology.HeaderDeadDelivered: "1", topology.HeaderDeadHandler: "test",
		topology.HeaderCorrelation: "cmd-7", "Own": "value",
	} {
		if got := dead.Metadata.Get(key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	at, err := time.Parse(time.RFC3339Nano, dead.Metadata.Get(topology.HeaderDeadTime))
	if err != nil || at.Before(start.Truncate(time.Millisecond)) || at.After(time.Now()) {
		t.Errorf("time is %v %v", at, err)
	}
	if string(dead.Payload) != "body" {
		t.Errorf("payload is %q", dead.Payload)
	}
	advisory, err := terminated.NextMsg(patience)
	if err != nil || !strings.Contains(string(advisory.Data), "not a command") {
		t.Errorf("the server reports no termination with the reason: %v %v", advisory, err)
	}
}

// TestRouter_StoresDeadLettersWhileStopping tests that a message that its handler gives up after the context ended
// still reaches DEAD.
func TestRouter_StoresDeadLettersWhileStopping(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	started := make(chan struct{})
	sub := b.subscriber(t, bus.SubscriberConfig{CloseTimeout: 50 * time.Millisecond})
	stop := b.route(t, bus.RouterConfig{}, sub, "work.a", func(ctx context.Context, _ *message.Message) error {
		close(started)
		<-ctx.Done()
		return bus.Poison(ctx.Err())
	}, bus.WithTimeout(-1))
	b.publish(t, "work.a", message.NewMessage("1", nil))
	wait(t, started, "the handler")
	stop()
	if got := b.messagesIn(t, "DEAD"); got != 1 {
		t.Errorf("%d dead letters, want 1", got)
	}
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
}

// failingPublisher is a publisher to DEAD that fails a number of times, as if the stream had no room.
type failingPublisher struct {
	message.Publisher
	left atomic.Int64
}

func (f *failingPublisher) Publish(topic string, messages ...*message.Message) error {
	if f.left.Add(-1) >= 0 {
		return bus.ErrFull
	}
	return f.Publisher.Publish(topic, messages...)
}

// TestRouter_KeepsTheMessageUntilDeadHasIt tests that a message stays in its stream until its dead letter is stored.
func TestRouter_KeepsTheMessageUntilDeadHasIt(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	dead := &failingPublisher{Publisher: newPublisher(t, b.js)}
	dead.left.Store(2)
	b.route(t, bus.RouterConfig{DeadLetter: dead}, b.quick(t), "work.a", func(context.Context, *message.Message) error {
		return bus.Poison(errors.New("bad"))
	})
	b.publish(t, "work.a", message.NewMessage("1", nil))
	if got := b.deadLetter(t).Metadata.Get(topology.HeaderDeadDelivered); got != "3" {
		t.Errorf("dead in delivery %s, want 3: two times there was no room", got)
	}
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
}

func TestRouter_DeadLettersAfterMaxDeliveries(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	var calls atomic.Int64
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.a", func(context.Context, *message.Message) error {
		calls.Add(1)
		return errors.New("not today")
	}, bus.WithMaxDeliveries(3))
	b.publish(t, "work.a", message.NewMessage("1", nil))
	dead := b.deadLetter(t)
	if reason := dead.Metadata.Get(topology.HeaderDeadReason); calls.Load() != 3 || !strings.Contains(reason, "delivery 3 of 3: not today") {
		t.Errorf("after %d calls: %s", calls.Load(), reason)
	}
}

// TestRouter_DoesNotHandleAMessageWhoseDeliveriesNeverEnded tests that a message whose process ended in each delivery
// goes to DEAD without another call of the handler.
func TestRouter_DoesNotHandleAMessageWhoseDeliveriesNeverEnded(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	sub := b.subscriber(t, bus.SubscriberConfig{Unrouted: true})
	ctx, cancel := context.WithCancel(t.Context())
	messages, err := sub.Subscribe(ctx, "work.a")
	if err != nil {
		t.Fatal(err)
	}
	b.publish(t, "work.a", message.NewMessage("1", nil))
	for range 2 {
		msg := wait(t, messages, "the message")
		bus.SetNakDelay(msg, time.Millisecond)
		msg.Nack()
	}
	cancel()
	if err := sub.Close(); err != nil {
		t.Fatal(err)
	}
	b.route(t, bus.RouterConfig{MaxDeliveries: 2}, b.quick(t), "work.a", func(context.Context, *message.Message) error {
		t.Error("the handler ran")
		return nil
	})
	if reason := b.deadLetter(t).Metadata.Get(topology.HeaderDeadReason); !strings.Contains(reason, "no delivery has ended") {
		t.Errorf("reason is %q", reason)
	}
}

func TestRouter_RecoversPanics(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.route(t, bus.RouterConfig{MaxDeliveries: 1}, b.quick(t), "work.a", func(context.Context, *message.Message) error {
		panic("boom")
	})
	b.publish(t, "work.a", message.NewMessage("1", nil))
	if reason := b.deadLetter(t).Metadata.Get(topology.HeaderDeadReason); !strings.Contains(reason, "handler panicked: boom") {
		t.Errorf("reason is %q", reason)
	}
}

func TestRouter_RetriesTransientErrorsInOneDelivery(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	done := make(chan uint64, 1)
	var transient, plain atomic.Int64
	b.route(t, bus.RouterConfig{MaxRetries: 2, RetryInterval: time.Millisecond}, b.quick(t), "work.>", func(_ context.Context, msg *message.Message) error {
		switch bus.Subject(msg) {
		case "work.transient":
			// The first delivery runs the handler three times. The second run of the second delivery succeeds.
			if transient.Add(1) < 5 {
				return bus.Transient(errors.New("busy"))
			}
		case "work.plain":
			if plain.Add(1) < 3 {
				return errors.New("no")
			}
		}
		done <- bus.DeliveryCount(msg)
		return nil
	})
	b.publish(t, "work.transient", message.NewMessage("1", nil))
	if delivered := wait(t, done, "success"); delivered != 2 || transient.Load() != 5 {
		t.Errorf("transient: %d runs in %d deliveries, want 5 in 2", transient.Load(), delivered)
	}
	b.publish(t, "work.plain", message.NewMessage("2", nil))
	if delivered := wait(t, done, "success"); delivered != 3 || plain.Load() != 3 {
		t.Errorf("plain error: %d runs in %d deliveries, want one in each of 3", plain.Load(), delivered)
	}
}

func TestRouter_DelaysTheNextDeliveryAsLaterAsks(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	times := make(chan time.Time, 2)
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.a", func(_ context.Context, msg *message.Message) error {
		times <- time.Now()
		if bus.DeliveryCount(msg) == 1 {
			return bus.RetryAfter(errors.New("held by another"), 500*time.Millisecond)
		}
		return nil
	})
	b.publish(t, "work.a", message.NewMessage("1", nil))
	first := wait(t, times, "the first delivery")
	if pause := wait(t, times, "the second").Sub(first); pause < 500*time.Millisecond {
		t.Errorf("delivered again after %s, want 500ms", pause)
	}
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
}

func TestRouter_EndsTheContextOfSlowHandlers(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	ended := make(chan error, 1)
	slow := func(ctx context.Context, _ *message.Message) error {
		<-ctx.Done()
		ended <- ctx.Err()
		return bus.Poison(ctx.Err())
	}
	b.route(t, bus.RouterConfig{Timeout: 50 * time.Millisecond}, b.quick(t), "work.a", slow)
	b.publish(t, "work.a", message.NewMessage("1", nil))
	if err := wait(t, ended, "the timeout"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("context ended with %v", err)
	}
	// The dead letter is stored although the handler's context has ended.
	b.deadLetter(t)

	limits := make(chan bool, 1)
	b.route(t, bus.RouterConfig{Timeout: 50 * time.Millisecond}, b.subscriber(t, bus.SubscriberConfig{Durable: "unbounded"}), "work.b",
		func(ctx context.Context, _ *message.Message) error {
			_, bounded := ctx.Deadline()
			limits <- bounded
			return nil
		}, bus.WithTimeout(-1))
	b.publish(t, "work.b", message.NewMessage("2", nil))
	if wait(t, limits, "the job") {
		t.Error("WithTimeout(-1) left a deadline")
	}
}

func TestRouter_PassesOnTheCorrelationID(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	out := newPublisher(t, b.js)
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.>", func(ctx context.Context, msg *message.Message) error {
		return out.Publish("dead.effect", bus.NewMessage(ctx, "effect-of-"+msg.UUID, nil))
	})
	sub, err := bus.NewSubscriber(bus.SubscriberConfig{JetStream: b.js, Stream: "DEAD", Durable: "effects", Unrouted: true})
	if err != nil {
		t.Fatal(err)
	}
	effects := subscribe(t, sub, "dead.effect")
	for _, tc := range []struct{ correlation, command, want string }{
		{"chain", "cmd", "chain"},
		{"", "cmd", "cmd"},
		{"", "", "uuid"},
	} {
		msg := message.NewMessage("uuid", nil)
		if tc.correlation != "" {
			msg.Metadata.Set(topology.HeaderCorrelation, tc.correlation)
		}
		if tc.command != "" {
			msg.Metadata.Set(topology.HeaderCommandID, tc.command)
		}
		b.publish(t, "work.a", msg)
		effect := wait(t, effects, "the effect")
		if got := effect.Metadata.Get(topology.HeaderCorrelation); got != tc.want {
			t.Errorf("%+v: effect carries %q", tc, got)
		}
		effect.Ack()
	}
}

// TestRouter_DrainsRunningHandlers tests that Run tells a running handler to stop and returns after the handler.
func TestRouter_DrainsRunningHandlers(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	started, finished := make(chan struct{}), atomic.Bool{}
	stop := b.route(t, bus.RouterConfig{}, b.quick(t), "work.a", func(ctx context.Context, _ *message.Message) error {
		close(started)
		<-bus.Draining(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		finished.Store(true)
		return nil
	}, bus.WithTimeout(-1))
	b.publish(t, "work.a", message.NewMessage("1", nil))
	wait(t, started, "the handler")
	stop()
	if !finished.Load() {
		t.Error("Run ended before the handler, or ended its context")
	}
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
}
