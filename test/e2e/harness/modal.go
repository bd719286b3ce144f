package harness

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/executor"
)

// ModalToken is the token that mockmodal accepts, as ID:SECRET.
const ModalToken = "ak-test:as-test"

// SandboxPrice is the price of one second of a Modal sandbox in tests, in dollars.
const SandboxPrice = 0.001

var (
	buildMockmodal = sync.OnceValues(func() (string, error) { return build("github.com/spoolhq/spool/cmd/mockmodal", "mockmodal") })
	buildExecutor  = sync.OnceValues(func() (string, error) {
		return build("github.com/spoolhq/spool/services/executor/cmd/executor", "executor")
	})
)

// Modal is a running cmd/mockmodal, the stand-in for modal.com.
type Modal struct {
	URL     string `json:"url"`
	Control string `json:"control"` // URL of its control API
	Gateway string `json:"gateway"` // the machine's address in sandboxes
}

// ModalSandbox is a sandbox in mockmodal's list.
type ModalSandbox struct {
	ID    string            `json:"id"`
	Name  string            `json:"name"` // its sbx_ id
	Tags  map[string]string `json:"tags"`
	State string            `json:"state"`
}

// StartModal runs cmd/mockmodal until the test ends. It fails the test if mockmodal refused a request.
func StartModal(t testing.TB) *Modal {
	t.Helper()
	binary, err := buildMockmodal()
	must(t, err)
	cmd := exec.Command(binary, "serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--data", t.TempDir(), "--token", ModalToken)
	cmd.Stderr = testWriter{t, "mockmodal"}
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	m := &Modal{}
	t.Cleanup(func() {
		check(t, cmd.Process.Signal(syscall.SIGTERM))
		check(t, cmd.Wait())
	})
	line, err := bufio.NewReader(out).ReadBytes('\n')
	must(t, err)
	must(t, json.Unmarshal(line, m))
	t.Cleanup(func() {
		var refused []json.RawMessage
		m.Ask(t, http.MethodGet, "/violations", nil, &refused)
		for _, v := range refused {
			t.Errorf("mockmodal refused a request: %s", v)
		}
	})
	return m
}

// Ask sends a request to mockmodal's own control API.
func (m *Modal) Ask(t testing.TB, method, path string, body, into any) {
	t.Helper()
	raw, err := json.Marshal(body)
	must(t, err)
	req, err := http.NewRequest(method, m.Control+path, bytes.NewReader(raw)) //nolint:noctx // the request of a test
	must(t, err)
	res, err := http.DefaultClient.Do(req)
	must(t, err)
	defer res.Body.Close() //nolint:errcheck // the body is read
	text, err := io.ReadAll(res.Body)
	must(t, err)
	if res.StatusCode/100 != 2 {
		t.Fatalf("mockmodal: %s %s: %s: %s", method, path, res.Status, text)
	}
	if into != nil {
		must(t, json.Unmarshal(text, into))
	}
}

// Outage cuts every connection, and refuses new ones until the outage is switched off.
func (m *Modal) Outage(t testing.TB, on bool) {
	m.Ask(t, http.MethodPost, "/outage", map[string]any{"on": on}, nil)
}

// Fault makes all calls of a method of Modal's API fail with a gRPC code, until Heal is called.
func (m *Modal) Fault(t testing.TB, method, code string) {
	m.Ask(t, http.MethodPost, "/faults", map[string]any{"method": method, "code": code, "message": "injected", "count": -1}, nil)
}

// Heal ends all faults that mockmodal has at present.
func (m *Modal) Heal(t testing.TB) { m.Ask(t, http.MethodDelete, "/faults", nil, nil) }

// End ends a sandbox in one of the ways in which Modal may end it: preempted, timeout or oom.
func (m *Modal) End(t testing.TB, sandbox, how string) {
	m.Ask(t, http.MethodPost, "/sandboxes/"+sandbox+"/end", map[string]any{"how": how}, nil)
}

// Running returns the running sandboxes.
func (m *Modal) Running(t testing.TB) (list []ModalSandbox) {
	var all []ModalSandbox
	m.Ask(t, http.MethodGet, "/sandboxes", nil, &all)
	for _, s := range all {
		if s.State == "running" {
			list = append(list, s)
		}
	}
	return list
}

// Runs reports whether a sandbox is running.
func (m *Modal) Runs(t testing.TB, sandbox string) bool {
	for _, s := range m.Running(t) {
		if s.Name == sandbox {
			return true
		}
	}
	return false
}

