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

// Image is what Docker sandboxes are made from; scripts/images makes it.
const Image = "spool/sandbox:latest"

// modelKey stands where a key of the scripted model is wanted.
const modelKey = "bench"

// dockerWithin bounds one command of the engine, and the wait for the egress proxy.
const dockerWithin = time.Minute

// Docker is nil where there is an engine with Image, else why there is not.
func Docker(ctx context.Context) error {
	if _, err := docker(ctx, "image", "inspect", "--format", "{{.Id}}", Image); err != nil {
		return fmt.Errorf("no Docker engine with the image %s (scripts/engine start; scripts/images): %w", Image, err)
	}
	return nil
}

// docker runs the engine's command line and gives the lines that it prints.
func docker(ctx context.Context, args ...string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, dockerWithin)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput() //nolint:gosec // our own arguments
	if err != nil {
		return nil, fmt.Errorf("docker %s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
	}
	return strings.Fields(string(out)), nil
}

// sandboxes sets the executor up for the model and the kind of sandboxes.
func (s *System) sandboxes(ctx context.Context) error {
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
	s.closers = append(s.closers, s.clear)
	egress, err := StartEgress(ctx, s.cfg.Dir, s.cfg.ModelURL)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, egress.Close)
	e.EgressSockets, e.EgressAdmin = filepath.Dir(egress.Sandboxes), egress.Admin
	return nil
}

func (s *System) label() string { return "label=dev.spool.engine=" + s.engine }

// Containers is how many containers of this system's the engine has; 0 without Docker.
func (s *System) Containers(ctx context.Context) (int, error) {
	if s.engine == "" {
		return 0, nil
	}
	list, err := docker(ctx, "ps", "--all", "--quiet", "--filter", s.label())
	return len(list), err
}

// clear removes what the engine still has of this system. That there was
// something beside the volume with the runner is an error: Spool should have removed it.
func (s *System) clear() error {
	ctx := context.Background() // bounded by docker
	containers, err := docker(ctx, "ps", "--all", "--quiet", "--filter", s.label())
	if err != nil {
		return err
	}
	var errs []error
	if len(containers) > 0 {
		_, err := docker(ctx, append([]string{"rm", "--force"}, containers...)...)
		errs = append(errs, fmt.Errorf("left on the engine, and removed now: containers %s", strings.Join(containers, ", ")), err)
	}
	volumes, err := docker(ctx, "volume", "ls", "--quiet", "--filter", s.label())
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, v := range volumes {
		if !strings.HasPrefix(v, "spool-runner-") && !strings.HasPrefix(v, "spool-skills-") {
			errs = append(errs, fmt.Errorf("left on the engine, and removed now: volume %s", v))
		}
		_, err := docker(ctx, "volume", "rm", v)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Egress is a running egress proxy, a process of its own as it always is.
type Egress struct {
	Sandboxes, Admin string // paths of its sockets
	cmd              *exec.Cmd
	dir              string
	errs             *strings.Builder
}

// EgressUnread is a route of StartEgress to the model whose requests the proxy passes on unread.
const EgressUnread = "unread"

// StartEgress builds the proxy into dir, runs it before a model, and returns when it is well.
func StartEgress(ctx context.Context, dir, modelURL string) (*Egress, error) {
	binary, err := build(ctx, dir, "egress", "github.com/spoolhq/spool/services/executor/cmd/egress")
	if err != nil {
		return nil, err
	}
	// A socket's path is short, and sandboxes run as another user.
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
	// A signal to the terminal's programs is not for it: sandboxes need it to their end.
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := e.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(e.dir))
	}
	healthy := func() bool {
		return exec.CommandContext(ctx, binary, "health", "--listen-admin", e.Admin).Run() == nil //nolint:gosec // built here
	}
	if err := Until(ctx, dockerWithin, "the egress proxy listens", func() (bool, error) { return healthy(), nil }); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// Close ends the proxy and removes its files.
func (e *Egress) Close() error {
	err := e.cmd.Process.Signal(syscall.SIGTERM)
	if werr := e.cmd.Wait(); werr != nil {
		err = errors.Join(err, fmt.Errorf("the egress proxy ended with %w: %s", werr, e.errs))
	}
	return errors.Join(err, os.RemoveAll(e.dir))
}

// Until asks again and again until the answer is yes, and gives up after a while.
func Until(ctx context.Context, within time.Duration, what string, ok func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if yes, err := ok(); yes || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("never: %s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
}
