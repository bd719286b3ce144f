package compose

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// root is the root folder of the repository.
const root = "../.."

// project is an installation from a copy of deploy/compose.yaml, with its own name, passwords and ports.
type project struct {
	t       *testing.T
	name    string
	dir     string   // contains the folder deploy
	env     []string // environment of every command, without the settings of the machine
	rootKey string
}

// newProject builds the images and writes the settings with deploy/env. It removes everything when the test ends.
// more holds further lines of deploy/.env.
func newProject(t *testing.T, more ...string) *project {
	t.Helper()
	if _, err := exec.LookPath("docker"); err != nil {
		t.Skip("docker is not installed: run scripts/install engine")
	}
	if out, err := exec.CommandContext(t.Context(), "docker", "version").CombinedOutput(); err != nil {
		t.Skipf("no Docker engine answers: run scripts/engine start: %s", out)
	}
	p := &project{t: t, name: fmt.Sprintf("spooltest%d", rand.IntN(1e6)), dir: t.TempDir()}
	for _, e := range os.Environ() {
		if name, _, _ := strings.Cut(e, "="); !strings.HasPrefix(name, "SPOOL_") && !strings.HasSuffix(name, "_API_KEY") && !strings.HasPrefix(name, "COMPOSE_") {
			p.env = append(p.env, e)
		}
	}
	began := time.Now()
	p.runIn(root, 25*time.Minute, "scripts/images")
	t.Logf("images in %s", time.Since(began).Round(time.Second))
	p.runIn(root, time.Minute, "cp", "-R", "deploy", p.dir)
	envFile := filepath.Join(p.dir, "deploy", ".env")
	if err := os.RemoveAll(envFile); err != nil { // the file of an installation on this machine
		t.Fatal(err)
	}
	p.run(time.Minute, "deploy/env", "--mock")
	written, err := os.ReadFile(envFile)
	if err != nil {
		t.Fatal(err)
	}
	base := freeRange(t, 20)
	more = append(more, "COMPOSE_PROFILES=mock", "SPOOL_PROJECT="+p.name, "SPOOL_GC_GRACE=2s", "SPOOL_GC_INTERVAL=1s",
		fmt.Sprintf("SPOOL_GATEWAY_PORTS=%d-%d", base, base+9), fmt.Sprintf("SPOOL_GATEWAY_GRPC_PORTS=%d-%d", base+10, base+19))
	if err := os.WriteFile(envFile, []byte(string(written)+strings.Join(more, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(written)) {
		if key, ok := strings.CutPrefix(strings.TrimSpace(line), "SPOOL_ROOT_KEY="); ok {
			p.rootKey = key
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			logs, err := p.try(time.Minute, p.compose("logs", "--no-color", "--tail", "1000")...)
			t.Logf("the end of the logs (%v):\n%s", err, logs)
			p.logGoroutines("executor", "session")
		}
		if _, err := p.try(3*time.Minute, p.compose("down", "--volumes", "--remove-orphans")...); err != nil {
			t.Errorf("remove the project: %v", err)
		}
		p.sweep()
	})
	return p
}

// logGoroutines sends services the signal that makes a Go program print its goroutines, and logs those of Spool.
func (p *project) logGoroutines(services ...string) {
	if out, err := p.try(time.Minute, p.compose(append([]string{"kill", "--signal", "QUIT"}, services...)...)...); err != nil {
		p.t.Logf("no stacks: %v\n%s", err, out)
		return
	}
	for _, name := range services {
		out, err := p.try(time.Minute, p.compose("logs", "--no-color", "--no-log-prefix", "--tail", "20000", name)...)
		if err != nil {
			p.t.Logf("stacks of %s: %v", name, err)
		}
		for stack := range strings.SplitSeq(out, "\n\n") {
			if strings.HasPrefix(stack, "goroutine ") && strings.Contains(stack, "spoolhq/spool/services") {
				p.t.Logf("%s: %s", name, stack)
			}
		}
	}
}

// freeRange returns the first of n consecutive ports on which no server listens.
func freeRange(t *testing.T, n int) int {
	t.Helper()
	for range 200 {
		base := 20000 + rand.IntN(10000)
		free := true
		for port := base; port < base+n && free; port++ {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			free = err == nil
			if free {
				free = l.Close() == nil
			}
		}
		if free {
			return base
		}
	}
	t.Fatalf("found no %d consecutive free ports", n)
	return 0
}

// compose returns a command line of docker compose for this project.
func (p *project) compose(args ...string) []string {
	return append([]string{"docker", "compose", "-f", "deploy/compose.yaml"}, args...)
}

// try runs a command in the project's folder and returns its output.
func (p *project) try(within time.Duration, args ...string) (string, error) {
	return p.tryIn(p.dir, within, args...)
}

func (p *project) tryIn(dir string, within time.Duration, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.Env = dir, p.env
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(args, " "), errors.Join(err, ctx.Err()), said.String())
	}
	return out.String(), nil
}

