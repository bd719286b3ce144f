// Package fake is a sandbox provider without sandboxes: every runner is a
// goroutine of this process that speaks the runner's protocol and plays a script
// as the agent. So a benchmark loads everything behind the runners with as many
// as it wants, by the executor's own path.
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

// Script is what an agent does with a query, until it returns, which ends the
// turn, or ctx does, which is the turn's interruption or its sandbox's end.
type Script func(ctx context.Context, t *Turn)

// Provider holds the sandboxes.
type Provider struct {
	script Script

	mu    sync.Mutex
	boxes map[string]*box
}

// New makes a provider.
func New(s Script) *Provider { return &Provider{script: s, boxes: map[string]*box{}} }

// Create makes a sandbox, or finds the one with the id.
func (p *Provider) Create(_ context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[spec.ID]; ok {
		return b, nil
	}
	b := &box{spec: spec, runner: newRunner(p.script, events.Derive(events.KindJournal, spec.ID))}
	p.boxes[spec.ID] = b
	return b, nil
}

// Attach finds a sandbox.
func (p *Provider) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.boxes[id]; ok {
		return b, nil
	}
	return nil, sandbox.ErrNotFound
}

// List gives every sandbox.
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

// Len is how many sandboxes there are.
func (p *Provider) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.boxes)
}

type box struct {
	spec   sandbox.Spec
	runner *fakeRunner
}

func (b *box) Secret() string                        { return "" } // it stands for one of a release without
func (b *box) ID() string                            { return b.spec.ID }
func (b *box) Running(context.Context) (bool, error) { return true, nil }

// Files is nothing: no session of a benchmark has any.
func (b *box) Files() sandbox.Files { return nil }

// Exec knows `runner attach` alone.
func (b *box) Exec(_ context.Context, c sandbox.Command) (sandbox.Process, error) {
	var a runner.Attach
	if n, err := fmt.Sscanf(strings.Join(c.Args, " "), "runner attach --epoch %d --after %d", &a.Epoch, &a.After); n != 2 {
		return nil, fmt.Errorf("fake sandbox: cannot run %v: %w", c.Args, err)
	}
	return b.runner.attach(a)
}
