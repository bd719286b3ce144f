package system

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/services/executor"
)

// SandboxImage is the container image of Docker sandboxes. scripts/images builds it.
const SandboxImage = "spool/sandbox:latest"

// modelKey is the API key that agents send to the scripted model server, which accepts any key.
const modelKey = "bench"

// dockerTimeout is the time limit of one docker command, and of the wait for the egress proxy to become healthy.
const dockerTimeout = time.Minute

// CheckDocker returns nil if this machine has a Docker engine with the image SandboxImage, and otherwise an error with
// the reason.
func CheckDocker(ctx context.Context) error {
	if _, err := runDocker(ctx, "image", "inspect", "--format", "{{.Id}}", SandboxImage); err != nil {
		return fmt.Errorf("no Docker engine with the image %s (scripts/engine start; scripts/images): %w", SandboxImage, err)
	}
	return nil
}

// runDocker runs the docker command with args and returns the words of its output.
func runDocker(ctx context.Context, args ...string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, dockerTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput() //nolint:gosec // the arguments are our own
	if err != nil {
		return nil, fmt.Errorf("docker %s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
	}
	return strings.Fields(string(out)), nil
}

// configureSandboxes sets the model and the sandbox provider in the executor's configuration. With Docker sandboxes it
// starts the egress proxy.
func (s *System) configureSandboxes(ctx context.Context) error {
	e := &s.cfg.Executor
	if s.cfg.ModelURL != "" {
		e.AnthropicBaseURL, e.AnthropicKey = s.cfg.ModelURL, modelKey
		e.OpenAIBaseURL, e.OpenAIKey = s.cfg.ModelURL+"/v1", modelKey
	}
	if !s.cfg.Docker {
		return nil
	}
	s.engine = "bench" + strings.ToLower(rand.Text()[:12])
	e.Sandbox, e.SandboxImage, e.Engine = executor.ProviderDocker, SandboxImage, s.engine
	s.cfg.Session.Providers = []string{executor.ProviderDocker}
	s.closers = append(s.closers, s.removeFromEngine)
	egress, err := StartEgressProxy(ctx, s.cfg.Dir, s.cfg.ModelURL)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, egress.Close)
	e.EgressSockets, e.EgressAdmin = filepath.Dir(egress.Sandboxes), egress.Admin
	return nil
}

// engineFilter returns the filter for docker commands that matches the containers and volumes of this system.
func (s *System) engineFilter() string { return "label=dev.spool.engine=" + s.engine }

// CountContainers returns the number of containers of this system on the Docker engine, or 0 if the system does not use
// Docker.
func (s *System) CountContainers(ctx context.Context) (int, error) {
	if s.engine == "" {
		return 0, nil
	}
	list, err := runDocker(ctx, "ps", "--all", "--quiet", "--filter", s.engineFilter())
	return len(list), err
}

// removeFromEngine removes the containers and volumes of this system from the Docker engine. It returns an error if
// there are containers, or volumes other than those of the runner and of skills, because Spool should have removed
// them.
func (s *System) removeFromEngine() error {
	ctx := context.Background() // docker has its own timeout
	containers, err := runDocker(ctx, "ps", "--all", "--quiet", "--filter", s.engineFilter())
	if err != nil {
		return err
	}
	var errs []error
	if len(containers) > 0 {
		_, err := runDocker(ctx, append([]string{"rm", "--force"}, containers...)...)
		errs = append(errs, fmt.Errorf("containers were left on the engine and are removed now: %s", strings.Join(containers, ", ")), err)
	}
	volumes, err := runDocker(ctx, "volume", "ls", "--quiet", "--filter", s.engineFilter())
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, v := range volumes {
		if !strings.HasPrefix(v, "spool-runner-") && !strings.HasPrefix(v, "spool-skills-") {
			errs = append(errs, fmt.Errorf("volume was left on the engine and is removed now: %s", v))
		}
		_, err := runDocker(ctx, "volume", "rm", v)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// EgressProxy is a running egress proxy in a process of its own, as in every installation.
type EgressProxy struct {
	Sandboxes, Admin string // paths of its sockets
	cmd              *exec.Cmd
	dir              string
	errs             *strings.Builder
}

// EgressUnreadRoute is the name of the egress proxy's second route to the model. The proxy forwards requests on this
// route without reading their bodies.
const EgressUnreadRoute = "unread"

// StartEgressProxy builds the egress proxy into the folder dir, starts it in front of the model at modelURL, and
// returns when it is healthy.
func StartEgressProxy(ctx context.Context, dir, modelURL string) (*EgressProxy, error) {
	binary, err := buildPackage(ctx, dir, "egress", "github.com/spoolhq/spool/services/executor/cmd/egress")
	if err != nil {
		return nil, err
	}
	// The path of a socket has to be short, and sandboxes run as another user.
	e := &EgressProxy{errs: &strings.Builder{}}
	if e.dir, err = os.MkdirTemp("", "egress-"); err != nil {
		return nil, err
	}
	sockets := filepath.Join(e.dir, "sandboxes")
	e.Sandboxes, e.Admin = filepath.Join(sockets, "egress.sock"), filepath.Join(e.dir, "admin.sock")
	if err := errors.Join(os.Chmod(e.dir, 0o755), os.Mkdir(sockets, 0o755)); err != nil { //nolint:gosec // see above
		return nil, errors.Join(err, os.RemoveAll(e.dir))
	}
	hosts := filepath.Join(e.dir, "hosts.yaml")
	if err := os.WriteFile(hosts, []byte("hosts: [{name: "+EgressUnreadRoute+", url: "+modelURL+"}]\n"), 0o600); err != nil {
		return nil, errors.Join(err, os.RemoveAll(e.dir))
	}
	e.cmd = exec.Command(binary, "--listen-sandboxes", e.Sandboxes, "--listen-admin", e.Admin, "--data", filepath.Join(e.dir, "data"), "--hosts", hosts) //nolint:gosec // built here
	e.cmd.Env = append(os.Environ(), "SPOOL_LOG_LEVEL=warn", "SPOOL_ANTHROPIC_BASE_URL="+modelURL, "SPOOL_OPENAI_BASE_URL="+modelURL+"/v1",
		"ANTHROPIC_API_KEY="+modelKey, "OPENAI_API_KEY="+modelKey)
	e.cmd.Stderr = e.errs
	// A signal from the terminal must not end the proxy, because sandboxes need it until they have ended.
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := e.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(e.dir))
	}
	healthy := func() bool {
		return exec.CommandContext(ctx, binary, "health", "--listen-admin", e.Admin).Run() == nil //nolint:gosec // built here
	}
	if err := PollUntil(ctx, dockerTimeout, "the egress proxy is healthy", func() (bool, error) { return healthy(), nil }); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// Close ends the process of the proxy and removes its files.
func (e *EgressProxy) Close() error {
	err := e.cmd.Process.Signal(syscall.SIGTERM)
	if werr := e.cmd.Wait(); werr != nil {
		err = errors.Join(err, fmt.Errorf("egress proxy: %w: %s", werr, e.errs))
	}
	return errors.Join(err, os.RemoveAll(e.dir))
}

// PollUntil calls condition every 20 ms until it returns true or an error, or until the timeout has passed. The error
// of a timeout contains what, a description of the condition.
func PollUntil(ctx context.Context, timeout time.Duration, what string, condition func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := condition(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
}
