package session

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// apiKeyChains finds the API keys of a tenant that are not revoked, by the number of commits that the log has for each
// key. It is safe for concurrent use.
type apiKeyChains struct {
	shards     []*bus.StreamHandle
	partitions events.Partitioning
}

// newAPIKeyChains returns an apiKeyChains that reads the streams of the log l.
func newAPIKeyChains(js jetstream.JetStream, l eventlog.Log) apiKeyChains {
	out := apiKeyChains{partitions: l.Partitioning()}
	for i := range l.Shards() {
		out.shards = append(out.shards, bus.NewStreamHandle(js, topology.EventsStreamName(i)))
	}
	return out
}

// unrevokedKeys returns the subjects of a tenant's API keys that are not revoked: those whose only commit is
// key_created. It asks the leaders of the log's streams.
func (k apiKeyChains) unrevokedKeys(ctx context.Context, tenant string) ([]events.Subject, error) {
	var list []events.Subject
	for _, handle := range k.shards {
		stream, err := handle.Open(ctx)
		if err != nil {
			return nil, err
		}
		info, err := stream.Info(ctx, jetstream.WithSubjectFilter(topology.TenantKeyFilter(tenant)))
		if err != nil {
			return nil, fmt.Errorf("count the API keys of tenant %s: %w", tenant, err)
		}
		for name, commits := range info.State.Subjects {
			subject, err := k.partitions.ParseSubject(name)
			if err != nil {
				return nil, err
			}
			if commits == 1 {
				list = append(list, subject)
			}
		}
	}
	return list, nil
}

// maxKeys returns the maximum number of API keys of a tenant: the tenant's own limit or, if it has none, the setting of
// the service.
func (s *Service) maxKeys(tenant string) int {
	if own := s.budgets.Limits(tenant).Keys; own > 0 {
		return int(own)
	}
	return s.cfg.MaxKeys
}
