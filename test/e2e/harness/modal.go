package harness

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/executor"
)

// ModalToken is the token that mockmodal accepts, in the form ID:SECRET. mockmodal is the stand-in for modal.com.
const ModalToken = "ak-test:as-test"

// ModalSandboxPrice is the price of one second of a Modal sandbox in tests, in dollars.
const ModalSandboxPrice = 0.001

var (
	// buildMockmodal builds cmd/mockmodal, the stand-in for modal.com, once for all tests of a process, and returns its
	// path.
	buildMockmodal = sync.OnceValues(func() (string, error) { return buildProgram("github.com/spoolhq/spool/cmd/mockmodal", "mockmodal") })
	// buildExecutor builds the executor once for all tests of a process, and returns the path of the program.
	buildExecutor = sync.OnceValues(func() (string, error) {
		return buildProgram("github.com/spoolhq/spool/services/executor/cmd/executor", "executor")
	})
)

// MockModal is a running cmd/mockmodal, the stand-in for modal.com.
type MockModal struct {
	URL     string `json:"url"`
	Control string `json:"control"` // URL of its control API
	Gateway string `json:"gateway"` // the machine's address in sandboxes
}

// ModalSandbox is a sandbox that mockmodal lists.
type ModalSandbox struct {
	ID    string            `json:"id"`
	Name  string            `json:"name"` // its sbx_ id
	Tags  map[string]string `json:"tags"`
	State string            `json:"state"`
}

// StartMockModal runs cmd/mockmodal, the stand-in for modal.com, until the test ends. The test fails if mockmodal has
// then refused a request as invalid.
func StartMockModal(t testing.TB) *MockModal {
	t.Helper()
	binary, err := buildMockmodal()
	requireNoError(t, err)
	cmd := exec.Command(binary, "serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--data", t.TempDir(), "--token", ModalToken)
	cmd.Stderr = testWriter{t, "mockmodal"}
	out, err := cmd.StdoutPipe()
	requireNoError(t, err)
	requireNoError(t, cmd.Start())
	m := &MockModal{}
	t.Cleanup(func() {
		assertNoError(t, cmd.Process.Signal(syscall.SIGTERM))
		assertNoError(t, cmd.Wait())
	})
	line, err := bufio.NewReader(out).ReadBytes('\n')
	requireNoError(t, err)
	requireNoError(t, json.Unmarshal(line, m))
	t.Cleanup(func() {
		var refused []json.RawMessage
		m.RequestControl(t, http.MethodGet, "/violations", nil, &refused)
		for _, v := range refused {
			t.Errorf("mockmodal refused a request: %s", v)
		}
	})
	return m
}

// RequestControl sends a request with a JSON body to mockmodal's own control API, and decodes the response into into
// unless into is nil.
func (m *MockModal) RequestControl(t testing.TB, method, path string, body, into any) {
	t.Helper()
	raw, err := json.Marshal(body)
	requireNoError(t, err)
	req, err := http.NewRequest(method, m.Control+path, bytes.NewReader(raw)) //nolint:noctx // the request of a test
	requireNoError(t, err)
	res, err := http.DefaultClient.Do(req)
	requireNoError(t, err)
	defer res.Body.Close() //nolint:errcheck // the body is read
	text, err := io.ReadAll(res.Body)
	requireNoError(t, err)
	if res.StatusCode/100 != 2 {
		t.Fatalf("mockmodal: %s %s: %s: %s", method, path, res.Status, text)
	}
	if into != nil {
		requireNoError(t, json.Unmarshal(text, into))
	}
}

// SetOutage(t, true) makes mockmodal cut every connection and refuse new ones; SetOutage(t, false) ends that.
func (m *MockModal) SetOutage(t testing.TB, on bool) {
	m.RequestControl(t, http.MethodPost, "/outage", map[string]any{"on": on}, nil)
}

// InjectFault makes all calls of a method of Modal's API fail with a gRPC code, until ClearFaults is called.
func (m *MockModal) InjectFault(t testing.TB, method, code string) {
	m.RequestControl(t, http.MethodPost, "/faults", map[string]any{"method": method, "code": code, "message": "injected", "count": -1}, nil)
}

// ClearFaults ends all faults that were injected into mockmodal.
func (m *MockModal) ClearFaults(t testing.TB) {
	m.RequestControl(t, http.MethodDelete, "/faults", nil, nil)
}

