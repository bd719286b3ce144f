package executor_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// script is the behaviour of a fake agent for a query. It must call End.
type script func(*fakeTurn)

// fakeProvider keeps sandboxes in memory, independently of executors, as a machine does.
type fakeProvider struct {
	script script

	mu         sync.Mutex
	boxes      map[string]*fakeBox
	createErr  error
	made       int
	terminated map[string]bool // id to wiped
	specs      map[string]sandbox.Spec
	paused     map[string]bool
	workspaces map[string]bool // by the id of the sandbox for which they were created
	stocked    []string        // digests of the skills that were copied into sandboxes, in order
}

// LoadSkills records the skills that are copied into a sandbox.
func (p *fakeProvider) LoadSkills(_ context.Context, id string, digests []string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.boxes[id] == nil {
		return sandbox.ErrNotFound
	}
	p.stocked = append(p.stocked, digests...)
	return nil
}

func (p *fakeProvider) hasStock() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.stocked)
}

func newFakeProvider(s script) *fakeProvider {
	return &fakeProvider{script: s, boxes: map[string]*fakeBox{}, terminated: map[string]bool{},
		specs: map[string]sandbox.Spec{}, paused: map[string]bool{}, workspaces: map[string]bool{}}
}

func (p *fakeProvider) Create(_ context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.createErr != nil {
		return nil, p.createErr
	}
	if b, ok := p.boxes[spec.ID]; ok {
		return b, nil
	}
	p.made++
	p.specs[spec.ID] = spec
	kept := spec.Workspace != "" && p.workspaces[spec.Workspace]
	p.workspaces[spec.ID] = true
	b := &fakeBox{spec: spec, kept: kept, files: &fakeFiles{content: map[string]string{}}, runner: newFakeRunner(p.script, events.DeriveID(events.KindJournal, spec.ID)), frozen: func() bool { return p.isPaused(spec.ID) }}
	p.boxes[spec.ID] = b
	return b, nil
}

func (p *fakeProvider) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	if b := p.box(id); b != nil && !b.runner.isDead() {
		return b, nil
	}
	return nil, sandbox.ErrNotFound
}

func (p *fakeProvider) List(context.Context) ([]sandbox.Info, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []sandbox.Info
	for id, b := range p.boxes {
		out = append(out, sandbox.Info{ID: id, Labels: b.spec.Labels, Running: !b.runner.isDead()})
	}
	return out, nil
}

func (p *fakeProvider) Terminate(_ context.Context, id string, wipe bool) error {
	p.mu.Lock()
	b := p.boxes[id]
	delete(p.boxes, id)
	p.terminated[id] = wipe
	if wipe {
		delete(p.workspaces, id)
	}
	p.mu.Unlock()
	if b != nil {
		b.runner.die()
	}
	return nil
}

func (p *fakeProvider) box(id string) *fakeBox {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.boxes[id]
}

// onlyBox returns the single sandbox.
func (p *fakeProvider) onlyBox() *fakeBox {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.boxes {
		return b
	}
	return nil
}

func (p *fakeProvider) wiped(id string) (wiped, terminated bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	wiped, terminated = p.terminated[id]
	return wiped, terminated
}

func (p *fakeProvider) close() {
	p.mu.Lock()
	list := p.boxes
	p.boxes = map[string]*fakeBox{}
	p.mu.Unlock()
	for _, b := range list {
		b.runner.die()
	}
}

type fakeBox struct {
	spec   sandbox.Spec
	runner *fakeRunner
	kept   bool
	files  *fakeFiles
	frozen func() bool
}

func (b *fakeBox) Secret() string                        { return "" } // as in a release without secrets
func (b *fakeBox) ID() string                            { return b.spec.ID }
func (b *fakeBox) Running(context.Context) (bool, error) { return !b.runner.isDead(), nil }
func (b *fakeBox) Files() sandbox.Files                  { return b.files }
func (b *fakeBox) HasWorkspace() bool                    { return b.kept }
func (b *fakeBox) Exec(_ context.Context, c sandbox.Command) (sandbox.Process, error) {
	if b.frozen() {
		return nil, fmt.Errorf("fake sandbox: %s is paused", b.spec.ID)
	}
	var a runner.Attach
	if n, err := fmt.Sscanf(strings.Join(c.Args, " "), "runner attach --epoch %d --after %d", &a.Epoch, &a.After); n != 2 {
		return nil, fmt.Errorf("fake sandbox: cannot run %v: %w", c.Args, err)
	}
	return b.runner.attach(a)
}

