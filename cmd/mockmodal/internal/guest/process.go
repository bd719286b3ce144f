package guest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// guestProcess is a process that the server has started in the container, with the connection that carries its standard
// streams.
type guestProcess struct {
	sending sync.Mutex // held while a frame is sent
	conn    net.Conn
	input   chan []byte // holds at most MaxUnconfirmedStdin frames; an empty one ends the input

	mu      sync.Mutex
	command *exec.Cmd
	exited  bool
	stdin   *os.File
	outputs map[FrameKind]*os.File
}

// runProcess runs a process, and returns when the process and its streams have ended and the server has been sent all
// of their output.
func runProcess(conn net.Conn, reader *bufio.Reader, spec ExecSpec) {
	p := &guestProcess{conn: conn, input: make(chan []byte, MaxUnconfirmedStdin), outputs: map[FrameKind]*os.File{}}
	if err := p.startCommand(spec); err != nil {
		p.sendExit(ExitResult{Code: startErrorExitCode(err), Error: err.Error()})
		return
	}
	p.sendFrame(FrameStarted, nil)
	go p.writeInput()
	go p.readFrames(reader)
	var streams sync.WaitGroup
	for kind, file := range p.outputs {
		streams.Go(func() { p.copyOutput(kind, file) })
	}
	err := p.command.Wait()
	p.mu.Lock()
	p.exited = true
	p.mu.Unlock()
	p.sendExit(newExitResult(p.command.ProcessState, err))
	streams.Wait()
}

// startErrorExitCode returns the exit code that a shell would return for a program that could not be started because of
// err.
func startErrorExitCode(err error) int {
	if errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 126
}

// newExitResult returns the result of a process from its state. If state is nil, the process did not start, and err is
// the reason.
func newExitResult(state *os.ProcessState, err error) ExitResult {
	if state == nil {
		return ExitResult{Code: 1, Error: err.Error()}
	}
	status, ok := state.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return ExitResult{Signal: int(status.Signal())}
	}
	return ExitResult{Code: state.ExitCode()}
}

// startCommand starts the process, and the goroutines that carry its standard streams.
func (p *guestProcess) startCommand(spec ExecSpec) error {
	env := append(os.Environ(), spec.Env...)
	path, err := findExecutable(spec.Args[0], env, spec.Dir)
	if err != nil {
		return err
	}
	p.command = &exec.Cmd{Path: path, Args: spec.Args, Env: env, Dir: spec.Dir, SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	var theirs []*os.File
	defer func() {
		for _, file := range theirs {
			_ = file.Close() // the process has its own copy
		}
	}()
	stdin, write, err := os.Pipe()
	if err != nil {
		return err
	}
	p.stdin, p.command.Stdin, theirs = write, stdin, append(theirs, stdin)
	output := func(kind FrameKind) (*os.File, error) {
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		p.outputs[kind], theirs = read, append(theirs, write)
		return write, nil
	}
	if !spec.DiscardStdout {
		write, err := output(FrameStdout)
		if err != nil {
			return err
		}
		p.command.Stdout = write
	}
	switch {
	case spec.StderrToStdout:
		p.command.Stderr = p.command.Stdout
	case !spec.DiscardStderr:
		write, err := output(FrameStderr)
		if err != nil {
			return err
		}
		p.command.Stderr = write
	}
	return p.command.Start()
}

// findExecutable returns the path of the program name, which it searches in the PATH of env as a shell does. A name
// with a slash is a path, relative to dir.
func findExecutable(name string, env []string, dir string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		return name, nil
	}
	paths := ""
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			paths = value
		}
	}
	for _, folder := range filepath.SplitList(paths) {
		path := filepath.Join(folder, name)
		if info, err := os.Stat(path); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("exec: %q: executable file not found in $PATH: %w", name, os.ErrNotExist)
}

// readFrames handles the server's frames with input and with requests to kill the process. It returns when the
// connection ends, and then kills the process, because the server is gone.
func (p *guestProcess) readFrames(reader *bufio.Reader) {
	defer close(p.input)
	for {
		kind, data, err := ReadFrame(reader)
		if err != nil {
			p.kill()
			return
		}
		switch kind {
		case FrameStdin:
			p.input <- data
		case FrameKill:
			p.kill()
		}
	}
}

// kill kills the process group. It does nothing if the process has exited, so that its remaining descendants continue
// to run.
func (p *guestProcess) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.exited {
		_ = syscall.Kill(-p.command.Process.Pid, syscall.SIGKILL) // fails only when nothing of the group is left
	}
}

// writeInput writes the input that the server sends to the standard input of the process, until the input ends. Input
// of a process that no longer reads is dropped, and confirmed to the server like any other.
func (p *guestProcess) writeInput() {
	open := true
	for data := range p.input {
		if len(data) == 0 {
			_ = p.stdin.Close()
			open = false
		}
		if open {
			if _, err := p.stdin.Write(data); err != nil {
				open = false
			}
		}
		p.sendFrame(FrameStdinRead, nil)
	}
	_ = p.stdin.Close()
}

// copyOutput reads the standard output or error of the process from file, and sends it to the server in frames of the
// given kind. It sends an empty frame at the end.
func (p *guestProcess) copyOutput(kind FrameKind, file *os.File) {
	defer file.Close() //nolint:errcheck // read only
	buffer := make([]byte, 64<<10)
	for {
		n, err := file.Read(buffer)
		if n > 0 {
			p.sendFrame(kind, buffer[:n])
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				p.sendFrame(kind, []byte("\nmockmodal: read the output: "+err.Error()+"\n"))
			}
			p.sendFrame(kind, nil)
			return
		}
	}
}

// sendExit sends a FrameExited with the result of the process to the server.
func (p *guestProcess) sendExit(exit ExitResult) {
	data, err := json.Marshal(exit)
	if err != nil {
		panic(err) // a struct of numbers and a string
	}
	p.sendFrame(FrameExited, data)
}

// sendFrame sends a frame to the server. It ignores write errors, because they mean that the server is gone, which
// readFrames notices too.
func (p *guestProcess) sendFrame(kind FrameKind, data []byte) {
	p.sending.Lock()
	defer p.sending.Unlock()
	_ = WriteFrame(p.conn, kind, data)
}
