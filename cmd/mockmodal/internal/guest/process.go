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

// process is a running exec and the connection that carries its streams.
type process struct {
	sending sync.Mutex // serialises frames
	conn    net.Conn
	input   chan []byte // holds at most StdinWindow frames; an empty one ends the input

	mu      sync.Mutex
	command *exec.Cmd
	exited  bool
	stdin   *os.File
	outputs map[Kind]*os.File
}

// start runs a process, and returns when the process and its streams have ended and everything about them was sent.
func start(conn net.Conn, reader *bufio.Reader, spec Exec) {
	p := &process{conn: conn, input: make(chan []byte, StdinWindow), outputs: map[Kind]*os.File{}}
	if err := p.launch(spec); err != nil {
		p.sendExit(Exit{Code: startFailureCode(err), Error: err.Error()})
		return
	}
	p.send(Started, nil)
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
	p.sendExit(exitOf(p.command.ProcessState, err))
	streams.Wait()
}

// startFailureCode returns the exit code of a shell for a program that could not be started with err.
func startFailureCode(err error) int {
	if errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 126
}

// exitOf returns how a process ended, from its state. If state is nil, the process did not start, and err is the
// reason.
func exitOf(state *os.ProcessState, err error) Exit {
	if state == nil {
		return Exit{Code: 1, Error: err.Error()}
	}
	status, ok := state.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return Exit{Signal: int(status.Signal())}
	}
	return Exit{Code: state.ExitCode()}
}

// launch starts the process and the goroutines that carry its streams.
func (p *process) launch(spec Exec) error {
	env := append(os.Environ(), spec.Env...)
	path, err := lookPath(spec.Args[0], env, spec.Dir)
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
	output := func(kind Kind) (*os.File, error) {
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		p.outputs[kind], theirs = read, append(theirs, write)
		return write, nil
	}
	if !spec.DiscardStdout {
		write, err := output(Stdout)
		if err != nil {
			return err
		}
		p.command.Stdout = write
	}
	switch {
	case spec.StderrToStdout:
		p.command.Stderr = p.command.Stdout
	case !spec.DiscardStderr:
		write, err := output(Stderr)
		if err != nil {
			return err
		}
		p.command.Stderr = write
	}
	return p.command.Start()
}

// lookPath finds an executable as a shell does, by the PATH of env.
func lookPath(name string, env []string, dir string) (string, error) {
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

// readFrames reads the server's frames, which carry input and requests to kill. It ends with the
// connection; a process whose server is gone is killed.
func (p *process) readFrames(reader *bufio.Reader) {
	defer close(p.input)
	for {
		kind, data, err := ReadFrame(reader)
		if err != nil {
			p.kill()
			return
		}
		switch kind {
		case Stdin:
			p.input <- data
		case Kill:
			p.kill()
		}
	}
}

// kill kills the process group. It does nothing if the process has exited: descendants that it left behind continue to
// run.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.exited {
		_ = syscall.Kill(-p.command.Process.Pid, syscall.SIGKILL) // fails only when nothing of the group is left
	}
}

// writeInput writes the input that the server sends to the process's standard input, until the end of the input. It
// drops the input of a process that no longer reads, and confirms it like any other.
func (p *process) writeInput() {
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
		p.send(StdinRead, nil)
	}
	_ = p.stdin.Close()
}

// copyOutput reads the process's standard output or error from file, sends it in frames of the given kind, and sends an
// empty frame at its end.
func (p *process) copyOutput(kind Kind, file *os.File) {
	defer file.Close() //nolint:errcheck // read only
	buffer := make([]byte, 64<<10)
	for {
		n, err := file.Read(buffer)
		if n > 0 {
			p.send(kind, buffer[:n])
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				p.send(kind, []byte("\nmockmodal: read the output: "+err.Error()+"\n"))
			}
			p.send(kind, nil)
			return
		}
	}
}

// sendExit sends the server a frame that states how the process ended.
func (p *process) sendExit(exit Exit) {
	data, err := json.Marshal(exit)
	if err != nil {
		panic(err) // a struct of numbers and a string
	}
	p.send(Exited, data)
}

// send writes a frame to the server. It ignores errors, because then the server is gone, which readFrames notices too.
func (p *process) send(kind Kind, data []byte) {
	p.sending.Lock()
	defer p.sending.Unlock()
	_ = WriteFrame(p.conn, kind, data)
}
