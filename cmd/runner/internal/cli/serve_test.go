package cli_test

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestTurnsShareAWarmProcess(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.attach(1, 0)
	if c.hello.Protocol != runner.ProtocolVersion || c.hello.First != 1 || c.hello.Last != 0 {
		t.Errorf("hello %+v", c.hello)
	}
	if err := events.CheckID("journal", events.KindJournal, c.hello.Journal); err != nil {
		t.Error(err)
	}
	one := decode[runner.TurnStart](t, c.run("exe_1", "say hello")[0])
	two := decode[runner.TurnStart](t, c.run("exe_2", "say again")[0])
	if one.Warm || !two.Warm || one.PID == 0 || one.PID != two.PID {
		t.Errorf("first %+v, second %+v", one, two)
	}
	if st := c.ask(runner.Command{Op: runner.OpStatus}).Status; st.AgentPID != one.PID || st.Architecture != "script" || st.ExecutionID != "" || st.MemoryBytes < 1<<20 {
		t.Errorf("status %+v", st)
	}
	// Another model needs another command line, so another process, which resumes the agent's session.
	c.run("exe_3", "session s-77")
	lines := c.run("exe_4", "args", func(q *runner.Query) { q.Model = "m2" })
	if got := find[events.BlockStart](t, lines).Block.Content; got != "m2,s-77" {
		t.Errorf("the new process has arguments %q", got)
	}
	if three := decode[runner.TurnStart](t, lines[0]); three.Warm || three.PID == one.PID {
		t.Errorf("another model on %+v", three)
	}
	if alive(one.PID) {
		t.Error("the former process lives")
	}
	// A process that was killed while idle is started again.
	if r := c.ask(runner.Command{Op: runner.OpKill}); r.Error != nil || r.Status.AgentPID != 0 {
		t.Errorf("after a kill: %+v", r)
	}
	if five := decode[runner.TurnStart](t, c.run("exe_5", "say back")[0]); five.Warm {
		t.Errorf("after a kill: %+v", five)
	}
}

func TestStart_RefusesInvalidQueries(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.attach(5, 0)
	for name, tc := range map[string]struct {
		change func(*runner.Query)
		code   string
		says   string
	}{
		"architecture": {func(q *runner.Query) { q.Architecture = "cobol" }, "UNKNOWN_ARCHITECTURE", "cobol"},
		"missing CLI":  {func(q *runner.Query) { q.Model = "missing" }, "AGENT_NOT_FOUND", "install it"},
		"fork":         {func(q *runner.Query) { q.Fork = &runner.Fork{Anchor: "a"} }, "INVALID_COMMAND", "query.fork"},
		"content":      {func(q *runner.Query) { q.Content = "" }, "INVALID_COMMAND", "content"},
		"execution":    {func(q *runner.Query) { q.ExecutionID = "" }, "INVALID_COMMAND", "executionId"},
		"session":      {func(q *runner.Query) { q.SessionID = "" }, "INVALID_COMMAND", "sessionId"},
	} {
		if r := c.start("exe_bad_"+name, "say x", tc.change); r.Error == nil || r.Error.Code != tc.code || !strings.Contains(r.Error.Message, tc.says) {
			t.Errorf("%s: %+v", name, r.Error)
		}
	}
	for line, says := range map[string]string{
		`{"id":1,"op":"dance","epoch":5}`: "dance",
		`{"id":1,"op":"start","epoch":5}`: "query",
		`nonsense`:                        "invalid character",
	} {
		c.sendRaw(line)
		if r := c.reply(); r.Error == nil || r.Error.Code != "INVALID_COMMAND" || !strings.Contains(r.Error.Message, says) {
			t.Errorf("%s: %+v", line, r.Error)
		}
	}
	if r := c.start("exe_gone", "say x", func(q *runner.Query) { q.Model = "gone" }); r.Error != nil {
		t.Fatal(r.Error)
	}
	if e := ended(t, c.journal("exe_gone")); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_NOT_FOUND" || !strings.Contains(e.Message, "/no/such/agent") {
		t.Errorf("end %+v", e)
	}
	first := s.dial()
	fmt.Fprintln(first, "hello?")
	if raw, err := io.ReadAll(first); err != nil || !strings.Contains(string(raw), "INVALID_COMMAND") {
		t.Errorf("a first line that is none: %s, %v", raw, err)
	}
}

