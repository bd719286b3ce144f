package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	defaultAckWait      = 30 * time.Second
	defaultNakDelay     = time.Second
	defaultCloseTimeout = 20 * time.Second
	// minNakDelay is the minimum of NakDelay. Messages that no handler has received are redelivered after this time, so that
	// another subscriber receives them almost at once.
	minNakDelay = time.Millisecond
	// cancelledHandlerTimeout is the time that a handler has to return after its context is cancelled.
	cancelledHandlerTimeout = time.Second
	// consumerRequestTimeout is the time limit of one request for a consumer. A request that fails is repeated.
	consumerRequestTimeout = 5 * time.Second
	consumerRetryPause     = 200 * time.Millisecond
	// maxWaitingPulls is the maximum number of waiting pull requests of a consumer, over all subscribers. Each
	// subscriber has up to maxPullers. Earlier builds had one request for each free slot, and the limit of an existing
	// consumer cannot be changed.
	maxWaitingPulls = 8192
)

// SubscriberConfig configures a Subscriber. JetStream, Stream and one of Durable and DurableFor are required.
type SubscriberConfig struct {
	// JetStream is the connection's JetStream. The Subscriber never closes the connection.
	JetStream jetstream.JetStream
	// Stream is the stream's name. The Subscriber does not create streams.
	Stream string
	// Durable is the name of the consumer. Subscribers of one durable share its messages. A durable belongs to one
	// topic: Subscribe returns an error for another one. Subscribe creates the consumer, or updates it to this
	// configuration. It never deletes it, and sets no InactiveThreshold, which would delete it.
	Durable string
	// DurableFor returns the name of the consumer for each topic, instead of Durable.
	DurableFor func(topic string) string
	// Description is the consumer's description for operators.
	Description string
	// FilterSubjects are additional filters of the consumer. They must not overlap with each other or the topic.
	FilterSubjects []string
	// AckWait is the time that the server waits for a heartbeat before it redelivers a message; 0 means 30 s. It limits
	// how long the work of a dead process waits, not how long a handler may take.
	AckWait time.Duration
	// HeartBeat is the interval of heartbeats while a handler runs; 0 means a third of AckWait.
	HeartBeat time.Duration
	// MaxAckPending is the maximum number of messages of this consumer in progress, over all subscribers; 0 means
	// no limit. It must be at least the sum of their Concurrency. 1 makes the order strict.
	MaxAckPending int
	// MaxDeliver is the server's limit of deliveries; 0 means none. A message that reaches it stays in a work queue
	// forever without being delivered, so prefer the Router's MaxDeliveries, which moves it to DEAD.
	MaxDeliver int
	// Concurrency is the number of messages that a subscription processes concurrently; 0 means 1, which keeps
	// their order.
	Concurrency int
	// NakDelay is the delay after which a message is redelivered after a handler's error; 0 means 1 s. SetNakDelay
	// overrides it for one message.
	NakDelay time.Duration
	// DoubleAck makes a slot wait until the server has confirmed an acknowledgement. Otherwise an acknowledgement
	// may be lost with the connection, and the message is redelivered.
	DoubleAck bool
	// PullExpiry is the time for which the server keeps a request for messages of free slots; 0 means 30 s, the minimum is 1
	// s. A suspended process still receives messages until its requests expire. If PullExpiry is shorter than
	// AckWait, the redelivery of a message that it held goes to another subscriber.
	PullExpiry time.Duration
	// CloseTimeout is the time that Close waits for handlers before it cancels their contexts; 0 means 20 s.
	CloseTimeout time.Duration
	// Unrouted delivers messages to callers other than a Router. It is for tests and tools; handlers of services
	// run on a Router.
	Unrouted bool
	// Logger may be nil.
	Logger *slog.Logger
}

