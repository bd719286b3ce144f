package modal

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// testImage is the image of all sandboxes in the tests.
const testImage = "debian:bookworm-slim"

var (
	scratch string // of the test binary
	// binaries are the runner and the test server.
	binaries = sync.OnceValues(build)
	// shared returns the server of the tests that do not change it.
	shared = sync.OnceValues(func() (*server, error) { return serve(filepath.Join(scratch, "shared")) })
)

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "spool-modal-"); err != nil {
		panic(err)
	}
	code := m.Run()
	if sharedUsed.Load() {
		if s, err := shared(); err == nil {
			err = s.stop()
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
		}
	}
	if err := errors.Join(goleak.Find(), os.RemoveAll(scratch)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var sharedUsed atomic.Bool

func build() (map[string]string, error) {
	out := map[string]string{}
	for _, name := range []string{"runner", "mockmodal"} {
		out[name] = filepath.Join(scratch, name)
		cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", out[name], "./"+name)
		cmd.Dir = filepath.Join("..", "..", "..", "..", "cmd") // a module of its own, which no service imports
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
		if text, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build %s: %w: %s", name, err, text)
		}
	}
	return out, nil
}

// server is a running cmd/mockmodal.
type server struct {
	cmd     *exec.Cmd
	said    *bytes.Buffer
	URL     string `json:"url"`
	Control string `json:"control"`
	Gateway string `json:"gateway"`
}

// region is a region that the server has.
const region = "us-east"

// serve starts a server.
func serve(dir string) (*server, error) {
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	s := &server{said: &bytes.Buffer{}}
	s.cmd = exec.Command(bin["mockmodal"], "serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--data", dir, "--until-parent-ends", "--token", "ak-test:as-test")
	s.cmd.Stderr = s.said
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, s)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mockmodal printed %q: %w", line, err), s.stop())
	}
	return s, nil
}

// stop ends the server, which removes everything that it created.
func (s *server) stop() error {
	http.DefaultClient.CloseIdleConnections()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := s.cmd.Wait(); err != nil {
		return fmt.Errorf("mockmodal: %w: %s", err, s.said)
	}
	return nil
}

// ask calls the server's control API.
func (s *server) ask(t testing.TB, method, path string, body, into any) {
	t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(context.Background(), method, s.Control+path, bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode/100 != 2 {
		t.Fatalf("%s %s: %s: %s %v", method, path, resp.Status, text, err)
	}
	if into != nil {
		if err := json.Unmarshal(text, into); err != nil {
			t.Fatalf("%s %s: %v: %s", method, path, err, text)
		}
	}
}

// fault makes calls of a method fail; count -1 is until clear.
func (s *server) fault(t testing.TB, method, code string, count int) {
	s.ask(t, http.MethodPost, "/faults", map[string]any{"method": method, "code": code, "message": "injected", "count": count}, nil)
}

func (s *server) clear(t testing.TB) { s.ask(t, http.MethodDelete, "/faults", nil, nil) }

func (s *server) outage(t testing.TB, on bool) {
	s.ask(t, http.MethodPost, "/outage", map[string]any{"on": on}, nil)
}

func (s *server) endSandbox(t testing.TB, id, how string) {
	s.ask(t, http.MethodPost, "/sandboxes/"+id+"/end", map[string]any{"how": how}, nil)
}

// calls returns how often a method was called.
func (s *server) calls(t testing.TB, method string) int {
	var all map[string]int
	s.ask(t, http.MethodGet, "/calls", nil, &all)
	return all[method]
}

// listed is a sandbox as the server lists it.
type listed struct {
	ID, Name, State string
	Tags            map[string]string
	Timeout         int `json:"timeoutSeconds"`
	Regions         []string
	Network         struct{ Type string }
	Resources       struct{ MilliCPU, MilliCPUMax, MemoryMB, MemoryMBMax int }
}

// running returns the running sandboxes of an engine.
func (s *server) running(t testing.TB, engine string) []listed {
	t.Helper()
	var all, out []listed
	s.ask(t, http.MethodGet, "/sandboxes", nil, &all)
	for _, l := range all {
		if l.State == "running" && l.Tags[tagEngine] == engine {
			out = append(out, l)
		}
	}
	return out
}

// sharedServer returns a server that the test must not change.
func sharedServer(t testing.TB) *server {
	t.Helper()
	sharedUsed.Store(true)
	s, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// ownServer returns a server that the test may break.
func ownServer(t testing.TB) *server {
	t.Helper()
	s, err := serve(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.noViolations(t)
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *server) noViolations(t testing.TB) {
	t.Helper()
	var violations []json.RawMessage
	s.ask(t, http.MethodGet, "/violations", nil, &violations)
	for _, v := range violations {
		t.Errorf("the server refused a request: %s", v)
	}
}

// config returns the config of a new engine, which must be empty when the test ends.
func (s *server) config(t testing.TB) Config {
	t.Helper()
	bin, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	engine := "test-" + strings.ToLower(rand.Text()[:12])
	t.Cleanup(func() {
		for _, left := range s.running(t, engine) {
			t.Errorf("left on the server: %+v", left)
		}
		s.noViolations(t)
	})
	return Config{
		TokenID: "ak-test", TokenSecret: "as-test", ServerURL: s.URL, App: engine, Engine: engine, Runner: bin["runner"], Image: testImage,
		Timeout: MaxTimeout,
		Limits:  sandbox.Limits{MemoryBytes: 512 << 20, CPUs: 1, DiskBytes: 1 << 30},
	}
}

// provide returns a provider that is closed with the test.
func provide(t testing.TB, cfg Config) *Provider {
	t.Helper()
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func newID(t testing.TB, kind events.IDKind) string {
	t.Helper()
	id, err := events.NewID(kind, time.Now(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func newSpec(t testing.TB, cfg Config) sandbox.Spec {
	t.Helper()
	return sandbox.Spec{ID: newID(t, events.KindSandbox), Labels: sandbox.Labels{
		Tenant: "default", Session: newID(t, events.KindSession), Engine: cfg.Engine, Epoch: 7,
	}}
}

// create creates a sandbox that ends with the test.
func create(t testing.TB, p *Provider, spec sandbox.Spec) sandbox.Sandbox {
	t.Helper()
	t.Cleanup(func() {
		if err := p.Terminate(context.Background(), spec.ID, true); err != nil {
			t.Error(err)
		}
	})
	box, err := p.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return box
}

// sh runs a shell line until it ends.
func sh(t testing.TB, box sandbox.Sandbox, line string) (stdout string, code int) {
	t.Helper()
	proc, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"sh", "-c", line}})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, proc.Stderr()) }()
	if err := proc.Stdin().Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(proc.Stdout())
	if err != nil {
		t.Fatal(err)
	}
	code, err = proc.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return string(raw), code
}

// wantCode fails unless err has a code.
func wantCode(t testing.TB, err error, code string) {
	t.Helper()
	var typed *sandbox.Error
	if !errors.As(err, &typed) || typed.Code != code {
		t.Errorf("error is %v, want code %s", err, cmp.Or(code, "none"))
	}
}
