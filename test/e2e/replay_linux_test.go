package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// recorded runs three turns with a tool that fails, and returns the session and its events.
func recorded(t *testing.T, c *harness.Cluster, a agentCase) (session string, list []events.WireEvent) {
	t.Helper()
	dir, data := t.TempDir(), t.TempDir()
	session = c.CreateSession(a.architecture, a.settings())
	for _, query := range []string{"please write a file", "now run the tests", "sum it up"} {
		code, out, says := c.RunCLI(t, dir, data, "run", "--session", session, query)
		if code != 0 {
			t.Fatalf("spool run ended with %d\n%s\n%s", code, out, says)
		}
	}
	var page struct{ Events []events.WireEvent }
	status, raw := request(t, http.MethodGet, c.URL(0)+"/api/sessions/"+session+"/events?limit=1000", nil, nil)
	if err := json.Unmarshal(raw, &page); status != http.StatusOK || err != nil {
		t.Fatalf("%d %s %v", status, raw, err)
	}
	return session, page.Events
}

// TestReplay_InATerminal replays a real session with keys, at 80 and at 200 columns. It looks like the live session,
// no row is longer than the terminal, and the terminal is restored when the command ends in any way.
func TestReplay_InATerminal(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "replay.yaml"), Executor: executor.Config{AnthropicModel: "known-model"}})
	// parts of the result of a tool that fails
	exits := map[string]string{"spool": "[exit status 3]", "claude-code": "Exit code 3"}
	if *matrixTable != "" {
		exits["codex"], exits["opencode"], exits["acp"] = "1 of 5 tests failed", "1 of 5 tests failed", "File not found"
	}
	for architecture, exit := range exits {
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			a := agentCase{architecture: architecture}
			if architecture == "claude-code" {
				needClaude(t)
			}
			c := c.ForSubtest(t)
			session, list := recorded(t, c, a)
			for _, columns := range []uint16{80, 200} {
				t.Run(fmt.Sprint(columns, " columns"), func(t *testing.T) {
					keys(t, c.ForSubtest(t), session, list, columns, exit)
				})
			}
			t.Run("narrower", func(t *testing.T) { replayOnANarrowerTerminal(t, c.ForSubtest(t), session) })
			t.Run("the end", func(t *testing.T) { ends(t, c.ForSubtest(t), session) })
			t.Run("in a pipe", func(t *testing.T) { replayIntoAPipe(t, c.ForSubtest(t), session, list) })
		})
	}
}

// firstSeq returns the seq of the first event that satisfies right.
func firstSeq(t *testing.T, list []events.WireEvent, right func(events.Event) bool) uint32 {
	t.Helper()
	i := slices.IndexFunc(list, func(w events.WireEvent) bool { return right(w.Event()) })
	if i < 0 {
		t.Fatal("the session has no such event")
	}
	return list[i].Seq
}