func (c *SubscriberConfig) validate() error {
	if c.JetStream == nil {
		return errors.New("bus: SubscriberConfig.JetStream is required")
	}
	if c.Stream == "" {
		return errors.New("bus: SubscriberConfig.Stream is required")
	}
	if (c.Durable == "") == (c.DurableFor == nil) {
		return errors.New("bus: SubscriberConfig needs Durable or DurableFor, and not both")
	}
	for _, filter := range c.FilterSubjects {
		if err := CheckFilter(filter); err != nil {
			return fmt.Errorf("bus: SubscriberConfig.FilterSubjects: %w", err)
		}
	}
	for name, d := range map[string]time.Duration{"AckWait": c.AckWait, "HeartBeat": c.HeartBeat, "NakDelay": c.NakDelay, "CloseTimeout": c.CloseTimeout} {
		if d < 0 {
			return fmt.Errorf("bus: SubscriberConfig.%s is %s, it cannot be negative", name, d)
		}
	}
	for name, n := range map[string]int{"MaxAckPending": c.MaxAckPending, "MaxDeliver": c.MaxDeliver, "Concurrency": c.Concurrency} {
		if n < 0 {
			return fmt.Errorf("bus: SubscriberConfig.%s is %d, it cannot be negative", name, n)
		}
	}
	c.setDefaults()
	if c.HeartBeat >= c.AckWait {
		return fmt.Errorf("bus: SubscriberConfig.HeartBeat is %s, it has to be shorter than AckWait, which is %s", c.HeartBeat, c.AckWait)
	}
	if c.PullExpiry < time.Second {
		return fmt.Errorf("bus: SubscriberConfig.PullExpiry is %s, it has to be at least 1s", c.PullExpiry)
	}
	if c.MaxAckPending > 0 && c.MaxAckPending < c.Concurrency {
		return fmt.Errorf("bus: SubscriberConfig.MaxAckPending is %d, less than Concurrency, which is %d: slots would stay empty", c.MaxAckPending, c.Concurrency)
	}
	return nil
}

func (c *SubscriberConfig) setDefaults() {
	if c.AckWait == 0 {
		c.AckWait = defaultAckWait
	}
	if c.HeartBeat == 0 {
		c.HeartBeat = max(c.AckWait/3, time.Millisecond)
	}
	if c.NakDelay == 0 {
		c.NakDelay = defaultNakDelay
	}
	c.NakDelay = max(c.NakDelay, minNakDelay)
	if c.PullExpiry == 0 {
		c.PullExpiry = pullExpiry
	}
	if c.CloseTimeout == 0 {
		c.CloseTimeout = defaultCloseTimeout
	}
	if c.Concurrency == 0 {
		c.Concurrency = 1
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
}

// Subscriber delivers the messages of durable consumers. It is safe for concurrent use.
type Subscriber struct {
	cfg     SubscriberConfig
	closing chan struct{}
	running sync.WaitGroup

	mu     sync.Mutex
	closed bool
	topics map[string]string // by durable
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// NewSubscriber returns a Subscriber, or an error that names the invalid setting. It sends no request.
func NewSubscriber(cfg SubscriberConfig) (*Subscriber, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Subscriber{cfg: cfg, closing: make(chan struct{}), topics: map[string]string{}}, nil
}

// Subscribe creates or updates the durable for topic, a subject that may contain wildcards, and returns the channel of
// its messages. Each message must be answered by Ack or Nack; until then it holds one of the Concurrency slots. The
// message's context has the values of ctx. It ends when the message is answered, or CloseTimeout after ctx ends or Close
// is called.
//
// The channel is closed when ctx ends, when Close is called, or when the connection is closed. A lost connection is
// restored automatically and does not close the channel. Without SubscriberConfig.Unrouted, Subscribe returns
// ErrNotRouted to every caller except a Router.
//
// While NATS does not respond, or the stream does not exist, Subscribe repeats its request until ctx ends, because
// services start in any order, while streams are being installed, and NATS may be restarted.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if !s.cfg.Unrouted && !isRouterContext(ctx) {
		return nil, fmt.Errorf("subscribe to %s: %w: register a handler with Router.Handle", topic, ErrNotRouted)
	}
	if err := s.registerUse(); err != nil {
		return nil, err
	}
	durable, err := s.awaitConsumer(ctx, topic)
	if err != nil {
		s.running.Done()
	}
	switch {
	case err != nil && ctx.Err() != nil:
		// ctx has ended: return a subscription that has ended too, not an error. After an error watermill's Router
		// would wait for handlers that never start.
		ended := make(chan *message.Message)
		close(ended)
		return ended, nil
	case err != nil:
		return nil, err
	}
	u := newSubscription(ctx, s, topic, durable)
	u.start(ctx)
	return u.out, nil
}

// SubscribeInitialize creates or updates the durable for topic, so that the durable receives messages from now on.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	return s.createDurable(context.Background(), topic)
}

// createDurable does what SubscribeInitialize does, and stops retrying when ctx ends.
func (s *Subscriber) createDurable(ctx context.Context, topic string) error {
	if err := s.registerUse(); err != nil {
		return err
	}
	defer s.running.Done()
	_, err := s.awaitConsumer(ctx, topic)
	return err
}

