package agenttest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/loopback"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// ProxyRestartCheck describes the test that a turn survives restarts of the egress proxy. The test kills the proxy, a real process,
// between two requests to the model, before an answer and within one.
type ProxyRestartCheck struct {
	// Env returns the environment of every query for an egress proxy at the URL, which has no path.
	Env func(proxyURL string) map[string]string
	// Shell returns the tool call by which the agent runs a command.
	Shell func(command string) ScriptToolCall
}

// streamedText is the answer that is cut off. The scripted model sends it in pieces.
const streamedText = "alpha beta gamma delta"

// checkProxyRestart tests that turns of the agent s complete although the egress proxy is killed and restarted.
func checkProxyRestart(t *testing.T, s AgentUnderTest, c ProxyRestartCheck) {
	t.Helper()
	if _, err := exec.LookPath(s.Program); s.Program != "" && err != nil {
		t.Skipf("%s is not on the PATH: %s, or make install", s.Program, s.Install)
	}
	program := buildEgressProxy(t)
	for name, kill := range map[string]func(*testing.T, *restartedProxy, *Harness) (query, want string, so Turn){
		"between two requests": c.killBetweenRequests, "before an answer": killBeforeAnswer, "within an answer": killWithinAnswer,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &restartedProxy{t: t, program: program}
			proxied := s
			proxied.Env = func(modelURL string) map[string]string { return c.Env(p.open(modelURL)) }
			b := NewHarnessWithScript(t, proxied, ScriptOfRules(t,
				ScriptRule("run it", c.Shell("touch started; until [ -e continue ]; do sleep 0.1; done; echo it ran")),
				`  - {match: {user: say it}, steps: [{text: {text: '`+streamedText+`', piece: 6}}]}`+"\n"))
			query, want, x := kill(t, p, b)
			p.awaitWaiting()
			p.start()
			x = b.ReadToEnd(x)
			if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || !strings.Contains(e.Result, want) {
				t.Errorf("%s: ended %+v, want a result with %q\n%s", query, e, want, x)
			}
		})
	}
}

// killBetweenRequests kills the proxy while the agent runs a tool.
func (c ProxyRestartCheck) killBetweenRequests(t *testing.T, p *restartedProxy, b *Harness) (query, want string, so Turn) {
	t.Helper()
	query = "run it please"
	x := b.MustStartTurn(query, nil)
	awaitCondition(t, "the agent did not run the command", func() bool { return b.HasFile("started") })
	p.kill()
	b.WriteFile("continue", "")
	return query, "it ran", x
}

// killBeforeAnswer kills the proxy while a request waits for its answer.
func killBeforeAnswer(t *testing.T, p *restartedProxy, b *Harness) (query, want string, so Turn) {
	t.Helper()
	p.stall("")
	query = "say it please"
	x := b.MustStartTurn(query, nil)
	<-p.stalled
	p.kill()
	return query, streamedText, x
}

// killWithinAnswer kills the proxy when the agent has received a part of an answer.
func killWithinAnswer(t *testing.T, p *restartedProxy, b *Harness) (query, want string, so Turn) {
	t.Helper()
	first, _, _ := strings.Cut(streamedText, " ")
	p.stall(first)
	query = "say it please"
	x := b.MustStartTurn(query, nil)
	<-p.stalled
	x = b.ReadUntil("text", isDelta, x)
	p.kill()
	return query, streamedText, x
}

// restartedProxy is an egress proxy process with one registered sandbox, the forwarder of a runner, and a server between the proxy and
// the scripted model that stalls answers.
type restartedProxy struct {
	t         *testing.T
	program   string
	dir       string
	env       []string
	cmd       *exec.Cmd
	log       lockedBuffer // of the forwarder
	stalled   chan struct{}
	stalling  atomic.Bool
	stallAt   string
	stallOnce sync.Once
}

// buildEgressProxy builds the egress proxy, and returns the path of the program, which exists until the test ends.
func buildEgressProxy(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "egress")
	if out, err := exec.Command("go", "build", "-o", program, "github.com/spoolhq/spool/services/executor/cmd/egress").CombinedOutput(); err != nil { //nolint:gosec // of this repository
		t.Fatalf("build the egress proxy: %v: %s", err, out)
	}
	return program
}