// fakeRunner implements the runner's protocol and runs its script as the agent.
type fakeRunner struct {
	script script
	name   string

	mu       sync.Mutex
	changed  *sync.Cond
	lines    []runner.JournalLine // lines[i].N == i+1
	raw      map[int]string
	acked    uint64
	hidden   func(n uint64) bool // lines that are not sent; nil for none
	epoch    uint64
	follower *fakeStream
	seen     map[string]bool
	turn     *fakeTurn
	warm     bool
	memory   uint64
	dead     bool
	queries  []runner.Query
	ops      []runner.Op
	deaf     bool // ignores interrupt, kill and decisions
	mute     bool // sends no replies
	stopping bool // refuses queries, because it ends
	stopped  bool // sends no hello to a new stream, like a stopped process
	attaches int
	all      sync.WaitGroup
	lagging  bool          // the end of a replaced stream arrives late
	late     []*fakeStream // such streams
}

func newFakeRunner(s script, name string) *fakeRunner {
	r := &fakeRunner{script: s, name: name, seen: map[string]bool{}, raw: map[int]string{}, memory: 100}
	r.changed = sync.NewCond(&r.mu)
	return r
}

func (r *fakeRunner) isDead() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dead
}

// die acts like kill -9 of the runner and all its descendants.
func (r *fakeRunner) die() {
	r.mu.Lock()
	r.dead = true
	if r.turn != nil {
		r.turn.kill()
	}
	if r.follower != nil {
		r.follower.cut()
	}
	r.changed.Broadcast()
	r.mu.Unlock()
	r.all.Wait()
}

func (r *fakeRunner) isWarm() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.warm
}

// status returns the status. The caller holds the lock.
func (r *fakeRunner) status() runner.Status {
	s := runner.Status{}
	if r.turn != nil {
		s.ExecutionID, s.Attempt = r.turn.Query.ExecutionID, r.turn.Query.Attempt
	}
	if r.warm {
		s.AgentPID, s.MemoryBytes = 42, r.memory
	}
	return s
}

func (r *fakeRunner) operations() []runner.Op {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.ops)
}

func (r *fakeRunner) receivedQueries() []runner.Query {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.queries)
}

// hide makes the runner skip lines.
func (r *fakeRunner) hide(hidden func(n uint64) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hidden = hidden
}

// erase removes all lines after the turn, as an agent that has taken over the runner could, and ends the stream.
func (r *fakeRunner) erase() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.turn != nil {
		return false
	}
	r.acked = uint64(len(r.lines))
	r.follower.cut()
	return true
}

func (r *fakeRunner) last() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return uint64(len(r.lines))
}

func (r *fakeRunner) acknowledged() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.acked
}

// fakeStream is the stream of one `runner attach`.
type fakeStream struct {
	r              *fakeRunner
	in             *io.PipeReader
	out            *io.PipeWriter
	stdin          *io.PipeWriter
	stdout, stderr *io.PipeReader
	errs           *io.PipeWriter
	once           sync.Once
	gone           chan struct{}
	closed         atomic.Bool

	wmu sync.Mutex
}

func (r *fakeRunner) attach(a runner.Attach) (sandbox.Process, error) {
	s := &fakeStream{r: r, gone: make(chan struct{})}
	s.in, s.stdin = io.Pipe()
	s.stdout, s.out = io.Pipe()
	s.stderr, s.errs = io.Pipe()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead {
		return nil, sandbox.ErrNotFound
	}
	if r.attaches++; r.stopped {
		return s, nil
	}
	if a.Epoch < r.epoch {
		r.all.Go(func() {
			s.write(runner.Message{Reply: &runner.Reply{Error: &runner.CommandError{Code: "FENCED", Message: "lower epoch"}}})
			s.cut()
		})
		return s, nil
	}
	r.epoch = a.Epoch
	switch {
	case r.follower == nil:
	case r.lagging:
		r.follower.closed.Store(true) // it gets no more lines, and its end arrives later
		r.late = append(r.late, r.follower)
	default:
		r.follower.cut()
	}
	r.follower = s
	hello := runner.Hello{Protocol: runner.ProtocolVersion, Journal: r.name, First: r.acked + 1, Last: uint64(len(r.lines)), Status: r.status()}
	r.all.Go(func() { s.send(hello, a.After) })
	r.all.Go(s.obey)
	return s, nil
}

