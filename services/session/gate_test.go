package session_test

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session"
)

// TestSettingGate tests that with SPOOL_NATS_GATE_PASSWORD the process also runs the consumer gate, so that services
// can create consumers, and that without it they cannot.
func TestSettingGate(t *testing.T) {
	t.Parallel()
	url := natstest.RunWithoutConsumerGate(t)
	js, err := jetstream.New(natstest.ConnAs(t, url, topology.UserProjector))
	must(t, err)
	for _, c := range []struct {
		gate session.ConsumerGate
		want error
	}{{session.ConsumerGate{}, nats.ErrNoResponders}, {session.ConsumerGate{NATSGatePassword: natstest.Password}, nil}} {
		stop, err := c.gate.Serve(url, "", slog.New(slog.DiscardHandler))
		must(t, err)
		t.Cleanup(stop)
		_, err = js.OrderedConsumer(t.Context(), topology.EventsStreamName(0), jetstream.OrderedConsumerConfig{})
		if !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.gate, err, c.want)
		}
	}
}
