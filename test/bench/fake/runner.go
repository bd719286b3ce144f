package fake

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// fakeRunner implements the runner's protocol for a Script: it keeps the journal, and sends it to the executor that is
// attached.
type fakeRunner struct {
	script Script
	name   string
	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup

	mu     sync.Mutex
	lines  []runner.Line // not acknowledged; the first has number first
	first  uint64
	epoch  uint64
	stream *stream
	query  *runner.Query // the running query; nil for none
	stop   context.CancelFunc
	warm   bool
}

func newRunner(s Script, name string) *fakeRunner {
	r := &fakeRunner{script: s, name: name, first: 1}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// end stops the runner and blocks until its goroutines have ended.
func (r *fakeRunner) end() {
	r.cancel()
	r.mu.Lock()
	s := r.stream
	r.mu.Unlock()
	if s != nil {
		s.close()
	}
	r.all.Wait()
}

// status returns the runner's status. The caller must hold the lock.
func (r *fakeRunner) status() *runner.Status {
	s := &runner.Status{}
	if r.query != nil {
		s.ExecutionID, s.Attempt = r.query.ExecutionID, r.query.Attempt
	}
	if r.warm {
		s.AgentPID, s.MemoryBytes = 1, 1
	}
	return s
}

// append numbers a line and wakes the stream. It never blocks.
func (r *fakeRunner) append(l runner.Line) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.N, l.Time = r.first+uint64(len(r.lines)), time.Now()
	r.lines = append(r.lines, l)
	if r.stream != nil {
		r.stream.wake()
	}
}

// after returns the lines with a greater number.
func (r *fakeRunner) after(n uint64) []runner.Line {
	r.mu.Lock()
	defer r.mu.Unlock()
	if from := n + 1; from >= r.first && from-r.first < uint64(len(r.lines)) {
		return append([]runner.Line(nil), r.lines[from-r.first:]...)
	}
	return nil
}

// do carries out a command. A nil reply means that none is sent.
func (r *fakeRunner) do(c runner.Command) *runner.Reply {
	r.mu.Lock()
	defer r.mu.Unlock()
	reply := &runner.Reply{ID: c.ID}
	if c.Epoch < r.epoch {
		reply.Error = &runner.Error{Code: "FENCED", Message: "lower epoch"}
		return reply
	}
	r.epoch = c.Epoch
	switch c.Op {
	case runner.OpAck:
		if c.Ack >= r.first {
			r.lines = append([]runner.Line(nil), r.lines[min(c.Ack+1-r.first, uint64(len(r.lines))):]...)
			r.first = c.Ack + 1
		}
		return nil
	case runner.OpStart:
		if r.query != nil && r.query.ExecutionID != c.Query.ExecutionID {
			reply.Error = &runner.Error{Code: "BUSY", Message: "another runs"}
			break
		}
		if r.query == nil {
			r.start(c.Query)
		}
	case runner.OpInterrupt, runner.OpKill:
		if r.stop != nil {
			r.stop()
		}
	case runner.OpShutdown:
		r.warm = false
	}
	reply.Status = r.status()
	return reply
}

// start starts a turn. The caller must hold the lock.
func (r *fakeRunner) start(q *runner.Query) {
	ctx, stop := context.WithCancel(r.ctx)
	started := runner.Started{Attempt: q.Attempt, Warm: r.warm, PID: 1, Policy: q.Policy}
	r.query, r.stop, r.warm = q, stop, true
	r.all.Go(func() {
		defer stop()
		t := &Turn{r: r, execution: q.ExecutionID}
		t.journal(runner.AgentStarted, started)
		r.script(ctx, t)
		outcome := runner.Completed
		if ctx.Err() != nil {
			outcome = runner.Interrupted
		}
		r.mu.Lock()
		r.query, r.stop = nil, nil
		r.mu.Unlock()
		t.journal(runner.TurnEnded, runner.Ended{Outcome: outcome, Result: "done"})
	})
}

// stream is the connection of an executor to a fakeRunner, by one `runner attach`.
type stream struct {
	r      *fakeRunner
	in     io.ReadCloser
	out    io.WriteCloser
	more   chan struct{}
	closed chan struct{}
	once   sync.Once
	write  sync.Mutex
}

// localStream is a stream over pipes to an executor in this process.
type localStream struct {
	*stream
	stdin  *io.PipeWriter
	stdout *io.PipeReader
}

