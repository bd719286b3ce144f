package system

import (
	"context"
	"fmt"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// defaultTenant is the tenant of all sessions, because authentication is off in benchmarks.
const defaultTenant = "default"

// DeleteAndAwaitEnd deletes a session and blocks until its sandbox has ended. The session must have had a sandbox. DeleteAndAwaitEnd reads the log,
// because the gateway does not send the events of a deleted session.
func (s *System) DeleteAndAwaitEnd(ctx context.Context, session string) error {
	if err := NewClient(s.URL).DeleteSession(ctx, session); err != nil {
		return err
	}
	start := eventlog.Position{Shard: events.Partition(session) % s.Log.Shards()}
	for rec, err := range s.Log.Tail(ctx, start, eventlog.Filter{Subject: events.Subject{Tenant: defaultTenant, ID: session}}) {
		if err != nil {
			return fmt.Errorf("wait until the sandbox of %s has ended: %w", session, err)
		}
		for _, e := range rec.Events {
			if e.Data.EventType() == (events.SandboxTerminated{}).EventType() {
				return nil
			}
		}
	}
	return fmt.Errorf("wait until the sandbox of %s has ended: %w", session, ctx.Err())
}
