package bus

import (
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// ConfigForDurable returns the configuration of a Subscriber for a durable of the topology, and the topic for
// Router.Handle. The caller adds what the topology does not define: Concurrency and the delays. It returns an error
// if a Subscriber cannot read the durable.
func ConfigForDurable(js jetstream.JetStream, d topology.Durable) (SubscriberConfig, string, error) {
	filters := d.Config.FilterSubjects
	if d.Config.FilterSubject != "" {
		filters = []string{d.Config.FilterSubject}
	}
	switch {
	case len(filters) == 0:
		return SubscriberConfig{}, "", fmt.Errorf("bus: durable %s of stream %s has no filter", d.Config.Durable, d.Stream)
	case d.Config.AckPolicy != jetstream.AckExplicitPolicy:
		return SubscriberConfig{}, "", fmt.Errorf("bus: durable %s of stream %s must use explicit acknowledgements", d.Config.Durable, d.Stream)
	}
	return SubscriberConfig{
		JetStream: js, Stream: d.Stream, Durable: d.Config.Durable, Description: d.Config.Description, FilterSubjects: filters[1:],
		AckWait: d.Config.AckWait, MaxDeliver: max(d.Config.MaxDeliver, 0), MaxAckPending: max(d.Config.MaxAckPending, 0),
	}, filters[0], nil
}
