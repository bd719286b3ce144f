package cli_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/cli"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// patience limits every wait for another process.
const patience = 60 * time.Second

// TestMain makes the test binary act as the runner, and as a scripted agent.
func TestMain(m *testing.M) {
	switch os.Getenv("RUNNER_TEST_AS") {
	case "agent":
		os.Exit(scriptedAgent())
	case "dialer":
		if err := dialer(os.Args[1], os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case "runner":
		if os.Getenv("RUNNER_TEST_PID1") != "" {
			mountProc()
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		sys := cli.ProcessSystem()
		sys.Architectures = cli.Architectures()
		sys.Architectures["script"] = scripted{}
		sys.Architectures["claude-code"] = scripted{} // the architecture of an alias, without the CLI
		code := cli.Run(ctx, os.Args[1:], sys)
		stop()
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// served is a running `runner serve`.
type served struct {
	t                        *testing.T
	socket, workspace, state string
	cmd                      *exec.Cmd
	exited                   chan struct{}
	log                      *strings.Builder
	secret                   string // the secret of the first attach
}

func serveRunner(t *testing.T, flags ...string) *served {
	t.Helper()
	return serveWith(t, nil, flags...)
}

// serveWith serves with more variables in the environment.
func serveWith(t *testing.T, env []string, flags ...string) *served {
	t.Helper()
	return serveAs(t, nil, env, flags...)
}

func serveAs(t *testing.T, attr *syscall.SysProcAttr, env []string, flags ...string) *served {
	t.Helper()
	dir, err := os.MkdirTemp("", "rt") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &served{t: t, socket: dir + "/s", workspace: dir + "/w", state: dir + "/st", exited: make(chan struct{}), log: &strings.Builder{}}
	if err := os.Mkdir(s.workspace, 0o755); err != nil {
		t.Fatal(err)
	}
	s.cmd = command(append([]string{"serve", "--socket", s.socket, "--workspace", s.workspace, "--state", s.state}, flags...)...)
	s.cmd.Env = append(s.cmd.Env, env...)
	s.cmd.SysProcAttr = attr
	ready, w := io.Pipe()
	s.cmd.Stderr = w
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	up := make(chan struct{})
	logged := make(chan struct{})
	go func() {
		defer close(logged)
		lines := bufio.NewScanner(ready)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			s.log.WriteString(lines.Text() + "\n")
			if strings.Contains(lines.Text(), "serving") {
				close(up)
			}
		}
	}()
	go func() {
		defer close(s.exited)
		_ = s.cmd.Wait() // tests check ProcessState
		_ = w.Close()
		<-logged
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Signal(syscall.SIGTERM)
		s.gone()
		if t.Failed() {
			t.Logf("runner's log:\n%s", s.log)
		}
	})
	select {
	case <-up:
	case <-s.exited:
		t.Fatalf("runner did not start:\n%s", s.log)
	case <-time.After(patience):
		t.Fatal("runner did not start in time")
	}
	return s
}

func command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "RUNNER_TEST_AS=runner")
	return cmd
}

// gone waits until the runner has ended.
func (s *served) gone() {
	s.t.Helper()
	select {
	case <-s.exited:
	case <-time.After(patience):
		_ = s.cmd.Process.Kill()
		s.t.Error("the runner does not end")
	}
}

// client is an attached follower.
type client struct {
	t        *testing.T
	conn     net.Conn
	epoch    uint64
	hello    runner.Hello
	refused  *runner.Reply       // in place of hello
	messages chan runner.Message // closed with the connection
	lines    []runner.JournalLine
	id       uint64
}