// open starts the proxy for the model at a URL, and the forwarder, and returns the URL of the forwarder.
func (p *restartedProxy) open(modelURL string) string {
	p.t.Helper()
	dir, err := os.MkdirTemp("", "eg") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		p.t.Fatal(err)
	}
	p.dir, p.stalled = dir, make(chan struct{})
	p.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	model := httptest.NewServer(p.stallingServer(modelURL))
	p.t.Cleanup(model.Close)
	p.env = append(os.Environ(), "SPOOL_EGRESS_LISTEN_SANDBOXES="+dir+"/s/p", "SPOOL_EGRESS_LISTEN_ADMIN="+dir+"/a/p", "SPOOL_EGRESS_DATA="+dir+"/d",
		"ANTHROPIC_API_KEY=test", "SPOOL_ANTHROPIC_BASE_URL="+model.URL, "OPENAI_API_KEY=test", "SPOOL_OPENAI_BASE_URL="+model.URL+"/v1")
	p.start()
	p.t.Cleanup(p.kill)
	f, err := loopback.Listen(p.t.Context(), loopback.Config{
		Socket: dir + "/s/p", Token: p.register(), Address: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(&p.log, nil)),
	})
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	p.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Error(err)
		}
	})
	return "http://" + f.Addr().String()
}

// start starts the process, and blocks until it listens.
func (p *restartedProxy) start() {
	p.t.Helper()
	p.cmd = exec.Command(p.program) //nolint:gosec // of this repository
	p.cmd.Env, p.cmd.Stderr = p.env, p.t.Output()
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	awaitCondition(p.t, "the egress proxy does not listen", func() bool {
		c, err := net.Dial("unix", p.dir+"/a/p")
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
}

// kill kills the process, and ends the stalling of answers.
func (p *restartedProxy) kill() {
	p.stalling.Store(false)
	if p.cmd.Process == nil {
		return // it could not be started
	}
	_ = p.cmd.Process.Kill() // it may have ended already
	_ = p.cmd.Wait()         // it was killed
}

// awaitWaiting blocks until a request of the agent waits at the forwarder for the proxy.
func (p *restartedProxy) awaitWaiting() {
	p.t.Helper()
	awaitCondition(p.t, "the agent sends no request", func() bool { return strings.Contains(p.log.String(), "cannot be reached") })
}

// register registers a sandbox with the proxy, as an executor does, and returns the sandbox's token.
func (p *restartedProxy) register() (token string) {
	p.t.Helper()
	id := func(kind events.IDKind) string {
		id, err := events.NewID(kind, time.Now(), rand.Reader)
		if err != nil {
			p.t.Fatal(err)
		}
		return id
	}
	token = rand.Text()
	body, err := json.Marshal(map[string]any{"token": token, "tenant": "acme", "session": id(events.KindSession), "execution": id(events.KindExecution), "epoch": 1})
	if err != nil {
		p.t.Fatal(err)
	}
	admin := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", p.dir+"/a/p")
	}}
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodPut, "http://egress/v1/sandboxes/"+id(events.KindSandbox), bytes.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	res, err := admin.RoundTrip(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer res.Body.Close() //nolint:errcheck // it is read
	if said, err := io.ReadAll(res.Body); err != nil || res.StatusCode != http.StatusOK {
		p.t.Fatalf("register a sandbox: %s, %s, %v", res.Status, said, err)
	}
	return token
}

// stall makes the model stall after a text of an answer, or before the answer if the text is "", until the proxy is killed. Then
// stalled is closed.
func (p *restartedProxy) stall(at string) {
	p.stallAt = at
	p.stalling.Store(true)
}

// stallingServer returns a handler that forwards requests to the model at a URL, and stalls as stall says.
func (p *restartedProxy) stallingServer(modelURL string) http.Handler {
	target, err := url.Parse(modelURL)
	if err != nil {
		p.t.Fatal(err)
	}
	return &httputil.ReverseProxy{
		FlushInterval: -1,
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		ModifyResponse: func(res *http.Response) error {
			if res.Request.Method == http.MethodPost && p.stalling.Load() {
				body := &stallingBody{ReadCloser: res.Body, p: p, ctx: res.Request.Context()}
				if p.stallAt == "" {
					body.wait()
				}
				res.Body = body
			}
			return nil
		},
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug), // connections that break are what is tested
	}
}

// stallingBody is an answer that stalls after a text.
type stallingBody struct {
	io.ReadCloser
	p    *restartedProxy
	ctx  context.Context //nolint:containedctx // of the request
	seen []byte
}

// wait blocks until the proxy has closed the connection, because it was killed.
func (s *stallingBody) wait() {
	s.p.stallOnce.Do(func() { close(s.p.stalled) })
	<-s.ctx.Done()
}

func (s *stallingBody) Read(b []byte) (int, error) {
	if _, rest, ok := bytes.Cut(s.seen, []byte(s.p.stallAt)); ok && bytes.Contains(rest, []byte("\n\n")) { // the event has ended
		s.wait()
		return 0, s.ctx.Err()
	}
	n, err := s.ReadCloser.Read(b[:min(len(b), 64)]) // the rest of the answer may come with the text
	s.seen = append(s.seen, b[:n]...)
	return n, err
}

// lockedBuffer is a buffer for concurrent use.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