// EndSandbox ends a sandbox in one of the ways in which Modal may end it: how is preempted, timeout or oom.
func (m *MockModal) EndSandbox(t testing.TB, sandbox, how string) {
	m.RequestControl(t, http.MethodPost, "/sandboxes/"+sandbox+"/end", map[string]any{"how": how}, nil)
}

// RunningSandboxes returns the sandboxes of mockmodal that are running.
func (m *MockModal) RunningSandboxes(t testing.TB) (list []ModalSandbox) {
	var all []ModalSandbox
	m.RequestControl(t, http.MethodGet, "/sandboxes", nil, &all)
	for _, s := range all {
		if s.State == "running" {
			list = append(list, s)
		}
	}
	return list
}

// IsRunning reports whether the sandbox with the given name, its sbx_ id, is running on mockmodal.
func (m *MockModal) IsRunning(t testing.TB, sandbox string) bool {
	for _, s := range m.RunningSandboxes(t) {
		if s.Name == sandbox {
			return true
		}
	}
	return false
}

// tlsListener holds the settings of the egress proxy's TLS listener: its address, and the paths of PEM files.
type tlsListener struct{ address, certificate, key, authority string }

// newTLSListener returns settings for a TLS listener of the egress proxy that sandboxes on mockmodal can reach. It
// writes the listener's certificate into dir.
func (m *MockModal) newTLSListener(t testing.TB, dir string) tlsListener {
	t.Helper()
	// a port of the gateway's address that was free a moment ago
	l, err := net.Listen("tcp", net.JoinHostPort(m.Gateway, "0"))
	requireNoError(t, err)
	requireNoError(t, l.Close())
	authority, err := certificate.OpenAuthority(filepath.Join(dir, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	requireNoError(t, err)
	pair, trusted := filepath.Join(dir, "egress"), filepath.Join(dir, "ca.pem")
	_, err = authority.Issue(pair, []string{m.Gateway})
	requireNoError(t, err)
	requireNoError(t, authority.WriteTrustFile(trusted))
	return tlsListener{l.Addr().String(), filepath.Join(pair, certificate.CertificateFile), filepath.Join(pair, certificate.KeyFile), trusted}
}

// NewUpInstallation returns an UpInstallation in a new folder, whose sandboxes run on m.
func (m *MockModal) NewUpInstallation(t testing.TB) *UpInstallation {
	t.Helper()
	u := NewUpInstallation(t)
	egress, err := buildEgress()
	requireNoError(t, err)
	l := m.newTLSListener(t, filepath.Join(u.dir, "certificates"))
	id, secret, _ := strings.Cut(ModalToken, ":")
	u.env = append(u.env,
		"PATH="+filepath.Dir(egress)+":"+os.Getenv("PATH"), "SPOOL_SANDBOX="+executor.ProviderModal,
		"SPOOL_MODAL_TOKEN_ID="+id, "SPOOL_MODAL_TOKEN_SECRET="+secret, "SPOOL_MODAL_SERVER_URL="+m.URL, "SPOOL_MODAL_IMAGE="+SandboxImage,
		"SPOOL_EGRESS_SERVER="+l.address, "SPOOL_EGRESS_AUTHORITY="+l.authority,
		"SPOOL_EGRESS_LISTEN_TLS="+l.address, "SPOOL_EGRESS_TLS_CERTIFICATE="+l.certificate, "SPOOL_EGRESS_TLS_KEY="+l.key,
	)
	return u
}

// startModal starts mockmodal, the stand-in for modal.com, and configures the cluster to run sandboxes there. These
// reach only the egress proxy on this machine, over TLS.
func (c *Cluster) startModal() {
	c.Modal = StartMockModal(c.T)
	l := c.Modal.newTLSListener(c.T, filepath.Join(c.dir, "certificates"))
	c.startEgress("--listen-tls", l.address, "--tls-cert", l.certificate, "--tls-key", l.key)

	e := &c.opts.Executor
	e.Sandbox, e.EgressSockets, e.EgressServer, e.EgressAuthority = executor.ProviderModal, "", l.address, l.authority
	e.Engine = "modal-" + strings.ToLower(rand.Text()[:12])
	c.opts.Session.Providers = []string{executor.ProviderModal}
	e.SandboxImages, c.opts.Session.SandboxImages = []string{"spool-test/*"}, []string{"spool-test/*"}
	c.T.Cleanup(func() {
		for _, s := range c.Modal.RunningSandboxes(c.T) {
			c.T.Errorf("Modal still has: %+v", s)
		}
	})
}

// ExecutorProcess is an executor that runs in a process of its own.
type ExecutorProcess struct {
	t    testing.TB
	cmd  *exec.Cmd
	once sync.Once
	done chan error // receives the result of Wait

	mu   sync.Mutex
	said strings.Builder
}

// Write stores log output of the executor. It implements io.Writer for the process's standard streams.
func (p *ExecutorProcess) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.t.Logf("executor %d: %s", p.cmd.Process.Pid, b)
	return p.said.Write(b)
}

// CountInLog returns how often text occurs in the log output of the executor so far.
func (p *ExecutorProcess) CountInLog(text string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Count(p.said.String(), text)
}

// Kill sends SIGKILL to the executor and waits until its process has ended.
func (p *ExecutorProcess) Kill() {
	p.once.Do(func() {
		assertNoError(p.t, p.cmd.Process.Kill())
		<-p.done // the error of Wait only states that the process was killed
	})
}

// AwaitExit blocks until the executor has ended by itself, and returns the error of its process. After the time
// WaitTimeout it kills the process and returns an error.
func (p *ExecutorProcess) AwaitExit() (err error) {
	p.once.Do(func() {
		select {
		case err = <-p.done:
		case <-time.After(WaitTimeout):
			assertNoError(p.t, p.cmd.Process.Kill())
			err = fmt.Errorf("the executor still ran after %s: %w", WaitTimeout, <-p.done)
		}
	})
	return err
}

// KillExecutorProcess sends SIGKILL to the i-th executor that runs in a process of its own.
func (c *Cluster) KillExecutorProcess(i int) { c.programs[i].Kill() }

// StartExecutorProcess starts one more executor on the same engine, in a process of its own. variables are environment
// variables, which override the settings of the cluster's Options.
func (c *Cluster) StartExecutorProcess(variables ...string) *ExecutorProcess {
	c.T.Helper()
	binary, err := buildExecutor()
	requireNoError(c.T, err)
	e := c.opts.Executor
	id, secret, _ := strings.Cut(ModalToken, ":")
	p := &ExecutorProcess{t: c.T, cmd: exec.Command(binary), done: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(),
		"SPOOL_NATS_URL="+c.Outage.nats.URL(), "SPOOL_DATA_DIR="+e.DataDir, "SPOOL_RUNNER="+e.Runner, "SPOOL_ENGINE="+e.Engine, "SPOOL_SANDBOX="+e.Sandbox,
		"SPOOL_EGRESS_ADMIN="+e.EgressAdmin, "SPOOL_EGRESS_SERVER="+e.EgressServer, "SPOOL_EGRESS_AUTHORITY="+e.EgressAuthority,
		"SPOOL_MODAL_TOKEN_ID="+id, "SPOOL_MODAL_TOKEN_SECRET="+secret, "SPOOL_MODAL_SERVER_URL="+c.Modal.URL, "SPOOL_MODAL_APP="+e.Engine,
		"SPOOL_MODAL_IMAGE="+SandboxImage, "SPOOL_MODAL_SANDBOX_PRICE="+strconv.FormatFloat(ModalSandboxPrice, 'g', -1, 64),
		"SPOOL_SANDBOX_IMAGES="+strings.Join(e.SandboxImages, ","), "SPOOL_SANDBOX_MEMORY=1073741824", "SPOOL_STOP_SANDBOXES=true",
		"SPOOL_POOL="+strings.Join(e.Pool, ","), "SPOOL_OPENAI_MODEL="+e.OpenAIModel, "SPOOL_SLOTS=4", "SPOOL_SWEEP_EVERY=1s", "SPOOL_ENGINE_GONE=2s",
	)
	p.cmd.Env = append(p.cmd.Env, variables...)
	p.cmd.Stdout, p.cmd.Stderr = p, p
	requireNoError(c.T, p.cmd.Start())
	go func() { p.done <- p.cmd.Wait() }()
	c.programs = append(c.programs, p)
	c.T.Cleanup(func() {
		p.once.Do(func() {
			assertNoError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
			assertNoError(p.t, <-p.done)
		})
	})
	return p
}