func (s *served) dial() net.Conn {
	s.t.Helper()
	c, err := net.Dial("unix", s.socket)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// seal claims the runner, if that was not done, and proves the secret to it.
func (s *served) seal() net.Conn {
	s.t.Helper()
	if s.secret == "" {
		s.secret = runner.NewSecret()
		if got := claim(s.socket, s.secret); strings.Contains(got, "error") {
			s.t.Fatalf("claim: %s", got)
		}
	}
	c := s.dial()
	sealed, err := runner.OpenSealedStream(s.secret, c, c)
	if err != nil {
		s.t.Fatal(err)
	}
	return sealed
}

func (s *served) attach(epoch, after uint64) *client {
	s.t.Helper()
	c := &client{t: s.t, conn: s.seal(), epoch: epoch, messages: make(chan runner.Message, 1<<16)}
	c.sendRaw(fmt.Sprintf(`{"epoch":%d,"after":%d}`, epoch, after))
	go func() {
		defer close(c.messages)
		in := bufio.NewReader(c.conn)
		for {
			raw, err := in.ReadBytes('\n')
			if err != nil {
				return
			}
			var m runner.Message
			if err := json.Unmarshal(raw, &m); err != nil {
				m.Reply = &runner.Reply{Error: &runner.CommandError{Code: "TEST", Message: err.Error()}}
			}
			c.messages <- m
		}
	}()
	m, ok := c.next()
	if !ok {
		s.t.Fatal("the runner closed at once")
	}
	if m.Hello != nil {
		c.hello = *m.Hello
	} else {
		c.refused = m.Reply
	}
	return c
}

func (c *client) sendRaw(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) next() (runner.Message, bool) {
	c.t.Helper()
	select {
	case m, ok := <-c.messages:
		return m, ok
	case <-time.After(patience):
		c.t.Fatal("nothing came from the runner")
		return runner.Message{}, false
	}
}

// ask sends a command and returns its reply; lines that come before are kept.
func (c *client) ask(cmd runner.Command) runner.Reply {
	c.t.Helper()
	c.id++
	cmd.ID, cmd.Epoch = c.id, c.epoch
	raw, err := json.Marshal(cmd)
	if err != nil {
		c.t.Fatal(err)
	}
	c.sendRaw(string(raw))
	return c.reply()
}

func (c *client) reply() runner.Reply {
	c.t.Helper()
	for {
		m, ok := c.next()
		switch {
		case !ok:
			c.t.Fatal("the runner closed instead of answering")
		case m.Reply != nil:
			return *m.Reply
		case m.Line != nil:
			c.lines = append(c.lines, *m.Line)
		}
	}
}

func (c *client) start(execution, script string, change ...func(*runner.Query)) runner.Reply {
	c.t.Helper()
	q := runner.Query{SessionID: "ses_1", ExecutionID: execution, Attempt: 1, Architecture: "script", Content: script}
	for _, f := range change {
		f(&q)
	}
	return c.ask(runner.Command{Op: runner.OpStart, Query: &q})
}

// until reads lines up to one of the type, and returns it.
func (c *client) until(typ events.Type) runner.JournalLine {
	c.t.Helper()
	for i, l := range c.lines {
		if l.Type == typ {
			c.lines = c.lines[i+1:]
			return l
		}
	}
	c.lines = nil
	for {
		m, ok := c.next()
		if !ok {
			c.t.Fatalf("the runner closed before a line of type %s", typ)
		}
		if m.Line != nil && m.Line.Type == typ {
			return *m.Line
		}
	}
}

// journal reads all lines up to the execution's end, and checks the invariants of a journal.
func (c *client) journal(execution string) []runner.JournalLine {
	c.t.Helper()
	lines := c.lines
	c.lines = nil
	for len(lines) == 0 || lines[len(lines)-1].Type != runner.TurnEnded || lines[len(lines)-1].ExecutionID != execution {
		m, ok := c.next()
		if !ok {
			c.t.Fatalf("the runner closed before the end of %s", execution)
		}
		if m.Line != nil {
			lines = append(lines, *m.Line)
		}
	}
	check(c.t, lines)
	return lines
}

// run runs one query from start to end.
func (c *client) run(execution, script string, change ...func(*runner.Query)) []runner.JournalLine {
	c.t.Helper()
	if r := c.start(execution, script, change...); r.Error != nil {
		c.t.Fatal(r.Error)
	}
	return c.journal(execution)
}
