package bus_test

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestSubscriber_CreatesTheConsumerOfTheTopology tests that the consumer that a Subscriber creates for a durable has
// the configuration of package topology.
func TestSubscriber_CreatesTheConsumerOfTheTopology(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	for _, d := range []topology.Durable{
		topology.SessionCommandsConsumer(), topology.ReactorConsumer(0, topology.DefaultPartitions), topology.TimersConsumer(),
		topology.ProviderJobsConsumer("local"), topology.EngineJobsConsumer("local", "here"),
	} {
		filters := append([]string{}, d.Config.FilterSubjects...)
		if d.Config.FilterSubject != "" {
			filters = append(filters, d.Config.FilterSubject)
		}
		d.Stream = "FOR-" + d.Config.Durable
		createStream(t, b.js, jetstream.StreamConfig{Name: d.Stream, Subjects: []string{fmt.Sprintf("for%s.>", d.Config.Durable)}, Retention: jetstream.LimitsPolicy})
		cfg, topic, err := bus.ConfigForDurable(b.js, d)
		if err != nil {
			t.Fatal(err)
		}
		sub := newSubscriber(t, cfg)
		if err := sub.SubscribeInitialize(topic); err != nil {
			t.Fatal(err)
		}
		consumer, err := b.js.Consumer(t.Context(), d.Stream, d.Config.Durable)
		if err != nil {
			t.Fatal(err)
		}
		got := consumer.CachedInfo().Config
		gotFilters := append([]string{}, got.FilterSubjects...)
		if got.FilterSubject != "" {
			gotFilters = append(gotFilters, got.FilterSubject)
		}
		if fmt.Sprint(gotFilters) != fmt.Sprint(filters) || got.AckWait != d.Config.AckWait || got.MaxDeliver != d.Config.MaxDeliver ||
			got.MaxAckPending != d.Config.MaxAckPending || got.Description != d.Config.Description || got.DeliverPolicy != d.Config.DeliverPolicy {
			t.Errorf("created %+v\nwant %+v", got, d.Config)
		}
	}
	for _, cfg := range []jetstream.ConsumerConfig{{Durable: "d", AckPolicy: jetstream.AckExplicitPolicy}, {Durable: "d", FilterSubject: "a", AckPolicy: jetstream.AckNonePolicy}} {
		if _, _, err := bus.ConfigForDurable(b.js, topology.Durable{Stream: "S", Config: cfg}); err == nil {
			t.Errorf("%+v: no error", cfg)
		}
	}
}