func (s *fakeStream) write(m runner.Message) {
	raw, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	s.writeRaw(raw)
}

func (s *fakeStream) writeRaw(raw []byte) {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	_, _ = s.out.Write(append(raw, '\n')) // the other side handles a reader that is gone
}

// send sends the lines of the journal.
func (s *fakeStream) send(hello runner.Hello, after uint64) {
	s.write(runner.Message{Hello: &hello})
	for {
		s.r.mu.Lock()
		for uint64(len(s.r.lines)) <= after && !s.closed.Load() {
			s.r.changed.Wait()
		}
		if s.closed.Load() {
			s.r.mu.Unlock()
			return
		}
		if after < s.r.acked && s.r.hidden == nil {
			panic("a follower wants lines that were acknowledged")
		}
		l, raw := s.r.lines[after], s.r.raw[int(after)] //nolint:gosec // small
		hidden := s.r.hidden != nil && s.r.hidden(l.N)
		s.r.mu.Unlock()
		if hidden {
			after++
			continue
		}
		if raw != "" {
			s.writeRaw([]byte(raw))
		}
		s.write(runner.Message{Line: &l})
		after++
	}
}

func (s *fakeStream) obey() {
	in := bufio.NewReader(s.in)
	for {
		raw, err := in.ReadBytes('\n')
		if err != nil {
			s.cut()
			return
		}
		var c runner.Command
		if err := json.Unmarshal(raw, &c); err != nil {
			panic(err)
		}
		if reply := s.r.do(c, !s.closed.Load()); reply != nil {
			s.write(runner.Message{Reply: reply})
		}
	}
}

func (r *fakeRunner) do(c runner.Command, current bool) *runner.Reply {
	r.mu.Lock()
	defer r.mu.Unlock()
	reply := &runner.Reply{ID: c.ID}
	if r.lagging && !current {
		return nil // commands on a stream that has ended are lost
	}
	if c.Epoch < r.epoch {
		reply.Error = &runner.CommandError{Code: "FENCED", Message: "lower epoch"}
		return reply
	}
	r.epoch = c.Epoch
	r.ops = append(r.ops, c.Op)
	if r.mute {
		return nil
	}
	switch c.Op {
	case runner.OpAck:
		r.acked = max(r.acked, c.Ack)
		return nil
	case runner.OpStart:
		reply.Error = r.start(*c.Query)
	case runner.OpInterrupt:
		if r.turn != nil && !r.deaf {
			r.turn.interrupt()
		}
	case runner.OpKill:
		if r.turn != nil && !r.deaf {
			r.turn.kill()
		} else if r.turn == nil {
			r.warm = false
		}
	case runner.OpDecide:
		if r.turn != nil && !r.deaf {
			r.turn.verdicts <- *c.Verdict
		}
	case runner.OpShutdown:
		r.warm = false
	}
	st := r.status()
	reply.Status = &st
	return reply
}

func (r *fakeRunner) start(q runner.Query) *runner.CommandError {
	key := fmt.Sprintf("%s/%d", q.ExecutionID, q.Attempt)
	if r.seen[key] {
		return nil
	}
	if r.stopping {
		go r.die()
		return &runner.CommandError{Code: runner.CodeStopping, Message: "the runner is shutting down"}
	}
	if r.turn != nil {
		return &runner.CommandError{Code: "BUSY", Message: "another runs"}
	}
	if q.Architecture == "nonesuch" {
		return &runner.CommandError{Code: "UNKNOWN_ARCHITECTURE", Message: "nonesuch is not known"}
	}
	r.seen[key] = true
	r.queries = append(r.queries, q)
	t := &fakeTurn{r: r, Query: q, interrupted: make(chan struct{}), killed: make(chan struct{}), verdicts: make(chan runner.ApprovalDecision, 64)}
	r.turn = t
	r.all.Go(func() { r.script(t) })
	return nil
}

func (s *fakeStream) cut() {
	s.once.Do(func() {
		s.closed.Store(true)
		_ = s.in.Close()
		_ = s.out.Close()
		_ = s.errs.Close()
		close(s.gone)
		go func() { // the lock may be held by the caller
			s.r.mu.Lock()
			defer s.r.mu.Unlock()
			s.r.changed.Broadcast()
		}()
	})
}

