package egress_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// programsDir is removed when the tests end.
var programsDir string

// programs builds the proxy and the runner, once.
var programs = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "egr"); err != nil {
		return "", err
	}
	programsDir = dir
	for _, build := range [][2]string{{".", "../../cmd/egress"}, {filepath.Join("..", "..", "..", "..", "cmd"), "./runner"}} {
		cmd := exec.Command("go", "build", "-o", dir+"/", build[1]) //nolint:gosec // of this repository
		cmd.Dir = build[0]
		if out, err := cmd.CombinedOutput(); err != nil {
			return dir, &exec.Error{Name: build[1] + ": " + string(out), Err: err}
		}
	}
	return dir, nil
})

// remote is a proxy process that listens for TLS, with its settings and its model server.
type remote struct {
	t      *testing.T
	issuer *issuer
	cfg    egress.Config
	client *api.Client
	env    []string
	log    *safeBuffer
	pid    int
	stop   func()
}

// newRemote starts a model server, and a proxy for it in a separate process.
func newRemote(t *testing.T, model http.HandlerFunc, env ...string) *remote {
	t.Helper()
	if _, err := programs(); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "egr") //nolint:usetesting // short: the path of a socket has its limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	srv := httptest.NewServer(model)
	t.Cleanup(srv.Close)
	r := &remote{t: t, issuer: newIssuer(t), log: new(safeBuffer)}
	r.issuer.listen(&r.cfg)
	r.cfg.ListenAdmin, r.cfg.ListenSandboxes = dir+"/a/e.sock", dir+"/s/e.sock"
	r.env = append(os.Environ(), "SPOOL_EGRESS_LISTEN_SANDBOXES="+r.cfg.ListenSandboxes, "SPOOL_EGRESS_LISTEN_ADMIN="+r.cfg.ListenAdmin, "SPOOL_EGRESS_DATA="+dir+"/d",
		"SPOOL_EGRESS_LISTEN_TLS="+r.cfg.ListenTLS, "SPOOL_EGRESS_TLS_CERTIFICATE="+r.cfg.TLSCert, "SPOOL_EGRESS_TLS_KEY="+r.cfg.TLSKey, "SPOOL_EGRESS_DRAIN=1s",
		"ANTHROPIC_API_KEY="+anthropicKey, "SPOOL_ANTHROPIC_BASE_URL="+srv.URL)
	r.env = append(r.env, env...)
	r.client = api.NewClient(api.DialSocket(r.cfg.ListenAdmin))
	r.start()
	t.Cleanup(func() {
		r.client.Close()
		r.stop()
		if t.Failed() {
			t.Logf("the proxy's log:\n%s", r.log)
		}
	})
	return r
}

// start runs the proxy and waits until it is healthy.
func (r *remote) start() {
	r.t.Helper()
	r.pid, r.stop = run(r.t, "egress", r.env, r.log)
	poll(r.t, "the proxy is well", func() bool {
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
		defer cancel()
		return r.client.Health(ctx) == nil
	})
}

// run starts a program; the function that it returns ends it by SIGTERM and waits.
func run(t *testing.T, name string, env []string, log io.Writer, args ...string) (pid int, stop func()) {
	t.Helper()
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.Background(), filepath.Join(dir, name), args...) //nolint:gosec // of this repository
	cmd.Env, cmd.Stderr = env, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	return cmd.Process.Pid, sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-exited:
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(within):
			t.Errorf("%s does not end", name)
			_ = cmd.Process.Kill()
			<-exited
		}
	})
}

// sandbox is a runner process whose forwarder dials the proxy over TLS.
type sandbox struct {
	t       *testing.T
	id      string
	address string
	log     *safeBuffer
	http    *http.Client
}

