package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/test/bench/system"
)

type object = map[string]any

// server is the process of a program that serves HTTP and sends events by SSE.
type server struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	url    string
	dir    string             // the workspace
	events chan receivedEvent // closed when the stream has ended
	cancel context.CancelFunc
}

// receivedEvent is an event of the stream, and the time at which it was read.
type receivedEvent struct {
	data []byte
	at   time.Time
}

// startServer starts a program that serves HTTP on the given port of loopback, and returns when it answers at path.
func startServer(ctx context.Context, dir, modelURL, address, health string, cmd *exec.Cmd) (*server, error) {
	env, err := bareagent.OpenCodeEnv(dir, modelURL)
	if err != nil {
		return nil, err
	}
	s := &server{cmd: cmd, url: "http://" + address, dir: filepath.Join(dir, "workspace"), events: make(chan receivedEvent, 1<<16), cancel: func() {}}
	home := filepath.Join(dir, "home")
	if err := errors.Join(os.MkdirAll(s.dir, 0o700), os.MkdirAll(home, 0o700)); err != nil {
		return nil, err
	}
	cmd.Dir, cmd.Stderr = s.dir, &s.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the program of npm starts the server, which starts the agent
	cmd.Env = append(append(env, "HOME="+home, "TMPDIR="+dir, "LANG=C.UTF-8"), cmd.Env...)
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	err = system.Until(ctx, turnTimeout, "the server answers", func() (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, turnTimeout)
		defer cancel()
		_, err := s.call(ctx, http.MethodGet, health, nil)
		return err == nil, nil
	})
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// freeAddress returns an address of loopback that nobody listens on.
func freeAddress() (address, port string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", err
	}
	_, port, err = net.SplitHostPort(l.Addr().String())
	return l.Addr().String(), port, errors.Join(err, l.Close())
}

// Close ends the event stream and the processes of the server.
func (s *server) Close() error {
	s.cancel()
	err := s.cmd.Process.Signal(os.Interrupt)
	stop := time.AfterFunc(5*time.Second, func() { _ = s.cmd.Process.Kill() }) // it may have ended
	defer stop.Stop()
	var exit *exec.ExitError
	if werr := s.cmd.Wait(); !errors.As(werr, &exit) {
		err = errors.Join(err, werr)
	}
	// The server and the agent outlive the program that started them.
	if kerr := syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL); !errors.Is(kerr, syscall.ESRCH) {
		err = errors.Join(err, kerr)
	}
	return err
}

// call sends a request with a JSON body and returns the body of the response. A status other than 2xx is an error.
func (s *server) call(ctx context.Context, method, path string, body any) (json.RawMessage, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	if raw, err = io.ReadAll(resp.Body); err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: status %d: %.300s", method, path, resp.StatusCode, raw)
	}
	return raw, err
}

// follow reads the events of a stream until Close.
func (s *server) follow(path string) error {
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "text/event-stream")
	resp, err := http.DefaultClient.Do(req) //nolint:bodyclose // closed below, or by the goroutine
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.Join(fmt.Errorf("GET %s: status %d", path, resp.StatusCode), resp.Body.Close())
	}
	go func() {
		defer close(s.events)
		defer resp.Body.Close() //nolint:errcheck // the stream ends with its process
		lines := bufio.NewReaderSize(resp.Body, 1<<20)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return
			}
			if data, ok := bytes.CutPrefix(line, []byte("data:")); ok {
				s.events <- receivedEvent{data, time.Now()}
			}
		}
	}()
	return nil
}