// tlsListener holds the settings of the egress proxy's TLS listener: an address and paths of PEM files.
type tlsListener struct{ address, certificate, key, authority string }

// listener returns the settings of a TLS listener of the egress proxy that mockmodal's sandboxes can reach. It issues
// the listener's certificate into dir.
func (m *Modal) listener(t testing.TB, dir string) tlsListener {
	t.Helper()
	// a port of the gateway's address that was free a moment ago
	l, err := net.Listen("tcp", net.JoinHostPort(m.Gateway, "0"))
	must(t, err)
	must(t, l.Close())
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	must(t, err)
	pair, trusted := filepath.Join(dir, "egress"), filepath.Join(dir, "ca.pem")
	_, err = authority.Issue(pair, []string{m.Gateway})
	must(t, err)
	must(t, authority.Trust(trusted))
	return tlsListener{l.Addr().String(), filepath.Join(pair, certificate.CertificateFile), filepath.Join(pair, certificate.KeyFile), trusted}
}

// Up runs the spool command as on a new user's machine: in an empty folder, and with only the environment variables of
// a new installation. Its sandboxes run on mockmodal.
type Up struct {
	t   testing.TB
	dir string
	env []string
}

// NewUp returns an Up whose sandboxes run on m.
func (m *Modal) NewUp(t testing.TB) *Up {
	t.Helper()
	runner, err := buildRunner()
	must(t, err)
	egress, err := buildEgress()
	must(t, err)
	dir := t.TempDir()
	l := m.listener(t, filepath.Join(dir, "certificates"))
	id, secret, _ := strings.Cut(ModalToken, ":")
	return &Up{t: t, dir: dir, env: append(os.Environ(),
		"PATH="+filepath.Dir(egress)+":"+os.Getenv("PATH"), "SPOOL_DATA_DIR="+filepath.Join(dir, "data"), "SPOOL_RUNNER="+runner,
		"SPOOL_LISTEN=127.0.0.1:0", "SPOOL_GRPC_LISTEN=127.0.0.1:0", "SPOOL_SANDBOX="+executor.Modal,
		"SPOOL_MODAL_TOKEN_ID="+id, "SPOOL_MODAL_TOKEN_SECRET="+secret, "SPOOL_MODAL_SERVER_URL="+m.URL, "SPOOL_MODAL_IMAGE="+SandboxImage,
		"SPOOL_EGRESS_SERVER="+l.address, "SPOOL_EGRESS_AUTHORITY="+l.authority,
		"SPOOL_EGRESS_LISTEN_TLS="+l.address, "SPOOL_EGRESS_TLS_CERTIFICATE="+l.certificate, "SPOOL_EGRESS_TLS_KEY="+l.key,
	)}
}

// command returns a command of spool. variables override settings.
func (u *Up) command(variables []string, args ...string) *exec.Cmd {
	u.t.Helper()
	bin, err := buildCLI()
	must(u.t, err)
	cmd := exec.CommandContext(u.t.Context(), bin, args...)
	cmd.Dir, cmd.Env = u.dir, append(slices.Clone(u.env), variables...)
	return cmd
}

