package local

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/command"
)

// TestConfig_ReadsEnvironmentAndOptions tests that settings come from the environment, and that options take precedence.
func TestConfig_ReadsEnvironmentAndOptions(t *testing.T) {
	t.Setenv("SPOOL_IDLE_TIMEOUT", "7m")
	t.Setenv("SPOOL_SLOTS", "3")
	t.Setenv("SPOOL_LISTEN", "127.0.0.1:1")
	t.Setenv("SPOOL_AUTH", "keys")
	t.Setenv("SPOOL_DATABASE_URL", "postgres://host/name")
	t.Setenv("SPOOL_BATCH_COMMITS", "9")
	c, err := stackConfig(command.StackOptions{DataDir: "/d", Listen: "127.0.0.1:2", Sandbox: "local", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if c.Session.IdleTimeout != 7*time.Minute || c.Executor.Slots != 3 || c.Gateway.Listen != "127.0.0.1:2" || c.Gateway.Auth != "keys" ||
		c.DatabaseURL != "postgres://host/name" || c.Projector.BatchCommits != 9 || c.Executor.DataDir != "/d/executor" || c.Session.Providers[0] != "local" {
		t.Errorf("got %+v", c)
	}
	if c, err = stackConfig(command.StackOptions{DataDir: "/d", Auth: "off"}); err != nil || c.Gateway.Auth != "off" {
		t.Errorf("auth %q %v", c.Gateway.Auth, err)
	}
	// Sessions use the provider of the only executor, whether a variable or an option sets it.
	if c, err = stackConfig(command.StackOptions{DataDir: "/d", Sandbox: "docker"}); err != nil || c.Executor.Sandbox != "docker" || c.Session.Providers[0] != "docker" {
		t.Errorf("sandbox %q for %v, %v", c.Executor.Sandbox, c.Session.Providers, err)
	}
	t.Setenv("SPOOL_SANDBOX", "docker")
	if c, err = stackConfig(command.StackOptions{DataDir: "/d"}); err != nil || c.Executor.Sandbox != "docker" || c.Session.Providers[0] != "docker" {
		t.Errorf("sandbox %q for %v, %v", c.Executor.Sandbox, c.Session.Providers, err)
	}
	t.Setenv("SPOOL_SLOTS", "many")
	if _, err := stackConfig(command.StackOptions{DataDir: "/d"}); err == nil || !strings.Contains(err.Error(), "settings of the executor") {
		t.Errorf("a wrong setting: %v", err)
	}
}

// TestConfig_AllowsHostPathsOnLoopbackOnly tests that sessions may work in every folder except Spool's own on loopback,
// and in none on other addresses or if the setting is none.
func TestConfig_AllowsHostPathsOnLoopbackOnly(t *testing.T) {
	for _, c := range []struct {
		listen, setting, want string
	}{
		{"127.0.0.1:0", "", "[/]"}, {"localhost:7700", "", "[/]"}, {"[::1]:1", "", "[/]"}, {"0.0.0.0:1", "", "[]"}, {"10.0.0.1:1", "", "[]"}, {":1", "", "[]"},
		{"127.0.0.1:0", "none", "[none]"}, {"127.0.0.1:0", "/srv,/home", "[/srv /home]"}, {"0.0.0.0:1", "/srv", "[/srv]"},
	} {
		t.Setenv("SPOOL_HOST_PATHS", c.setting)
		got, err := stackConfig(command.StackOptions{DataDir: "/d", Listen: c.listen, Auth: "keys"})
		if err != nil || fmt.Sprint(got.Session.HostPaths) != c.want || fmt.Sprint(got.Executor.HostPaths) != c.want ||
			fmt.Sprint(got.Session.Private, got.Executor.Private) != "[/d] [/d]" {
			t.Errorf("%+v: session %q, executor %q, private %q, %v", c, got.Session.HostPaths, got.Executor.HostPaths, got.Executor.Private, err)
		}
	}
}

func TestMachine_ReportsThatNoStackRuns(t *testing.T) {
	t.Parallel()
	if _, ok, err := (Machine{}).Find(t.TempDir()); ok || err != nil {
		t.Errorf("found %t, %v", ok, err)
	}
	missing := t.TempDir() + "/none"
	if _, err := (Machine{}).Open(t.Context(), command.StackOptions{DataDir: missing}); err == nil || !strings.Contains(err.Error(), "folder "+missing+" does not exist") {
		t.Errorf("open: %v", err)
	}
}