func (p *project) run(within time.Duration, args ...string) string {
	p.t.Helper()
	return p.runIn(p.dir, within, args...)
}

func (p *project) runIn(dir string, within time.Duration, args ...string) string {
	p.t.Helper()
	out, err := p.tryIn(dir, within, args...)
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

// up starts everything, with several executors and two gateways, and waits until every container is healthy. It
// returns the gateways' addresses.
func (p *project) up() []string {
	p.t.Helper()
	began := time.Now()
	p.run(5*time.Minute, p.compose("up", "--detach", "--no-build", "--scale", "executor=3", "--scale", "gateway=2")...)
	p.healthy()
	var names []string
	for _, c := range p.containers() {
		names = append(names, c.Name)
	}
	p.t.Logf("up in %s: %s", time.Since(began).Round(time.Second), strings.Join(names, " "))
	return []string{p.url(1), p.url(2)}
}

// url returns the address of a copy of the gateway. The first copy is 1.
func (p *project) url(copy int) string {
	p.t.Helper()
	return "http://" + strings.TrimSpace(p.run(time.Minute, p.compose("port", "--index", fmt.Sprint(copy), "gateway", "7700")...))
}

// healthy waits until every container has the expected health.
func (p *project) healthy() {
	p.t.Helper()
	p.await("every container is healthy", 3*time.Minute, func() error {
		for _, c := range p.containers() {
			if want := expectedHealth(c.Service); c.Health != want {
				return fmt.Errorf("%s is %s, %q", c.Name, c.State, c.Health)
			}
		}
		return nil
	})
}

// expectedHealth returns the health that a container should have. A container that has done its work has none.
func expectedHealth(service string) string {
	if service == "certificates" || service == "provision" || service == "database" {
		return ""
	}
	return "healthy"
}

// container is an entry of `docker compose ps`.
type container struct{ ID, Name, Service, State, Health string }

func (p *project) containers() []container {
	p.t.Helper()
	var list []container
	for line := range strings.Lines(p.run(time.Minute, p.compose("ps", "--format", "json")...)) {
		var c container
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			p.t.Fatalf("docker compose ps printed %s: %v", line, err)
		}
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b container) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// await calls ok until it returns nil.
func (p *project) await(what string, within time.Duration, ok func() error) {
	p.t.Helper()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(within); ; <-tick.C {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("%s: not within %s: %v", what, within, err)
		}
	}
}

// list returns the names that a docker command prints, one on each line.
func (p *project) list(args ...string) []string {
	p.t.Helper()
	return strings.Fields(p.run(time.Minute, append([]string{"docker"}, args...)...))
}

// remaining returns everything of the project that is still on the engine, except volumes.
func (p *project) remaining() map[string][]string {
	p.t.Helper()
	ours := "label=com.docker.compose.project=" + p.name
	out := map[string][]string{}
	for what, args := range map[string][]string{
		"containers": {"ps", "--all", "--filter", ours, "--format", "{{.Names}}"},
		"networks":   {"network", "ls", "--filter", ours, "--format", "{{.Name}}"},
		"sandboxes":  {"ps", "--all", "--filter", "label=dev.spool.engine=" + p.name, "--format", "{{.Names}}"},
	} {
		if names := p.list(args...); len(names) > 0 {
			out[what] = names
		}
	}
	return out
}

// workspaces returns the volumes of sandboxes and of their users. The runner's volume belongs to the engine.
func (p *project) workspaces() []string {
	p.t.Helper()
	var names []string
	for _, role := range []string{"volume", "note", "user"} {
		names = append(names, p.list("volume", "ls", "--filter", "label=dev.spool.engine="+p.name, "--filter", "label=dev.spool.role="+role, "--format", "{{.Name}}")...)
	}
	return names
}

// volumes returns the named volumes.
func (p *project) volumes() []string {
	p.t.Helper()
	return p.list("volume", "ls", "--filter", "label=com.docker.compose.project="+p.name, "--format", "{{.Name}}")
}

// sweep removes the sandboxes that a failed test has left. The runner's volume belongs to the engine, because
// sandboxes of another project may use it.
func (p *project) sweep() {
	for _, what := range []struct{ list, remove []string }{
		{[]string{"ps", "--all", "--quiet"}, []string{"rm", "--force"}},
		{[]string{"volume", "ls", "--quiet"}, []string{"volume", "rm"}},
	} {
		names, err := p.try(time.Minute, append([]string{"docker"}, append(what.list, "--filter", "label=dev.spool.engine="+p.name)...)...)
		if err != nil {
			p.t.Errorf("sweep: %v", err)
		}
		for _, name := range strings.Fields(names) {
			_, err := p.try(time.Minute, append([]string{"docker"}, append(what.remove, name)...)...)
			if err != nil && !(strings.HasPrefix(name, "spool-runner-") && strings.Contains(err.Error(), "volume is in use")) {
				p.t.Errorf("sweep: %v", err)
			}
		}
	}
}
