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

// exitSignalBase is the exit code, without the number of the signal, of a program that a signal has ended, as in
// shells.
const exitSignalBase = 128

// findProgram returns the path of an executable, as exec.LookPath does.
func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return name, fmt.Errorf("start the server's program: %w", err)
	}
	return path, nil
}

// serverProgram is a running program of an MCP server, with the runner's ends of its stdin, stdout and stderr.
type serverProgram struct {
	cmd              *exec.Cmd
	stdin            *os.File
	stdout, stderr   *os.File
	exited, inputEnd chan struct{}
}

// runProgram runs the program that a connection requests, and copies its streams to and from the connection. It returns
// when the program and all of its descendants have ended.
func (s *Server) runProgram(ctx context.Context, h helloLine, in *bufio.Reader, out *frameWriter) endFrame {
	p, err := s.startProgram(h)
	if err != nil {
		return endFrame{Code: exitNotStarted, Error: err.Error()}
	}
	go func() { // ends with the connection, which its owner closes
		defer close(p.inputEnd)
		_, _ = io.Copy(p.stdin, in) // the program closed its stdin, or the connection broke
		closeQuietly(p.stdin)
	}()
	var readers sync.WaitGroup
	for from, to := range map[*os.File]streamID{p.stdout: streamStdout, p.stderr: streamStderr} {
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
	return endFrame{Code: exitCode(p.cmd.ProcessState)}
}

// exitNotStarted is the exit code that is returned for a program that could not be started, as in shells.
const exitNotStarted = 127

// startProgram starts the program that a connection requests, as leader of a session of its own.
func (s *Server) startProgram(h helloLine) (*serverProgram, error) {
	args, err := s.requestedCommand(h)
	if err != nil {
		return nil, err
	}
	p := &serverProgram{cmd: exec.Command(args[0], args[1:]...), exited: make(chan struct{}), inputEnd: make(chan struct{})} //nolint:gosec // running it is the purpose
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
func (s *Server) waitForExit(ctx context.Context, p *serverProgram) {
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

// copyFrames reads a stream of the program to its end and sends the data in frames. After an error of out it discards
// the data, so that the program does not block.
func copyFrames(out *frameWriter, to streamID, from io.Reader) {
	buf := make([]byte, maxFrameData)
	for gone := false; ; {
		n, err := from.Read(buf)
		if n > 0 && !gone {
			gone = out.writeFrames(to, buf[:n]) != nil
		}
		if err != nil {
			return // the end of the stream
		}
	}
}

// exitCode returns the exit code of a program that has ended, as in shells.
func exitCode(s *os.ProcessState) int {
	if s == nil {
		return 1
	}
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return exitSignalBase + int(ws.Signal())
	}
	return s.ExitCode()
}
