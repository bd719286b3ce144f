package main

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

	"github.com/spoolhq/spool/pkg/runner"
)

// said is what a line of an agent's means here.
type said struct {
	text  bool // it has text of the answer
	ended bool // the turn is over
	err   error
}

// process is a warm agent on bare stdio.
type process struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Reader
	errs  bytes.Buffer
	query func(text string) any
	read  func(line []byte) said
}

// started starts a program with its folder as home and workspace.
func started(dir string, cmd *exec.Cmd, p *process) (*process, error) {
	if err := prepare(dir, cmd); err != nil {
		return nil, err
	}
	p.cmd, cmd.Stderr = cmd, &p.errs
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewReaderSize(out, 1<<20)
	return p, cmd.Start()
}

func prepare(dir string, cmd *exec.Cmd) error {
	cmd.Dir = filepath.Join(dir, "workspace")
	cmd.Env = append(cmd.Env, "PATH="+os.Getenv("PATH"), "HOME="+filepath.Join(dir, "home"), "TMPDIR="+dir, "LANG=C.UTF-8")
	return errors.Join(os.MkdirAll(cmd.Dir, 0o700), os.MkdirAll(filepath.Join(dir, "home"), 0o700))
}

// Close ends the process.
func (p *process) Close() error {
	return errors.Join(p.in.Close(), p.cmd.Process.Kill(), ignoreExit(p.cmd.Wait()))
}

func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil // it was killed
	}
	return err
}

func (p *process) send(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = p.in.Write(append(raw, '\n'))
	return err
}

func (p *process) turn(ctx context.Context, text string) (time.Duration, error) {
	// A process that hangs is ended, which ends the reading.
	stop := context.AfterFunc(ctx, func() { _ = p.cmd.Process.Kill() })
	defer stop()
	began := time.Now()
	if err := p.send(p.query(text)); err != nil {
		return 0, err
	}
	first, err := follow(p.lines, began, p.read)
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, p.errs.String())
	}
	return first, nil
}

// follow reads to the turn's end and gives the time to the first text.
func follow(lines *bufio.Reader, began time.Time, read func([]byte) said) (first time.Duration, err error) {
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return 0, err
		}
		at := time.Now()
		s := read(line)
		switch {
		case s.err != nil:
			return 0, s.err
		case s.text && first == 0:
			first = at.Sub(began)
		case s.ended && first == 0:
			return 0, errors.New("the turn ended without a text")
		case s.ended:
			return first, nil
		}
	}
}

// bareBuiltIn is `runner agent`.
func bareBuiltIn(path, dir, url string) (talker, error) {
	state := filepath.Join(dir, "state")
	if err := os.MkdirAll(state, 0o700); err != nil {
		return nil, err
	}
	cmd := exec.Command(path, "agent", "--workspace", filepath.Join(dir, "workspace"), "--state", state) //nolint:gosec // built here
	cmd.Env = []string{"OPENAI_BASE_URL=" + url + "/v1", "OPENAI_API_KEY=bench"}
	n := 0
	return started(dir, cmd, &process{
		query: func(text string) any {
			n++
			return map[string]any{"op": "query", "query": runner.Query{
				SessionID: "bare", ExecutionID: fmt.Sprint("bare-", n), Attempt: 1, Architecture: "spool", Content: text, Policy: runner.PolicyWorkspace,
			}}
		},
		read: func(line []byte) said {
			var l struct {
				Op    string
				Text  string
				Ended *runner.Ended
			}
			if err := json.Unmarshal(line, &l); err != nil {
				return said{err: err}
			}
			if l.Ended != nil && l.Ended.Outcome != runner.Completed {
				return said{err: fmt.Errorf("the turn ended with %+v", *l.Ended)}
			}
			return said{text: l.Op == "text" && l.Text != "", ended: l.Ended != nil}
		},
	})
}

// claudeEnv is what the runner's adapter gives Claude Code too.
func claudeEnv(dir, url string) []string {
	return []string{
		"ANTHROPIC_BASE_URL=" + url, "ANTHROPIC_API_KEY=bench", "CLAUDE_CONFIG_DIR=" + filepath.Join(dir, "claude"),
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1", "CLAUDE_CODE_DISABLE_CRON=1",
	}
}

// bareClaude is Claude Code as the runner's adapter drives it: two-way, one process for all turns.
func bareClaude(path, dir, url string) (talker, error) {
	cmd := exec.Command(path, "-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose", //nolint:gosec // the installed CLI
		"--include-partial-messages", "--replay-user-messages", "--permission-prompt-tool", "stdio", "--permission-mode", "default")
	cmd.Env = claudeEnv(dir, url)
	p, err := started(dir, cmd, &process{
		query: func(text string) any {
			return map[string]any{"type": "user", "message": map[string]any{"role": "user", "content": text}}
		},
		read: func(line []byte) said { return readClaude(line, nil) },
	})
	if err != nil {
		return nil, err
	}
	return p, p.send(map[string]any{"type": "control_request", "request_id": "1", "request": map[string]any{"subtype": "initialize", "hooks": nil}})
}

// readClaude reads a line of --output-format stream-json, and the session's id where it is wanted.
func readClaude(line []byte, session *string) said {
	var l struct {
		Type    string
		Subtype string
		Session string `json:"session_id"`
		IsError bool   `json:"is_error"`
		Result  string
		Event   struct {
			Type  string
			Delta struct{ Type, Text string }
		}
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return said{err: err}
	}
	if l.Type == "result" && l.IsError {
		return said{err: fmt.Errorf("the turn ended with %s: %s", l.Subtype, l.Result)}
	}
	if session != nil && l.Session != "" {
		*session = l.Session
	}
	return said{
		text:  l.Type == "stream_event" && l.Event.Type == "content_block_delta" && l.Event.Delta.Text != "",
		ended: l.Type == "result",
	}
}

// oneShot is `claude -p "message"`, which goes on with its session by --resume.
type oneShot struct {
	path, dir, url string
	session        string
}

func (o *oneShot) Close() error { return nil }

func (o *oneShot) turn(ctx context.Context, text string) (first time.Duration, err error) {
	args := []string{"-p", text, "--output-format", "stream-json", "--verbose", "--include-partial-messages"}
	if o.session != "" {
		args = append(args, "--resume", o.session)
	}
	cmd := exec.CommandContext(ctx, o.path, args...) //nolint:gosec // the installed CLI
	cmd.Env = claudeEnv(o.dir, o.url)
	if err := prepare(o.dir, cmd); err != nil {
		return 0, err
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	first, err = follow(bufio.NewReaderSize(out, 1<<20), began, func(line []byte) said { return readClaude(line, &o.session) })
	if err != nil {
		_ = cmd.Process.Kill()
		return 0, errors.Join(fmt.Errorf("%w: %s", err, errs.String()), ignoreExit(cmd.Wait()))
	}
	return first, cmd.Wait()
}
