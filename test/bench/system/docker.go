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

// Image is the image of Docker sandboxes. scripts/images builds it.
const Image = "spool/sandbox:latest"

// modelKey is the API key of the scripted model, which accepts any key.
const modelKey = "bench"

// dockerTimeout limits one command of the engine, and the wait for the egress proxy.
const dockerTimeout = time.Minute

// Docker returns nil if there is a Docker engine that has Image, and otherwise the reason why not.
func Docker(ctx context.Context) error {
	if _, err := docker(ctx, "image", "inspect", "--format", "{{.Id}}", Image); err != nil {
		return fmt.Errorf("no Docker engine with the image %s (scripts/engine start; scripts/images): %w", Image, err)
	}
	return nil
}

// docker runs the docker CLI and returns the words that it prints.
func docker(ctx context.Context, args ...string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, dockerTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput() //nolint:gosec // the arguments are our own
	if err != nil {
		return nil, fmt.Errorf("docker %s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
	}
	return strings.Fields(string(out)), nil
}

// configureSandboxes configures the executor for the model and the sandbox provider.
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
	e.Sandbox, e.SandboxImage, e.Engine = executor.Docker, Image, s.engine
	s.cfg.Session.Providers = []string{executor.Docker}
	s.closers = append(s.closers, s.removeFromEngine)
	egress, err := StartEgress(ctx, s.cfg.Dir, s.cfg.ModelURL)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, egress.Close)
	e.EgressSockets, e.EgressAdmin = filepath.Dir(egress.Sandboxes), egress.Admin
	return nil
}

func (s *System) label() string { return "label=dev.spool.engine=" + s.engine }

// Containers returns the number of containers of this system on the engine, or 0 without Docker.
func (s *System) Containers(ctx context.Context) (int, error) {
	if s.engine == "" {
		return 0, nil
	}
	list, err := docker(ctx, "ps", "--all", "--quiet", "--filter", s.label())
	return len(list), err
}

// removeFromEngine removes the containers and volumes of this system from the engine. Containers, and volumes other than
// those of the runner and of skills, are an error, because Spool should have removed them.
func (s *System) removeFromEngine() error {
	ctx := context.Background() // docker has its own timeout
	containers, err := docker(ctx, "ps", "--all", "--quiet", "--filter", s.label())
	if err != nil {
		return err
	}
	var errs []error
	if len(containers) > 0 {
		_, err := docker(ctx, append([]string{"rm", "--force"}, containers...)...)
		errs = append(errs, fmt.Errorf("containers were left on the engine and are removed now: %s", strings.Join(containers, ", ")), err)
	}
	volumes, err := docker(ctx, "volume", "ls", "--quiet", "--filter", s.label())
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, v := range volumes {
		if !strings.HasPrefix(v, "spool-runner-") && !strings.HasPrefix(v, "spool-skills-") {
			errs = append(errs, fmt.Errorf("volume was left on the engine and is removed now: %s", v))
		}
		_, err := docker(ctx, "volume", "rm", v)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Egress is a running egress proxy in a process of its own, as in every installation.
type Egress struct {
	Sandboxes, Admin string // paths of its sockets
	cmd              *exec.Cmd
	dir              string
	errs             *strings.Builder
}

// EgressUnread is the name of a second route to the model, whose requests the proxy forwards without reading their bodies.
const EgressUnread = "unread"

// StartEgress builds the proxy into dir, starts it in front of a model, and returns when it is healthy.
func StartEgress(ctx context.Context, dir, modelURL string) (*Egress, error) {
	binary, err := build(ctx, dir, "egress", "github.com/spoolhq/spool/services/executor/cmd/egress")
	if err != nil {
		return nil, err
	}
	// The path of a socket has to be short, and sandboxes run as another user.
	e := &Egress{errs: &strings.Builder{}}
	if e.dir, err = os.MkdirTemp("", "egress-"); err != nil {
		return nil, err
	}
	sockets := filepath.Join(e.dir, "sandboxes")
	e.Sandboxes, e.Admin = filepath.Join(sockets, "egress.sock"), filepath.Join(e.dir, "admin.sock")
	if err := errors.Join(os.Chmod(e.dir, 0o755), os.Mkdir(sockets, 0o755)); err != nil { //nolint:gosec // see above
		return nil, errors.Join(err, os.RemoveAll(e.dir))
	}
	hosts := filepath.Join(e.dir, "hosts.yaml")
	if err := os.WriteFile(hosts, []byte("hosts: [{name: "+EgressUnread+", url: "+modelURL+"}]\n"), 0o600); err != nil {
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
	if err := Until(ctx, dockerTimeout, "the egress proxy is healthy", func() (bool, error) { return healthy(), nil }); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// Close ends the proxy and removes its files.
func (e *Egress) Close() error {
	err := e.cmd.Process.Signal(syscall.SIGTERM)
	if werr := e.cmd.Wait(); werr != nil {
		err = errors.Join(err, fmt.Errorf("egress proxy: %w: %s", werr, e.errs))
	}
	return errors.Join(err, os.RemoveAll(e.dir))
}

// Until calls condition every 20 ms until it returns true or an error, or until the timeout is over. The error of a
// timeout contains what, which names the condition.
func Until(ctx context.Context, timeout time.Duration, what string, condition func() (bool, error)) error {
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