// take posts a message, reads events until ended returns true, and returns the time to the first text.
func (s *server) take(ctx context.Context, post func() error, read func(data []byte) (text, ended bool, err error)) (first time.Duration, err error) {
	begun := time.Now()
	posted := make(chan error, 1)
	go func() { posted <- post() }()
	for {
		select {
		case e, ok := <-s.events:
			if !ok {
				return 0, errors.New("the stream of events ended")
			}
			text, ended, err := read(e.data)
			if err != nil {
				return 0, err
			}
			if text && first == 0 {
				first = e.at.Sub(begun)
			}
			if ended && first != 0 {
				return first, <-posted
			}
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// viaPeer is a conversation with OpenCode through sandbox-agent, which serves ACP over HTTP. It implements
// conversation.
type viaPeer struct {
	*server
	session string
	id      int
}

const peerPath = "/v1/acp/bench"

// startPeer starts sandbox-agent and a session in it. agents is the folder with the program of OpenCode.
func startPeer(ctx context.Context, binary, agents, dir, modelURL string) (conversation, error) {
	address, port, err := freeAddress()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(binary, "server", "--no-telemetry", "--no-token", "--port", port) //nolint:gosec // the pinned program
	// It runs the opencode that it finds on the PATH.
	cmd.Env = []string{"PATH=" + agents + string(os.PathListSeparator) + os.Getenv("PATH")}
	s, err := startServer(ctx, dir, modelURL, address, "/v1/health", cmd)
	if err != nil {
		return nil, err
	}
	c := &viaPeer{server: s}
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	_, err = c.request(ctx, "initialize", object{"protocolVersion": 1, "clientInfo": object{"name": "spool", "version": "1"}})
	if err == nil {
		var raw json.RawMessage
		if raw, err = c.request(ctx, "session/new", object{"cwd": s.dir, "mcpServers": []any{}}); err == nil {
			var result struct{ SessionID string }
			err = json.Unmarshal(raw, &result)
			c.session = result.SessionID
		}
	}
	if err == nil {
		err = s.follow(peerPath)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return c, nil
}

// request sends a request of ACP and returns its result. The first one starts the agent.
func (c *viaPeer) request(ctx context.Context, method string, params any) (json.RawMessage, error) {
	c.id++
	raw, err := c.call(ctx, http.MethodPost, peerPath+"?agent=opencode", object{"jsonrpc": "2.0", "id": c.id, "method": method, "params": params})
	if err != nil {
		return nil, err
	}
	var m struct{ Result, Error json.RawMessage }
	if err := json.Unmarshal(raw, &m); err != nil || m.Error != nil {
		return nil, fmt.Errorf("%s: %w: %.300s", method, err, raw)
	}
	return m.Result, nil
}

// Turn implements conversation.
func (c *viaPeer) Turn(ctx context.Context, text string) (time.Duration, error) {
	post := func() error {
		_, err := c.request(ctx, "session/prompt", object{"sessionId": c.session, "prompt": []object{{"type": "text", "text": text}}})
		return err
	}
	return c.take(ctx, post, func(data []byte) (bool, bool, error) {
		var m struct {
			Method string
			Params struct {
				Update struct {
					Kind    string `json:"sessionUpdate"`
					Content json.RawMessage
				}
			}
		}
		if err := json.Unmarshal(data, &m); err != nil {
			return false, false, err
		}
		kind := m.Params.Update.Kind
		// The usage is the last update of a turn.
		return kind == "agent_message_chunk" && bytes.Contains(m.Params.Update.Content, []byte(`"text"`)), kind == "usage_update", nil
	})
}

// install installs the pinned version into .tools/peer of the repository and returns the path of the program.
func install(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", err
	}
	module := filepath.Dir(strings.TrimSpace(string(out))) // test
	dir := filepath.Join(filepath.Dir(module), ".tools", "peer")
	binary := filepath.Join(dir, "node_modules", ".bin", "sandbox-agent")
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // like .tools
		return "", err
	}
	for _, name := range []string{"package.json", "package-lock.json"} {
		raw, err := os.ReadFile(filepath.Join(module, "bench", "peer", name)) //nolint:gosec // a file of the repository
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), raw, 0o644) //nolint:gosec // as above
		}
		if err != nil {
			return "", err
		}
	}
	// The lock file of npm names the same version, so an installed one stays.
	cmd := exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "--no-save", "--no-fund", "--no-audit", "--loglevel=error")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm install: %w: %s", err, out)
	}
	return binary, nil
}