func TestStartIsIdempotentAndOneAtATime(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	if r := c.start("exe_1", "wait"); r.Error != nil || r.Status.ExecutionID != "exe_1" || r.Status.Attempt != 1 {
		t.Fatalf("start: %+v", r)
	}
	if r := c.start("exe_1", "wait"); r.Error != nil {
		t.Errorf("the same start again: %v", r.Error)
	}
	if r := c.start("exe_2", "say no"); r.Error == nil || r.Error.Code != "BUSY" || !strings.Contains(r.Error.Message, "exe_1") {
		t.Errorf("a second execution: %+v", r.Error)
	}
	c.until(runner.AgentStarted)
	if r := c.ask(runner.Command{Op: runner.OpInterrupt}); r.Error != nil {
		t.Fatal(r.Error)
	}
	if e := decode[runner.TurnEnd](t, c.until(runner.TurnEnded)); e.Outcome != runner.OutcomeInterrupted {
		t.Errorf("end %+v", e)
	}
	if r := c.start("exe_1", "say never"); r.Error != nil {
		t.Errorf("the same start after its end: %v", r.Error)
	}
	lines := c.run("exe_3", "say warm")
	if lines[0].ExecutionID != "exe_3" || !decode[runner.TurnStart](t, lines[0]).Warm {
		t.Errorf("after an interrupt: %+v", lines[0])
	}
	if r := c.ask(runner.Command{Op: runner.OpInterrupt}); r.Error != nil {
		t.Errorf("an interrupt of nothing: %v", r.Error)
	}
}

func TestAttach_FencesAndReplacesFollowers(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	old := s.attach(3, 0)
	if r := old.start("exe_1", "say one\nwait"); r.Error != nil {
		t.Fatal(r.Error)
	}
	old.until("block_start")
	if r := s.attach(2, 0).refused; r == nil || r.Error == nil || r.Error.Code != "FENCED" {
		t.Errorf("a lower epoch got %+v", r)
	}
	newer := s.attach(4, 2)
	for ok := true; ok; {
		_, ok = old.next() // closed by its replacement
	}
	if newer.hello.Status.ExecutionID != "exe_1" || newer.hello.Last != 2 {
		t.Errorf("hello %+v", newer.hello)
	}
	zombie := *newer
	zombie.epoch = 3
	if r := zombie.ask(runner.Command{Op: runner.OpKill}); r.Error == nil || r.Error.Code != "FENCED" {
		t.Errorf("a command of a former epoch: %+v", r)
	}
	newer.id = zombie.id
	if r := newer.ask(runner.Command{Op: runner.OpInterrupt}); r.Error != nil {
		t.Fatal(r.Error)
	}
	l := newer.until(runner.TurnEnded)
	if l.N != 3 {
		t.Errorf("the end is line %d, want 3: the agent noticed its followers", l.N)
	}
	// A follower with an equal epoch also replaces, and can read all lines again.
	again := s.attach(4, 0)
	if lines := again.journal("exe_1"); len(lines) != 3 || lines[0].N != 1 {
		t.Errorf("read again: %d lines", len(lines))
	}
}

func TestAckTrimsTheJournal(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.attach(1, 0)
	lines := c.run("exe_1", "say a\nsay b\nsay c")
	if r := c.ask(runner.Command{Op: runner.OpAck, Ack: 2}); r.Error != nil {
		t.Fatal(r.Error)
	}
	after := s.attach(1, 0)
	if after.hello.First != 3 || after.hello.Last != uint64(len(lines)) {
		t.Errorf("hello %+v", after.hello)
	}
	if m, _ := after.next(); m.Line == nil || m.Line.N != 3 {
		t.Errorf("first line %+v", m.Line)
	}
	if r := after.ask(runner.Command{Op: runner.OpAck, Ack: 99}); r.Error != nil {
		t.Fatal(r.Error)
	}
	if empty := s.attach(1, 0); empty.hello.First != 6 || empty.hello.Last != 5 {
		t.Errorf("all acknowledged: %+v", empty.hello)
	}
}

func TestFullJournal_BlocksTheAgentAndLosesNothing(t *testing.T) {
	t.Parallel()
	s := serveRunner(t, "--journal-limit", "65536")
	c := s.attach(1, 0)
	const lines = 3000
	if r := c.start("exe_1", fmt.Sprintf("flood %d", lines)); r.Error != nil {
		t.Fatal(r.Error)
	}
	var seen uint64
	for seen < 30 { // the lines that fit without an acknowledgement
		m, _ := c.next()
		if m.Line != nil {
			seen = m.Line.N
		}
	}
	if r := c.ask(runner.Command{Op: runner.OpStatus}); r.Status == nil || r.Status.ExecutionID != "exe_1" {
		t.Fatalf("the runner is held up too: %+v", r)
	}
	if look := s.attach(1, 1<<40); look.hello.Last > 200 {
		t.Fatalf("%d lines in a journal of 64 KiB", look.hello.Last)
	}
	c = s.attach(1, 0)
	var n, texts uint64
	for {
		m, ok := c.next()
		if !ok {
			t.Fatal("closed")
		}
		if m.Line == nil {
			continue
		}
		if n++; m.Line.N != n {
			t.Fatalf("line %d, want %d", m.Line.N, n)
		}
		if m.Line.Type == "block_start" {
			if got := decode[events.BlockStart](t, *m.Line).Block.Content; !strings.HasPrefix(got, fmt.Sprintf("%d ", texts)) {
				t.Fatalf("text %d is %.10q", texts, got)
			}
			texts++
		}
		if m.Line.Type == runner.TurnEnded {
			break
		}
		if n%20 == 0 {
			c.sendRaw(fmt.Sprintf(`{"op":"ack","epoch":1,"ack":%d}`, n))
		}
	}
	if texts != lines {
		t.Errorf("%d texts, want %d", texts, lines)
	}
}

