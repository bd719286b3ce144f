package jslog_test

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestLog_WithTheRightsOfEachService tests that each service can use the log with the rights of its own NATS user.
func TestLog_WithTheRightsOfEachService(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	srv := natstest.RunConfig(t, natsserver.Config{Accounts: true})
	asRole := func(user string) *jslog.Log {
		t.Helper()
		nc, err := srv.ConnectAs(user, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		if user == topology.UserAdmin {
			return open(t, nc, 2)
		}
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		return openConfig(t, jslog.Config{JetStream: js, Shards: 2})
	}
	asRole(topology.UserAdmin)
	session, executor, projector := asRole(topology.UserSession), asRole(topology.UserExecutor), asRole(topology.UserProjector)

	life := eventlogtest.SessionSubject(1, 2, "users")
	run := events.RunSubject(life.Tenant, life.ID)
	large := eventlogtest.Draft("large", strings.Repeat("x", 300_000))
	a, err := session.Append(ctx, eventlog.Head{Subject: life}, large)
	if err != nil {
		t.Fatalf("session writes life: %v", err)
	}
	b, err := executor.Append(ctx, eventlog.Head{Subject: run}, eventlogtest.Draft("run", "run"))
	if err != nil {
		t.Fatalf("executor writes run: %v", err)
	}
	// These rights also suffice to settle a commit that was lost or repeated.
	if _, err := executor.Append(ctx, eventlog.Head{Subject: run}, eventlogtest.Draft("run", "run")); err != nil {
		t.Errorf("executor repeats its commit: %v", err)
	}
	for _, f := range []eventlog.Freshness{eventlog.AnyReplica, eventlog.LeaderOnly} {
		if h, err := executor.Last(ctx, life, f); err != nil || h.Seq != a.Seq {
			t.Errorf("executor reads life: %d, %v", h.Seq, err)
		}
	}
	tail := eventlogtest.StartTail(ctx, t, projector, eventlog.Position{Shard: 1}, eventlog.Filter{Partitions: []int{life.Partition()}})
	rec := eventlogtest.ExpectCommit(ctx, t, tail, a)
	if got := rec.Events[0].Data.(events.MessageAccepted).Content; len(got) != 300_000 {
		t.Errorf("projector reads %d bytes of a large message", len(got))
	}
	eventlogtest.ExpectCommit(ctx, t, tail, b)
	if _, err := projector.CommitAt(ctx, eventlog.Position{Shard: 1, Seq: b.Seq}); err != nil {
		t.Errorf("projector checks its checkpoint: %v", err)
	}
	for rec, err := range executor.Read(ctx, eventlog.Position{Shard: 1}, eventlog.Filter{Subject: events.Subject{Tenant: life.Tenant, ID: life.ID}}) {
		if err != nil {
			t.Errorf("executor reads the session: %s, %v", rec.Position, err)
		}
	}

	gateway, filter := asRole(topology.UserGateway), topology.TenantLifeFilter(life.Partition(), life.Tenant)
	if h, err := gateway.NextHead(ctx, eventlog.Position{Shard: 1}, filter); err != nil || h.Seq != a.Seq || h.Subject != life {
		t.Errorf("gateway finds the life of a tenant's session: %+v, %v", h, err)
	}
	if h, err := gateway.NextHead(ctx, eventlog.Position{Shard: 1, Seq: a.Seq}, filter); err != nil || h.Seq != 0 {
		t.Errorf("gateway finds a commit after the last one: %+v, %v", h, err)
	}
	if h, err := gateway.NextHead(ctx, eventlog.Position{Shard: 1}, topology.TenantLifeFilter(life.Partition(), "else")); err != nil || h.Seq != 0 {
		t.Errorf("gateway finds a commit of another tenant: %+v, %v", h, err)
	}

	for what, try := range map[string]struct {
		log  *jslog.Log
		head eventlog.Head
	}{"executor writes life": {executor, a}, "projector writes run": {projector, b}} {
		short, stop := context.WithTimeout(ctx, 200*time.Millisecond)
		if _, err := try.log.Append(short, try.head, eventlogtest.Draft("forbidden", "")); !errors.Is(err, eventlog.ErrUnavailable) {
			t.Errorf("%s: %v", what, err)
		}
		stop()
		if h, err := session.Last(ctx, try.head.Subject, eventlog.LeaderOnly); err != nil || h.Seq != try.head.Seq {
			t.Errorf("%s: the head is %d, %v, want %d", what, h.Seq, err, try.head.Seq)
		}
	}

	// The signer of heads reads only the last commits of changed subjects.
	if c, err := session.Changed(ctx, eventlog.Position{Shard: 1}, 10); err != nil || len(c.Last) != 2 {
		t.Errorf("session finds %+v, %v", c, err)
	}
	if a, err = session.Append(ctx, a, eventlogtest.Draft("second", "second")); err != nil {
		t.Fatal(err)
	}
	end := b.Seq
	if b, err = executor.Append(ctx, b, eventlogtest.Draft("run 2", "run 2")); err != nil {
		t.Fatal(err)
	}
	c, err := session.Changed(ctx, eventlog.Position{Shard: 1, Seq: end}, 10)
	if want := map[string]string{life.String(): a.Hash, run.String(): b.Hash}; err != nil || !maps.Equal(c.Hash, want) {
		t.Errorf("session reads %+v, %v, want the hashes %v", c, err, want)
	}
	cancel()
	for range tail {
	}
}