func (r *fakeRunner) attach(a runner.Attach) (sandbox.Process, error) {
	in, stdin := io.Pipe()
	stdout, out := io.Pipe()
	s, err := r.attachTo(a, in, out)
	if err != nil {
		return nil, err
	}
	return &localStream{s, stdin, stdout}, nil
}

// attachTo starts a stream of commands from in and of messages to out, in place of the runner's present stream.
func (r *fakeRunner) attachTo(a runner.Attach, in io.ReadCloser, out io.WriteCloser) (*stream, error) {
	if r.ctx.Err() != nil {
		return nil, sandbox.ErrNotFound
	}
	s := &stream{r: r, in: in, out: out, more: make(chan struct{}, 1), closed: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream != nil {
		r.stream.close()
	}
	r.stream, r.epoch = s, max(r.epoch, a.Epoch)
	hello := runner.Hello{
		Protocol: runner.ProtocolVersion, Journal: r.name, First: r.first, Last: r.first + uint64(len(r.lines)) - 1, Status: *r.status(),
	}
	r.all.Go(func() { s.follow(hello, a.After) })
	r.all.Go(s.receive)
	return s, nil
}

// wake makes the goroutine that runs follow send new lines of the journal.
func (s *stream) wake() {
	select {
	case s.more <- struct{}{}:
	default:
	}
}

// send encodes a message. It returns false if no follower reads any more.
func (s *stream) send(m runner.Message) bool {
	raw, err := json.Marshal(m)
	if err != nil {
		panic(err) // the types can be encoded
	}
	s.write.Lock()
	defer s.write.Unlock()
	_, err = s.out.Write(append(raw, '\n'))
	return err == nil
}

// follow sends the hello and then all lines after a number, until the stream is closed.
func (s *stream) follow(hello runner.Hello, after uint64) {
	if !s.send(runner.Message{Hello: &hello}) {
		return
	}
	for {
		for _, l := range s.r.after(after) {
			if !s.send(runner.Message{Line: &l}) {
				return
			}
			after = l.N
		}
		select {
		case <-s.more:
		case <-s.closed:
			return
		}
	}
}

// receive carries out commands until the follower has gone.
func (s *stream) receive() {
	defer s.close()
	lines := bufio.NewReader(s.in)
	for {
		raw, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var c runner.Command
		if err := json.Unmarshal(raw, &c); err != nil {
			return
		}
		if reply := s.r.do(c); reply != nil && !s.send(runner.Message{Reply: reply}) {
			return
		}
	}
}

// close ends the stream. It may be called more than once.
func (s *stream) close() {
	s.once.Do(func() {
		_ = s.in.Close() // nothing is buffered
		_ = s.out.Close()
		close(s.closed)
	})
}

func (s *localStream) Stdin() io.WriteCloser { return s.stdin }
func (s *localStream) Stdout() io.Reader     { return s.stdout }
func (s *localStream) Stderr() io.Reader     { return strings.NewReader("") }
func (s *localStream) Wait() (int, error)    { <-s.closed; return 0, nil }
func (s *localStream) Kill() error {
	_ = s.stdin.Close()  // closing a pipe never fails
	_ = s.stdout.Close() // as above
	s.close()
	return nil
}

// Turn is the running turn of a Script, by which the Script writes text and blocks to the journal.
type Turn struct {
	r         *fakeRunner
	execution string
}

// journal appends a line to the journal.
func (t *Turn) journal(typ events.Type, data any) {
	raw, err := json.Marshal(data)
	if err != nil {
		panic(err) // the types can be encoded
	}
	t.r.append(runner.Line{Type: typ, ExecutionID: t.execution, ConversationID: events.MainConversation, Data: raw})
}

// Open journals the start of a block of the assistant's text.
func (t *Turn) Open(block string) {
	t.journal(events.BlockStart{}.EventType(), events.BlockStart{Block: events.Block{ID: block, Kind: events.KindAssistantText, Status: events.StatusPending}})
}

// Text appends text to a block, at an offset in bytes.
func (t *Turn) Text(block string, offset int, piece string) {
	t.journal(events.TextDelta, runner.Delta{BlockID: block, Offset: uint32(offset), Delta: piece}) //nolint:gosec // small
}

// Complete journals the end of a block, with the block's complete text.
func (t *Turn) Complete(block, content string) {
	t.journal(events.BlockComplete{}.EventType(), events.BlockComplete{Block: events.Block{ID: block, Kind: events.KindAssistantText, Status: events.StatusComplete, Content: content}})
}