// sandbox registers a sandbox and starts its runner.
func (r *remote) sandbox(server, authority string) *sandbox {
	r.t.Helper()
	s := &sandbox{t: r.t, id: mint(r.t, events.KindSandbox), log: new(safeBuffer)}
	token := "token-of-" + s.id
	if _, err := r.client.Register(r.t.Context(), s.id, api.Registration{
		Token: token, Tenant: "acme", Session: mint(r.t, events.KindSession), Execution: mint(r.t, events.KindExecution), Epoch: 1,
	}); err != nil {
		r.t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "run") //nolint:usetesting // short, as above
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Mkdir(dir+"/w", 0o700); err != nil {
		r.t.Fatal(err)
	}
	env := append(os.Environ(), "SPOOL_RUNNER_SOCKET="+dir+"/s", "SPOOL_RUNNER_WORKSPACE="+dir+"/w", "SPOOL_RUNNER_STATE="+dir+"/st",
		"SPOOL_RUNNER_EGRESS_TOKEN="+token, "SPOOL_RUNNER_EGRESS_SERVER="+server, "SPOOL_RUNNER_EGRESS_AUTHORITY="+authority, "SPOOL_RUNNER_EGRESS_ADDRESS=127.0.0.1:0",
		"SSL_CERT_FILE="+r.issuer.authority()) // the authorities of the machine are not trusted
	_, stop := run(r.t, "runner", env, s.log, "serve")
	r.t.Cleanup(stop)
	poll(r.t, "the runner forwards", func() bool {
		m := regexp.MustCompile(`forwarding to the egress proxy" address=(\S+)`).FindStringSubmatch(s.log.String())
		if m != nil {
			s.address = m[1]
		}
		return m != nil
	})
	s.http = &http.Client{Transport: &http.Transport{}, Timeout: within}
	r.t.Cleanup(s.http.CloseIdleConnections)
	return s
}

// ask calls a model as an agent does.
func (s *sandbox) ask() (status int, body string) {
	s.t.Helper()
	res, err := s.http.Post("http://"+s.address+"/anthropic/v1/messages", "application/json", strings.NewReader(`{"model":"m","max_tokens":1,"messages":[]}`))
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return res.StatusCode, string(raw)
}

// logs waits until the runner has logged a text.
func (s *sandbox) logs(text string) {
	s.t.Helper()
	poll(s.t, "the runner logs "+text, func() bool { return strings.Contains(s.log.String(), text) })
}

