package bareagent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// lineResult is the effect of one line of an agent's standard output on the turn.
type lineResult struct {
	text   bool // the line has text of the answer
	answer any  // if set, the line asks whether a tool may be called, and this request allows it
	result bool // the line has the result of a call
	ended  bool // the turn has completed
	err    error
}

// agentProcess is a running process of an agent's CLI with its stdin and stdout. The process of a warm agent is itself
// a Conversation; a oneShotConversation starts one for every turn.
type agentProcess struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  *bufio.Reader
	stderr bytes.Buffer
	query  func(text string) any        // returns the request that begins a turn of a warm agent
	read   func(line []byte) lineResult // reads one line of a turn
}

// handshakeTimeout is the time limit for the handshake with a new process of an agent. It is long because the machine
// may be busy.
const handshakeTimeout = 60 * time.Second

// handshakeStep is one request that is sent to a new process. The function answered reports whether a line of the
// process answers the request; it is nil for a request without an answer.
type handshakeStep struct {
	request  any
	answered func(line []byte) (bool, error)
}

// matchResponse returns the function answered of a handshakeStep for the JSON-RPC request id. The function decodes the
// result of the response into result.
func matchResponse(id int, result any) func(line []byte) (bool, error) {
	return func(line []byte) (bool, error) {
		var m struct {
			ID     int
			Method string
			Result json.RawMessage
			Error  *struct{ Message string }
		}
		if err := json.Unmarshal(line, &m); err != nil {
			return false, fmt.Errorf("%w: %s", err, line)
		}
		if m.Method != "" || m.ID != id {
			return false, nil
		}
		if m.Error != nil {
			return false, fmt.Errorf("request %d: %s", id, m.Error.Message)
		}
		return true, json.Unmarshal(m.Result, result)
	}
}

// startProcess starts cmd as the process p, with folders below dir as its home and workspace, and performs the steps of
// the handshake.
func startProcess(dir string, cmd *exec.Cmd, p *agentProcess, handshake ...handshakeStep) (*agentProcess, error) {
	if err := p.start(dir, cmd); err != nil {
		return nil, err
	}
	for _, s := range handshake {
		if err := p.performStep(s); err != nil {
			_ = p.Close() // the error of the handshake matters
			return nil, err
		}
	}
	return p, nil
}

// start starts the command with pipes as its stdin and stdout.
func (p *agentProcess) start(dir string, cmd *exec.Cmd) error {
	if err := prepareCommand(dir, cmd); err != nil {
		return err
	}
	p.cmd, cmd.Stderr = cmd, &p.stderr
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	p.lines = bufio.NewReaderSize(out, 1<<20)
	return cmd.Start()
}

// prepareCommand creates the home and the workspace of a command below dir, and sets its working directory and
// environment.
func prepareCommand(dir string, cmd *exec.Cmd) error {
	cmd.Dir = filepath.Join(dir, "workspace")
	cmd.Env = append(cmd.Env, "PATH="+os.Getenv("PATH"), "HOME="+filepath.Join(dir, "home"), "TMPDIR="+dir, "LANG=C.UTF-8")
	return errors.Join(os.MkdirAll(cmd.Dir, 0o700), os.MkdirAll(filepath.Join(dir, "home"), 0o700))
}

// Close kills the process and waits until it has ended.
func (p *agentProcess) Close() error {
	return errors.Join(p.in.Close(), p.cmd.Process.Kill(), ignoreExitError(p.cmd.Wait()))
}

// ignoreExitError returns nil for the error of a process that exited or was killed.
func ignoreExitError(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil // the process was killed
	}
	return err
}

// sendJSONLine writes a value as one line of JSON.
func (p *agentProcess) sendJSONLine(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = p.in.Write(append(raw, '\n'))
	return err
}

// performStep sends the request of a handshakeStep and reads lines of the process until one answers the request.
func (p *agentProcess) performStep(s handshakeStep) error {
	stop := time.AfterFunc(handshakeTimeout, func() { _ = p.cmd.Process.Kill() })
	defer stop.Stop()
	if err := p.sendJSONLine(s.request); err != nil || s.answered == nil {
		return err
	}
	for {
		line, err := p.lines.ReadBytes('\n')
		if err != nil {
			return fmt.Errorf("handshake: %w: %s", err, p.stderr.String())
		}
		if ok, err := s.answered(line); ok || err != nil {
			return err
		}
	}
}

// Turn implements Conversation.
func (p *agentProcess) Turn(ctx context.Context, text string) (time.Duration, error) {
	start := time.Now()
	if err := p.sendJSONLine(p.query(text)); err != nil {
		return 0, err
	}
	t, err := p.readTurn(ctx)
	return t.text.Sub(start), err
}

// Ask implements PermissionConversation.
func (p *agentProcess) Ask(ctx context.Context, text string) (time.Duration, error) {
	if err := p.sendJSONLine(p.query(text)); err != nil {
		return 0, err
	}
	t, err := p.readTurn(ctx)
	if err == nil && (t.answers != 1 || t.result.IsZero()) {
		err = fmt.Errorf("the agent asked about %d calls, want 1 with a result", t.answers)
	}
	return t.result.Sub(t.answered), err
}

// turnTimes are the moments of a turn that are measured.
type turnTimes struct {
	text             time.Time // the first text
	answers          int       // calls that were allowed
	answered, result time.Time // the last call was allowed, and its result
}

// readTurn reads lines of the process until the turn has completed, and allows each call for which the agent requests a
// permission. The end of ctx kills the process. An error contains the standard error of the process.
func (p *agentProcess) readTurn(ctx context.Context) (t turnTimes, err error) {
	// The kill ends a blocked read.
	stop := context.AfterFunc(ctx, func() { _ = p.cmd.Process.Kill() })
	defer stop()
	for {
		line, err := p.lines.ReadBytes('\n')
		received := time.Now()
		var o lineResult
		if err == nil {
			o = p.read(line)
		}
		if o.answer != nil {
			t.answers, t.answered, t.result = t.answers+1, time.Now(), time.Time{}
			err = errors.Join(err, p.sendJSONLine(o.answer))
		}
		if o.ended && t.text.IsZero() {
			o.err = errors.New("turn ended without text")
		}
		switch err := errors.Join(err, o.err); {
		case err != nil:
			return t, fmt.Errorf("%w: standard error: %s", err, p.stderr.String())
		case o.ended:
			return t, nil
		case o.text && t.text.IsZero():
			t.text = received
		case o.result && t.answers > 0 && t.result.IsZero():
			t.result = received
		}
	}
}
