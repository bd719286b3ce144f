package skills_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
)

// TestProcess_ServesAndLogsJSON tests that the process reports when it is ready, executes a push, and writes log
// lines as JSON that name the command, its tenant and the skill.
func TestProcess_ServesAndLogsJSON(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "skills")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/skills").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b := &fixture{t: t, srv: natstest.RunConfig(t, natsserver.Config{Relaxed: true, Port: natsserver.RandomPort})}
	js, err := jetstream.New(natstest.Conn(t, b.srv))
	must(t, err)
	b.admin, b.gateway = js, js
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{}))
	b.uploads, err = natsstore.Open(t.Context(), js, topology.BucketSkills)
	must(t, err)
	env := append(os.Environ(), "SPOOL_NATS_URL="+b.srv.ClientURL(), "SPOOL_METRICS_LISTEN="+free(t), "SPOOL_LOG_LEVEL=debug", "SPOOL_SKILL_SCRATCH="+t.TempDir())
	var log bytes.Buffer
	serve := exec.CommandContext(t.Context(), binary)
	serve.Stderr, serve.Env = &log, env
	must(t, serve.Start())
	for deadline := time.Now().Add(30 * time.Second); ; {
		health := exec.CommandContext(t.Context(), binary, "health")
		health.Env = env
		out, err := health.CombinedOutput()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("not ready: %s", out)
		}
	}
	cmd := id(events.KindCommand)
	a := b.ok(b.pushAs(cmd, version(1), func(p *command.PushSkill) { p.Tags = []string{"v1"} }))
	must(t, serve.Process.Signal(os.Interrupt))
	if err := serve.Wait(); err != nil {
		t.Errorf("the process ended with %v", err)
	}
	about := 0
	for lines := bufio.NewScanner(&log); lines.Scan(); {
		var line struct{ Time, Level, Msg, Service, Command, Tenant, Skill, Outcome string }
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.Service != "skills" || line.Time == "" || line.Msg == "" {
			t.Errorf("%s: %v", lines.Text(), err)
		}
		if line.Command == cmd && line.Tenant == tenant && line.Skill == a.Ref.String() && line.Outcome == "ok" {
			about++
		}
	}
	if about != 1 {
		t.Errorf("%d lines about the command", about)
	}
}

// free returns an address of loopback on which no server listens.
func free(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close() //nolint:errcheck // the listener accepted no connection
	return l.Addr().String()
}