func TestRunnerOverTLS_ReachesModelsAcrossRestartsAndRenewals(t *testing.T) {
	t.Parallel()
	next := make(chan string)
	r := newRemote(t, func(w http.ResponseWriter, req *http.Request) {
		if req.Header.Get("X-Api-Key") != anthropicKey {
			t.Errorf("the model is asked with %v", req.Header)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for {
			select {
			case event := <-next:
				if event == "" {
					return
				}
				_, _ = io.WriteString(w, event)
				w.(http.Flusher).Flush()
			case <-t.Context().Done(): // the test has failed
				return
			}
		}
	})
	send := func(events ...string) {
		go func() {
			for _, e := range events {
				select {
				case next <- e:
				case <-t.Context().Done():
				}
			}
		}()
	}
	s := r.sandbox(r.cfg.ListenTLS, r.issuer.pem())
	answered := func() string {
		t.Helper()
		send(startEvent, "")
		status, body := s.ask()
		if status != http.StatusOK || body != startEvent {
			t.Errorf("the model answered %d %s\n%s", status, body, s.log)
		}
		return body
	}
	answered()

	// A stream continues after a renewal of the certificate, and new connections get the new certificate.
	send(startEvent)
	res, err := s.http.Post("http://"+s.address+"/anthropic/v1/messages", "application/json", strings.NewReader(`{"model":"m"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	in := bufio.NewReader(res.Body)
	if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "event: ") {
		t.Fatalf("%q, %v", line, err)
	}
	r.issuer.issue(time.Now(), 48*time.Hour, "127.0.0.1")
	other := r.sandbox(r.cfg.ListenTLS, r.issuer.pem())
	send("event: more\n\n", "")
	if raw, err := io.ReadAll(in); err != nil || !strings.HasSuffix(string(raw), "event: more\n\n") {
		t.Errorf("the stream: %q, %v", raw, err)
	}
	send(startEvent, "")
	if status, body := other.ask(); status != http.StatusOK || body != startEvent {
		t.Errorf("after the renewal: %d %s\n%s", status, body, other.log)
	}

	// While the proxy is down, requests wait. After its restart it has the same registrations.
	r.stop()
	s.http.CloseIdleConnections()
	waiting := make(chan string)
	go func() {
		_, body := s.ask()
		waiting <- body
	}()
	s.logs("the egress proxy cannot be reached")
	r.start()
	send(startEvent, "")
	if body := <-waiting; body != startEvent {
		t.Errorf("a request that was sent while it was away: %s", body)
	}
	answered()
	s.logs("the egress proxy is back")
}

func TestAttack_RunnerOverTLS_TrustsItsAuthorityAndTheServersNameAlone(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 16)
	r := newRemote(t, func(w http.ResponseWriter, _ *http.Request) {
		asked <- struct{}{}
		_, _ = io.WriteString(w, "{}")
	})
	_, port, _ := strings.Cut(r.cfg.ListenTLS, ":")
	other := newIssuer(t)
	for what, c := range map[string]struct{ server, authority, says string }{
		"an authority that did not sign it": {r.cfg.ListenTLS, other.pem(), "unknown authority"},
		"a name that it is not for":         {"localhost:" + port, r.issuer.pem(), "wanted to match localhost"},
	} {
		s := r.sandbox(c.server, c.authority)
		if status, body := s.ask(); status != http.StatusBadGateway || !strings.Contains(body, "the egress proxy cannot be reached") {
			t.Errorf("%s: %d %s", what, status, body)
		}
		s.logs(c.says)
	}
	s := r.sandbox(r.cfg.ListenTLS, r.issuer.pem())
	if status, _ := s.ask(); status != http.StatusOK {
		t.Errorf("a good certificate: %d\n%s", status, s.log)
	}
	r.issuer.issue(time.Now().Add(-48*time.Hour), time.Hour, "127.0.0.1")
	late := r.sandbox(r.cfg.ListenTLS, r.issuer.pem())
	if status, _ := late.ask(); status != http.StatusBadGateway {
		t.Errorf("an expired certificate: %d\n%s", status, late.log)
	}
	late.logs("certificate has expired")
	if n := len(asked); n != 1 {
		t.Errorf("the model was asked %d times", n)
	}
}

// Clients that connect and send nothing more, before, during or after the handshake, use a bounded amount of memory.
func TestAttack_EgressTLS_StrangersTakeLittleMemory(t *testing.T) {
	t.Parallel()
	const strangers, addresses, most = 2400, 12, 180 << 20
	r := newRemote(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") }, "SPOOL_EGRESS_TLS_HANDSHAKE=1h", "GOGC=20") // so that the peak is close to the memory in use
	s := r.sandbox(r.cfg.ListenTLS, r.issuer.pem())
	client := r.issuer.client()
	for i := range strangers {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+i%addresses))}, Timeout: within}
		c, err := d.DialContext(t.Context(), "tcp", r.cfg.ListenTLS)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		switch i / addresses % 8 {
		default: // most of the largest message of a handshake, in four records
			_, _ = io.WriteString(c, "\x16\x03\x01\x40\x00\x01\x00\xff\xf0\x03\x03"+strings.Repeat("x", 16<<10-6))
			for range 2 {
				_, _ = io.WriteString(c, "\x16\x03\x01\x40\x00"+strings.Repeat("x", 16<<10))
			}
			_, _ = io.WriteString(c, "\x16\x03\x01\x3f\x00"+strings.Repeat("x", 0x3f00))
		case 0:
		case 1:
			client.ServerName = "127.0.0.1"
			if err := tls.Client(c, client).HandshakeContext(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if status, _ := s.ask(); status != http.StatusOK {
		t.Errorf("a sandbox: %d\n%s", status, s.log)
	}
	r.checkPeak(most)
}

// checkPeak fails the test if the proxy process had more than most bytes of memory at any time.
func (r *remote) checkPeak(most int64) {
	r.t.Helper()
	text, err := os.ReadFile("/proc/" + strconv.Itoa(r.pid) + "/status")
	if err != nil {
		r.t.Fatal(err)
	}
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(text)
	if m == nil {
		r.t.Fatalf("no peak of memory in %s", text)
	}
	kib, err := strconv.ParseInt(string(m[1]), 10, 64)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Logf("the proxy's memory was %d MiB at most", kib>>10)
	if kib<<10 > most {
		r.t.Errorf("%d MiB of memory, of at most %d", kib>>10, most>>20)
	}
}
