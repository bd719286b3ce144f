package daemon

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/daemon/porttest"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestSettingLogKeys tests that a service signs its commits with SPOOL_LOG_KEYS. A service whose keys do not match
// those of the installation logs an error and does not run.
func TestSettingLogKeys(t *testing.T) {
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort})
	js, err := jetstream.New(natstest.Conn(t, srv))
	if err != nil {
		t.Fatal(err)
	}
	key := func(name string) string { return strings.Repeat(name, 8) }
	all := "session:" + key("session") + ",executor:" + key("executor") + ",skills:" + key("skills") + ",janitor:" + key("janitor")
	installed, err := eventlog.ParseKeys(all, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{KeyIDs: installed.KeyIDs()}); err != nil {
		t.Fatal(err)
	}
	for keys, want := range map[string]string{
		all: "", "": "are signed", "gateway:" + key("gateway"): "a role of", "session:short": "at least 32",
		strings.Replace(all, "session:", "session:"+key("another")+"+", 1): "does not know the key", "session:" + key("session"): "no key of executor",
	} {
		t.Setenv("SPOOL_LOG_KEYS", keys)
		var c struct {
			Settings
			LogSettings
		}
		ran := false
		p := serviceProgram{name: "session", doc: "A service.", cli: &c, settings: &c.Settings, open: logOpener{"session", jslog.RoleWriter, &c}.open}
		p.run = func(ctx context.Context, env Env) error {
			ran = true
			_, err := env.Log.Append(ctx, eventlog.Head{Subject: eventlogtest.SessionSubject(0, 1, "daemon")}, eventlogtest.Draft("daemon", "text"))
			return err
		}
		var said bytes.Buffer
		code := p.runMain([]string{"--nats-url=" + srv.ClientURL()}, io.Discard, &said)
		if ran != (want == "") || (code == 0) != ran || !strings.Contains(said.String(), want) {
			t.Errorf("with keys %q: ran: %v, exit code %d, output %s", keys, ran, code, said.String())
		}
	}
	s, err := js.Stream(t.Context(), topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.GetMsg(t.Context(), 1)
	if err != nil || !strings.HasPrefix(m.Header.Get(topology.HeaderSignature), "session/") {
		t.Errorf("the commit's headers are %v, %v", m.Header, err)
	}
}

// TestSettingNATS tests that a service connects to the configured server as the configured user, with the rights of
// that user, and that another password is refused.
func TestSettingNATS(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Accounts: true})
	right := srv.Password(topology.UserGateway)
	for password, in := range map[string]bool{right: true, "wrong": false, "": false} {
		var c cli
		p := serviceProgram{name: "svc", doc: "A service.", cli: &c, settings: &c.Settings, open: openNoLog}
		p.run = func(_ context.Context, env Env) error {
			err := env.NATS.FlushTimeout(2 * time.Second)
			if (err == nil) != in {
				t.Errorf("with password %q: %v", password, err)
			}
			if _, well := env.Health.RunChecks(context.Background()); well != in {
				t.Errorf("with password %q it is ready: %v", password, well)
			}
			return nil
		}
		args := []string{"--database=x", "--nats-url=" + srv.ClientURL(), "--nats-user=" + topology.UserGateway, "--nats-password=" + password} // SPOOL_NATS_URL, SPOOL_NATS_USER, SPOOL_NATS_PASSWORD
		if code := p.runMain(args, io.Discard, io.Discard); code != 0 {
			t.Errorf("with password %q the service ended with %d", password, code)
		}
	}
}

// TestSettingMetricsListen tests that health and metrics are served at the address in SPOOL_METRICS_LISTEN until the
// service ends.
func TestSettingMetricsListen(t *testing.T) {
	addr := porttest.FreeAddrs(t, 1)[0]
	t.Setenv("SPOOL_METRICS_LISTEN", addr)
	code := service(t, io.Discard, func(context.Context, Env) error {
		if status, _ := get(t, addr, "/metrics"); status != 200 {
			t.Errorf("/metrics answers %d", status)
		}
		return nil
	})
	if code != 0 {
		t.Errorf("the service ended with %d", code)
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		_ = c.Close()
		t.Error("the address still accepts connections after the end")
	}
}