// keys moves through a session with keys. The replay starts paused: at the slowest speed the first key is pressed
// before the second event.
func keys(t *testing.T, c *harness.Cluster, session string, list []events.WireEvent, columns uint16, exit string) {
	x := c.StartTerminalWithColumns(t, columns, t.TempDir(), t.TempDir(), nil, "replay", session, "--speed", "0.000001")
	at := func(seq uint32) string { return fmt.Sprintf("event %d of ", seq) } // there may be more events now than in list
	x.AwaitText(at(1))
	if x.EchoesInput() {
		t.Error("the terminal shows the keys")
	}
	x.Type(" ")
	x.AwaitText("· 1e-06x · paused")
	now := seqOf(x.Output(), at)
	x.Type(".")
	x.AwaitText(at(now + 1))
	tool := firstSeq(t, list, func(e events.Event) bool {
		b, ok := block(e)
		return ok && b.Kind == events.KindToolUse && len(b.Input) > 0
	})
	x.Type("n")
	x.AwaitText(at(tool))
	x.AwaitText("hello.txt")
	result := firstSeq(t, list, func(e events.Event) bool {
		b, ok := block(e)
		return ok && b.IsError
	})
	x.Type("e")
	x.AwaitText(at(result))
	x.AwaitText(exit)
	if strings.Contains(x.Output(), "One test fails.") {
		t.Error("the replay went past the error")
	}
	dispatched := uint32(0)
	for _, w := range list {
		if w.Type == (events.ExecutionDispatched{}).EventType() {
			dispatched = w.Seq
		}
	}
	x.Type("t")
	x.AwaitText(at(dispatched))
	wide := columns
	if columns == 80 { // the following output is wrapped at the new width
		wide = 120
		x.Resize(wide)
	}
	x.Type("n") // there are no more tool calls, so the replay goes to the end
	code, _ := x.AwaitExit()
	rows := x.ScreenRows(int(wide))
	screen := strings.Join(rows, "\n")
	t.Logf("at %d columns:\n%s", columns, screen)
	if code != 0 || !x.EchoesInput() {
		t.Errorf("ended with %d; the terminal is raw: %v", code, !x.EchoesInput())
	}
	whole := strings.Join(strings.Fields(screen), " ")
	for _, said := range []string{"> please write a file", "I will write hello.txt with a greeting, and then look at it.", "The file is written.", "> now run the tests", exit,
		"One test fails.", "> sum it up", "of which one fails: look at the greeting first."} {
		if strings.Count(whole, said) != 1 {
			t.Errorf("the screen has %q %d times:\n%s", said, strings.Count(whole, said), screen)
		}
	}
	if last := "That was all. You asked for a file, and then for the tests, of which one fails: look at the greeting first."; !slices.Contains(rows, last) {
		t.Errorf("no row is %q", last)
	}
	if got := x.ScreenRows(10000); !slices.Equal(got, rows) {
		t.Errorf("a row is longer than the terminal:\n%s", strings.Join(got, "\n"))
	}
}

// replayOnANarrowerTerminal replays a session on a terminal that becomes narrower: the following output is wrapped at the new width.
func replayOnANarrowerTerminal(t *testing.T, c *harness.Cluster, session string) {
	x := c.StartTerminalWithColumns(t, 200, t.TempDir(), t.TempDir(), nil, "replay", session, "--speed", "0.000001")
	x.AwaitText("event 1 of ")
	x.Type(" ")
	x.AwaitText("paused")
	x.Resize(50)
	x.Type("eee")
	code, screen := x.AwaitExit()
	if code != 0 || !strings.Contains(screen, "That was all. You asked for a file, and then for\n") {
		t.Errorf("ended with %d:\n%s", code, screen)
	}
}

// seqOf returns the seq that the status line showed last.
func seqOf(screen string, at func(uint32) string) (last uint32) {
	end := -1
	for seq := uint32(1); seq < 100; seq++ {
		if i := strings.LastIndex(screen, at(seq)); i > end {
			end, last = i, seq
		}
	}
	return last
}

// block returns the block that an event starts or completes.
func block(e events.Event) (events.Block, bool) {
	switch d := e.Data.(type) {
	case events.BlockStart:
		return d.Block, true
	case events.BlockComplete:
		return d.Block, true
	}
	return events.Block{}, false
}

// ends ends a replay in every way.
func ends(t *testing.T, c *harness.Cluster, session string) {
	for name, end := range map[string]struct {
		do   func(*harness.Terminal)
		code int
	}{
		"q":       {func(x *harness.Terminal) { x.Type("q") }, 0},
		"Ctrl-C":  {func(x *harness.Terminal) { x.Type(harness.CtrlC) }, 130},
		"SIGINT":  {func(x *harness.Terminal) { x.Signal(syscall.SIGINT) }, 130},
		"SIGTERM": {func(x *harness.Terminal) { x.Signal(syscall.SIGTERM) }, 130},
		"SIGHUP":  {func(x *harness.Terminal) { x.Signal(syscall.SIGHUP) }, 130},
		"SIGQUIT": {func(x *harness.Terminal) { x.Signal(syscall.SIGQUIT) }, 130},
		"paused":  {func(x *harness.Terminal) { x.Type("  q") }, 0},
	} {
		x := c.StartTerminalWithColumns(t, 80, t.TempDir(), t.TempDir(), nil, "replay", session, "--speed", "0.000001")
		x.AwaitText("event 1 of")
		if x.EchoesInput() {
			t.Errorf("%s: the terminal shows the keys", name)
		}
		end.do(x)
		if code, screen := x.AwaitExit(); code != end.code || !x.EchoesInput() {
			t.Errorf("%s: ended with %d, want %d; the terminal is raw: %v\n%s", name, code, end.code, !x.EchoesInput(), screen)
		}
	}
	x := c.StartTerminalWithColumns(t, 80, t.TempDir(), t.TempDir(), nil, "replay", session, "--from", "100000")
	if code, screen := x.AwaitExit(); code != 1 || !x.EchoesInput() || !strings.Contains(screen, "CURSOR_AHEAD") {
		t.Errorf("an error: ended with %d; the terminal is raw: %v\n%s", code, !x.EchoesInput(), screen)
	}
}

