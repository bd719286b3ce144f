package harness

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/executor"
)

// SandboxImage is the container image of Docker sandboxes in tests. scripts/images builds it.
const SandboxImage = "spool/sandbox:latest"

// NeedDocker skips the test if the machine has no Docker engine or no SandboxImage. CI has both, and fails on a skip.
func NeedDocker(t testing.TB) {
	t.Helper()
	if out, err := exec.Command("docker", "image", "inspect", "--format", "{{.Id}}", SandboxImage).CombinedOutput(); err != nil {
		t.Skipf("needs a Docker engine with the image %s (scripts/engine start; scripts/images): %s", SandboxImage, strings.TrimSpace(string(out)))
	}
}

// buildEgress builds the egress proxy once for all tests of a process, and returns the path of the program.
var buildEgress = sync.OnceValues(func() (string, error) {
	return buildProgram("github.com/spoolhq/spool/services/executor/cmd/egress", "egress")
})

// startEgress starts the egress proxy as a separate process, as in an installation, and configures the executors and
// their sandboxes to use it. args are further arguments of the proxy's command line.
func (c *Cluster) startEgress(args ...string) {
	binary, err := buildEgress()
	requireNoError(c.T, err)
	// Sandboxes run as another user, and the path of a Unix socket must be short.
	dir, err := os.MkdirTemp("", "egress-")
	requireNoError(c.T, err)
	c.T.Cleanup(func() { assertNoError(c.T, os.RemoveAll(dir)) })
	requireNoError(c.T, os.Chmod(dir, 0o755)) //nolint:gosec // another user must reach the folder
	c.egressDir = dir
	sockets := filepath.Join(dir, "sandboxes")
	requireNoError(c.T, os.Mkdir(sockets, 0o755)) //nolint:gosec // another user must reach the folder
	admin := filepath.Join(dir, "admin.sock")
	routes := "hosts:\n"
	for name, url := range c.opts.EgressRoutes {
		routes += fmt.Sprintf("  - {name: %s, url: %q}\n", name, url)
	}
	hosts := filepath.Join(dir, "hosts.yaml")
	requireNoError(c.T, os.WriteFile(hosts, []byte(routes), 0o600))
	args = append(args, "--hosts", hosts, "--listen-sandboxes", filepath.Join(sockets, "egress.sock"), "--listen-admin", admin, "--data", filepath.Join(dir, "data"))
	cmd := exec.Command(binary, args...)
	cmd.Env = append(os.Environ(),
		"SPOOL_EGRESS_OPEN="+c.opts.EgressOpen,
		"NVIDIA_API_KEY="+ModelAPIKey, "SPOOL_NVIDIA_BASE_URL="+c.Model.URL()+"/v1",
	)
	if !c.opts.NVIDIAAlone {
		cmd.Env = append(cmd.Env,
			"ANTHROPIC_API_KEY="+ModelAPIKey, "SPOOL_ANTHROPIC_BASE_URL="+c.modelURL,
			"OPENAI_API_KEY="+ModelAPIKey, "SPOOL_OPENAI_BASE_URL="+c.modelURL+"/v1",
		)
	}
	cmd.Stderr = io.MultiWriter(testWriter{c.T, "egress"}, c.said)
	requireNoError(c.T, cmd.Start())
	c.T.Cleanup(func() {
		assertNoError(c.T, cmd.Process.Signal(syscall.SIGTERM))
		// The exit code does not matter: sandboxes that were cut off may have open streams.
		_ = cmd.Wait()
	})
	Eventually(c.T, "the egress proxy listens", func() bool {
		return exec.Command(binary, "health", "--listen-admin", admin).Run() == nil
	})
	c.opts.Executor.EgressSockets, c.opts.Executor.EgressAdmin = sockets, admin
}