// Close requests no further message, returns messages that no handler has to the queue, and waits for the running
// handlers: for CloseTimeout, and a second more after their contexts are cancelled. Messages that are not answered
// then are redelivered after AckWait; Close logs them.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
	}
	s.mu.Unlock()
	s.running.Wait()
	return nil
}

// registerUse registers a use of the Subscriber: Close waits for the matching call of running.Done. It returns ErrClosed after
// Close.
func (s *Subscriber) registerUse() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	s.running.Add(1)
	return nil
}

// awaitConsumer calls ensureConsumer until NATS responds and the stream exists. It returns an error when ctx ends, when
// Close is called, when the connection is closed, and when NATS refuses the consumer.
func (s *Subscriber) awaitConsumer(ctx context.Context, topic string) (string, error) {
	for logged := false; ; logged = true {
		durable, err := s.ensureConsumer(ctx, topic)
		if err == nil || !isNotReady(err) || s.cfg.JetStream.Conn().IsClosed() {
			return durable, err
		}
		if !logged {
			s.cfg.Logger.Warn("NATS has not created a consumer, retrying", "stream", s.cfg.Stream, "topic", topic, "error", err)
		}
		select {
		case <-ctx.Done():
			return "", err
		case <-s.closing:
			return "", ErrClosed
		case <-time.After(consumerRetryPause):
		}
	}
}

// isNotReady reports whether a request to JetStream failed because NATS was unavailable or not ready, or because the
// stream is not installed yet, so that a retry may succeed.
func isNotReady(err error) bool {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.Code == http.StatusServiceUnavailable || errors.Is(err, ErrNoStream)
	}
	for _, target := range []error{ErrUnavailable, context.DeadlineExceeded, nats.ErrTimeout, nats.ErrNoResponders, nats.ErrReconnectBufExceeded} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// ensureConsumer creates or updates the durable for topic and returns its name.
func (s *Subscriber) ensureConsumer(ctx context.Context, topic string) (string, error) {
	if err := CheckFilter(topic); err != nil {
		return "", err
	}
	durable, err := s.reserveDurable(topic)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, consumerRequestTimeout)
	defer cancel()
	if err := waitConnected(ctx, s.cfg.JetStream.Conn()); err != nil {
		return "", fmt.Errorf("consumer %s of stream %s: %w", durable, s.cfg.Stream, err)
	}
	_, err = s.cfg.JetStream.CreateOrUpdateConsumer(ctx, s.cfg.Stream, s.consumerConfig(durable, topic))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return "", fmt.Errorf("consumer %s: %w: there is no stream %s: %w", durable, ErrNoStream, s.cfg.Stream, err)
	}
	if err != nil {
		return "", fmt.Errorf("consumer %s of stream %s for %s: %w", durable, s.cfg.Stream, topic, err)
	}
	return durable, nil
}

// reserveDurable returns the name of the durable for topic, and reserves the durable for it. It returns an error if the durable belongs to
// another topic.
func (s *Subscriber) reserveDurable(topic string) (string, error) {
	durable := s.cfg.Durable
	if s.cfg.DurableFor != nil {
		durable = s.cfg.DurableFor(topic)
	}
	if durable == "" {
		return "", fmt.Errorf("bus: DurableFor named no durable for topic %s", topic)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if other, ok := s.topics[durable]; ok && other != topic {
		return "", fmt.Errorf("bus: durable %s serves topic %s already: topic %s needs one of its own", durable, other, topic)
	}
	s.topics[durable] = topic
	return durable, nil
}

// consumerConfig returns the configuration of the consumer durable for topic.
func (s *Subscriber) consumerConfig(durable, topic string) jetstream.ConsumerConfig {
	unlimited := func(n int) int {
		if n == 0 {
			return -1
		}
		return n
	}
	cfg := jetstream.ConsumerConfig{
		Durable:       durable,
		Description:   s.cfg.Description,
		DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       s.cfg.AckWait,
		MaxDeliver:    unlimited(s.cfg.MaxDeliver),
		MaxAckPending: unlimited(s.cfg.MaxAckPending),
		MaxWaiting:    maxWaitingPulls,
	}
	if len(s.cfg.FilterSubjects) == 0 {
		cfg.FilterSubject = topic
		return cfg
	}
	cfg.FilterSubjects = append([]string{topic}, s.cfg.FilterSubjects...)
	return cfg
}
