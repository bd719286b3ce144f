package link

import (
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// stdin is a process whose standard input alone works. It sends each write to a channel as one string.
type stdin struct {
	sandbox.Process
	writes chan string
}

func (s stdin) Stdin() io.WriteCloser { return s }

func (s stdin) Write(b []byte) (int, error) {
	s.writes <- string(b)
	return len(b), nil
}

func (stdin) Close() error { return nil }

// writing returns a link that writes to the test until the test ends. late is the time after which an acknowledgement
// is sent without a command.
func writing(t *testing.T, late time.Duration) (*Link, <-chan string) {
	t.Helper()
	s := stdin{writes: make(chan string)}
	l := &Link{
		proc: s, in: s, log: slog.New(slog.DiscardHandler), lines: newItemQueue(), out: make(chan []byte), acked: make(chan struct{}, 1), late: late,
		done: make(chan struct{}), stop: make(chan struct{}), calls: map[uint64]chan runner.Reply{},
	}
	l.all.Go(l.writeCommands)
	t.Cleanup(func() { close(l.stop); l.all.Wait() })
	return l, s.writes
}

func acknowledge(t *testing.T, l *Link, lines ...uint64) {
	t.Helper()
	for _, n := range lines {
		if err := l.Acknowledge(3, n); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAcknowledge_TravelsWithTheNextCommand(t *testing.T) {
	t.Parallel()
	l, writes := writing(t, time.Hour)
	acknowledge(t, l, 1, 2)
	if err := l.enqueueCommand(t.Context(), runner.Command{Op: runner.OpStatus, Epoch: 3}); err != nil {
		t.Fatal(err)
	}
	got := strings.Split(strings.TrimSpace(<-writes), "\n")
	if len(got) != 2 || !strings.Contains(got[0], `"ack":2`) || !strings.Contains(got[1], string(runner.OpStatus)) {
		t.Errorf("one write has %q, want the last acknowledgement, and then the command", got)
	}
}

func TestAcknowledge_GoesByItselfWithoutACommand(t *testing.T) {
	t.Parallel()
	l, writes := writing(t, time.Millisecond)
	acknowledge(t, l, 1)
	if got := <-writes; !strings.Contains(got, `"ack":1`) {
		t.Errorf("wrote %q", got)
	}
	acknowledge(t, l, 2)
	if got := <-writes; !strings.Contains(got, `"ack":2`) {
		t.Errorf("wrote %q", got)
	}
}

func TestAcknowledge_GoesAtOnceWhenMuchWasRead(t *testing.T) {
	t.Parallel()
	l, writes := writing(t, time.Hour)
	line := []byte(`{"line":{"n":1,"type":"log","data":"` + strings.Repeat("x", maxUnacknowledgedBytes) + `"}}`)
	if !l.handleLine(line, false, nil) {
		t.Fatal("the line was not taken")
	}
	acknowledge(t, l, 1)
	if got := <-writes; !strings.Contains(got, `"ack":1`) {
		t.Errorf("wrote %q", got)
	}
}
