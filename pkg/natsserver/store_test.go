package natsserver_test

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestMaxStore_LoweredBelowWhatIsUsed tests that a server whose limit was lowered starts with everything that it
// stores, refuses writes, and accepts them again after enough was deleted.
func TestMaxStore_LoweredBelowWhatIsUsed(t *testing.T) {
	t.Parallel()
	for name, accounts := range map[string]bool{"with accounts": true, "without accounts": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			start := func(limit int64) (*natsserver.Server, jetstream.JetStream) {
				t.Helper()
				srv, err := natsserver.Start(natsserver.Config{StoreDir: dir, Accounts: accounts, Relaxed: true, MaxStore: limit, Logger: natstest.Logger(t)})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(srv.Shutdown)
				connect := srv.Connect
				if accounts {
					connect = func(opts ...nats.Option) (*nats.Conn, error) { return srv.ConnectAs(topology.UserAdmin, opts...) }
				}
				nc, err := connect()
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(nc.Close)
				js, err := jetstream.New(nc)
				if err != nil {
					t.Fatal(err)
				}
				return srv, js
			}
			const subject = "$O." + topology.BucketWorkspaces + ".C.much"
			put := func(js jetstream.JetStream) error {
				_, err := js.Publish(t.Context(), subject, make([]byte, 1<<20))
				return err
			}
			srv, js := start(natsserver.MinStoreSize + 100<<20)
			if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{}); err != nil {
				t.Fatal(err)
			}
			for range (natsserver.MinStoreSize + 50<<20) >> 20 {
				if err := put(js); err != nil {
					t.Fatal(err)
				}
			}
			srv.Shutdown()
			_, js = start(natsserver.MinStoreSize)
			if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{}); err != nil {
				t.Errorf("provision a store over its limit: %v", err)
			}
			s, err := js.Stream(t.Context(), "OBJ_"+topology.BucketWorkspaces)
			if err != nil {
				t.Fatal(err)
			}
			if n := s.CachedInfo().State.Msgs; n != (natsserver.MinStoreSize+50<<20)>>20 {
				t.Errorf("%d messages are left", n)
			}
			if err := put(js); err == nil || !strings.Contains(err.Error(), "resource") {
				t.Errorf("a write over the limit: %v", err)
			}
			if err := s.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := put(js); err != nil {
				t.Errorf("a write once there is room: %v", err)
			}
		})
	}
}

// TestMaxStore_OutOfRange tests that a limit that is too small for the streams is refused.
func TestMaxStore_OutOfRange(t *testing.T) {
	t.Parallel()
	for _, limit := range []int64{-1, 1, natsserver.MinStoreSize - 1} {
		if _, err := natsserver.Start(natsserver.Config{StoreDir: t.TempDir(), MaxStore: limit}); err == nil || !strings.Contains(err.Error(), "MaxStore") {
			t.Errorf("%d: %v", limit, err)
		}
	}
}
