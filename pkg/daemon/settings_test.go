package daemon

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/daemon/settingstest"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestEverySettingIsTested(t *testing.T) {
	t.Parallel()
	settingstest.Covered(t, Settings{}, map[string]string{
		"SPOOL_NATS_URL": "TestSettingNATS", "SPOOL_NATS_USER": "TestSettingNATS", "SPOOL_NATS_PASSWORD": "TestSettingNATS",
		"SPOOL_METRICS_LISTEN": "TestSettingMetricsListen", "SPOOL_LOG_LEVEL": "TestLogLevel",
	})
}

// TestSettingNATS: a service is at the server that is named, as the user that is named, with that one's rights, and not with another's password.
func TestSettingNATS(t *testing.T) {
	t.Parallel()
	u := topology.Users()[0]
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Users: []natsserver.User{
		{Name: u.Name, Password: "right", InboxPrefix: topology.InboxPrefix(u.Name), Publish: u.Publish, Subscribe: u.Subscribe},
	}})
	for password, in := range map[string]bool{"right": true, "wrong": false, "": false} {
		var c cli
		p := program{name: "svc", doc: "A service.", cli: &c, settings: &c.Settings, open: withoutLog}
		p.run = func(_ context.Context, env Env) error {
			err := env.NATS.FlushTimeout(2 * time.Second)
			if (err == nil) != in {
				t.Errorf("with password %q: %v", password, err)
			}
			if _, well := env.Health.Report(context.Background()); well != in {
				t.Errorf("with password %q it is ready: %v", password, well)
			}
			return nil
		}
		args := []string{"--database=x", "--nats-url=" + srv.ClientURL(), "--nats-user=" + u.Name, "--nats-password=" + password} // SPOOL_NATS_URL, SPOOL_NATS_USER, SPOOL_NATS_PASSWORD
		if code := p.main(args, io.Discard, io.Discard); code != 0 {
			t.Errorf("with password %q it ended with %d", password, code)
		}
	}
}

// TestSettingMetricsListen: SPOOL_METRICS_LISTEN is where health and metrics are, and there only.
func TestSettingMetricsListen(t *testing.T) {
	addr := settingstest.FreeAddrs(t, 1)[0]
	t.Setenv("SPOOL_METRICS_LISTEN", addr)
	code := service(t, io.Discard, func(context.Context, Env) error {
		if status, _ := get(t, addr, "/metrics"); status != 200 {
			t.Errorf("/metrics answers %d", status)
		}
		return nil
	})
	if code != 0 {
		t.Errorf("it ended with %d", code)
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		_ = c.Close()
		t.Error("it still listens")
	}
}
