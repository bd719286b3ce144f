// Package fake is a sandbox provider without sandboxes: every runner is some goroutines, of this process or of another
// one, that speak the runner's protocol and play a script in place of an agent. A benchmark can thereby load everything behind the
// runners with any number of them, over the executor's normal path.
package fake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Script is a function that takes the place of an agent in a turn. The turn ends when the function returns. ctx ends
// when the turn is interrupted or its sandbox ends.
type Script func(ctx context.Context, t *Turn)

// Provider is a sandbox provider without real sandboxes. In each of its sandboxes a Script takes the place of the
// agent.
type Provider struct {
	runner func(id string) sandboxRunner // of a new sandbox

	mu    sync.Mutex
	boxes map[string]*fakeSandbox
}

// sandboxRunner is the fake runner of one sandbox of a Provider.
type sandboxRunner interface {
	// attach returns the process of a `runner attach` that follows the journal.
	attach(runner.Attach) (sandbox.Process, error)
	// end ends the runner and its turn.
	terminate()
}

// New returns a Provider whose sandboxes all run the script s, in this process.
func New(s Script) *Provider {
	return newProvider(func(id string) sandboxRunner { return newFakeRunner(s, events.DeriveID(events.KindJournal, id)) })
}

// newProvider returns a Provider. It calls r with the id of each new sandbox; r returns the sandbox's runner.
func newProvider(r func(id string) sandboxRunner) *Provider {
	return &Provider{runner: r, boxes: map[string]*fakeSandbox{}}
}

// Create creates a sandbox with the id of spec, or returns the existing sandbox with this id.
func (p *Provider) Create(_ context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[spec.ID]; ok {
		return b, nil
	}
	b := &fakeSandbox{spec: spec, runner: p.runner(spec.ID)}
	p.boxes[spec.ID] = b
	return b, nil
}

// Attach returns the sandbox with the given id, or sandbox.ErrNotFound.
func (p *Provider) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[id]; ok {
		return b, nil
	}
	return nil, sandbox.ErrNotFound
}

// List returns all sandboxes that were not terminated.
func (p *Provider) List(context.Context) ([]sandbox.Info, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []sandbox.Info
	for id, b := range p.boxes {
		out = append(out, sandbox.Info{ID: id, Labels: b.spec.Labels, Running: true})
	}
	return out, nil
}

// Terminate ends the sandbox with the given id, and its runner. It does nothing if the sandbox does not exist.
func (p *Provider) Terminate(_ context.Context, id string, _ bool) error {
	p.mu.Lock()
	b := p.boxes[id]
	delete(p.boxes, id)
	p.mu.Unlock()
	if b != nil {
		b.runner.terminate()
	}
	return nil
}

// SandboxCount returns the number of sandboxes that were not terminated.
func (p *Provider) SandboxCount() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.boxes)
}

// fakeSandbox is a sandbox of a Provider. It has a fake runner, and neither processes nor files.
type fakeSandbox struct {
	spec   sandbox.Spec
	runner sandboxRunner
}

func (b *fakeSandbox) Secret() string                        { return "" } // like the sandboxes of releases without secrets
func (b *fakeSandbox) ID() string                            { return b.spec.ID }
func (b *fakeSandbox) Running(context.Context) (bool, error) { return true, nil }

// Files returns an empty workspace that takes no files. The inspector lists it.
func (b *fakeSandbox) Files() sandbox.Files { return noFiles{} }

// noFiles is an empty workspace that takes no files.
type noFiles struct{}

func (noFiles) Put(context.Context, string, io.Reader) error { return errors.ErrUnsupported }

func (noFiles) Get(context.Context, string) (io.ReadCloser, error) { return nil, sandbox.ErrNotFound }

func (noFiles) List(context.Context, string) ([]sandbox.File, error) { return nil, nil }

func (noFiles) Remove(context.Context, string) error { return sandbox.ErrNotFound }

// Exec starts the command c. The only supported command is `runner attach`, whose process it returns; others are an
// error.
func (b *fakeSandbox) Exec(_ context.Context, c sandbox.Command) (sandbox.Process, error) {
	var a runner.Attach
	if n, err := fmt.Sscanf(strings.Join(c.Args, " "), "runner attach --epoch %d --after %d", &a.Epoch, &a.After); n != 2 {
		return nil, fmt.Errorf("fake sandbox: cannot run %v: %w", c.Args, err)
	}
	return b.runner.attach(a)
}
