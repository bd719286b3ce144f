// Package fake is a sandbox provider without sandboxes: every runner is some goroutines, of this process or of another
// one, that speak the runner's protocol and play a script in place of an agent. A benchmark can thereby load everything behind the
// runners with any number of them, over the executor's normal path.
package fake

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Script is a function that plays an agent in a turn. The turn ends when Script returns. ctx ends when the turn is
// interrupted or its sandbox ends.
type Script func(ctx context.Context, t *Turn)

// Provider is a sandbox provider without real sandboxes: a Script takes the place of the agent in each.
type Provider struct {
	runner func(id string) boxRunner // of a new sandbox

	mu    sync.Mutex
	boxes map[string]*box
}

// boxRunner is the fake runner in one sandbox of the Provider.
type boxRunner interface {
	// attach returns the process of a `runner attach` that follows the journal.
	attach(runner.Attach) (sandbox.Process, error)
	// end ends the runner and its turn.
	end()
}

// New returns a Provider that runs the script of each sandbox in this process.
func New(s Script) *Provider {
	return newProvider(func(id string) boxRunner { return newRunner(s, events.Derive(events.KindJournal, id)) })
}

// newProvider returns a provider. r returns the runner of a new sandbox.
func newProvider(r func(id string) boxRunner) *Provider {
	return &Provider{runner: r, boxes: map[string]*box{}}
}

// Create creates a sandbox, or returns the existing one with the id.
func (p *Provider) Create(_ context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[spec.ID]; ok {
		return b, nil
	}
	b := &box{spec: spec, runner: p.runner(spec.ID)}
	p.boxes[spec.ID] = b
	return b, nil
}

// Attach returns a sandbox by id.
func (p *Provider) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[id]; ok {
		return b, nil
	}
	return nil, sandbox.ErrNotFound
}

// List returns all sandboxes.
func (p *Provider) List(context.Context) ([]sandbox.Info, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []sandbox.Info
	for id, b := range p.boxes {
		out = append(out, sandbox.Info{ID: id, Labels: b.spec.Labels, Running: true})
	}
	return out, nil
}

// Terminate ends a sandbox and its runner.
func (p *Provider) Terminate(_ context.Context, id string, _ bool) error {
	p.mu.Lock()
	b := p.boxes[id]
	delete(p.boxes, id)
	p.mu.Unlock()
	if b != nil {
		b.runner.end()
	}
	return nil
}

// Len returns the number of sandboxes.
func (p *Provider) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.boxes)
}

// box is a sandbox of the Provider, which has a fake runner and no processes.
type box struct {
	spec   sandbox.Spec
	runner boxRunner
}

func (b *box) Secret() string                        { return "" } // like the sandboxes of releases without secrets
func (b *box) ID() string                            { return b.spec.ID }
func (b *box) Running(context.Context) (bool, error) { return true, nil }

// Files returns nil: no session of a benchmark has files.
func (b *box) Files() sandbox.Files { return nil }

// Exec supports only `runner attach`.
func (b *box) Exec(_ context.Context, c sandbox.Command) (sandbox.Process, error) {
	var a runner.Attach
	if n, err := fmt.Sscanf(strings.Join(c.Args, " "), "runner attach --epoch %d --after %d", &a.Epoch, &a.After); n != 2 {
		return nil, fmt.Errorf("fake sandbox: cannot run %v: %w", c.Args, err)
	}
	return b.runner.attach(a)
}
