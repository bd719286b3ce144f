package lease

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// An executor whose lease is renewed while others look for it is not overlooked: the last of an engine ends its sandboxes.
func TestOthers_SeesALeaseThatIsRenewedMeanwhile(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 1}); err != nil {
		t.Fatal(err)
	}
	open := func(id string) *Keeper {
		k := New(js, topology.Lease{Executor: id, Provider: "docker", Engine: "e", Slots: 1}, func() string { return "" }, slog.New(slog.DiscardHandler))
		if err := k.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		return k
	}
	looks := open("exe_one")
	renewed := open("exe_two")
	ctx, stop := context.WithCancel(t.Context())
	var renewing sync.WaitGroup
	renewing.Go(func() {
		for ctx.Err() == nil {
			if err := renewed.writeLease(ctx); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	for i := range 300 {
		if others, err := looks.HasOtherExecutor(t.Context()); err != nil || !others {
			t.Errorf("look %d: %v, %v", i, others, err)
			break
		}
	}
	stop()
	renewing.Wait()
}
