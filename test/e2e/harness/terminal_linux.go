package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unicode/utf8"
	"unsafe"
)

// Terminal is a run of the spool program on a pseudo-terminal, as a user runs it: the program asks questions, the
// terminal echoes input, and Ctrl-C is a signal.
type Terminal struct {
	t      testing.TB
	cmd    *exec.Cmd
	keys   *os.File // the other end of the terminal
	mu     sync.Mutex
	screen bytes.Buffer
	read   chan struct{} // closed when all output was read
}

// CtrlC is the input with which a user interrupts the program on a terminal.
const CtrlC = "\x03"

// StartTerminal starts the spool program on a pseudo-terminal, as a client of gateway 0. env holds further environment
// variables. The terminal is so wide that no line of a test is wrapped.
func (c *Cluster) StartTerminal(t testing.TB, folder, data string, env []string, args ...string) *Terminal {
	t.Helper()
	return c.StartTerminalWithColumns(t, 400, folder, data, env, args...)
}

// StartTerminalWithColumns is like StartTerminal, but the terminal has the given number of columns.
func (c *Cluster) StartTerminalWithColumns(t testing.TB, columns uint16, folder, data string, env []string, args ...string) *Terminal {
	t.Helper()
	cmd := c.cliCommand(t, folder, data, args...)
	cmd.Env = append(cmd.Env, append([]string{"TERM=xterm", "NO_COLOR=1"}, env...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	master, tty, err := openTerminal()
	requireNoError(t, err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	requireNoError(t, errors.Join(cmd.Start(), tty.Close()))
	x := &Terminal{t: t, cmd: cmd, keys: master, read: make(chan struct{})}
	x.Resize(columns)
	go func() {
		defer close(x.read)
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b) // fails when no program uses the terminal any more
			x.mu.Lock()
			x.screen.Write(b[:n])
			x.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the program has ended, unless the test failed
		<-x.read
		_ = cmd.Wait() // fails if AwaitExit has called it
		assertNoError(t, master.Close())
	})
	return x
}

// openTerminal opens a pseudo-terminal and returns both its ends.
func openTerminal() (master, tty *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	var n, unlock int32
	for _, call := range []struct {
		request uintptr
		arg     unsafe.Pointer
	}{{syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)}, {syscall.TIOCGPTN, unsafe.Pointer(&n)}} { //nolint:gosec // as in ioctl_tty(2)
		if err := ioctl(master, call.request, call.arg); err != nil {
			return nil, nil, errors.Join(err, master.Close())
		}
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, errors.Join(err, master.Close())
	}
	return master, tty, nil
}

// ioctl calls ioctl(2) on the terminal f.
func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

// Resize changes the number of columns of the terminal while the program runs.
func (x *Terminal) Resize(columns uint16) {
	x.t.Helper()
	size := [4]uint16{50, columns}                                                // rows and columns
	requireNoError(x.t, ioctl(x.keys, syscall.TIOCSWINSZ, unsafe.Pointer(&size))) //nolint:gosec // as in ioctl_tty(2)
}

// EchoesInput reports whether the terminal echoes input and makes Ctrl-C a signal. Both hold unless the program has set the
// terminal to raw mode.
func (x *Terminal) EchoesInput() bool {
	x.t.Helper()
	var mode syscall.Termios
	requireNoError(x.t, ioctl(x.keys, syscall.TCGETS, unsafe.Pointer(&mode))) //nolint:gosec // as in ioctl_tty(2)
	return mode.Lflag&(syscall.ECHO|syscall.ISIG|syscall.ICANON) == syscall.ECHO|syscall.ISIG|syscall.ICANON
}

// Signal sends a signal to the program on the terminal.
func (x *Terminal) Signal(s os.Signal) {
	x.t.Helper()
	requireNoError(x.t, x.cmd.Process.Signal(s))
}

// controlSequencePattern matches the control sequences that the spool program writes to a terminal: move up some rows,
// erase to the end, and colours.
var controlSequencePattern = regexp.MustCompile(`\x1b\[(\d+)A|\x1b\[J|\x1b\[[0-9;]*m`)

// ScreenRows returns the rows of text that a terminal with the given number of columns shows after all output so far, without
// trailing spaces. A line that is longer than the terminal is wrapped. No row is scrolled away.
func (x *Terminal) ScreenRows(columns int) []string {
	x.mu.Lock()
	text := x.screen.String()
	x.mu.Unlock()
	rows, row, column := [][]rune{nil}, 0, 0
	for text != "" {
		if at := controlSequencePattern.FindStringSubmatchIndex(text); at != nil && at[0] == 0 {
			switch {
			case at[2] >= 0:
				n, _ := strconv.Atoi(text[at[2]:at[3]]) // digits
				row = max(0, row-n)
			case text[:at[1]] == "\x1b[J":
				rows, rows[row] = rows[:row+1], rows[row][:min(column, len(rows[row]))]
			}
			text = text[at[1]:]
			continue
		}
		r, size := utf8.DecodeRuneInString(text)
		switch text = text[size:]; {
		case r == '\r':
			column = 0
		case r == '\n':
			row++
		default:
			if column == columns {
				row, column = row+1, 0
			}
			for row >= len(rows) {
				rows = append(rows, nil)
			}
			for len(rows[row]) <= column {
				rows[row] = append(rows[row], ' ')
			}
			rows[row][column] = r
			column++
		}
		for row >= len(rows) {
			rows = append(rows, nil)
		}
	}
	var out []string
	for _, r := range rows {
		out = append(out, strings.TrimRight(string(r), " "))
	}
	return out
}

// Output returns everything that the program has written to the terminal.
func (x *Terminal) Output() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return strings.ReplaceAll(x.screen.String(), "\r\n", "\n")
}

// AwaitText blocks until the program has written text to the terminal. It fails the test if the program ends before, or
// after the time WaitTimeout.
func (x *Terminal) AwaitText(text string) {
	x.t.Helper()
	ended := false
	Eventually(x.t, fmt.Sprintf("the terminal shows %q", text), func() bool {
		if strings.Contains(x.Output(), text) {
			return true
		}
		if ended {
			x.t.Fatalf("the program ended without %q on the screen:\n%s", text, x.Output())
		}
		select {
		case <-x.read:
			ended = true
		default:
		}
		return false
	})
}

// Type writes keys to the terminal, as a user types them.
func (x *Terminal) Type(keys string) {
	x.t.Helper()
	_, err := x.keys.WriteString(keys)
	requireNoError(x.t, err)
}

// AwaitExit blocks until the program on the terminal has ended, and returns its exit code and all its output.
func (x *Terminal) AwaitExit() (code int, screen string) {
	x.t.Helper()
	Eventually(x.t, "the program ends", func() bool {
		select {
		case <-x.read:
			return true
		default:
			return false
		}
	})
	var exit *exec.ExitError
	if err := x.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		x.t.Fatal(err)
	}
	return x.cmd.ProcessState.ExitCode(), x.Output()
}
