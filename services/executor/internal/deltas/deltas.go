// Package deltas publishes the text of unfinished blocks to the stream DELTAS and reads it again.
package deltas

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/topology"
)

// textsTimeout bounds one call of Texts.
const textsTimeout = 10 * time.Second

// Stream is the stream DELTAS, which holds the text of blocks that are not complete yet. It is safe for concurrent use.
type Stream struct {
	js         jetstream.JetStream
	deltas     *bus.StreamHandle
	partitions events.Partitioning
}

// New returns a Stream. It does not send anything to NATS.
func New(js jetstream.JetStream, partitions events.Partitioning) *Stream {
	return &Stream{js: js, deltas: bus.NewStreamHandle(js, topology.StreamDeltas), partitions: partitions}
}

// Publish sends a delta of a session without waiting for an acknowledgement. It uses the connection of the commits, so that text arrives
// before the commit that follows it.
func (s *Stream) Publish(tenant, session string, data []byte) error {
	return s.js.Conn().Publish(s.partitions.DeltaSubject(tenant, session), data)
}

// Texts returns the text of a session's blocks, by block id, from the deltas that were published since a time.
func (s *Stream) Texts(ctx context.Context, tenant, session string, since time.Time) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, textsTimeout)
	defer cancel()
	out := map[string]string{}
	subject := s.partitions.DeltaSubject(tenant, session)
	stream, err := s.deltas.Open(ctx)
	if err != nil {
		return out, err
	}
	last, err := stream.GetLastMsgForSubject(ctx, subject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return out, nil
	}
	if err != nil {
		return out, fmt.Errorf("find the end of %s: %w", subject, err)
	}
	if last.Time.Before(since) {
		return out, nil
	}
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{subject}, DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &since,
	})
	if err != nil {
		return out, fmt.Errorf("read %s: %w", subject, err)
	}
	texts := map[string]*blocks.Text{}
	it, err := consumer.Messages()
	if err != nil {
		return out, fmt.Errorf("read %s: %w", subject, err)
	}
	defer it.Stop()
	for {
		msg, err := it.Next(jetstream.NextContext(ctx))
		if err != nil {
			return out, fmt.Errorf("read %s: %w", subject, err)
		}
		if d, err := events.DecodeDelta(msg.Data()); err == nil {
			if texts[d.BlockID] == nil {
				texts[d.BlockID] = &blocks.Text{}
			}
			texts[d.BlockID].Add(d)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return out, fmt.Errorf("read %s: %w", subject, err)
		}
		if meta.Sequence.Stream >= last.Sequence {
			break
		}
	}
	for id, t := range texts {
		out[id] = t.Known
	}
	return out, nil
}
