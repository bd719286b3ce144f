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
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/cli"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// patience bounds every wait for another process.
const patience = 60 * time.Second

// TestMain lets the test's binary stand for the runner, and for a scripted agent.
func TestMain(m *testing.M) {
	switch os.Getenv("RUNNER_TEST_AS") {
	case "agent":
		os.Exit(scriptedAgent())
	case "runner":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		sys := cli.OS()
		sys.Architectures = cli.Architectures()
		sys.Architectures["script"] = scripted{}
		code := cli.Run(ctx, os.Args[1:], sys)
		stop()
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// scripted is an architecture whose queries are small scripts: a verb and its argument a line.
type scripted struct{}

func (scripted) Command(l agent.Launch) (agent.Command, error) {
	if l.Model == "missing" {
		return agent.Command{}, &runner.Error{Code: "AGENT_NOT_FOUND", Message: "script is not installed: install it"}
	}
	path := l.Executable
	if l.Model == "gone" {
		path = "/no/such/agent"
	}
	return agent.Command{Path: path, Args: []string{l.Model, l.Resume}, Env: l.Environment(map[string]string{"RUNNER_TEST_AS": "agent"})}, nil
}

func (scripted) Open(_ agent.Launch, in agent.Stdin) agent.Session { return &scriptedSession{in: in} }

func (scripted) Transcript(p agent.Place, id string) (string, error) {
	return filepath.Join(p.State, "script-"+id), nil
}

type scriptedSession struct {
	in   agent.Stdin
	text string
}

func (s *scriptedSession) Begin(q runner.Query, _ *agent.Turn) error {
	return s.in.Send(map[string]string{"script": q.Content})
}

func (s *scriptedSession) Interrupt() error { return s.in.Send(map[string]string{"interrupt": "now"}) }

func (s *scriptedSession) Line(line []byte, t *agent.Turn) error {
	var l struct{ Say, Open, End, Panic, Session *string }
	if err := json.Unmarshal(line, &l); err != nil {
		return err
	}
	switch {
	case l.Say != nil:
		t.Whole(events.MainConversation, events.Block{Kind: events.KindAssistantText, Content: *l.Say})
	case l.Open != nil:
		s.text = t.Open(events.MainConversation, events.Block{Kind: events.KindAssistantText})
		t.Text(s.text, *l.Open)
	case l.Session != nil:
		t.Emit(events.MainConversation, events.TranscriptWritten{AgentSessionID: *l.Session})
	case l.Panic != nil:
		panic(*l.Panic)
	case l.End != nil:
		t.End(runner.Ended{Outcome: runner.Outcome(*l.End)})
	}
	return nil
}

// scriptedAgent is the process of the architecture script.
func scriptedAgent() int {
	in := bufio.NewReader(os.Stdin)
	out := bufio.NewWriter(os.Stdout)
	say := func(key, value string) {
		raw, err := json.Marshal(map[string]string{key: value})
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(out, "%s\n", raw)
	}
	for {
		raw, err := in.ReadBytes('\n')
		if err != nil {
			return 0
		}
		var order map[string]string
		if err := json.Unmarshal(raw, &order); err != nil {
			return 9
		}
		if order["interrupt"] != "" {
			continue
		}
		end := "completed"
		for line := range strings.SplitSeq(order["script"], "\n") {
			verb, arg, _ := strings.Cut(line, " ")
			n, _ := strconv.Atoi(arg)
			switch verb {
			case "say":
				say("say", arg)
			case "open":
				say("open", arg)
			case "panic":
				say("panic", arg)
			case "session":
				say("session", arg)
			case "args":
				say("say", strings.Join(os.Args[1:], ","))
			case "raw":
				s, err := strconv.Unquote(arg)
				if err != nil {
					panic(err)
				}
				fmt.Fprint(out, s)
			case "big":
				fmt.Fprintf(out, "%s\n", strings.Repeat("x", n))
			case "flood":
				for i := range n {
					say("say", fmt.Sprintf("%d %s", i, strings.Repeat("f", 900)))
				}
			case "stderr":
				fmt.Fprintln(os.Stderr, arg)
			case "exit":
				out.Flush()
				return n
			case "spawn": // a child, a grandchild in a session of its own, and one whose parent is gone
				tree := exec.Command("sh", "-c", "sleep 601 & setsid sleep 602 & (setsid sleep 603 &) ; wait")
				if err := tree.Start(); err != nil {
					panic(err)
				}
			case "orphan": // one that dies after its parent has
				if err := exec.Command("sh", "-c", "(setsid sleep 0.05 &)").Run(); err != nil {
					panic(err)
				}
			case "dial":
				say("say", dialRunner(arg))
			case "wait":
				out.Flush()
				if _, err := in.ReadBytes('\n'); err != nil {
					return 0
				}
				end = "interrupted"
			case "hang":
				out.Flush()
				select {}
			case "deaf":
				say("end", end)
				out.Flush()
				select {}
			}
		}
		say("end", end)
		out.Flush()
	}
}

// dialRunner is an agent that tries to fence the executor off.
func dialRunner(socket string) string {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	fmt.Fprintf(c, "{\"epoch\":%d,\"after\":0}\n", uint64(1)<<60)
	raw, err := io.ReadAll(c)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// served is a running `runner serve`.
type served struct {
	t                        *testing.T
	socket, workspace, state string
	cmd                      *exec.Cmd
	exited                   chan struct{}
	log                      *strings.Builder
}

func serveRunner(t *testing.T, flags ...string) *served {
	t.Helper()
	dir, err := os.MkdirTemp("", "rt") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &served{t: t, socket: dir + "/s", workspace: dir + "/w", state: dir + "/st", exited: make(chan struct{}), log: &strings.Builder{}}
	if err := os.Mkdir(s.workspace, 0o755); err != nil {
		t.Fatal(err)
	}
	s.cmd = command(append([]string{"serve", "--socket", s.socket, "--workspace", s.workspace, "--state", s.state}, flags...)...)
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
		_ = s.cmd.Wait() // tests look at ProcessState
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

// gone waits for the runner's end.
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
	lines    []runner.Line
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

func (s *served) attach(epoch, after uint64) *client {
	s.t.Helper()
	c := &client{t: s.t, conn: s.dial(), epoch: epoch, messages: make(chan runner.Message, 1<<16)}
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
				m.Reply = &runner.Reply{Error: &runner.Error{Code: "TEST", Message: err.Error()}}
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

// ask sends a command and gives its reply; lines that come before are kept.
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
	q := runner.Query{SessionID: "ses_1", ExecutionID: execution, Attempt: 1, Architecture: "script", Content: script, Policy: runner.PolicyWorkspace}
	for _, f := range change {
		f(&q)
	}
	return c.ask(runner.Command{Op: runner.OpStart, Query: &q})
}

// until reads lines up to one of the type and gives it.
func (c *client) until(typ events.Type) runner.Line {
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

// journal reads everything up to the execution's end and checks what holds of every journal.
func (c *client) journal(execution string) []runner.Line {
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

// run is one query from start to end.
func (c *client) run(execution, script string, change ...func(*runner.Query)) []runner.Line {
	c.t.Helper()
	if r := c.start(execution, script, change...); r.Error != nil {
		c.t.Fatal(r.Error)
	}
	return c.journal(execution)
}

// check holds a journal to its promises: numbers without holes; of each
// execution the start first, the end once and last, and no block left open.
func check(t *testing.T, lines []runner.Line) {
	t.Helper()
	open := map[string]string{}
	text := map[string]int{}
	state := map[string]string{}
	for i, l := range lines {
		if i > 0 && l.N != lines[i-1].N+1 {
			t.Fatalf("line %d follows %d", l.N, lines[i-1].N)
		}
		if state[l.ExecutionID] == "" && l.Type != runner.AgentStarted {
			t.Errorf("%s begins with %s", l.ExecutionID, l.Type)
		}
		if state[l.ExecutionID] == "ended" {
			t.Errorf("%s goes on with %s after its end", l.ExecutionID, l.Type)
		}
		state[l.ExecutionID] = "begun"
		switch l.Type {
		case "block_start":
			if b := decode[events.BlockStart](t, l).Block; b.Status == events.StatusPending {
				open[b.ID] = l.ExecutionID
			}
		case events.TextDelta:
			d := decode[runner.Delta](t, l)
			if open[d.BlockID] == "" || int(d.Offset) != text[d.BlockID] {
				t.Errorf("delta at %d of block %s, open %q, want offset %d", d.Offset, d.BlockID, open[d.BlockID], text[d.BlockID])
			}
			text[d.BlockID] += len(d.Delta)
		case "block_complete":
			b := decode[events.BlockComplete](t, l).Block
			if open[b.ID] == "" || b.Status == events.StatusPending {
				t.Errorf("completion of %s, which is not open, or with status %s", b.ID, b.Status)
			}
			delete(open, b.ID)
		case runner.TurnEnded:
			state[l.ExecutionID] = "ended"
			for id, e := range open {
				if e == l.ExecutionID {
					t.Errorf("block %s is open at the end of %s", id, e)
				}
			}
		}
	}
}

func decode[T any](t *testing.T, l runner.Line) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(l.Data, &v); err != nil {
		t.Fatalf("line %d %s: %v", l.N, l.Type, err)
	}
	return v
}

func ended(t *testing.T, lines []runner.Line) runner.Ended {
	t.Helper()
	return decode[runner.Ended](t, lines[len(lines)-1])
}

// find gives the first line of a type.
func find[T events.Payload](t *testing.T, lines []runner.Line) T {
	t.Helper()
	var zero T
	for _, l := range lines {
		if l.Type == zero.EventType() {
			return decode[T](t, l)
		}
	}
	t.Fatalf("no line of type %s", zero.EventType())
	return zero
}
