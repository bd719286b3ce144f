package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"
)

// Terminal is a run of spool on a terminal of its own, as a person has it: it
// asks questions, echoes what is typed, and makes Ctrl-C a signal.
type Terminal struct {
	t      testing.TB
	cmd    *exec.Cmd
	keys   *os.File // the terminal's other end
	mu     sync.Mutex
	screen bytes.Buffer
	read   chan struct{} // closed when all output was read
}

// CtrlC interrupts the program that runs on a terminal.
const CtrlC = "\x03"

// Terminal starts spool against gateway 0 on a terminal, with further environment variables.
func (c *Cluster) Terminal(t testing.TB, folder, data string, env []string, args ...string) *Terminal {
	t.Helper()
	cmd := c.command(t, folder, data, args...)
	cmd.Env = append(cmd.Env, append([]string{"TERM=xterm", "NO_COLOR=1"}, env...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	master, tty, err := openTerminal()
	must(t, err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	must(t, errors.Join(cmd.Start(), tty.Close()))
	x := &Terminal{t: t, cmd: cmd, keys: master, read: make(chan struct{})}
	go func() {
		defer close(x.read)
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b) // fails once no program has the terminal
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
		_ = cmd.Wait() // fails if Ended has called it
		check(t, master.Close())
	})
	return x
}

// openTerminal makes a pseudo-terminal.
func openTerminal() (master, tty *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	var n, unlock int32
	size := [4]uint16{50, 400} // rows and columns: no text of a test is wrapped
	for _, call := range []struct {
		request uintptr
		arg     unsafe.Pointer
	}{{syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)}, {syscall.TIOCGPTN, unsafe.Pointer(&n)}, {syscall.TIOCSWINSZ, unsafe.Pointer(&size)}} { //nolint:gosec // as ioctl_tty(2) has them
		_, _, e := syscall.Syscall(syscall.SYS_IOCTL, master.Fd(), call.request, uintptr(call.arg))
		if e != 0 {
			return nil, nil, errors.Join(e, master.Close())
		}
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, errors.Join(err, master.Close())
	}
	return master, tty, nil
}

// Screen returns all that was printed.
func (x *Terminal) Screen() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return strings.ReplaceAll(x.screen.String(), "\r\n", "\n")
}

// Shows waits until a text is on the screen.
func (x *Terminal) Shows(text string) {
	x.t.Helper()
	ended := false
	Eventually(x.t, fmt.Sprintf("the terminal shows %q", text), func() bool {
		if strings.Contains(x.Screen(), text) {
			return true
		}
		if ended {
			x.t.Fatalf("the program ended without %q on the screen:\n%s", text, x.Screen())
		}
		select {
		case <-x.read:
			ended = true
		default:
		}
		return false
	})
}

// Type types keys.
func (x *Terminal) Type(keys string) {
	x.t.Helper()
	_, err := x.keys.WriteString(keys)
	must(x.t, err)
}

// Ended waits for the program's end and returns its exit code and all that was printed.
func (x *Terminal) Ended() (code int, screen string) {
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
	return x.cmd.ProcessState.ExitCode(), x.Screen()
}
