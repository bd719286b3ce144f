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

// jsonObject is a JSON object.
type jsonObject = map[string]any

// serverProcess is a running program that serves HTTP on loopback and sends events as an SSE stream.
type serverProcess struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	url    string
	dir    string             // the workspace
	events chan receivedEvent // closed when the stream has ended
	cancel context.CancelFunc
}

// receivedEvent is the data of an event of an SSE stream, and the time at which it was read.
type receivedEvent struct {
	data []byte
	at   time.Time
}

// startServer starts cmd, a program that serves HTTP at an address of loopback, and returns when it answers requests
// for the path health. dir is the folder for its files; modelURL is the model that OpenCode uses.
func startServer(ctx context.Context, dir, modelURL, address, health string, cmd *exec.Cmd) (*serverProcess, error) {
	env, err := bareagent.OpenCodeVariables(dir, modelURL)
	if err != nil {
		return nil, err
	}
	s := &serverProcess{cmd: cmd, url: "http://" + address, dir: filepath.Join(dir, "workspace"), events: make(chan receivedEvent, 1<<16), cancel: func() {}}
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
	err = system.PollUntil(ctx, turnTimeout, "the server answers", func() (bool, error) {
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

// freeAddress returns an address of loopback on which nothing listens, and its port.
func freeAddress() (address, port string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", err
	}
	_, port, err = net.SplitHostPort(l.Addr().String())
	return l.Addr().String(), port, errors.Join(err, l.Close())
}

// Close ends the stream of events and the processes of the program.
func (s *serverProcess) Close() error {
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

// call sends a request with a JSON body to the program and returns the body of the response. A status other than 2xx is
// an error.
func (s *serverProcess) call(ctx context.Context, method, path string, body any) (json.RawMessage, error) {
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

// followEvents starts to read the SSE stream at path, whose events it sends to s.events until Close.
func (s *serverProcess) followEvents(path string) error {
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

// postAndRead calls post, which sends a message, and calls read for every event that follows. It returns the time from
// the message to the first event for which read reported text, when read has reported the end of the turn.
func (s *serverProcess) postAndRead(ctx context.Context, post func() error, read func(data []byte) (text, ended bool, err error)) (first time.Duration, err error) {
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

// sandboxAgentConversation is a conversation with OpenCode through the program sandbox-agent, which serves ACP over
// HTTP. It implements conversation.
type sandboxAgentConversation struct {
	*serverProcess
	session string
	id      int
}

// acpPath is the path at which sandbox-agent serves ACP.
const acpPath = "/v1/acp/bench"

// startSandboxAgent starts the program sandbox-agent, whose path is binary, and creates a session in it. agents is the
// folder that contains the program of OpenCode.
func startSandboxAgent(ctx context.Context, binary, agents, dir, modelURL string) (conversation, error) {
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
	c := &sandboxAgentConversation{serverProcess: s}
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	_, err = c.requestACP(ctx, "initialize", jsonObject{"protocolVersion": 1, "clientInfo": jsonObject{"name": "spool", "version": "1"}})
	if err == nil {
		var raw json.RawMessage
		if raw, err = c.requestACP(ctx, "session/new", jsonObject{"cwd": s.dir, "mcpServers": []any{}}); err == nil {
			var result struct{ SessionID string }
			err = json.Unmarshal(raw, &result)
			c.session = result.SessionID
		}
	}
	if err == nil {
		err = s.followEvents(acpPath)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return c, nil
}

// requestACP sends a request of ACP to sandbox-agent and returns its result. The first request starts the agent.
func (c *sandboxAgentConversation) requestACP(ctx context.Context, method string, params any) (json.RawMessage, error) {
	c.id++
	raw, err := c.call(ctx, http.MethodPost, acpPath+"?agent=opencode", jsonObject{"jsonrpc": "2.0", "id": c.id, "method": method, "params": params})
	if err != nil {
		return nil, err
	}
	var m struct{ Result, Error json.RawMessage }
	if err := json.Unmarshal(raw, &m); err != nil || m.Error != nil {
		return nil, fmt.Errorf("%s: %w: %.300s", method, err, raw)
	}
	return m.Result, nil
}

// Turn posts text as a message and returns the time to the first text of the answer, after the end of the turn. It
// implements conversation.
func (c *sandboxAgentConversation) Turn(ctx context.Context, text string) (time.Duration, error) {
	post := func() error {
		_, err := c.requestACP(ctx, "session/prompt", jsonObject{"sessionId": c.session, "prompt": []jsonObject{{"type": "text", "text": text}}})
		return err
	}
	return c.postAndRead(ctx, post, func(data []byte) (bool, bool, error) {
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

// installSandboxAgent installs the version of sandbox-agent that package.json names into .tools/peer of the repository,
// with npm, and returns the path of the program.
func installSandboxAgent(ctx context.Context) (string, error) {
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
