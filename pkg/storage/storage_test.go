package storage_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestCheckReserve_RefusesPercentagesOutsideTheRange(t *testing.T) {
	t.Parallel()
	for percent, valid := range map[int]bool{0: false, 1: true, 90: true, -1: false, 91: false} {
		if err := storage.CheckReserve(percent); (err == nil) != valid {
			t.Errorf("CheckReserve(%d) = %v", percent, err)
		}
	}
}

// TestCheck_KeepsTheReserveFree tests that every service's NATS user can read the fill level, and that Check refuses
// writes into the reserve, even if the last read saw room, and accepts them again once there is room.
func TestCheck_KeepsTheReserveFree(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Accounts: true, Relaxed: true, MaxStore: natsserver.MinStoreSize})
	admin, err := srv.ConnectAs(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(admin.Close)
	js, err := jetstream.New(admin)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	watches := map[string]*storage.Watch{}
	for _, user := range []string{topology.UserGateway, topology.UserSession, topology.UserExecutor} {
		nc, err := srv.ConnectAs(user)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		own, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		watches[user] = storage.NewWatch(storage.Config{JetStream: own, Reserve: 60, Logger: natstest.Logger(t)})
		if err := watches[user].Check(t.Context(), 0); err != nil {
			t.Errorf("%s: an empty store: %v", user, err)
		}
		if room := watches[user].Room(); room.Limit != natsserver.MinStoreSize || room.Reserve != natsserver.MinStoreSize/100*60 {
			t.Errorf("%s reads %+v", user, room)
		}
	}
	empty := natstest.FillStore(t, admin, 41)
	for user, w := range watches {
		var reserved *storage.ReservedError
		if err := w.Check(t.Context(), 0); !errors.As(err, &reserved) || !w.IsLow() {
			t.Errorf("%s: a full store: %v, low %v", user, err, w.IsLow())
		}
	}
	empty()
	for user, w := range watches {
		if err := w.Check(t.Context(), 0); err != nil || w.IsLow() {
			t.Errorf("%s: a store with room again: %v, low %v", user, err, w.IsLow())
		}
		if err := w.Check(t.Context(), natsserver.MinStoreSize/2); err == nil {
			t.Errorf("%s: a write larger than the room was accepted", user)
		}
	}
}

// TestWatch_FollowsTheStore tests that IsLow follows the store without a call of Check, and that Run ends with its
// context.
func TestWatch_FollowsTheStore(t *testing.T) {
	t.Parallel()
	srv := natstest.RunWithMinStore(t)
	nc := natstest.Conn(t, srv)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	w := storage.NewWatch(storage.Config{JetStream: js, Reserve: 90, Logger: natstest.Logger(t)})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	becomes := func(low bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); w.IsLow() != low; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("low is not %v: %+v", low, w.Room())
			}
		}
	}
	empty := natstest.FillStore(t, nc, 11)
	becomes(true)
	empty()
	becomes(false)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestNilWatch_HasRoom tests that a nil Watch accepts every write.
func TestNilWatch_HasRoom(t *testing.T) {
	t.Parallel()
	var w *storage.Watch
	if err := w.Check(t.Context(), 1<<40); err != nil || w.IsLow() {
		t.Errorf("%v, low %v", err, w.IsLow())
	}
}
