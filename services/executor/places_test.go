package executor_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/metering"
)

// pausable is the fake provider with the features of Docker: pause, a pool, and an engine that can become unavailable.
type pausable struct{ *fakeProvider }

func (p pausable) Pause(_ context.Context, id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused[id] = true
	return nil
}

func (p pausable) Resume(_ context.Context, id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.paused, id)
	return nil
}

func (p pausable) Adopt(_ context.Context, id string, l sandbox.Labels) error {
	b := p.box(id)
	if b == nil {
		return sandbox.ErrNotFound
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	b.spec.Labels = l
	return nil
}

func (p *fakeProvider) isPaused(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.paused[id]
}

func (p *fakeProvider) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.boxes)
}

// fakeFiles is a workspace in memory.
type fakeFiles struct {
	mu      sync.Mutex
	content map[string]string
}

func (f *fakeFiles) Put(_ context.Context, path string, content io.Reader) error {
	raw, err := io.ReadAll(content)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.content[path] = string(raw)
	return nil
}

func (f *fakeFiles) Get(_ context.Context, path string) (io.ReadCloser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, ok := f.content[path]
	if !ok {
		return nil, sandbox.ErrNotFound
	}
	return io.NopCloser(strings.NewReader(c)), nil
}

func (f *fakeFiles) List(context.Context, string) ([]sandbox.File, error) { return nil, nil }

func (f *fakeFiles) Remove(_ context.Context, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.content[path]; !ok {
		return sandbox.ErrNotFound
	}
	delete(f.content, path)
	return nil
}

func (f *fakeFiles) all() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for path, c := range f.content {
		out = append(out, path+"="+c)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// fakeStore keeps snapshots, the files of a fake box, in memory.
type fakeStore struct {
	mu        sync.Mutex
	snapshots map[string]map[string]string
	block     chan struct{} // if set, snapshots wait until it is closed, or their context ends
	began     chan struct{} // signalled when a snapshot or put begins
	returned  chan struct{} // signalled when a blocked put returns
	fail      error
	restores  *blockedRestores   // nil: restores do not wait
	puts      chan chan struct{} // channels for which the next puts wait, one each; empty for none
}

func newFakeStore() *fakeStore {
	return &fakeStore{snapshots: map[string]map[string]string{}, began: make(chan struct{}, 100), returned: make(chan struct{}, 100), puts: make(chan chan struct{}, 1)}
}

// blockSnapshots makes snapshots wait until the returned channel is closed. began is signalled only for those.
func (s *fakeStore) blockSnapshots() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.block = make(chan struct{})
	for len(s.began) > 0 {
		<-s.began
	}
	return s.block
}

func (s *fakeStore) Snapshot(ctx context.Context, box sandbox.Sandbox, _ topology.SessionRef, _ string, _ bool) (contents.Snapshot, error) {
	s.mu.Lock()
	block, fail := s.block, s.fail
	s.mu.Unlock()
	s.began <- struct{}{}
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return contents.Snapshot{}, ctx.Err()
		}
	}
	if fail != nil {
		return contents.Snapshot{}, fail
	}
	f := box.Files().(*fakeFiles)
	id := "m-" + f.all()
	s.mu.Lock()
	defer s.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	content := map[string]string{}
	for k, v := range f.content {
		content[k] = v
	}
	s.snapshots[id] = content
	return contents.Snapshot{ID: id, Files: uint32(len(content))}, nil
}

// blockedRestores makes restores wait until block is closed. began is signalled for each.
type blockedRestores struct{ began, block chan struct{} }

func (s *fakeStore) blockRestores() *blockedRestores {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restores = &blockedRestores{make(chan struct{}, 100), make(chan struct{})}
	return s.restores
}

func (*fakeStore) Provide(ctx context.Context, box sandbox.Sandbox, t events.Transcript) error {
	return workspace.ProvideTranscript(ctx, box, t.SHA256, strings.NewReader(t.Object))
}

func (s *fakeStore) Restore(ctx context.Context, box sandbox.Sandbox, _ topology.SessionRef, id string, _ ...workspace.TreeName) (uint32, error) {
	s.mu.Lock()
	content, ok := s.snapshots[id]
	restores := s.restores
	s.mu.Unlock()
	if restores != nil {
		restores.began <- struct{}{}
		select {
		case <-restores.block:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	if !ok {
		return 0, fmt.Errorf("there is no snapshot %s", id)
	}
	for path, c := range content {
		if err := box.Files().Put(ctx, path, strings.NewReader(c)); err != nil {
			return 0, err
		}
	}
	return uint32(len(content)), nil
}

func (s *fakeStore) Put(ctx context.Context, box sandbox.Sandbox, f events.FilePut, fence contents.Fence) error {
	if strings.HasPrefix(f.Path, "..") {
		return fmt.Errorf("%w: outside", contents.ErrInvalidContent)
	}
	select {
	case block := <-s.puts:
		s.began <- struct{}{}
		defer func() { s.returned <- struct{}{} }()
		select {
		case <-block:
		case <-ctx.Done():
			return ctx.Err()
		}
	default:
	}
	if err := fence(ctx); err != nil {
		return err
	}
	return box.Files().Put(ctx, f.Path, bytes.NewReader([]byte(f.Object)))
}

// grant is a registration of a sandbox.
type grant struct {
	Sandbox string
	api.Registration
}

// fakeEgress is an egress proxy with a journal in memory.
type fakeEgress struct {
	mu       sync.Mutex
	grants   []grant
	released []string
	open     int
	away     time.Time // end of the time in which it does not answer
	lines    []events.Payload
	by       string        // execution to which the lines belong
	off      time.Duration // clock offset of the proxy's host

	authority string          // the proxy's certificate
	gone      map[string]bool // sandboxes that it has forgotten
}

func (e *fakeEgress) Register(_ context.Context, id string, r api.Registration) (string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if time.Now().Before(e.away) {
		return "", &sandbox.Error{Code: sandbox.CodeEgressUnavailable, Message: "the proxy does not answer"}
	}
	if r.Token == "" && e.gone[id] {
		return "", metering.ErrUnknownSandbox
	}
	e.grants = append(e.grants, grant{id, r})
	return e.authority, nil
}

func (e *fakeEgress) Release(_ context.Context, id string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.released = append(e.released, id)
	return nil
}

func (e *fakeEgress) OpenModelRequests(context.Context, string) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.open, nil
}

func (e *fakeEgress) set(open int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.open = open
}

func (e *fakeEgress) Lines(_ context.Context, _ string, after run.JournalPosition, _ bool) ([]metering.JournalLine, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []metering.JournalLine
	for i, data := range e.lines {
		n := uint64(i + 1)
		if after.Journal == "proxy" && n <= after.N {
			continue
		}
		switch d := data.(type) {
		case events.EgressDenied:
			d.Journal, d.Line = "proxy", n
			data = d
		case events.ModelCalled:
			d.Journal, d.Line = "proxy", n
			data = d
		}
		out = append(out, metering.JournalLine{Execution: e.by, Time: time.Now().Add(e.off), Data: data})
	}
	return out, nil
}

func (e *fakeEgress) say(execution string, data ...events.Payload) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.by = execution
	e.lines = append(e.lines, data...)
}

func (e *fakeEgress) Ack(context.Context, string, run.JournalPosition) error { return nil }
