package bus_test

import (
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

// features declares the properties of JetStream that hold in every configuration: delivery is at least once, and
// messages are persistent. The settings of a durable determine the other properties. The suite's TestReconnect needs
// a command that restarts the server. TestSubscriber_SurvivesServerRestarts tests this package instead.
func features() tests.Features {
	return tests.Features{
		Persistent:          true,
		ExactlyOnceDelivery: false,
		GenerateTopicFunc:   func(tctx tests.TestContext) string { return "suite." + tctx.TestID.String() },
	}
}

// TestPubSub runs watermill's suite on a stream that keeps its messages, in strict order: a durable delivers one
// message at a time.
func TestPubSub(t *testing.T) {
	t.Parallel()
	f := features()
	f.ConsumerGroups = true
	f.GuaranteedOrder = true
	suite := newSuite(t, jetstream.LimitsPolicy, bus.SubscriberConfig{MaxAckPending: 1})
	tests.TestPubSub(t, f, suite.shared, suite.group)
}

// TestPubSubWorkQueue runs the suite on a work queue, like those of commands and jobs: each message goes to one
// handler and is then removed. Many messages are delivered concurrently, so there is no order. A subject of a work
// queue has only one consumer, so there are no consumer groups.
func TestPubSubWorkQueue(t *testing.T) {
	t.Parallel()
	suite := newSuite(t, jetstream.WorkQueuePolicy, bus.SubscriberConfig{Concurrency: 8, DoubleAck: true})
	tests.TestPubSub(t, features(), suite.shared, nil)
}

// TestPubSubOwnDurable gives each subscriber its own durable, so that the subscriber also receives messages that were
// published before it subscribed. Every subscriber reads every message, therefore the test runs the suite's short
// form.
func TestPubSubOwnDurable(t *testing.T) {
	t.Parallel()
	f := features()
	f.NewSubscriberReceivesOldMessages = true
	f.ForceShort = true
	suite := newSuite(t, jetstream.LimitsPolicy, bus.SubscriberConfig{})
	tests.TestPubSub(t, f, func(t *testing.T) (message.Publisher, message.Subscriber) { return suite.group(t, watermill.NewUUID()) }, nil)
}

type suite struct {
	js  jetstream.JetStream
	cfg bus.SubscriberConfig
}

func newSuite(t *testing.T, retention jetstream.RetentionPolicy, cfg bus.SubscriberConfig) *suite {
	t.Helper()
	// The suite publishes 15,000 messages. Other tests check that messages are synced to disk.
	srv := natstest.RunConfig(t, natsserver.Config{Relaxed: true})
	js := jetStream(t, natstest.Conn(t, srv))
	createStream(t, js, jetstream.StreamConfig{Name: "SUITE", Subjects: []string{"suite.>"}, Retention: retention, Discard: jetstream.DiscardNew})
	cfg.JetStream, cfg.Stream = js, "SUITE"
	cfg.AckWait = 2 * time.Second
	cfg.NakDelay = 5 * time.Millisecond
	// The suite calls Close while messages are unanswered.
	cfg.CloseTimeout = 50 * time.Millisecond
	cfg.Unrouted = true
	return &suite{js: js, cfg: cfg}
}

func (s *suite) shared(t *testing.T) (message.Publisher, message.Subscriber) {
	return s.group(t, "shared")
}

func (s *suite) group(t *testing.T, group string) (message.Publisher, message.Subscriber) {
	t.Helper()
	cfg := s.cfg
	cfg.DurableFor = func(topic string) string { return group + "_" + strings.ReplaceAll(topic, ".", "_") }
	return newPublisher(t, s.js), newSubscriber(t, cfg)
}
