package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spoolhq/spool/services/executor"
)

const (
	// maxSocketPath is the maximum length in bytes of the path of a Unix socket.
	maxSocketPath = 100
	// egressStartTimeout is the maximum time that the egress proxy may take to listen.
	egressStartTimeout = 10 * time.Second
	// egressStopTimeout is the maximum time that the egress proxy may take to end after a request to stop.
	egressStopTimeout = 5 * time.Second
)

// startEgress starts the egress proxy for Docker and Modal sandboxes as a separate process, which has the models' keys.
// For Docker, the proxy's sockets are in a folder that the engine mounts, so the engine must be on this machine. If
// EgressImage is set, the executor starts the proxy on the engine instead. Modal sandboxes connect to the proxy over
// TLS; the proxy reads the settings for this, such as SPOOL_EGRESS_LISTEN_TLS, from its environment.
func (s *Stack) startEgress(ctx, run context.Context) error {
	cfg := &s.cfg.Executor
	if cfg.Sandbox != executor.ProviderDocker && cfg.Sandbox != executor.ProviderModal || cfg.EgressAdmin != "" || cfg.EgressImage != "" {
		return nil
	}
	if cfg.Sandbox == executor.ProviderModal {
		if err := executor.CheckEgressListener(os.Getenv); err != nil {
			return err
		}
	}
	binary, err := findProgram("egress")
	if err != nil {
		return err
	}
	dir, err := s.createEgressFolder()
	if err != nil {
		return fmt.Errorf("egress: %w", err)
	}
	sockets, admin := filepath.Join(dir, "sandboxes"), filepath.Join(dir, "admin.sock")
	output := &outputTail{}
	cmd := exec.Command(binary, //nolint:gosec // Spool's own program
		"--listen-sandboxes", filepath.Join(sockets, "egress.sock"), "--listen-admin", admin,
		"--data", filepath.Join(s.cfg.DataDir, "egress"), "--drain", "1s")
	cmd.Env = append(os.Environ(),
		"ANTHROPIC_API_KEY="+cfg.AnthropicKey, "SPOOL_ANTHROPIC_BASE_URL="+cfg.AnthropicBaseURL,
		"OPENAI_API_KEY="+cfg.OpenAIKey, "SPOOL_OPENAI_BASE_URL="+cfg.OpenAIBaseURL,
		"NVIDIA_API_KEY="+cfg.NVIDIAKey, "SPOOL_NVIDIA_BASE_URL="+cfg.NVIDIABaseURL,
	)
	cmd.Stderr = output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal must not reach the proxy
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", binary, err)
	}
	s.proxy = &egressProcess{process: cmd.Process, output: output, dir: dir, exited: make(chan struct{})}
	go func() {
		s.proxy.err = cmd.Wait()
		close(s.proxy.exited)
	}()
	s.group.Go(func() error { return s.proxy.waitForExit(run) })
	if err := waitForSocket(ctx, admin, s.proxy.exited); err != nil {
		select {
		case <-s.proxy.exited:
			return s.proxy.exitError()
		default:
			return fmt.Errorf("the egress proxy does not listen: %w", err)
		}
	}
	cfg.EgressAdmin = admin
	if cfg.Sandbox == executor.ProviderDocker {
		cfg.EgressSockets = sockets
	}
	return nil
}

// outputTail is a writer that keeps the last bytes that a process has printed.
type outputTail struct {
	mu  sync.Mutex
	end []byte
}

func (w *outputTail) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end = append(w.end, p...)
	w.end = bytes.Clone(w.end[max(0, len(w.end)-4<<10):])
	return len(p), nil
}

// lastLine returns the last line that the process has printed.
func (w *outputTail) lastLine() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := strings.TrimSpace(string(w.end))
	return all[strings.LastIndexByte(all, '\n')+1:]
}

// egressProcess is the process of the egress proxy that the stack has started.
type egressProcess struct {
	process *os.Process
	output  *outputTail
	dir     string
	exited  chan struct{}
	err     error // the error with which the process ended; set before exited is closed
}

// waitForExit blocks until the stack ends, and then returns nil. If the proxy ends first, it returns an error.
func (p *egressProcess) waitForExit(run context.Context) error {
	select {
	case <-run.Done():
		return nil
	case <-p.exited:
	}
	return p.exitError()
}

// exitError returns the error for an egress proxy that has ended by itself, with the last line that it printed.
func (p *egressProcess) exitError() error {
	err := p.err
	if err == nil {
		err = errors.New("exit status 0")
	}
	return fmt.Errorf("the egress proxy ended: %w: %s", err, p.output.lastLine())
}

// stop ends the egress proxy. It must be called after the executor has ended, because the executor unregisters its
// sandboxes from the proxy.
func (p *egressProcess) stop() error {
	err := p.process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(egressStopTimeout):
		err = errors.Join(err, p.process.Kill())
		<-p.exited
	}
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}

// createEgressFolder creates the folder of the egress proxy's sockets. Its path is short, as Unix sockets require, and
// the user of sandboxes may enter it.
func (s *Stack) createEgressFolder() (string, error) {
	dir, err := os.MkdirTemp("", "spool-egress-")
	if err != nil {
		return "", err
	}
	if len(dir) > maxSocketPath-len("/sandboxes/egress.sock") {
		return "", fmt.Errorf("%s is too long for a Unix socket: set TMPDIR to a shorter folder", dir)
	}
	return dir, os.Mkdir(filepath.Join(dir, "sandboxes"), 0o755) //nolint:gosec // sandboxes run as another user
}

// findProgram returns the path of a program of Spool, which is next to the running program or on the PATH.
func findProgram(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	path := filepath.Join(filepath.Dir(self), name)
	if info, err := os.Stat(path); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
		return path, nil
	}
	if path, err = exec.LookPath(name); err != nil {
		return "", fmt.Errorf("%s: not found next to %s nor on the PATH; build it with scripts/build", name, self)
	}
	return path, nil
}

// waitForSocket blocks until a process listens on a Unix socket. It returns an error if the process ends first, which
// closes exited.
func waitForSocket(ctx context.Context, socket string, exited <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, egressStartTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := net.Dial("unix", socket)
		if err == nil {
			return c.Close()
		}
		select {
		case <-tick.C:
		case <-exited:
			return errors.New("the process exited")
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}
