package session_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestProcess_LogsAtTheConfiguredLevel tests that the process writes log lines of SPOOL_LOG_LEVEL and above, as JSON
// that names the service and the session and execution of the line.
func TestProcess_LogsAtTheConfiguredLevel(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "session")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/session").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for level, want := range map[string]map[string]bool{
		"":      {"INFO": true},
		"debug": {"INFO": true, "DEBUG": true},
		"warn":  {},
	} {
		t.Run("level "+level, func(t *testing.T) {
			t.Parallel()
			srv := natstest.RunConfig(t, natsserver.Config{Relaxed: true, Port: natsserver.RandomPort})
			nc := natstest.Conn(t, srv)
			js, err := jetstream.New(nc)
			must(t, err)
			must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{}))
			s := &stack{t: t, srv: srv, nc: nc, js: js, ses: eventlog.Sessions{}}
			var log bytes.Buffer
			serve := exec.CommandContext(t.Context(), binary, "--metrics-listen=127.0.0.1:0")
			serve.Stderr = &log
			serve.Env = append(os.Environ(), "SPOOL_NATS_URL="+srv.ClientURL(), "SPOOL_COMMAND_WORKERS=2")
			if level != "" {
				serve.Env = append(serve.Env, "SPOOL_LOG_LEVEL="+level)
			}
			must(t, serve.Start())
			sid := s.create(events.Options{})
			exe := id(events.KindExecution)
			s.send(command.TypePostMessage, sid, exe, command.PostMessage{Content: "hello"})
			must(t, serve.Process.Signal(os.Interrupt))
			if err := serve.Wait(); err != nil {
				t.Errorf("the process ended with %v", err)
			}
			got, about := map[string]bool{}, 0
			for lines := bufio.NewScanner(&log); lines.Scan(); {
				var line struct{ Time, Level, Msg, Service, Session, Execution string }
				if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.Service != "session" || line.Time == "" || line.Msg == "" {
					t.Errorf("%s: %v", lines.Text(), err)
				}
				got[line.Level] = true
				if line.Session == sid && line.Execution == exe {
					about++
				}
			}
			for _, l := range []string{"DEBUG", "INFO"} {
				if got[l] != want[l] {
					t.Errorf("lines of level %s: %v, want %v", l, got[l], want[l])
				}
			}
			if (about > 0) != want["DEBUG"] {
				t.Errorf("%d lines about the execution", about)
			}
		})
	}
}
