package bus_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

// patience is the time limit of every wait in these tests. No test passes by reaching it.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	// A helper of watermill's suite leaves messages on a channel that it no longer reads.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe.func2"),
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe.func3"))
}

// fixture is a server with the streams that most tests need.
type fixture struct {
	nc *nats.Conn
	js jetstream.JetStream
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	nc := natstest.Conn(t, natstest.Run(t))
	return newFixtureOn(t, nc)
}

func newFixtureOn(t *testing.T, nc *nats.Conn) *fixture {
	t.Helper()
	b := &fixture{nc: nc, js: jetStream(t, nc)}
	createStream(t, b.js, jetstream.StreamConfig{Name: "WORK", Subjects: []string{"work.>"}, Retention: jetstream.WorkQueuePolicy, Discard: jetstream.DiscardNew})
	createStream(t, b.js, jetstream.StreamConfig{Name: "DEAD", Subjects: []string{"dead.>"}})
	return b
}

func (b *fixture) subscriber(t *testing.T, cfg bus.SubscriberConfig) *bus.Subscriber {
	t.Helper()
	cfg.JetStream, cfg.Stream = b.js, "WORK"
	if cfg.Durable == "" {
		cfg.Durable = "worker"
	}
	if cfg.CloseTimeout == 0 {
		cfg.CloseTimeout = 5 * time.Second
	}
	cfg.Logger = natstest.Logger(t)
	return newSubscriber(t, cfg)
}

func (b *fixture) publish(t *testing.T, subject string, messages ...*message.Message) {
	t.Helper()
	if err := newPublisher(t, b.js).Publish(subject, messages...); err != nil {
		t.Fatal(err)
	}
}

// route runs fn on a Router for topic until the test ends, and returns a function that stops the Router earlier.
func (b *fixture) route(t *testing.T, cfg bus.RouterConfig, sub message.Subscriber, topic string, fn bus.HandlerFunc, options ...bus.HandlerOption) (stop func()) {
	t.Helper()
	if cfg.DeadLetter == nil {
		dead, err := bus.NewPublisher(bus.PublisherConfig{JetStream: b.js, Deduplicate: true})
		if err != nil {
			t.Fatal(err)
		}
		cfg.DeadLetter = dead
	}
	router, err := bus.NewRouter(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := router.Handle("test", topic, sub, fn, options...); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	wait(t, router.Running(), "the router to run")
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Error("Run did not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// messagesIn returns the number of messages in a stream.
func (b *fixture) messagesIn(t *testing.T, stream string) uint64 {
	t.Helper()
	s, err := b.js.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	info, err := s.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Msgs
}

// unacknowledged returns the number of messages that a consumer of WORK still has to deliver, or that it delivered
// without receiving an acknowledgement.
func (b *fixture) unacknowledged(t *testing.T, durable string) uint64 {
	t.Helper()
	c, err := b.js.Consumer(t.Context(), "WORK", durable)
	if err != nil {
		t.Fatal(err)
	}
	info := c.CachedInfo()
	return info.NumPending + uint64(info.NumAckPending)
}

// eventually polls done until it returns true. It is for facts that only the server knows.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s", patience, what)
		}
		<-time.After(10 * time.Millisecond)
	}
}

func wait[T any](t *testing.T, ch <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatalf("waited %s for %s", patience, what)
		panic("unreachable")
	}
}

func jetStream(t *testing.T, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func createStream(t *testing.T, js jetstream.JetStream, cfg jetstream.StreamConfig) {
	t.Helper()
	if _, err := js.CreateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
}

func newPublisher(t *testing.T, js jetstream.JetStream) *bus.Publisher {
	t.Helper()
	p, err := bus.NewPublisher(bus.PublisherConfig{JetStream: js})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func newSubscriber(t *testing.T, cfg bus.SubscriberConfig) *bus.Subscriber {
	t.Helper()
	s, err := bus.NewSubscriber(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
