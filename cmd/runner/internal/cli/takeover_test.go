package cli_test

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// An agent cannot take its runner over, whichever peer SO_PEERCRED returns for the connection: the agent itself, a
// process that has ended (a child, or an orphan that the runner reaped), or a process that the runner did not start,
// because the pid of a dead process can be used again. None of them can claim the runner or raise the epoch. With a
// higher epoch, the agent could remove lines of the journal and fence every executor off.
func TestTakeover_IsRefusedWhateverThePeerIs(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"attach", "claim", "interrupt"} {
		for _, how := range []string{"itself", "dead", "orphan", "given"} {
			t.Run(first+" by "+how, func(t *testing.T) {
				t.Parallel()
				s := serveRunner(t)
				c := s.attach(1, 0)
				if how == "given" {
					s.giveAway()
				}
				lines := c.run("exe_1", fmt.Sprintf("takeover %s %s %s", how, first, s.socket))
				if got := find[events.BlockStart](t, lines).Block.Content; strings.Count(got, "FORBIDDEN") != 1 || strings.Contains(got, "hello") {
					t.Errorf("the agent was answered %s", got)
				}
				if r := c.ask(runner.Command{Op: runner.OpStatus}); r.Error != nil {
					t.Errorf("the executor is fenced off: %v", r.Error)
				}
				if next := s.attach(2, 0); next.refused != nil || next.hello.First != 1 {
					t.Errorf("the next executor is answered %+v %+v", next.hello, next.refused)
				}
			})
		}
	}
}

// A process that listens in the runner's place gets nothing that would let it act as the runner or as an executor.
func TestTakeover_OfTheSocketIsFoundOut(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	s.attach(1, 0)
	real := s.socket + ".real"
	if err := os.Rename(s.socket, real); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	other, err := runner.RunnerTLS(runner.NewSecret())
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, err = runner.AcceptSealedStream(c, c, other)
			_ = c.Close()
		}
		heard <- err
	}()
	c := s.dial()
	if _, err := runner.OpenSealedStream(s.secret, c, c); err == nil {
		t.Error("the executor takes another process for the runner")
	}
	if err := <-heard; err == nil {
		t.Error("the executor proved the secret to another process")
	}
	s.socket = real
	if next := s.attach(2, 0); next.refused != nil {
		t.Errorf("the next executor is refused: %+v", next.refused)
	}
}

// A runner is claimed once: a repeated claim succeeds with the same secret, and fails with another one.
func TestClaim_IsOnceOnly(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	secret := runner.NewSecret()
	for _, c := range []struct{ secret, want string }{{secret, `"reply":{"id":1}`}, {secret, `"reply":{"id":1}`}, {runner.NewSecret(), "FORBIDDEN"}, {"", "FORBIDDEN"}} {
		if got := claim(s.socket, c.secret); !strings.Contains(got, c.want) {
			t.Errorf("claim is answered %s, want %s", got, c.want)
		}
	}
	plain := serveRunner(t)
	if out, err := attachPlain(plain.socket, 0); err != nil || !strings.Contains(out, "hello") {
		t.Errorf("an unclaimed runner answers %s, %v", out, err)
	}
	if got := claim(plain.socket, secret); !strings.Contains(got, "FORBIDDEN") {
		t.Errorf("a runner that was attached to without a secret is claimed: %s", got)
	}
}

// claim sends a claim and returns the answer.
func claim(socket, secret string) string {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = c.Close() }()
	return ask(c, fmt.Sprintf(`{"id":1,"op":"claim","secret":%q}`, secret))
}

func ask(c net.Conn, line string) string {
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return err.Error()
	}
	raw, err := io.ReadAll(c)
	if err != nil {
		return string(raw) + err.Error()
	}
	return string(raw)
}

// attachPlain attaches without a secret and returns the first message.
func attachPlain(socket string, epoch uint64) (string, error) {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	if _, err := fmt.Fprintf(c, "{\"epoch\":%d,\"after\":0}\n", epoch); err != nil {
		return "", err
	}
	buf := make([]byte, 1<<10)
	n, err := c.Read(buf)
	return string(buf[:n]), err
}