func TestKill_EndsAnAgentBlockedByAFullJournal(t *testing.T) {
	t.Parallel()
	s := serveRunner(t, "--journal-limit", "65536", "--term-grace", "100ms")
	c := s.attach(1, 0)
	if r := c.start("exe_1", "open x\nflood 30000"); r.Error != nil {
		t.Fatal(r.Error)
	}
	for n := 0; n < 30; {
		if m, _ := c.next(); m.Line != nil {
			n++
		}
	}
	if r := c.ask(runner.Command{Op: runner.OpKill}); r.Error != nil || r.Status.AgentPID != 0 || r.Status.ExecutionID != "" {
		t.Errorf("kill: %+v", r)
	}
	if e := ended(t, s.attach(1, 0).journal("exe_1")); e.Outcome != runner.OutcomeKilled {
		t.Errorf("end %+v", e)
	}
}

func TestSlowFollower_BlocksNoOther(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.seal()
	fmt.Fprintln(c, `{"epoch":1,"after":0}`)
	raw, err := json.Marshal(runner.Command{Op: runner.OpStart, Epoch: 1, Query: &runner.Query{
		SessionID: "ses_1", ExecutionID: "exe_1", Architecture: "script", Content: "flood 3000",
	}})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(c, "%s\n", raw) // and never reads
	eventually(t, "the agent's end", func() bool {
		answer := s.dial() // a separate connection, because another attach would replace the follower
		fmt.Fprintln(answer, `{"id":1,"op":"status"}`)
		var m runner.Message
		if err := json.NewDecoder(answer).Decode(&m); err != nil || m.Reply == nil || m.Reply.Status == nil {
			t.Fatalf("status: %+v, %v", m.Reply, err)
		}
		return m.Reply.Status.AgentPID != 0 && m.Reply.Status.ExecutionID == ""
	})
	if lines := s.attach(1, 0).journal("exe_1"); len(lines) != 3002 {
		t.Errorf("%d lines", len(lines))
	}
}

func TestKillAndShutdownLeaveNothingRunning(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*served, *client){
		"kill":     func(_ *served, c *client) { c.sendRaw(`{"op":"kill","epoch":1}`) },
		"shutdown": func(_ *served, c *client) { c.sendRaw(`{"op":"shutdown","epoch":1}`) },
		"SIGTERM":  func(s *served, _ *client) { _ = s.cmd.Process.Signal(syscall.SIGTERM) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serveRunner(t, "--term-grace", "100ms")
			c := s.attach(1, 0)
			if r := c.start("exe_1", "open half\nspawn\nwait"); r.Error != nil {
				t.Fatal(r.Error)
			}
			var tree []int
			eventually(t, "the agent's tree of a shell and three sleepers", func() bool {
				tree = sleepers(s.workspace)
				return len(tree) == 3
			})
			end(s, c)
			lines := c.journal("exe_1")
			if e := ended(t, lines); e.Outcome != runner.OutcomeKilled {
				t.Errorf("end %+v", e)
			}
			if b := find[events.BlockComplete](t, lines).Block; b.Status != events.StatusError || b.Content != "half" {
				t.Errorf("open block %+v", b)
			}
			if left := sleepers(s.workspace); len(left) != 0 {
				t.Errorf("still running at the end of the turn: %v", left)
			}
			if name == "kill" {
				return
			}
			s.gone()
			if code := s.cmd.ProcessState.ExitCode(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if _, err := os.Stat(s.socket); err == nil {
				t.Error("the socket is left behind")
			}
		})
	}
}

func TestOrphansAreReaped(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	s.attach(1, 0).run("exe_1", "orphan\norphan\norphan")
	eventually(t, "no dead orphan", func() bool { return len(children(s.cmd.Process.Pid)) == 1 })
}

func TestSecondRunner_OnASocketIsRefused(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	out, err := command("serve", "--socket", s.socket, "--workspace", s.workspace, "--state", s.state).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "another runner") {
		t.Errorf("%v: %s", err, out)
	}
	// The leftovers of a killed runner do not prevent the start.
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	s.gone()
	next := command("serve", "--socket", s.socket, "--workspace", s.workspace, "--state", s.state)
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a runner in its place", func() bool {
		return command("interrupt", "--socket", s.socket).Run() == nil
	})
	if err := next.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := next.Wait(); err != nil {
		t.Error(err)
	}
}

// eventually polls until the condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !holds(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in %s", what, patience)
		}
	}
}