// startDocker configures the cluster for Docker sandboxes and starts the egress proxy. When the test ends, it checks
// that no container and no volume is left.
func (c *Cluster) startDocker() {
	e := &c.opts.Executor
	e.Sandbox, e.SandboxImage = executor.ProviderDocker, SandboxImage
	if e.Engine == "" {
		e.Engine = strings.ToLower(rand.Text()[:12])
	}
	e.StopSandboxes = true
	c.opts.Session.Providers = []string{executor.ProviderDocker}
	// Tests name images that they have just built, and one that does not exist.
	e.SandboxImages, c.opts.Session.SandboxImages = []string{"spool-test/*"}, []string{"spool-test/*"}
	c.T.Cleanup(func() {
		// The volume of skills belongs to the engine, and this engine ends with the test.
		RunDocker(c.T, "volume", "rm", "--force", "spool-skills-"+c.opts.Executor.Engine)
		// The same holds for layers.
		for _, v := range strings.Fields(RunDocker(c.T, "volume", "ls", "--format", "{{.Name}}", "--filter", "name=spool-layer-"+c.opts.Executor.Engine+"-")) {
			RunDocker(c.T, "volume", "rm", "--force", v)
		}
		if left := c.describeLeftovers(); left != "" {
			c.T.Errorf("the engine still has: %s", left)
		}
	})
	c.startEgress()
}

// ModelAPIKey is the API key of the models, which only the egress proxy has. Tests check that no sandbox contains it.
const ModelAPIKey = "sk-the-real-key-of-the-models-0123456789"

// testWriter is a writer that copies the output of a process to the log of a test.
type testWriter struct {
	t    testing.TB
	name string
}

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s: %s", w.name, p)
	return len(p), nil
}

// RunDocker runs the docker command with args and returns its output. It fails the test if the command fails.
func RunDocker(t testing.TB, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("docker %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// SandboxContainer returns the id of the container of a session's present sandbox.
func (c *Cluster) SandboxContainer(session string) string {
	c.T.Helper()
	var shown struct{ CurrentSandbox struct{ SandboxID string } }
	c.Call(0, "GET", "/api/sessions/"+session, nil, &shown)
	id := RunDocker(c.T, "ps", "-a", "--no-trunc", "--format", "{{.ID}}", "--filter", "label=dev.spool.role=sandbox", "--filter", "label=dev.spool.sandbox="+shown.CurrentSandbox.SandboxID)
	if id == "" {
		c.T.Fatalf("session %s has no container: sandbox %q", session, shown.CurrentSandbox.SandboxID)
	}
	return id
}

// MCPServerContainers returns the ids of the containers of a session's MCP servers.
func (c *Cluster) MCPServerContainers(session string) []string {
	c.T.Helper()
	return strings.Fields(RunDocker(c.T, "ps", "-aq", "--no-trunc", "--filter", "label=dev.spool.role=server", "--filter", "label=dev.spool.session="+session))
}

// Containers returns the ids of all containers of this cluster on the Docker engine.
func (c *Cluster) Containers() []string {
	c.T.Helper()
	return strings.Fields(RunDocker(c.T, "ps", "-aq", "--no-trunc", "--filter", "label=dev.spool.engine="+c.opts.Executor.Engine))
}

// describeLeftovers describes the containers and volumes of this cluster that are still on the Docker engine; "" if
// there are none.
func (c *Cluster) describeLeftovers() string {
	label := "label=dev.spool.engine=" + c.opts.Executor.Engine
	containers := RunDocker(c.T, "ps", "-a", "--format", "container {{.Names}} ({{.Status}})", "--filter", label)
	left := strings.Split(containers, "\n")
	for _, v := range strings.Split(RunDocker(c.T, "volume", "ls", "--format", "{{.Name}}", "--filter", label), "\n") {
		// The runner's volume belongs to the engine and can be used by later executors with the same runner.
		if v != "" && !strings.HasPrefix(v, "spool-runner-") {
			left = append(left, "volume "+v)
		}
	}
	return strings.TrimSpace(strings.Join(left, "\n"))
}

// buildProgram builds the Go package pkg as a program with the given name, and returns its path.
func buildProgram(pkg, name string) (string, error) {
	dir, err := os.MkdirTemp("", "spool-"+name+"-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // tests also run the program as other users
		return "", err
	}
	path := filepath.Join(dir, name)
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", name, err, out)
	}
	return path, nil
}
