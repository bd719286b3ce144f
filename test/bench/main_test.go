package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

func TestCollect_WritesPageOfRows(t *testing.T) {
	t.Parallel()
	rows := func() *bytes.Buffer {
		var in bytes.Buffer
		for _, r := range []row.Row{{What: "a", Target: "1 s", OK: true, Command: "go run a"}, {What: "b", Target: "1 s", Command: "go run a"}} {
			if err := row.Write(&in, r); err != nil {
				t.Fatal(err)
			}
		}
		return &in
	}
	file := filepath.Join(t.TempDir(), "performance.md")
	var out bytes.Buffer
	if err := runCommandLine(t.Context(), []string{"collect", file}, &standardStreams{rows(), &out, io.Discard}); err != nil {
		t.Fatal(err)
	}
	if out.Len() != 0 {
		t.Errorf("printed %s", out.String())
	}
	if err := runCommandLine(t.Context(), []string{"collect"}, &standardStreams{rows(), &out, io.Discard}); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(page, out.Bytes()) {
		t.Error("the file differs from the printed page")
	}
	for _, want := range []string{"| a |", "| ok |", "| short |", "cores"} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page has no %q:\n%s", want, page)
		}
	}
	if n := strings.Count(string(page), "go run a"); n != 1 {
		t.Errorf("the page has the command %d times, want once", n)
	}
	for what, in := range map[string]string{"empty input": "", "input without rows": "PASS\n"} {
		if err := runCommandLine(t.Context(), []string{"collect"}, &standardStreams{strings.NewReader(in), &out, io.Discard}); err == nil {
			t.Errorf("%s was accepted", what)
		}
	}
}

// TestCollect_UpdatesRowsOfTheSameName checks that an update replaces rows with their followers, keeps all others, and
// adds new ones.
func TestCollect_UpdatesRowsOfTheSameName(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "performance.md")
	collect := func(flags []string, rows ...row.Row) {
		t.Helper()
		var in bytes.Buffer
		for _, r := range rows {
			if err := row.Write(&in, r); err != nil {
				t.Fatal(err)
			}
		}
		if err := runCommandLine(t.Context(), append([]string{"collect", file}, flags...), &standardStreams{&in, io.Discard, io.Discard}); err != nil {
			t.Fatal(err)
		}
	}
	collect(nil, row.Row{What: "a", Measured: "1"}, row.Row{What: "the same: CPU", Measured: "2"}, row.Row{What: "b", Measured: "3", Command: "go run b"}, row.Row{What: "the same: CPU", Measured: "4"})
	collect([]string{"--update"}, row.Row{What: "b", Measured: "5", Command: "go run b"}, row.Row{What: "the same: CPU", Measured: "6"}, row.Row{What: "c", Measured: "7", Command: "go run c"})
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, " | "); strings.HasPrefix(line, "| ") && len(cells) > 3 {
			got = append(got, strings.TrimPrefix(cells[0], "| ")+"="+cells[2])
		}
	}
	if want := "what=measured ---=--- a=1 the same: CPU=2 b=5 the same: CPU=6 c=7"; strings.Join(got, " ") != want {
		t.Errorf("the table is %s\nwant %s", strings.Join(got, " "), want)
	}
	for _, command := range []string{"go run b", "go run c"} {
		if n := strings.Count(string(page), command+"\n"); n != 1 {
			t.Errorf("the page has %q %d times", command, n)
		}
	}
}

// TestPerformancePage_ShowsCommandsOfBenchmarks reads the commands in docs/performance.md as the program does.
func TestPerformancePage_ShowsCommandsOfBenchmarks(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/performance.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for line := range strings.Lines(string(page)) {
		arguments, ok := strings.CutPrefix(strings.TrimSpace(line), harness.ShellCommand(""))
		if !ok {
			if strings.Contains(line, "go run") {
				t.Errorf("%q does not begin with %q", line, harness.ShellCommand(""))
			}
			continue
		}
		found++
		parser, err := newParser(&commandLine{})
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := parser.Parse(strings.Fields(arguments))
		if err != nil {
			t.Errorf("%q: %v", line, err)
			continue
		}
		if _, ok := benchmarkOf(parsed.Selected()); !ok {
			t.Errorf("%q measures nothing", line)
		}
	}
	if found == 0 {
		t.Error("the page has no commands")
	}
}

func TestRun_RejectsInvalidArguments(t *testing.T) {
	t.Parallel()
	for _, args := range []string{
		"append --rounds 0", "append --sessions 1,0", "append --each 0s", "approvals --decisions 0", "approvals --agents codex", "egress --tokens 1", "fanout --sessions 0", "fanout --each 3s", "fanout --modes all", "heads --commits 0",
		"idle --sessions 1 --sockets 2", "idle --worked 0", "latency --pieces 0", "pool --size 0", "projector --rounds=-1", "ready --rounds 0",
		"skills --skills 0", "snapshot --files 99", "turn --agents nothing", "turn --places moon", "all nothing", "all idle-nats",
	} {
		// An error that names no argument would be that of a measurement.
		if err := runCommandLine(t.Context(), append(strings.Fields(args), "--dir", "/nonexistent"), &standardStreams{strings.NewReader(""), io.Discard, io.Discard}); err == nil || strings.Contains(err.Error(), "/nonexistent") {
			t.Errorf("%s: error %v, want one about the arguments", args, err)
		}
	}
}
