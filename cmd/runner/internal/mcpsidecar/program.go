package mcpsidecar

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

// exitSignal is added to the number of the signal that ended a program to get its exit code, as in shells.
const exitSignal = 128

// find returns the path of an executable, as exec.LookPath does.
func find(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return name, fmt.Errorf("start the server's program: %w", err)
	}
	return path, nil
}

// program is a running MCP server with the runner's ends of its stdin, stdout and stderr.
type program struct {
	cmd              *exec.Cmd
	stdin            *os.File
	stdout, stderr   *os.File
	exited, inputEnd chan struct{}
}

// run runs the program that a connection requests and carries its streams. It returns when the program and all of its
// descendants have ended.
func (s *Server) run(ctx context.Context, h hello, in *bufio.Reader, out *frames) endFrame {
	p, err := s.start(h)
	if err != nil {
		return endFrame{Code: exitNotStarted, Error: err.Error()}
	}
	go func() { // ends with the connection, which its owner closes
		defer close(p.inputEnd)
		_, _ = io.Copy(p.stdin, in) // the program closed its stdin, or the connection broke
		closeQuietly(p.stdin)
	}()
	var readers sync.WaitGroup
	for from, to := range map[*os.File]stream{p.stdout: toStdout, p.stderr: toStderr} {
		readers.Go(func() {
			defer closeQuietly(from)
			copyFrames(out, to, from)
		})
	}
	go func() {
		defer close(p.exited)
		s.cfg.ProcessGroup.Await(p.cmd)
	}()
	s.waitForExit(ctx, p)
	// Processes that are left in its group would keep the streams open.
	if err := s.cfg.ProcessGroup.EndTree(p.cmd); err != nil {
		s.cfg.Log.Error("end a server", "err", err)
	}
	<-p.exited
	soon := time.Now().Add(s.cfg.Grace) // a process that left the group may have the streams open
	for _, f := range []*os.File{p.stdout, p.stderr} {
		_ = f.SetReadDeadline(soon) // one that is closed was read to its end
	}
	readers.Wait()
	return endFrame{Code: code(p.cmd.ProcessState)}
}

// exitNotStarted is the exit code of a program that could not be started, as in shells.
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
		if err = s.cfg.ProcessGroup.Spawn(p.cmd); err != nil {
			err = fmt.Errorf("start the server's program: %w", err)
		}
	}
	if err != nil {
		theirs = all
	}
	for _, f := range theirs {
		closeQuietly(f)
	}
	return p, err
}

// waitForExit blocks until the program has ended or ctx ends. When the input of the connection has ended, waitForExit
// sends SIGTERM to the program after the grace time, and SIGKILL after another grace time.
func (s *Server) waitForExit(ctx context.Context, p *program) {
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
			_ = syscall.Kill(-p.cmd.Process.Pid, ask) // an error means that it has ended
		}
	}
}

// copyFrames reads a stream of the program to its end and sends it in frames. After an error of out it discards what it
// reads, so that the program does not block.
func copyFrames(out *frames, to stream, from io.Reader) {
	buf := make([]byte, maxFrame)
	for gone := false; ; {
		n, err := from.Read(buf)
		if n > 0 && !gone {
			gone = out.write(to, buf[:n]) != nil
		}
		if err != nil {
			return // the end of the stream
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