// Run runs a command of spool and returns its exit code and all its output.
func (u *Up) Run(variables []string, args ...string) (code int, printed string) {
	u.t.Helper()
	cmd := u.command(variables, args...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		u.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// While runs `spool up` with a scripted model server, calls f when it is ready, and stops it. It fails the test if
// spool does not exit with 0.
func (u *Up) While(variables []string, f func()) {
	u.t.Helper()
	cmd := u.command(variables, "up", "--mock-llm")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stderr = testWriter{u.t, "spool up"}
	out, err := cmd.StdoutPipe()
	must(u.t, err)
	must(u.t, cmd.Start())
	defer func() {
		check(u.t, cmd.Process.Signal(syscall.SIGTERM))
		check(u.t, cmd.Wait())
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "ready ") {
		u.t.Errorf("spool up printed %q: %v", line, err)
		return
	}
	f()
}

// startModal configures sandboxes on mockmodal, which reach only the egress proxy on this machine, by TLS.
func (c *Cluster) startModal() {
	c.Modal = StartModal(c.T)
	l := c.Modal.listener(c.T, filepath.Join(c.dir, "certificates"))
	c.startEgress("--listen-tls", l.address, "--tls-cert", l.certificate, "--tls-key", l.key)

	e := &c.opts.Executor
	e.Sandbox, e.EgressSockets, e.EgressServer, e.EgressAuthority = executor.Modal, "", l.address, l.authority
	e.Engine = "modal-" + strings.ToLower(rand.Text()[:12])
	c.opts.Session.Providers = []string{executor.Modal}
	e.SandboxImages, c.opts.Session.SandboxImages = []string{"spool-test/*"}, []string{"spool-test/*"}
	c.T.Cleanup(func() {
		for _, s := range c.Modal.Running(c.T) {
			c.T.Errorf("Modal still has: %+v", s)
		}
	})
}

// ExecutorProgram is an executor in a separate process.
type ExecutorProgram struct {
	t    testing.TB
	cmd  *exec.Cmd
	once sync.Once
	done chan error // receives the result of Wait

	mu   sync.Mutex
	said strings.Builder
}

// Write stores the log output of the process.
func (p *ExecutorProgram) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.t.Logf("executor %d: %s", p.cmd.Process.Pid, b)
	return p.said.Write(b)
}

// Said returns how often a text occurs in the log of the process.
func (p *ExecutorProgram) Said(text string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Count(p.said.String(), text)
}

// Kill sends SIGKILL to the executor's process.
func (p *ExecutorProgram) Kill() {
	p.once.Do(func() {
		check(p.t, p.cmd.Process.Kill())
		<-p.done // the error of Wait only states that the process was killed
	})
}

// Ended waits for a process that ends by itself, and returns its error.
func (p *ExecutorProgram) Ended() (err error) {
	p.once.Do(func() {
		select {
		case err = <-p.done:
		case <-time.After(Patience):
			check(p.t, p.cmd.Process.Kill())
			err = fmt.Errorf("the executor still ran after %s: %w", Patience, <-p.done)
		}
	})
	return err
}

// KillExecutorProgram sends SIGKILL to the i-th executor.
func (c *Cluster) KillExecutorProgram(i int) { c.programs[i].Kill() }

// StartExecutorProgram runs one more executor on the same engine. variables override the settings of the cluster's
// Options.
func (c *Cluster) StartExecutorProgram(variables ...string) *ExecutorProgram {
	c.T.Helper()
	binary, err := buildExecutor()
	must(c.T, err)
	e := c.opts.Executor
	id, secret, _ := strings.Cut(ModalToken, ":")
	p := &ExecutorProgram{t: c.T, cmd: exec.Command(binary), done: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(),
		"SPOOL_NATS_URL="+c.Outage.nats.URL(), "SPOOL_DATA_DIR="+e.DataDir, "SPOOL_RUNNER="+e.Runner, "SPOOL_ENGINE="+e.Engine, "SPOOL_SANDBOX="+e.Sandbox,
		"SPOOL_EGRESS_ADMIN="+e.EgressAdmin, "SPOOL_EGRESS_SERVER="+e.EgressServer, "SPOOL_EGRESS_AUTHORITY="+e.EgressAuthority,
		"SPOOL_MODAL_TOKEN_ID="+id, "SPOOL_MODAL_TOKEN_SECRET="+secret, "SPOOL_MODAL_SERVER_URL="+c.Modal.URL, "SPOOL_MODAL_APP="+e.Engine,
		"SPOOL_MODAL_IMAGE="+SandboxImage, "SPOOL_MODAL_SANDBOX_PRICE="+strconv.FormatFloat(SandboxPrice, 'g', -1, 64),
		"SPOOL_SANDBOX_IMAGES="+strings.Join(e.SandboxImages, ","), "SPOOL_SANDBOX_MEMORY=1073741824", "SPOOL_STOP_SANDBOXES=true",
		"SPOOL_POOL="+strings.Join(e.Pool, ","), "SPOOL_OPENAI_MODEL="+e.OpenAIModel, "SPOOL_SLOTS=4", "SPOOL_SWEEP_EVERY=1s", "SPOOL_ENGINE_GONE=2s",
	)
	p.cmd.Env = append(p.cmd.Env, variables...)
	p.cmd.Stdout, p.cmd.Stderr = p, p
	must(c.T, p.cmd.Start())
	go func() { p.done <- p.cmd.Wait() }()
	c.programs = append(c.programs, p)
	c.T.Cleanup(func() {
		p.once.Do(func() {
			check(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
			check(p.t, <-p.done)
		})
	})
	return p
}