// takeover is an agent that tries to fence executors off over a connection that another process opened.
func takeover(arg string) string {
	var how, first, socket string
	if _, err := fmt.Sscan(arg, &how, &first, &socket); err != nil {
		return err.Error()
	}
	c, err := stolen(how, socket)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = c.Close() }()
	switch first {
	case "claim":
		return ask(c, `{"id":1,"op":"claim","secret":"the agent's"}`)
	case "interrupt":
		return ask(c, `{"id":1,"op":"interrupt"}`)
	}
	// It does not read until the end of the stream: a runner that obeys keeps the stream open.
	if _, err := fmt.Fprintf(c, "{\"epoch\":%d,\"after\":0}\n", uint64(math.MaxUint64)); err != nil {
		return err.Error()
	}
	buf := make([]byte, 1<<10)
	n, err := c.Read(buf)
	if err != nil {
		return err.Error()
	}
	return string(buf[:n])
}

// stolen returns a connection to the runner whose peer is not this process.
func stolen(how, socket string) (net.Conn, error) {
	switch how {
	case "itself":
		return net.Dial("unix", socket)
	case "given":
		from, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket + ".give", Net: "unix"})
		if err != nil {
			return nil, err
		}
		defer func() { _ = from.Close() }()
		c, _, err := receive(from)
		return c, err
	}
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs") //nolint:gosec // descriptors
	defer func() { _ = ours.Close() }()
	cmd := exec.Command(os.Args[0], how, socket)
	cmd.Env = append(os.Environ(), "RUNNER_TEST_AS=dialer")
	cmd.ExtraFiles = []*os.File{theirs}
	if err := errors.Join(cmd.Run(), theirs.Close()); err != nil { // the child has ended, and no process has its pid
		return nil, err
	}
	from, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	defer func() { _ = from.Close() }()
	c, pid, err := receive(from.(*net.UnixConn))
	if err != nil || how != "orphan" {
		return c, err
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) { // until the runner has reaped it, its pid is not used again
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil {
			return c, nil
		}
		if time.Now().After(deadline) {
			return nil, errors.New("the orphan is not reaped")
		}
	}
}

// dialer connects to the runner, passes the connection by descriptor 3 and ends, as a child or as an orphan.
func dialer(how, socket string) error {
	if how == "orphan" {
		cmd := exec.Command(os.Args[0], "dead", socket)
		cmd.Env, cmd.ExtraFiles = os.Environ(), []*os.File{os.NewFile(3, "pass")}
		return cmd.Start()
	}
	pass, err := net.FileConn(os.NewFile(3, "pass"))
	if err != nil {
		return err
	}
	return send(pass.(*net.UnixConn), socket)
}

// giveAway passes a connection that this process, which is not the runner's, opens to whoever asks for one.
func (s *served) giveAway() {
	s.t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.socket + ".give", Net: "unix"})
	if err != nil {
		s.t.Fatal(err)
	}
	given := make(chan error, 1)
	go func() {
		c, err := l.AcceptUnix()
		if err == nil {
			err = errors.Join(send(c, s.socket), c.Close())
		}
		given <- err
	}()
	s.t.Cleanup(func() {
		_ = l.Close()
		if err := <-given; err != nil {
			s.t.Error(err)
		}
	})
}

// send passes a new connection to the runner to a process.
func send(to *net.UnixConn, socket string) error {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	f, err := c.File()
	if err != nil {
		return err
	}
	_, _, err = to.WriteMsgUnix(fmt.Appendf(nil, "%8d", os.Getpid()), syscall.UnixRights(int(f.Fd())), nil) //nolint:gosec // a descriptor
	return errors.Join(err, f.Close(), c.Close())
}

// receive takes a connection that send passed, and the number of the process that opened it.
func receive(from *net.UnixConn) (net.Conn, int, error) {
	data, oob := make([]byte, 8), make([]byte, syscall.CmsgSpace(4))
	_, n, _, _, err := from.ReadMsgUnix(data, oob)
	if err != nil {
		return nil, 0, err
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) == 0 {
		return nil, 0, fmt.Errorf("no descriptor came: %w", err)
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return nil, 0, err
	}
	f := os.NewFile(uintptr(fds[0]), "runner") //nolint:gosec // a descriptor
	c, err := net.FileConn(f)
	return c, pid, errors.Join(err, f.Close())
}
