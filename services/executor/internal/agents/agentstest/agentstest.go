// Package agentstest provides a sandbox whose runner answers commands, for tests that need an open stream.
package agentstest

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"slices"
	"sync"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// A FakeSandbox is a fake sandbox, whose fake runner has an agent process and runs no execution unless SetStatus changes that. It is
// safe for concurrent use.
type FakeSandbox struct {
	Name    string // id of the sandbox
	Journal string

	mu     sync.Mutex
	status runner.Status
	ops    []runner.Op
	procs  []*fakeProcess
}

// NewFakeSandbox returns a FakeSandbox with an id. memory is the memory of its agent process in bytes.
func NewFakeSandbox(id string, memory uint64) *FakeSandbox {
	return &FakeSandbox{Name: id, Journal: "jnl_" + id, status: runner.Status{AgentPID: 42, MemoryBytes: memory}}
}

// SetStatus sets the status that the runner reports.
func (b *FakeSandbox) SetStatus(s runner.Status) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.status = s
}

// ReceivedOps returns the operations of the commands that the fake runner has received.
func (b *FakeSandbox) ReceivedOps() []runner.Op {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.ops)
}

// CloseStreams closes all streams of executors to the fake runner.
func (b *FakeSandbox) CloseStreams() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.procs {
		_ = p.Kill()
	}
}

// ID implements sandbox.Sandbox.
func (b *FakeSandbox) ID() string { return b.Name }

// Secret implements sandbox.Sandbox.
func (b *FakeSandbox) Secret() string { return "" }

// Running implements sandbox.Sandbox.
func (b *FakeSandbox) Running(context.Context) (bool, error) { return true, nil }

// Files implements sandbox.Sandbox.
func (b *FakeSandbox) Files() sandbox.Files { return nil }

// Exec implements sandbox.Sandbox: every command attaches to the runner.
func (b *FakeSandbox) Exec(context.Context, sandbox.Command) (sandbox.Process, error) {
	p := &fakeProcess{}
	p.in, p.stdin = io.Pipe()
	p.stdout, p.out = io.Pipe()
	p.stderr, p.errs = io.Pipe()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.procs = append(b.procs, p)
	hello := runner.Hello{Protocol: runner.ProtocolVersion, Journal: b.Journal, First: 1, Status: b.status}
	p.all.Go(func() { b.serveRunner(p, hello) })
	return p, nil
}

// serveRunner answers the commands of one executor that is attached to the fake runner. It first sends hello.
func (b *FakeSandbox) serveRunner(p *fakeProcess, hello runner.Hello) {
	out := json.NewEncoder(p.out)
	if out.Encode(runner.Message{Hello: &hello}) != nil {
		return
	}
	for in := bufio.NewScanner(p.in); in.Scan(); {
		var c runner.Command
		if json.Unmarshal(in.Bytes(), &c) != nil {
			return
		}
		b.mu.Lock()
		b.ops = append(b.ops, c.Op)
		if c.Op == runner.OpKill {
			b.status.ExecutionID, b.status.AgentPID = "", 0
		}
		status := b.status
		b.mu.Unlock()
		if out.Encode(runner.Message{Reply: &runner.Reply{ID: c.ID, Status: &status}}) != nil {
			return
		}
	}
}

// fakeProcess is the fake process of a command in the FakeSandbox: its stdin and stdout are one executor's stream to the fake runner.
type fakeProcess struct {
	in             *io.PipeReader
	out            *io.PipeWriter
	stdin          *io.PipeWriter
	stdout, stderr *io.PipeReader
	errs           *io.PipeWriter
	all            sync.WaitGroup
}

func (p *fakeProcess) Stdin() io.WriteCloser { return p.stdin }
func (p *fakeProcess) Stdout() io.Reader     { return p.stdout }
func (p *fakeProcess) Stderr() io.Reader     { return p.stderr }

func (p *fakeProcess) Wait() (int, error) {
	p.all.Wait()
	return -1, nil
}

func (p *fakeProcess) Kill() error {
	_, _, _ = p.in.Close(), p.out.Close(), p.errs.Close()
	return nil
}
