package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// buildBoxImage builds an image whose entrypoint is the reference server.
func buildBoxImage(t *testing.T) string {
	t.Helper()
	dir, image := t.TempDir(), "spool-test/server-box:latest"
	file := "FROM " + withServer(t) + "\nENV NODE_OPTIONS=--experimental-global-webcrypto\nENTRYPOINT [\"mcp-server-everything\"]\nCMD [\"stdio\"]\n"
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "docker", "build", "--quiet", "--tag", image, dir).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v: %s", image, err, out)
	}
	return image
}

// box returns the definition of the server for an agent.
func box(image string, more map[string]any) []map[string]any {
	s := map[string]any{"name": "box", "type": "docker", "image": image, "env": map[string]string{"DOOR_TOKEN": "${DOOR_TOKEN}", "GREETING": "hail ${WHOM}"}}
	for k, v := range more {
		s[k] = v
	}
	return []map[string]any{s}
}

// TestDockerServers_RunInTheirOwnContainers tests that agents call an MCP server in a container next to their
// sandbox.
func TestDockerServers_RunInTheirOwnContainers(t *testing.T) {
	image := buildBoxImage(t)
	c := newDockerCluster(t, harness.Options{Executors: 2, Executor: executor.Config{Slots: 4}, KeepLogs: true})
	apply(c, "environments", "street", map[string]any{"variables": map[string]any{
		"WHOM": map[string]any{"value": "Ada"}, "DOOR_TOKEN": map[string]any{"value": credential, "secret": true},
	}})
	agent := func(c *harness.Cluster, slug, architecture string, servers []map[string]any) {
		apply(c, "agents", slug, map[string]any{"architecture": architecture, "model": "known-model", "instructions": "You call servers of tools.", "mcpServers": servers})
	}
	t.Run("agents", func(t *testing.T) {
		for _, architecture := range []string{"claude-code", "spool"} {
			t.Run(architecture, func(t *testing.T) {
				t.Parallel()
				c := c.ForSubtest(t)
				agent(c, architecture+"-boxer", architecture, box(image, nil))
				containerTalk(t, newTalkWith(t, c, "", map[string]any{"agent": architecture + "-boxer", "environments": []string{"street"}}))
			})
		}
		t.Run("missing image", func(t *testing.T) {
			t.Parallel()
			c := c.ForSubtest(t)
			agent(c, "lost-boxer", "spool", box("spool-test/no-such-image:1", nil))
			k := newTalkWith(t, c, "", map[string]any{"agent": "lost-boxer", "environments": []string{"street"}})
			x := k.mustFail("hello", "IMAGE_NOT_FOUND", "mcpServers[0].image: server box: ")
			if len(of[events.ExecutionStarted](x)) != 0 {
				t.Error("the agent was started")
			}
		})
		t.Run("secret argument", func(t *testing.T) {
			t.Parallel()
			c := c.ForSubtest(t)
			agent(c, "loud-boxer", "spool", box(image, map[string]any{"command": []string{"stdio", "--token=${DOOR_TOKEN}"}}))
			newTalkWith(t, c, "", map[string]any{"agent": "loud-boxer", "environments": []string{"street"}}).mustFail("hello", "SECRET_EXPOSED", "mcpServers[0].command[1]: variable DOOR_TOKEN")
		})
	})
	for where, content := range c.WrittenData() {
		// The agent's transcript contains the answers of the server, and so do snapshots.
		if bytes.Contains(content, []byte(credential)) && !strings.Contains(where, "OBJ_workspaces") {
			t.Errorf("%s holds the secret", where)
		}
	}
}

