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

// ModalToken is the token that mockmodal accepts, as ID:SECRET.
const ModalToken = "ak-test:as-test"

// SandboxPrice is what a second of a Modal sandbox costs in tests, in dollars.
const SandboxPrice = 0.001

var (
	buildMockmodal = sync.OnceValues(func() (string, error) { return build("github.com/spoolhq/spool/cmd/mockmodal", "mockmodal") })
	buildExecutor  = sync.OnceValues(func() (string, error) {
		return build("github.com/spoolhq/spool/services/executor/cmd/executor", "executor")
	})
)

// Modal is a running cmd/mockmodal.
type Modal struct {
	URL     string `json:"url"`
	Control string `json:"control"` // of its control API
	Gateway string `json:"gateway"` // the machine's address in sandboxes
}

// ModalSandbox is a sandbox as mockmodal lists it.
type ModalSandbox struct {
	ID    string            `json:"id"`
	Name  string            `json:"name"` // its sbx_ id
	Tags  map[string]string `json:"tags"`
	State string            `json:"state"`
}

// StartModal runs cmd/mockmodal until the test ends. It fails the test if it refused a request.
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

// Ask calls the control API.
func (m *Modal) Ask(t testing.TB, method, path string, body, into any) {
	t.Helper()
	raw, err := json.Marshal(body)
	must(t, err)
	req, err := http.NewRequest(method, m.Control+path, bytes.NewReader(raw)) //nolint:noctx // a test's
	must(t, err)
	res, err := http.DefaultClient.Do(req)
	must(t, err)
	defer res.Body.Close() //nolint:errcheck // it is read
	text, err := io.ReadAll(res.Body)
	must(t, err)
	if res.StatusCode/100 != 2 {
		t.Fatalf("mockmodal: %s %s: %s: %s", method, path, res.Status, text)
	}
	if into != nil {
		must(t, json.Unmarshal(text, into))
	}
}

// Outage cuts every connection, and refuses new ones until it is off.
func (m *Modal) Outage(t testing.TB, on bool) {
	m.Ask(t, http.MethodPost, "/outage", map[string]any{"on": on}, nil)
}

// Fault has calls of a method fail until Heal.
func (m *Modal) Fault(t testing.TB, method, code string) {
	m.Ask(t, http.MethodPost, "/faults", map[string]any{"method": method, "code": code, "message": "injected", "count": -1}, nil)
}

// Heal ends all faults.
func (m *Modal) Heal(t testing.TB) { m.Ask(t, http.MethodDelete, "/faults", nil, nil) }

// End ends a sandbox as Modal may: preempted, timeout or oom.
func (m *Modal) End(t testing.TB, sandbox, how string) {
	m.Ask(t, http.MethodPost, "/sandboxes/"+sandbox+"/end", map[string]any{"how": how}, nil)
}

// Running lists the sandboxes that run.
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

// Runs reports whether a sandbox runs.
func (m *Modal) Runs(t testing.TB, sandbox string) bool {
	for _, s := range m.Running(t) {
		if s.Name == sandbox {
			return true
		}
	}
	return false
}

// startModal makes sandboxes those of mockmodal, which reach the egress proxy on this machine by TLS, and nothing else.
func (c *Cluster) startModal() {
	c.Modal = StartModal(c.T)
	// A port of the gateway that was free a moment ago.
	l, err := net.Listen("tcp", net.JoinHostPort(c.Modal.Gateway, "0"))
	must(c.T, err)
	listen := l.Addr().String()
	must(c.T, l.Close())
	certificates := filepath.Join(c.dir, "certificates")
	authority, err := certificate.OpenAuthority(filepath.Join(certificates, "authority"), certificate.Validity{For: time.Hour}, time.Now())
	must(c.T, err)
	pair, trusted := filepath.Join(certificates, "egress"), filepath.Join(certificates, "ca.pem")
	_, err = authority.Issue(pair, []string{c.Modal.Gateway})
	must(c.T, err)
	must(c.T, authority.Trust(trusted))
	c.startEgress("--listen-tls", listen, "--tls-cert", filepath.Join(pair, certificate.CertificateFile), "--tls-key", filepath.Join(pair, certificate.KeyFile))

	e := &c.opts.Executor
	e.Sandbox, e.EgressSockets, e.EgressServer, e.EgressAuthority = executor.Modal, "", listen, trusted
	e.Engine = "modal-" + strings.ToLower(rand.Text()[:12])
	c.opts.Session.Providers = []string{executor.Modal}
	e.SandboxImages, c.opts.Session.SandboxImages = []string{"spool-test/*"}, []string{"spool-test/*"}
	c.T.Cleanup(func() {
		for _, s := range c.Modal.Running(c.T) {
			c.T.Errorf("left on Modal: %+v", s)
		}
	})
}

// ExecutorProgram is an executor as a program of its own.
type ExecutorProgram struct {
	t    testing.TB
	cmd  *exec.Cmd
	once sync.Once
	done chan error // has what Wait returned

	mu   sync.Mutex
	said strings.Builder
}

// Write takes what the program logs.
func (p *ExecutorProgram) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.t.Logf("executor %d: %s", p.cmd.Process.Pid, b)
	return p.said.Write(b)
}

// Said counts how often the program has logged something.
func (p *ExecutorProgram) Said(text string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Count(p.said.String(), text)
}

// Kill is kill -9.
func (p *ExecutorProgram) Kill() {
	p.once.Do(func() {
		check(p.t, p.cmd.Process.Kill())
		<-p.done // that it was killed
	})
}

// Ended waits for a program that ends by itself, and returns its error.
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

// KillExecutorProgram is kill -9 of the i-th executor that was started.
func (c *Cluster) KillExecutorProgram(i int) { c.programs[i].Kill() }

// StartExecutorProgram runs one more executor on the same engine. Variables replace what the cluster's Options say.
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
