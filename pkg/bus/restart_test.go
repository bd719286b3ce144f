package bus_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

// TestSubscriber_SurvivesServerRestarts stops and starts the server twice while messages are published. Every message
// whose publish was acknowledged must be handled and acknowledged. A message whose handler runs the whole time must
// be delivered once.
//
// The stream may keep a handled message: nats-server 2.15.2 stores an acknowledgement with the consumer before it
// removes the message. A stop between the two steps leaves a message that the server never delivers again. When it
// starts, the server removes such messages from interest streams only.
func TestSubscriber_SurvivesServerRestarts(t *testing.T) {
	t.Parallel()
	server := natstest.RunRestartable(t)
	b := newFixtureOn(t, server.Conn())

	long, release := make(chan uint64, 10), make(chan struct{})
	b.route(t, bus.RouterConfig{}, b.subscriber(t, bus.SubscriberConfig{Durable: "long", AckWait: patience}), "work.long",
		func(_ context.Context, msg *message.Message) error {
			long <- bus.DeliveryCount(msg)
			<-release
			return nil
		}, bus.WithTimeout(-1))
	b.publish(t, "work.long", message.NewMessage("long", nil))
	if delivered := wait(t, long, "the long job"); delivered != 1 {
		t.Fatalf("delivery %d", delivered)
	}

	var mu sync.Mutex
	handled := map[string]bool{}
	b.route(t, bus.RouterConfig{}, b.subscriber(t, bus.SubscriberConfig{Durable: "short", AckWait: time.Second, Concurrency: 4}), "work.short",
		func(_ context.Context, msg *message.Message) error {
			mu.Lock()
			defer mu.Unlock()
			handled[msg.UUID] = true
			return nil
		})

	const count = 600
	progress, published := make(chan int, 8), make(chan error, 1)
	go func() { published <- publishAll(b, t, count, progress) }()
	for i := range progress {
		if i == count/3 || i == 2*count/3 {
			server.Stop()
			server.Start()
		}
	}
	if err := wait(t, published, "the publisher"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all messages to be handled", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(handled) == count
	})
	close(release)
	eventually(t, "all messages to be acknowledged", func() bool { return b.unacknowledged(t, "long") == 0 && b.unacknowledged(t, "short") == 0 })
	select {
	case delivered := <-long:
		t.Errorf("the long job was delivered again, delivery %d", delivered)
	default:
	}
}

// TestRouterRun_WaitsForNATS starts a Router while NATS is down, for longer than one request for a consumer may take.
// Run repeats the request and handles messages when NATS is back.
func TestRouterRun_WaitsForNATS(t *testing.T) {
	t.Parallel()
	server := natstest.RunRestartable(t)
	b := newFixtureOn(t, server.Conn())
	lines := make(logLines, 100)
	cfg := bus.SubscriberConfig{JetStream: b.js, Stream: "WORK", Durable: "worker", Logger: slog.New(slog.NewJSONHandler(lines, nil))}
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: newPublisher(t, b.js)})
	if err != nil {
		t.Fatal(err)
	}
	handled := make(chan string, 1)
	if err := router.Handle("test", "work.a", newSubscriber(t, cfg), func(_ context.Context, msg *message.Message) error {
		handled <- msg.UUID
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	select {
	case <-lines:
	case err := <-ended:
		t.Fatalf("Run returned while NATS was down: %v", err)
	case <-time.After(patience):
		t.Fatal("nothing was logged about NATS")
	}
	server.Start()
	wait(t, router.Running(), "the router to run")
	b.publish(t, "work.a", message.NewMessage("1", nil))
	wait(t, handled, "the message")
	cancel()
	if err := wait(t, ended, "the end of Run"); err != nil {
		t.Error(err)
	}
}

// TestRouterRun_EndsWhileNATSIsAway tests that Run, while it waits for NATS, returns nil when its context ends.
func TestRouterRun_EndsWhileNATSIsAway(t *testing.T) {
	t.Parallel()
	server := natstest.RunRestartable(t)
	b := newFixtureOn(t, server.Conn())
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: newPublisher(t, b.js)})
	if err != nil {
		t.Fatal(err)
	}
	if err := router.Handle("test", "work.a", b.quick(t), func(context.Context, *message.Message) error { return nil }); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := router.Run(ctx); err != nil {
		t.Errorf("Run returned %v after its context ended", err)
	}
}

// cancellingSubscriber is a subscriber that ends the router's context during its first Subscribe.
type cancellingSubscriber struct {
	message.Subscriber
	cancel context.CancelFunc
}

func (c cancellingSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	c.cancel()
	<-ctx.Done()
	return c.Subscriber.Subscribe(ctx, topic)
}

// TestRouterRun_EndsWhileItSubscribes tests that Run returns nil at once when its context ends while it subscribes
// the handlers.
func TestRouterRun_EndsWhileItSubscribes(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: newPublisher(t, b.js), CloseTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, name := range []string{"a", "b", "c"} {
		sub := cancellingSubscriber{b.subscriber(t, bus.SubscriberConfig{Durable: name}), cancel}
		if err := router.Handle(name, "work."+name, sub, func(context.Context, *message.Message) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if err := router.Run(ctx); err != nil {
		t.Errorf("Run returned %v", err)
	}
}

// logLines receives each line that a logger writes. It drops lines while the channel is full.
type logLines chan string

func (l logLines) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default:
	}
	return len(p), nil
}

// publishAll publishes each message until JetStream acknowledges it, always under the same message id.
func publishAll(b *fixture, t *testing.T, count int, progress chan<- int) error {
	defer close(progress)
	p, err := bus.NewPublisher(bus.PublisherConfig{JetStream: b.js, Deduplicate: true, Timeout: time.Second})
	if err != nil {
		return err
	}
	for i := range count {
		msg := bus.NewMessage(t.Context(), fmt.Sprint(i), nil)
		for {
			err := p.Publish("work.short", msg)
			if err == nil {
				break
			}
			if t.Context().Err() != nil || !errors.Is(err, bus.ErrUnavailable) && !errors.Is(err, bus.ErrOutcomeUnknown) && !errors.Is(err, bus.ErrNoStream) {
				return fmt.Errorf("message %d: %w", i, err)
			}
		}
		progress <- i
	}
	return nil
}
