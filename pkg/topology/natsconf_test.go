package topology_test

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
)

const natsConf = "../../deploy/nats.conf"

// TestNATSConf runs a server by the file that deployments use, and holds it to what the embedded one is held to.
func TestNATSConf(t *testing.T) { // not parallel: passwords come from the environment
	for _, u := range topology.Users() {
		t.Setenv(topology.PasswordVariable(u.Name), "pw")
	}
	t.Setenv(topology.StoreVariable, "1GB")
	opts, err := server.ProcessConfigFile(natsConf)
	if err != nil {
		t.Fatal(err)
	}
	if opts.StoreDir != "/data" || opts.Port != 4222 || opts.HTTPPort != 8222 || opts.JetStreamMaxStore != 1<<30 {
		t.Errorf("store %s of %d bytes, port %d, monitoring %d", opts.StoreDir, opts.JetStreamMaxStore, opts.Port, opts.HTTPPort)
	}
	opts.StoreDir, opts.Host, opts.Port, opts.HTTPPort, opts.NoSigs, opts.NoLog = t.TempDir(), "127.0.0.1", server.RANDOM_PORT, 0, true, true
	ns := running(t, opts)
	if !ns.JetStreamConfig().SyncAlways {
		t.Error("an acknowledged message may not be on the disk")
	}
	if got := ns.ClusterName(); got != "" {
		t.Errorf("it is in cluster %s", got)
	}
	nc, _ := as(t, ns, topology.UserGateway)
	if nc.MaxPayload() != natsserver.DefaultMaxPayload {
		t.Errorf("the largest message has %d bytes, the embedded server's %d", nc.MaxPayload(), natsserver.DefaultMaxPayload)
	}
	for name, who := range map[string]nats.Option{
		"nobody": nats.Name("x"), "a stranger": nats.UserInfo("x", "pw"), "a wrong password": nats.UserInfo(topology.UserAdmin, "x"),
	} {
		if nc, err := nats.Connect(ns.ClientURL(), who); err == nil {
			nc.Close()
			t.Errorf("%s may connect", name)
		}
	}
	t.Run("work", func(t *testing.T) { checkWork(t, ns) })
	t.Run("reply subjects", func(t *testing.T) { attack(t, ns, topology.UserSkills) })
	t.Run("publish", func(t *testing.T) { checkPublish(t, ns) })
	t.Run("subscribe", func(t *testing.T) { checkSubscribe(t, ns) })
}

func TestNATSConfWantsEveryPassword(t *testing.T) {
	t.Setenv(topology.StoreVariable, "1GB")
	for _, u := range topology.Users() {
		t.Setenv(topology.PasswordVariable(u.Name), "pw")
	}
	for _, u := range topology.Users() {
		t.Run(u.Name, func(t *testing.T) {
			t.Setenv(topology.PasswordVariable(u.Name), "") // put back when the test ends
			if err := os.Unsetenv(topology.PasswordVariable(u.Name)); err != nil {
				t.Fatal(err)
			}
			if _, err := server.ProcessConfigFile(natsConf); err == nil || !strings.Contains(err.Error(), topology.PasswordVariable(u.Name)) {
				t.Errorf("without the password of %s: %v", u.Name, err)
			}
		})
	}
}

func TestNATSConfIsCurrent(t *testing.T) {
	t.Parallel()
	want, err := os.ReadFile(natsConf)
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := topology.WriteNATSConf(&got); err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Error("deploy/nats.conf is not what the code says: run go generate ./topology")
	}
}