// replayIntoAPipe replays a session into a pipe: as text without escapes, or as the stored events.
func replayIntoAPipe(t *testing.T, c *harness.Cluster, session string, list []events.WireEvent) {
	dir, data := t.TempDir(), t.TempDir()
	code, out, says := c.RunCLI(t, dir, data, "replay", session, "--speed", "max")
	if code != 0 || says != "" || strings.Contains(out, "\x1b") || strings.Contains(out, "\r") || !strings.Contains(out, "look at the greeting first.") {
		t.Errorf("ended with %d\n%s\n%s", code, out, says)
	}
	code, out, says = c.RunCLI(t, dir, data, "replay", session, "--speed", "max", "--json", "--to", fmt.Sprint(len(list)))
	var got []string
	text := 0
	for line := range strings.Lines(out) {
		if strings.Contains(line, `"type":"text_delta"`) {
			text++
			continue
		}
		got = append(got, strings.TrimSpace(line))
	}
	_, all, _ := c.RunCLI(t, dir, data, "events", session, "--json")
	want := strings.Split(all, "\n")[:len(list)]
	if code != 0 || says != "" || !slices.Equal(got, want) || text == 0 {
		t.Errorf("ended with %d, %d pieces of text\n%s\n%s", code, text, out, says)
	}

	second := list[firstSeq(t, list, func(e events.Event) bool {
		m, ok := e.Data.(events.MessageAccepted)
		return ok && m.Content == "now run the tests"
	})-1].ExecutionID
	code, out, _ = c.RunCLI(t, dir, data, "replay", session, "--speed", "max", "--execution", second)
	if code != 0 || !strings.Contains(out, "One test fails.") || strings.Contains(out, "write a file") || strings.Contains(out, "sum it up") {
		t.Errorf("one execution: ended with %d\n%s", code, out)
	}
	// At this speed every gap is shortened, and the output states that.
	later := firstSeq(t, list, func(e events.Event) bool { return e.Time.Sub(list[0].Time) > 10*time.Microsecond })
	if _, _, says = c.RunCLI(t, dir, data, "replay", session, "--speed", "0.000001", "--to", fmt.Sprint(later)); !strings.Contains(says, "are skipped") {
		t.Errorf("a shortened gap: %s", says)
	}
	for _, bad := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{session, "--from", "0"}, 2, "from"},
		{[]string{session, "--to", "0"}, 2, "to"},
		{[]string{session, "--from=-1"}, 2, "--from"},
		{[]string{session, "--from", "x"}, 2, "--from"},
		{[]string{session, "--to", "18446744073709551616"}, 2, "--to"},
		{[]string{session, "--from", "3", "--to", "2"}, 2, "from: 3 is greater than to"},
		{[]string{session, "--from", "100000"}, 1, "from: value is greater than the seq of the session's last event"},
		{[]string{session, "--to", "100000"}, 1, "to: value is greater than the seq of the session's last event"},
		{[]string{session, "--speed", "0"}, 2, "speed: must be a positive number, or max"},
		{[]string{session, "--speed=-1"}, 2, "speed: must be"},
		{[]string{session, "--speed", "NaN"}, 2, "speed: must be"},
		{[]string{session, "--execution", "exe_*"}, 2, "execution"},
		{[]string{session, "--execution", "exe_00000000000000000000000000"}, 1, "EXECUTION_NOT_FOUND"},
		{[]string{"ses_00000000000000000000000000"}, 1, "SESSION_NOT_FOUND"},
		{[]string{"ses_*"}, 2, "session"},
	} {
		if code, out, says := c.RunCLI(t, dir, data, append([]string{"replay"}, bad.args...)...); code != bad.code || out != "" || !strings.Contains(says, bad.says) {
			t.Errorf("%q: ended with %d\n%s%s", bad.args, code, out, says)
		}
	}
}
