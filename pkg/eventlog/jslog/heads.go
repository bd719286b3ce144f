package jslog

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/topology"
)

// ReadHeads reads the signed heads of every shard and verifies their signatures with the keys. The NATS user must
// be allowed to create consumers on the stream of heads.
func ReadHeads(ctx context.Context, js jetstream.JetStream, shards int, keys ...heads.PublicKey) ([]*heads.Chain, error) {
	chains := make([]*heads.Chain, shards)
	bySubject := map[string]*heads.Chain{}
	for i := range chains {
		chains[i] = heads.NewChain(i)
		bySubject[topology.HeadSubject(i)] = chains[i]
	}
	stream, err := js.Stream(ctx, topology.StreamHeads)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("the installation has no stream %s, so its heads were never signed: create it with `spool provision`, and set heads-key of the session service", topology.StreamHeads)
	}
	if err != nil {
		return nil, fmt.Errorf("open stream %s: %w", topology.StreamHeads, err)
	}
	end := stream.CachedInfo().State.LastSeq
	if stream.CachedInfo().State.Msgs == 0 {
		return chains, nil
	}
	c, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", topology.StreamHeads, err)
	}
	messages, err := c.Messages()
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", topology.StreamHeads, err)
	}
	defer messages.Stop()
	for {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", topology.StreamHeads, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", topology.StreamHeads, err)
		}
		if chain := bySubject[m.Subject()]; chain != nil {
			if err := chain.Add(meta.Sequence.Stream, m.Data(), keys...); err != nil {
				return nil, err
			}
		}
		if meta.Sequence.Stream >= end || meta.NumPending == 0 {
			return chains, nil
		}
	}
}
