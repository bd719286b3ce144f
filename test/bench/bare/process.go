// Package bare talks to agents without Spool: to a warm process on its stdio, as
// the runner's adapters drive it, and to the one-shot form of a CLI, which starts
// a process for every turn.
package bare

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

// Talker takes turns with an agent.
type Talker interface {
	// Turn says a text and gives the time to the first text of the answer; it returns when the turn is over.
	Turn(ctx context.Context, text string) (time.Duration, error)
	io.Closer
}

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

// greetWithin bounds a handshake, on a busy machine.
const greetWithin = 60 * time.Second

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

// greet sends a request of the handshake, if any, and reads until its answer.
func (p *process) greet(request any, answered func(line []byte) (bool, error)) error {
	stop := time.AfterFunc(greetWithin, func() { _ = p.cmd.Process.Kill() })
	defer stop.Stop()
	if err := p.send(request); err != nil {
		return err
	}
	for {
		line, err := p.lines.ReadBytes('\n')
		if err != nil {
			return fmt.Errorf("in the handshake: %w: %s", err, p.errs.String())
		}
		if yes, err := answered(line); yes || err != nil {
			return err
		}
	}
}

// Turn implements Talker.
func (p *process) Turn(ctx context.Context, text string) (time.Duration, error) {
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

// BuiltIn is `runner agent`.
func BuiltIn(path, dir, url string) (Talker, error) {
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