// containerTalk calls the server, and inspects its container.
func containerTalk(t *testing.T, k *talk) {
	x := k.mustComplete("call the server box with heron", "Echo: heron")
	if calls := x.kind(events.KindToolUse); len(calls) != 1 || calls[0].ToolName != "mcp__box__echo" {
		t.Errorf("the tools that were used are %+v", calls)
	}
	servers := k.c.MCPServerContainers(k.session)
	if len(servers) != 1 {
		t.Fatalf("containers of servers: %q", servers)
	}
	x = k.mustComplete("show the variables of box", "hail Ada")
	for _, w := range x.events {
		if bytes.Contains(w.Data, []byte(credential)) {
			t.Errorf("%s shows the secret: %s", w.Type, w.Data)
		}
	}
	if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, `DOOR_TOKEN": "[redacted]"`) {
		t.Errorf("the server does not have its secret: %s", end.Result)
	}
	if again := k.c.MCPServerContainers(k.session); len(again) != 1 || again[0] != servers[0] {
		t.Errorf("the second turn has the containers %q, the first %q", again, servers)
	}
	if got := harness.RunDocker(t, "inspect", "-f", "{{.HostConfig.NetworkMode}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}} {{.Config.User}}", servers[0]); !ownUser.MatchString(got) {
		t.Errorf("the confinement of the container is %s", got)
	}
	if inspected := harness.RunDocker(t, append([]string{"inspect"}, k.c.Containers()...)...); strings.Contains(inspected, credential) || !strings.Contains(inspected, "mcp-serve") {
		t.Error("docker inspect shows the secret, or not the server")
	}
	noSecretArguments(t)
	// A server that ended between two turns is started again, and the warm agent reaches it.
	harness.RunDocker(t, "kill", servers[0])
	k.mustComplete("call the server box with lark", "Echo: lark")
	k.control("/api/sessions/" + k.session + "/environment/terminate")
	harness.Eventually(t, "the server's container is gone", func() bool { return len(k.c.MCPServerContainers(k.session)) == 0 })
	k.mustComplete("call the server box with swift", "Echo: swift")
}

// ownUser matches the confinement of a server's container that runs as a user of the default range.
var ownUser = regexp.MustCompile(`^none true \[ALL\] \[no-new-privileges\] ([7-9]\d{4}):([7-9]\d{4})$`)

// noSecretArguments searches the arguments of every process of the machine.
func noSecretArguments(t *testing.T) {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	joined := false
	for _, path := range list {
		raw, err := os.ReadFile(path)
		if err != nil {
			continue // the process has ended
		}
		joined = joined || bytes.Contains(raw, []byte("mcp-join"))
		if bytes.Contains(raw, []byte(credential)) {
			t.Errorf("%s shows the secret: %q", path, raw)
		}
	}
	if !joined {
		t.Error("no process of a server was found")
	}
}

// TestDockerServers_OutliveExecutors tests that a call continues when its executor is cut off and another one takes
// over.
func TestDockerServers_OutliveExecutors(t *testing.T) {
	image := buildBoxImage(t)
	c := newDockerCluster(t, harness.Options{})
	apply(c, "environments", "street", map[string]any{"variables": map[string]any{"WHOM": map[string]any{"value": "Ada"}, "DOOR_TOKEN": map[string]any{"value": credential, "secret": true}}})
	apply(c, "agents", "boxer", map[string]any{"architecture": "spool", "model": "known-model", "instructions": "You call servers of tools.", "mcpServers": box(image, nil)})
	k := newTalkWith(t, c, "", map[string]any{"agent": "boxer", "environments": []string{"street"}})
	execution := k.post("keep box busy for 12 seconds", func(w events.WireEvent) bool {
		return !(w.Type == events.BlockStart{}.EventType() && strings.Contains(string(w.Data), "tool_use"))
	})
	servers := c.MCPServerContainers(k.session)
	c.StartExecutor()
	c.KillExecutor(0)
	x := k.until(execution)
	if end := ended[events.ExecutionCompleted](x); !strings.Contains(end.Result, "Long running operation completed") {
		t.Errorf("ended with %+v", end)
	}
	if n := len(of[events.ExecutionClaimed](x)); n != 2 || len(of[events.ExecutionStarted](x)) != 1 {
		t.Errorf("%d claims: %s", n, kinds(x))
	}
	k.mustComplete("call the server box with heron", "Echo: heron")
	if again := c.MCPServerContainers(k.session); len(servers) != 1 || len(again) != 1 || again[0] != servers[0] {
		t.Errorf("containers of servers %q, before %q", again, servers)
	}
	k.control("/api/sessions/" + k.session + "/environment/terminate")
	harness.Eventually(t, "the server's container is gone", func() bool { return len(c.MCPServerContainers(k.session)) == 0 })
}
