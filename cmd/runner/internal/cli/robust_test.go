package cli_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestStrayOutputBecomesLines(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	lines := c.run("exe_1", strings.Join([]string{
		`raw "not json at all\n"`,
		`raw "\x1b[31mred\x1b[0m \x00 nul\n"`,
		`raw "bad utf8 \xff\xfe\n"`,
		`raw "\n   \n"`,
		`raw "{\"say\":\"kept \\u0000 \xff\"}\n"`,
		`raw "{\"say\":3}\n"`,
		`stderr a complaint`,
		`big 52428800`,
		`say after all`,
	}, "\n"))
	if e := ended(t, lines); e.Outcome != runner.OutcomeCompleted {
		t.Fatalf("end %+v", e)
	}
	var got []string
	for _, l := range lines {
		if !utf8.Valid(l.Data) {
			t.Errorf("line %d is no UTF-8", l.N)
		}
		switch l.Type {
		case "log":
			d := decode[events.Log](t, l)
			got = append(got, d.Stream+": "+d.Message)
		case "error":
			d := decode[events.Error](t, l)
			got = append(got, d.Code)
			if d.Code == "LINE_TOO_LONG" && !strings.Contains(d.Message, "52428801 bytes") {
				t.Errorf("the long line is reported as %q", d.Message)
			}
		case "block_start":
			got = append(got, "say: "+decode[events.BlockStart](t, l).Block.Content)
		}
	}
	want := []string{
		"stdout: not json at all", "stdout: \x1b[31mred\x1b[0m \x00 nul", "stdout: bad utf8 \uFFFD", "say: kept \x00 \uFFFD",
		"AGENT_PROTOCOL", "stderr: a complaint", "LINE_TOO_LONG", "say: after all",
	}
	for _, w := range want { // stderr comes when it comes
		if !strings.Contains(strings.Join(got, "|"), w) {
			t.Errorf("no %q in %q", w, got)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d lines %q, want %d", len(got), got, len(want))
	}
}

func TestAgentExit_EndsTheTurn(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	lines := c.run("exe_1", "open half\nstderr out of memory\nraw \"{\\\"say\\\":\\\"cut\"\nexit 7")
	e := ended(t, lines)
	if e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_EXITED" || !strings.Contains(e.Message, "exit status 7") || !strings.Contains(e.Message, "out of memory") {
		t.Errorf("end %+v", e)
	}
	if b := find[events.BlockComplete](t, lines).Block; b.Status != events.StatusError || b.Content != "half" {
		t.Errorf("block %+v", b)
	}
	if !strings.Contains(string(lines[len(lines)-3].Data)+string(lines[len(lines)-4].Data)+string(lines[len(lines)-5].Data), `{\"say\":\"cut`) {
		t.Error("the half line is lost")
	}
	if next := decode[runner.TurnStart](t, c.run("exe_2", "say fresh")[0]); next.Warm {
		t.Errorf("after an exit: %+v", next)
	}
}

func TestSilentAgent_IsReportedAndEnded(t *testing.T) {
	t.Parallel()
	c := serveRunner(t, "--silence-warn", "50ms", "--silence-kill", "200ms", "--term-grace", "50ms").attach(1, 0)
	lines := c.run("exe_1", "say begun\nhang")
	if e := ended(t, lines); e.Outcome != runner.OutcomeFailed || e.Code != "AGENT_SILENT" {
		t.Errorf("end %+v", e)
	}
	var actions []string
	for _, l := range lines {
		if l.Type == "watchdog_warned" {
			w := decode[events.WatchdogWarned](t, l)
			actions = append(actions, w.Watchdog+" "+w.Action)
		}
	}
	// On a slow machine there is a warning before the first line too.
	if n := len(actions); n < 2 || actions[n-1] != "silence killed" || actions[n-2] != "silence none" {
		t.Errorf("watchdog said %q", actions)
	}
}

func TestHungWarmAgent_IsReplaced(t *testing.T) {
	t.Parallel()
	c := serveRunner(t, "--mute-kill", "100ms", "--term-grace", "50ms").attach(1, 0)
	first := decode[runner.TurnStart](t, c.run("exe_1", "session s-1\ndeaf")[0])
	lines := c.run("exe_2", "args")
	second := decode[runner.TurnStart](t, lines[0])
	if second.Warm || second.PID == first.PID {
		t.Errorf("second %+v", second)
	}
	if w := find[events.WatchdogWarned](t, lines); w.Watchdog != "after_result" || w.Action != "killed" {
		t.Errorf("watchdog %+v", w)
	}
	if got := find[events.BlockStart](t, lines).Block.Content; got != ",s-1" {
		t.Errorf("the query was given to %q", got)
	}
	if e := ended(t, lines); e.Outcome != runner.OutcomeCompleted {
		t.Errorf("end %+v", e)
	}
}

func TestAdapterPanic_EndsTheTurn(t *testing.T) {
	t.Parallel()
	c := serveRunner(t, "--term-grace", "50ms").attach(1, 0)
	if e := ended(t, c.run("exe_1", "panic oh no\nhang")); e.Outcome != runner.OutcomeFailed || e.Code != "INTERNAL" || !strings.Contains(e.Message, "oh no") {
		t.Errorf("end %+v", e)
	}
	if e := ended(t, c.run("exe_2", "say fine")); e.Outcome != runner.OutcomeCompleted {
		t.Errorf("end %+v", e)
	}
}
