package natstest

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// Password is the password of every NATS user on the server of RunWithoutConsumerGate.
const Password = "pw"

// RunWithoutConsumerGate starts a NATS server with the accounts and streams of package topology, but without the
// consumer gate.
func RunWithoutConsumerGate(t testing.TB) (url string) {
	t.Helper()
	var accounts strings.Builder
	if err := topology.WriteAccounts(&accounts, "1GB", func(string) string { return Password }); err != nil {
		t.Fatal(err)
	}
	options := &server.Options{}
	if err := options.ProcessConfigString(accounts.String()); err != nil {
		t.Fatal(err)
	}
	options.Host, options.Port, options.JetStream, options.StoreDir = "127.0.0.1", server.RANDOM_PORT, true, t.TempDir()
	options.NoSigs, options.NoLog = true, true
	ns, err := server.NewServer(options)
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	if !ns.ReadyForConnections(clusterReadyTimeout) {
		t.Fatal("the server is not ready")
	}
	js, err := jetstream.New(ConnAs(t, ns.ClientURL(), topology.UserAdmin))
	if err == nil {
		err = topology.Provision(t.Context(), js, topology.ProvisionConfig{})
	}
	if err != nil {
		t.Fatal(err)
	}
	return ns.ClientURL()
}

// ConnAs opens a connection as a NATS user to a server of RunWithoutConsumerGate. The connection is closed when the
// test ends.
func ConnAs(t testing.TB, url, user string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, nats.UserInfo(user, Password), nats.CustomInboxPrefix(topology.InboxPrefix(user)), nats.Timeout(30*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}
