package process_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, script string) *process.Process {
	t.Helper()
	n := process.NewGroup(slog.New(slog.DiscardHandler))
	p, err := n.Start(agent.Command{Path: "/bin/sh", Args: []string{"-c", script}, Env: os.Environ()}, t.TempDir(), 1000)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.End(0); err != nil {
			t.Error(err)
		}
	})
	return p
}

func all(p *process.Process) (out, errs []string) {
	for l := range p.Lines() {
		s := string(l.Data)
		if l.IsCut() {
			s = fmt.Sprintf("cut %d of %d", len(l.Data), l.Size)
		}
		if l.Stream == process.Stderr {
			errs = append(errs, s)
		} else {
			out = append(out, s)
		}
	}
	return out, errs
}

func TestLines_AreSplitAndCut(t *testing.T) {
	t.Parallel()
	p := start(t, `echo one; printf '\n'; printf 'two\r\n'; head -c 50000 /dev/zero | tr '\0' x; echo; echo after; echo trouble >&2; printf half; exit 3`)
	out, errs := all(p)
	if want := []string{"one", "", "two", "cut 1000 of 50001", "after", "half"}; !slices.Equal(out, want) {
		t.Errorf("stdout %q, want %q", out, want)
	}
	if !slices.Equal(errs, []string{"trouble"}) || p.StderrTail() != "trouble" {
		t.Errorf("stderr %q, tail %q", errs, p.StderrTail())
	}
	if p.ExitState() != "exit status 3" {
		t.Errorf("state %q", p.ExitState())
	}
}

func TestStdin_SendsJSONLines(t *testing.T) {
	t.Parallel()
	p := start(t, `cat`)
	for i := range 3 {
		if err := p.Send(map[string]int{"i": i}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Send(func() {}); err == nil {
		t.Error("what is no JSON was sent")
	}
	go p.CloseStdin(time.Minute)
	out, _ := all(p)
	if !slices.Equal(out, []string{`{"i":0}`, `{"i":1}`, `{"i":2}`}) {
		t.Errorf("echo %q", out)
	}
}

// A child that inherited the pipes cannot keep the lines open for ever: it may print without an end, and it may leave unread what was sent.
func TestExit_EndsLinesWhateverAChildDoesWithThePipes(t *testing.T) {
	t.Parallel()
	for name, child := range map[string]string{
		"prints fast":          `while :; do echo child; done`,
		"prints slowly":        `while :; do echo child; sleep 0.1; done`,
		"leaves stdin unread":  `exec sleep 600`,
		"prints one long line": `while :; do printf x; sleep 0.1; done`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, `exec 3<&0; { `+child+`; } <&3 & head -c 1 <&3 >&2; echo last; exit 0`)
			if err := p.Send(strings.Repeat("x", 1<<20)); err != nil {
				t.Fatal(err)
			}
			out := make(chan []string, 1)
			go func() {
				lines, _ := all(p)
				out <- lines
			}()
			select {
			case lines := <-out:
				if !strings.Contains(strings.Join(lines, "\n"), "last") {
					t.Errorf("stdout %q", lines)
				}
			case <-time.After(time.Minute):
				t.Error("the lines do not end")
			}
		})
	}
}

// A child that keeps the pipes open does not hide the exit of the process, nor the end of its output.
func TestExit_IsSeenWhilePipesAreHeldOpen(t *testing.T) {
	t.Parallel()
	p := start(t, `sleep 600 & echo last; exit 0`)
	out, _ := all(p)
	if !slices.Equal(out, []string{"last"}) {
		t.Errorf("stdout %q", out)
	}
}

func TestUnreadOutputHoldsTheProcessUp(t *testing.T) {
	t.Parallel()
	p := start(t, `i=0; while [ $i -lt 5000 ]; do echo "line $i 0123456789012345678901234567890123456789012345678901234567890123456789"; i=$((i+1)); done; echo end >&2`)
	first := <-p.Lines()
	if !strings.HasPrefix(string(first.Data), "line 0") {
		t.Fatalf("first line %q", first.Data)
	}
	select {
	case <-p.Exited():
		t.Error("the process wrote 400 KB that nobody read")
	case <-time.After(100 * time.Millisecond): // only limits how long the test observes; no result depends on it
	}
	out, errs := all(p)
	if len(out) != 4999 || len(errs) != 1 {
		t.Errorf("%d lines and %d errors came after, want 4999 and 1", len(out), len(errs))
	}
}

func TestEndStopsAGroupThatIgnoresTheRequest(t *testing.T) {
	t.Parallel()
	p := start(t, `trap '' TERM; (trap '' TERM; echo $$; exec sleep 600) & echo ready; while :; do sleep 600; done`)
	<-p.Lines()
	<-p.Lines()
	if err := p.End(50 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if got := p.ExitState(); got != "signal: killed" {
		t.Errorf("state %q", got)
	}
}

func TestStartSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	n := process.NewGroup(slog.New(slog.DiscardHandler))
	_, err := n.Start(agent.Command{Path: "/no/such/agent"}, t.TempDir(), 10)
	if err == nil || !strings.Contains(err.Error(), "/no/such/agent") {
		t.Errorf("error %v", err)
	}
}

func TestSendToAProcessThatDoesNotRead(t *testing.T) {
	t.Parallel()
	p := start(t, `exec sleep 600`)
	big := bytes.Repeat([]byte("x"), 1<<20)
	for range 3 {
		if err := p.Send(big); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.End(0); err != nil {
		t.Fatal(err)
	}
}
