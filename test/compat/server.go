package compat

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// waitTimeout is the time limit of each wait for a server. A turn of an agent's CLI takes a few seconds.
const waitTimeout = 2 * time.Minute

// Server is a running `spool up` of a released or of the present build, together with a scripted model server.
type Server struct {
	Config
	URL  string
	ctx  context.Context
	cmd  *exec.Cmd
	done chan error
}

// Config configures a Server: the build's program, its data folder, its root key, and the script of the model server.
// All fields are required.
type Config struct {
	Spool   string // the program; its runner is in the same folder
	Data    string // the data folder
	Script  string // script file of the model server
	RootKey string
}

// StartServer starts `spool up` of a build on a data folder and returns when it is ready.
func StartServer(ctx context.Context, cfg Config) (*Server, error) {
	s := &Server{Config: cfg, ctx: ctx, done: make(chan error, 1)}
	s.cmd = exec.Command(cfg.Spool, "up", "--data", cfg.Data, "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0",
		"--sandbox", "local", "--mock-llm", "--mock-script", cfg.Script, "--auth", "keys", "--root-key", cfg.RootKey)
	s.cmd.Stderr = os.Stderr
	// The longest possible lifetime of a session, so that the recording can be used for as long as possible.
	s.cmd.Env = append(os.Environ(), "SPOOL_SESSION_LIMIT=1193h")
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	ready := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if url, ok := strings.CutPrefix(lines.Text(), "ready "); ok {
				ready <- strings.Fields(url)[0]
			}
		}
		s.done <- s.cmd.Wait()
	}()
	select {
	case s.URL = <-ready:
		return s, nil
	case err := <-s.done:
		return nil, fmt.Errorf("spool up ended before it was ready: %w", err)
	case <-time.After(waitTimeout):
		return nil, errors.Join(errors.New("spool up was not ready"), s.cmd.Process.Kill())
	}
}

// Stop interrupts `spool up` with the signal that Ctrl-C sends, and returns when its process has ended.
func (s *Server) Stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGINT); err != nil {
		return err
	}
	return <-s.done
}

// NATSURL returns the URL of the server's NATS, with the password of the user admin.
func (s *Server) NATSURL() (string, error) {
	raw, err := os.ReadFile(filepath.Join(s.Data, "spool.json"))
	if err != nil {
		return "", err
	}
	var c struct {
		NATSURL string `json:"natsUrl"`
	}
	return c.NATSURL, json.Unmarshal(raw, &c)
}

// RunCLI runs a command of the same build's spool program with an API key, and returns its standard output.
func (s *Server) RunCLI(key string, args ...string) (string, error) {
	cmd := exec.CommandContext(s.ctx, s.Spool, args...)
	cmd.Env = append(os.Environ(), "SPOOL_URL="+s.URL, "SPOOL_API_KEY="+key, "SPOOL_DATA_DIR="+s.Data)
	var out, messages bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &messages
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("spool %s: %w: %s%s", strings.Join(args, " "), err, &out, &messages)
	}
	return out.String(), nil
}

// CallAPI sends a request to the REST API with an API key, and decodes the response into out unless out is nil. A status
// other than 2xx is a StatusError.
func (s *Server) CallAPI(key, method, path string, body, out any) error {
	var in io.Reader
	switch b := body.(type) {
	case nil:
	case []byte:
		in = bytes.NewReader(b)
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			return err
		}
		in = bytes.NewReader(raw)
	}
	ctx, cancel := context.WithTimeout(s.ctx, waitTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, s.URL+path, in)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	if _, raw := body.([]byte); !raw {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // the body was read to its end
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return &StatusError{resp.StatusCode, fmt.Sprintf("%s %s answered %d: %s", method, path, resp.StatusCode, raw)}
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(raw, out)
}

// StatusError is the error for a response of the REST API with a status other than 2xx.
type StatusError struct {
	Status  int
	message string
}

func (e *StatusError) Error() string { return e.message }

// AwaitEvent reads the event stream of a session, after the event with the seq after. It returns the first event or
// delta for which want returns true.
func (s *Server) AwaitEvent(key, session string, after uint32, want func(events.WireEvent) bool) (events.WireEvent, error) {
	ctx, cancel := context.WithTimeout(s.ctx, waitTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/api/sessions/"+session+fmt.Sprintf("/events/stream?after=%d", after), nil)
	if err != nil {
		return events.WireEvent{}, err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return events.WireEvent{}, err
	}
	defer resp.Body.Close() //nolint:errcheck // the connection is cut off
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data:")
		if !ok {
			continue
		}
		var w events.WireEvent
		if err := json.Unmarshal([]byte(data), &w); err != nil {
			return w, err
		}
		if want(w) {
			return w, nil
		}
	}
	return events.WireEvent{}, fmt.Errorf("the stream of session %s ended first: %w", session, errors.Join(lines.Err(), ctx.Err()))
}
