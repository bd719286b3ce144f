package companion

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"
)

// exitSignal is added to a signal's number, as shells do.
const exitSignal = 128

// find gives the path of a program.
func find(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return name, fmt.Errorf("its program cannot be started: %w", err)
	}
	return path, nil
}

// program is a started one, with this side's ends of its streams.
type program struct {
	cmd              *exec.Cmd
	stdin            *os.File
	stdout, stderr   *os.File
	exited, inputEnd chan struct{}
}

// run runs the program of a connection to its end, with all that it started.
func (s *Server) run(ctx context.Context, h hello, in *bufio.Reader, out *frames) ended {
	p, err := s.start(h)
	if err != nil {
		return ended{Code: exitNotStarted, Error: err.Error()}
	}
	go func() { // ends with the connection, which its owner closes
		defer close(p.inputEnd)
		_, _ = io.Copy(p.stdin, in) // a program that reads no more, or a connection that broke
		quietly(p.stdin)
	}()
	var readers sync.WaitGroup
	for from, to := range map[*os.File]stream{p.stdout: toStdout, p.stderr: toStderr} {
		readers.Go(func() {
			defer quietly(from)
			carry(out, to, from)
		})
	}
	go func() {
		defer close(p.exited)
		s.cfg.Nursery.Await(p.cmd)
	}()
	s.outlast(ctx, p)
	// What is left of its group keeps the streams open.
	if err := s.cfg.Nursery.EndTree(p.cmd); err != nil {
		s.cfg.Log.Error("end a server", "err", err)
	}
	<-p.exited
	soon := time.Now().Add(s.cfg.Grace) // for what left the group and has the streams still
	for _, f := range []*os.File{p.stdout, p.stderr} {
		_ = f.SetReadDeadline(soon) // one that is closed was read to its end
	}
	readers.Wait()
	return ended{Code: code(p.cmd.ProcessState)}
}

// exitNotStarted is the code by which shells tell that there is no such program.
const exitNotStarted = 127

// start starts the program as leader of a session of its own.
func (s *Server) start(h hello) (*program, error) {
	args, err := s.command(h)
	if err != nil {
		return nil, err
	}
	p := &program{cmd: exec.Command(args[0], args[1:]...), exited: make(chan struct{}), inputEnd: make(chan struct{})} //nolint:gosec // running it is the purpose
	p.cmd.Env = slices.Clone(s.cfg.Environ)
	for _, k := range slices.Sorted(maps.Keys(h.Env)) {
		p.cmd.Env = append(p.cmd.Env, k+"="+h.Env[k])
	}
	var theirs, all []*os.File
	pipe := func() (r, w *os.File) {
		if err == nil {
			if r, w, err = os.Pipe(); err == nil {
				all = append(all, r, w)
			}
		}
		return r, w
	}
	var in, outEnd, errEnd *os.File
	in, p.stdin = pipe()
	p.stdout, outEnd = pipe()
	p.stderr, errEnd = pipe()
	if err == nil {
		theirs = []*os.File{in, outEnd, errEnd}
		p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = in, outEnd, errEnd
		if err = s.cfg.Nursery.Spawn(p.cmd); err != nil {
			err = fmt.Errorf("its program cannot be started: %w", err)
		}
	}
	if err != nil {
		theirs = all
	}
	for _, f := range theirs {
		quietly(f)
	}
	return p, err
}

// outlast waits until the program has ended by itself. One whose connection has
// ended may take a while, is asked to then, and may take as long again.
func (s *Server) outlast(ctx context.Context, p *program) {
	select {
	case <-p.exited:
		return
	case <-p.inputEnd:
	case <-ctx.Done():
		return
	}
	for _, ask := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		timer := time.NewTimer(s.cfg.Grace)
		select {
		case <-p.exited:
			timer.Stop()
			return
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
			_ = syscall.Kill(-p.cmd.Process.Pid, ask) // gone is what is wanted
		}
	}
}

// carry copies until the end; what nobody takes any more is dropped, so that the program is not held up.
func carry(out *frames, to stream, from io.Reader) {
	buf := make([]byte, maxFrame)
	for gone := false; ; {
		n, err := from.Read(buf)
		if n > 0 && !gone {
			gone = out.write(to, buf[:n]) != nil
		}
		if err != nil {
			return // its end, or nobody is left to write
		}
	}
}

func code(s *os.ProcessState) int {
	if s == nil {
		return 1
	}
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return exitSignal + int(ws.Signal())
	}
	return s.ExitCode()
}
