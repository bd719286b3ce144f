package executor_test

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
)

// dockerCLI runs the docker command and returns its output.
func dockerCLI(t *testing.T, stdin []byte, args ...string) string {
	t.Helper()
	cmd := exec.Command("docker", args...) //nolint:gosec // the test's own arguments
	cmd.Stdin = bytes.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("docker %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// static builds a program for containers.
func static(t *testing.T, dir, pkg string) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", path, pkg) //nolint:gosec // the test's own arguments
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v: %s", pkg, err, out)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// onEngine returns settings with a new engine name and an image of the egress proxy.
func onEngine(t *testing.T) func(*executor.Config) {
	t.Helper()
	if out, err := exec.Command("docker", "version").CombinedOutput(); err != nil {
		t.Skipf("no Docker engine answers (scripts/engine start brings one up): %v: %s", err, out)
	}
	name := "test-" + strings.ToLower(rand.Text()[:12])
	runner := filepath.Join(t.TempDir(), "runner")
	if err := os.WriteFile(runner, append(static(t, filepath.Join("..", "..", "cmd"), "./runner"), name...), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	program := static(t, ".", "./cmd/egress")
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	err := w.WriteHeader(&tar.Header{Name: "egress", Mode: 0o555, Size: int64(len(program)), Typeflag: tar.TypeReg})
	_, werr := w.Write(program)
	if err := errors.Join(err, werr, w.Close()); err != nil {
		t.Fatal(err)
	}
	image := "spool-test/egress-" + name
	dockerCLI(t, layer.Bytes(), "import", "--change", `ENTRYPOINT ["/egress"]`, "-", image)
	t.Cleanup(func() {
		label := "label=dev.spool.engine=" + name
		for _, what := range []struct{ list, remove []string }{
			{[]string{"ps", "-aq", "--filter", label}, []string{"rm", "-f"}},
			{[]string{"volume", "ls", "-q", "--filter", label}, []string{"volume", "rm"}},
		} {
			if ids := strings.Fields(dockerCLI(t, nil, what.list...)); len(ids) > 0 {
				dockerCLI(t, nil, append(what.remove, ids...)...)
			}
		}
		dockerCLI(t, nil, "rmi", image)
	})
	return func(c *executor.Config) {
		c.Sandbox, c.Engine, c.Runner, c.SandboxImage = executor.ProviderDocker, name, runner, "debian:bookworm-slim"
		c.EgressImage, c.EgressNetwork = image, "host" // not every machine that runs the tests has a bridge
		c.StopSandboxes = true
	}
}

// Two executors start one egress proxy on their engine. An agent in a container without a network reaches its model
// through it, and the proxy outlives the executors.
func TestEgress_ProxyOnTheEngineServesModels(t *testing.T) {
	t.Parallel()
	engine := onEngine(t)
	b := newLocalBench(t, program)
	local := b.local
	b.local = func(c *executor.Config) {
		local(c)
		engine(c)
	}
	var cfg executor.Config
	engine(&cfg)
	copies := []*runningExecutor{b.run(), b.run()}
	proxies := func() string {
		return dockerCLI(t, nil, "ps", "--format", "{{.Names}}", "--filter", "label=dev.spool.role=egress", "--filter", "label=dev.spool.engine="+cfg.Engine)
	}
	if got := proxies(); got != "spool-egress-"+cfg.Engine {
		t.Fatalf("proxies: %q", got)
	}
	if got := dockerCLI(t, nil, "inspect", "--format", "{{.HostConfig.NetworkMode}}", "spool-egress-"+cfg.Engine); got != cfg.EgressNetwork {
		t.Errorf("its network is %q", got)
	}
	s := b.session(func(c *events.SessionCreated) { c.Architecture, c.Provider = "spool", executor.ProviderDocker })
	first := s.post("write a program")
	s.jobAt(topology.ProviderJobSubject(executor.ProviderDocker))
	if l := s.untilEnded(first); l.Run.Phase != run.Completed {
		t.Fatalf("end: %+v\n%s", s.last(first), types(s.events()))
	}
	if done, _ := s.last(first).(events.ExecutionCompleted); !strings.Contains(done.Result, "hello from hello.sh") {
		t.Errorf("result %q", done.Result)
	}
	// A process that outlives the turn in the sandbox calls the model. The proxy refuses that, because no execution
	// would be charged.
	ran := strings.Fields(dockerCLI(t, nil, "ps", "-q", "--filter", "label=dev.spool.sandbox="+s.load().Run.Sandbox.ID, "--filter", "label=dev.spool.role=sandbox"))
	if len(ran) != 1 {
		t.Fatalf("containers of the sandbox: %q", ran)
	}
	const body = `{"model":"m","messages":[{"role":"user","content":"go on"}]}`
	address, port, _ := strings.Cut(runner.EgressAddress, ":")
	answer := dockerCLI(t, nil, "exec", ran[0], "bash", "-c", fmt.Sprintf(
		`exec 3<>/dev/tcp/%s/%s && printf 'POST /%s/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%%s' '%s' >&3 && timeout 60 cat <&3`,
		address, port, runner.EgressRouteOpenAI, len(body), body))
	if !strings.Contains(answer, "403 Forbidden") || !strings.Contains(answer, "NO_EXECUTION") {
		t.Errorf("after the turn the model answers %s", answer)
	}
	called := 0
	for _, e := range s.events() {
		if d, ok := e.Data.(events.ModelCalled); ok && d.Status == 200 {
			called++
		}
		if strings.Contains(fmt.Sprintf("%+v", e), "test-key-of-the-model") {
			t.Errorf("the model's key is in the log: %s", e.Type())
		}
	}
	if called < 2 { // the line of the last call may come with the next turn
		t.Errorf("%d calls of the model are in the log, want 2 or 3: %s", called, types(s.events()))
	}
	for _, c := range copies {
		if err := c.stop(); err != nil {
			t.Error(err)
		}
	}
	if got := proxies(); got != "spool-egress-"+cfg.Engine {
		t.Errorf("after the executors: %q", got)
	}
	s.check()
}

// An executor whose engine does not answer takes jobs, which wait for the engine.
func TestEgress_JobsWaitForTheEngine(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, program)
	local := b.local
	b.local = func(c *executor.Config) {
		local(c)
		c.Sandbox, c.Engine, c.EgressImage = executor.ProviderDocker, "nowhere", "spool/egress"
		c.DockerHost = "unix://" + filepath.Join(t.TempDir(), "none.sock")
	}
	b.run()
}