func (s *fakeStream) Stdin() io.WriteCloser { return s.stdin }
func (s *fakeStream) Stdout() io.Reader     { return s.stdout }
func (s *fakeStream) Stderr() io.Reader     { return s.stderr }
func (s *fakeStream) Wait() (int, error)    { <-s.gone; return 0, nil }
func (s *fakeStream) Kill() error {
	_ = s.stdin.Close()
	_ = s.stdout.Close()
	_ = s.stderr.Close()
	s.cut()
	return nil
}

// fakeTurn is the turn that a script runs.
type fakeTurn struct {
	r     *fakeRunner
	Query runner.Query

	once1, once2        sync.Once
	interrupted, killed chan struct{}
	verdicts            chan runner.ApprovalDecision
}

func (t *fakeTurn) interrupt() { t.once1.Do(func() { close(t.interrupted) }) }
func (t *fakeTurn) kill()      { t.once2.Do(func() { close(t.killed) }) }

// Say journals a line.
func (t *fakeTurn) Say(typ events.Type, data any) {
	t.say(runner.JournalLine{Type: typ, ExecutionID: t.Query.ExecutionID, ConversationID: "main"}, data, "")
}

// Raw writes a line that is not a message, before the next journal line.
func (t *fakeTurn) Raw(text string, typ events.Type, data any) {
	t.say(runner.JournalLine{Type: typ, ExecutionID: t.Query.ExecutionID}, data, text)
}

func (t *fakeTurn) say(l runner.JournalLine, data any, raw string) {
	body, err := json.Marshal(data)
	if err != nil {
		panic(err)
	}
	t.r.mu.Lock()
	defer t.r.mu.Unlock()
	l.N, l.Time, l.Data = uint64(len(t.r.lines)+1), time.Now(), body
	if raw != "" {
		t.r.raw[len(t.r.lines)] = raw
	}
	t.r.lines = append(t.r.lines, l)
	t.r.changed.Broadcast()
}

// Start reports that the agent has the query.
func (t *fakeTurn) Start() {
	t.r.mu.Lock()
	warm := t.r.warm
	t.r.warm = true
	t.r.mu.Unlock()
	t.Say(runner.AgentStarted, runner.TurnStart{Attempt: t.Query.Attempt, Warm: warm, PID: 42, Policy: t.Query.PolicyName()})
}

// Text opens a block, streams it and completes it.
func (t *fakeTurn) Text(id string, pieces ...string) {
	t.Open(id)
	whole := t.Stream(id, 0, pieces...)
	t.Say("block_complete", events.BlockComplete{Block: events.Block{ID: id, Kind: events.KindAssistantText, Content: whole}})
}

// Open opens a block of text.
func (t *fakeTurn) Open(id string) {
	t.Say("block_start", events.BlockStart{Block: events.Block{ID: id, Kind: events.KindAssistantText, Status: events.StatusPending}})
}

// Stream writes text to a block from an offset.
func (t *fakeTurn) Stream(id string, from int, pieces ...string) (whole string) {
	for _, p := range pieces {
		t.Say(events.TextDelta, runner.TextDelta{BlockID: id, Offset: uint32(from + len(whole)), Delta: p}) //nolint:gosec // small
		whole += p
	}
	return whole
}

// End ends the turn.
func (t *fakeTurn) End(e runner.TurnEnd) {
	t.r.mu.Lock()
	t.r.turn = nil
	if e.Outcome == runner.OutcomeKilled {
		t.r.warm = false
	}
	t.r.mu.Unlock()
	t.Say(runner.TurnEnded, e)
}

// Wait waits for a signal. It returns false if the agent is killed first.
func (t *fakeTurn) Wait(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	case <-t.killed:
		return false
	}
}

// between journals a line outside of turns.
func (r *fakeRunner) between(text string) {
	(&fakeTurn{r: r}).Say("log", events.Log{Level: "info", Stream: "stdout", Message: text})
}

// lag makes the ends of streams arrive late, or delivers the late ones.
func (r *fakeRunner) lag(late bool) {
	r.mu.Lock()
	list := r.late
	r.lagging, r.late = late, nil
	r.mu.Unlock()
	for _, s := range list {
		s.cut()
	}
}

// runs reports whether the runner has a turn.
func (r *fakeRunner) runs() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.turn != nil
}
