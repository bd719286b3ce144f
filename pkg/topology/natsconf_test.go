package topology_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
)

const natsConf = "../../deploy/nats.conf"

// TestNATSConf_PassesTheTestsOfTheEmbeddedServer runs a server with the configuration file of deployments, and runs the tests of the embedded server
// against it.
func TestNATSConf_PassesTheTestsOfTheEmbeddedServer(t *testing.T) { // not parallel: passwords come from the environment
	for _, u := range topology.Users() {
		t.Setenv(topology.PasswordVariable(u.Name), "pw")
	}
	t.Setenv(topology.StoreLimitVariable, "1GB")
	ca := setCertificate(t)
	opts, err := server.ProcessConfigFile(natsConf)
	if err != nil {
		t.Fatal(err)
	}
	if opts.StoreDir != "/data" || opts.Port != 4222 || opts.HTTPPort != 8222 || opts.HTTPHost != "127.0.0.1" || opts.JetStreamMaxStore != 1<<30 {
		t.Errorf("store %s of %d bytes, port %d, monitoring %s:%d", opts.StoreDir, opts.JetStreamMaxStore, opts.Port, opts.HTTPHost, opts.HTTPPort)
	}
	if opts.AllowNonTLS || opts.TLSConfig == nil || opts.TLSConfig.MinVersion != tls.VersionTLS12 {
		t.Errorf("TLS is %+v, optional: %v", opts.TLSConfig, opts.AllowNonTLS)
	}
	opts.StoreDir, opts.Host, opts.Port, opts.HTTPPort, opts.NoSigs, opts.NoLog = t.TempDir(), "127.0.0.1", server.RANDOM_PORT, 0, true, true
	checkTLS(t, opts.Clone(), ca)
	opts.TLS, opts.TLSConfig = false, nil // other tests cover TLS; the rest does not depend on it
	ns := runServer(t, opts)
	if !ns.JetStreamConfig().SyncAlways {
		t.Error("an acknowledged message may not be on the disk")
	}
	if got := ns.ClusterName(); got != "" {
		t.Errorf("the server is in cluster %s", got)
	}
	nc, _ := connectAs(t, ns, topology.UserGateway)
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

// setCertificate sets the variables for the server's certificate, and returns the file of its authority.
func setCertificate(t *testing.T) (caFile string) {
	t.Helper()
	dir := t.TempDir()
	caFile = filepath.Join(dir, "ca.pem")
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	if err == nil {
		err = authority.WriteTrustFile(caFile)
	}
	if err == nil {
		_, err = authority.Issue(dir, []string{"127.0.0.1"})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(topology.TLSCertificateVariable, filepath.Join(dir, certificate.CertificateFile))
	t.Setenv(topology.TLSKeyVariable, filepath.Join(dir, certificate.KeyFile))
	return caFile
}

// checkTLS runs the server with its certificate, and checks that a client without TLS is refused even with a valid
// password.
func checkTLS(t *testing.T, opts *server.Options, caFile string) {
	t.Helper()
	opts.StoreDir = t.TempDir()
	ns := runServer(t, opts)
	nc, err := nats.Connect(ns.ClientURL(), nats.UserInfo(topology.UserAdmin, "pw"), nats.RootCAs(caFile))
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
	c, err := net.Dial("tcp", ns.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // the client only reads
	if _, err := io.WriteString(c, `CONNECT {"user":"admin","pass":"pw"}`+"\r\nPING\r\n"); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(c)
	if strings.Contains(string(answer), "PONG") || !strings.Contains(string(answer), `"tls_required":true`) {
		t.Errorf("without TLS the server answered %s, %v", answer, err)
	}
}

func TestNATSConf_RequiresEveryPassword(t *testing.T) {
	t.Setenv(topology.StoreLimitVariable, "1GB")
	for _, u := range topology.Users() {
		t.Setenv(topology.PasswordVariable(u.Name), "pw")
	}
	setCertificate(t)
	for _, u := range topology.Users() {
		t.Run(u.Name, func(t *testing.T) {
			t.Setenv(topology.PasswordVariable(u.Name), "") // Setenv restores the value when the test ends
			if err := os.Unsetenv(topology.PasswordVariable(u.Name)); err != nil {
				t.Fatal(err)
			}
			if _, err := server.ProcessConfigFile(natsConf); err == nil || !strings.Contains(err.Error(), topology.PasswordVariable(u.Name)) {
				t.Errorf("without the password of %s: %v", u.Name, err)
			}
		})
	}
}

func TestNATSConf_IsCurrent(t *testing.T) {
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
		t.Error("deploy/nats.conf is out of date: run go generate ./topology")
	}
}
