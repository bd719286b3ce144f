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

// fakeRunner speaks the runner's protocol and runs a Script as the agent. It keeps the journal, and sends it to the
// executor that is attached.
type fakeRunner struct {
	script Script
	name   string
	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup

	mu     sync.Mutex
	lines  []runner.JournalLine // not acknowledged; the first has number first
	first  uint64
	epoch  uint64
	stream *attachment
	query  *runner.Query // the running query; nil for none
	stop   context.CancelFunc
	warm   bool
}

// newFakeRunner returns a fake runner that runs the script s. name is the id of its journal.
func newFakeRunner(s Script, name string) *fakeRunner {
	r := &fakeRunner{script: s, name: name, first: 1}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// terminate ends the runner, its turn and its attachment, and blocks until their goroutines have ended.
func (r *fakeRunner) terminate() {
	r.cancel()
	r.mu.Lock()
	s := r.stream
	r.mu.Unlock()
	if s != nil {
		s.close()
	}
	r.all.Wait()
}

// status returns what the runner reports to executors: the running query, and whether an agent process exists. The
// caller must hold r.mu.
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

// appendLine sets the number of a line to the next one, appends it to the journal, and wakes the goroutine that sends the journal to
// the executor. It never blocks.
func (r *fakeRunner) appendLine(l runner.JournalLine) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.N, l.Time = r.first+uint64(len(r.lines)), time.Now()
	r.lines = append(r.lines, l)
	if r.stream != nil {
		r.stream.wakeSender()
	}
}

// linesAfter returns the lines of the journal whose number is greater than n.
func (r *fakeRunner) linesAfter(n uint64) []runner.JournalLine {
	r.mu.Lock()
	defer r.mu.Unlock()
	if from := n + 1; from >= r.first && from-r.first < uint64(len(r.lines)) {
		return append([]runner.JournalLine(nil), r.lines[from-r.first:]...)
	}
	return nil
}

// execute executes a command of the executor and returns the reply, or nil if the command has none.
func (r *fakeRunner) execute(c runner.Command) *runner.Reply {
	r.mu.Lock()
	defer r.mu.Unlock()
	reply := &runner.Reply{ID: c.ID}
	if c.Epoch < r.epoch {
		reply.Error = &runner.CommandError{Code: "FENCED", Message: "lower epoch"}
		return reply
	}
	r.epoch = c.Epoch
	switch c.Op {
	case runner.OpAck:
		if c.Ack >= r.first {
			r.lines = append([]runner.JournalLine(nil), r.lines[min(c.Ack+1-r.first, uint64(len(r.lines))):]...)
			r.first = c.Ack + 1
		}
		return nil
	case runner.OpStart:
		if r.query != nil && r.query.ExecutionID != c.Query.ExecutionID {
			reply.Error = &runner.CommandError{Code: "BUSY", Message: "another runs"}
			break
		}
		if r.query == nil {
			r.startTurn(c.Query)
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

// startTurn starts the turn of a query. The caller must hold r.mu.
func (r *fakeRunner) startTurn(q *runner.Query) {
	ctx, stop := context.WithCancel(r.ctx)
	started := runner.TurnStart{Attempt: q.Attempt, Warm: r.warm, PID: 1, Policy: q.PolicyName()}
	r.query, r.stop, r.warm = q, stop, true
	r.all.Go(func() {
		defer stop()
		t := &Turn{r: r, execution: q.ExecutionID}
		t.appendEvent(runner.AgentStarted, started)
		r.script(ctx, t)
		outcome := runner.OutcomeCompleted
		if ctx.Err() != nil {
			outcome = runner.OutcomeInterrupted
		}
		r.mu.Lock()
		r.query, r.stop = nil, nil
		r.mu.Unlock()
		t.appendEvent(runner.TurnEnded, runner.TurnEnd{Outcome: outcome, Result: "done"})
	})
}

// attachment is the connection of one executor to a fakeRunner, which the executor opened with `runner attach`.
type attachment struct {
	r      *fakeRunner
	in     io.ReadCloser
	out    io.WriteCloser
	more   chan struct{}
	closed chan struct{}
	once   sync.Once
	write  sync.Mutex
}

// localAttachment is an attachment of an executor in this process, over pipes.
type localAttachment struct {
	*attachment
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
	return &localAttachment{s, stdin, stdout}, nil
}

// attachTo attaches an executor to the runner and detaches the one before. The runner reads commands from in and writes
// messages to out.
func (r *fakeRunner) attachTo(a runner.Attach, in io.ReadCloser, out io.WriteCloser) (*attachment, error) {
	if r.ctx.Err() != nil {
		return nil, sandbox.ErrNotFound
	}
	s := &attachment{r: r, in: in, out: out, more: make(chan struct{}, 1), closed: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream != nil {
		r.stream.close()
	}
	r.stream, r.epoch = s, max(r.epoch, a.Epoch)
	hello := runner.Hello{
		Protocol: runner.ProtocolVersion, Journal: r.name, First: r.first, Last: r.first + uint64(len(r.lines)) - 1, Status: *r.status(),
	}
	r.all.Go(func() { s.sendJournal(hello, a.After) })
	r.all.Go(s.receiveCommands)
	return s, nil
}

// wakeSender makes the goroutine that runs sendJournal send new lines.
func (s *attachment) wakeSender() {
	select {
	case s.more <- struct{}{}:
	default:
	}
}

// sendMessage writes a message to the executor. It returns false if the executor has closed its end.
func (s *attachment) sendMessage(m runner.Message) bool {
	raw, err := json.Marshal(m)
	if err != nil {
		panic(err) // the types can be encoded
	}
	s.write.Lock()
	defer s.write.Unlock()
	_, err = s.out.Write(append(raw, '\n'))
	return err == nil
}

// sendJournal sends the message hello to the executor, and then every line of the journal whose number is greater than
// after, until the attachment is closed.
func (s *attachment) sendJournal(hello runner.Hello, after uint64) {
	if !s.sendMessage(runner.Message{Hello: &hello}) {
		return
	}
	for {
		for _, l := range s.r.linesAfter(after) {
			if !s.sendMessage(runner.Message{Line: &l}) {
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

// receiveCommands executes the executor's commands until the executor has closed its end.
func (s *attachment) receiveCommands() {
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
		if reply := s.r.execute(c); reply != nil && !s.sendMessage(runner.Message{Reply: reply}) {
			return
		}
	}
}

// close ends the attachment. It may be called more than once.
func (s *attachment) close() {
	s.once.Do(func() {
		_ = s.in.Close() // nothing is buffered
		_ = s.out.Close()
		close(s.closed)
	})
}

func (s *localAttachment) Stdin() io.WriteCloser { return s.stdin }
func (s *localAttachment) Stdout() io.Reader     { return s.stdout }
func (s *localAttachment) Stderr() io.Reader     { return strings.NewReader("") }
func (s *localAttachment) Wait() (int, error)    { <-s.closed; return 0, nil }
func (s *localAttachment) Kill() error {
	_ = s.stdin.Close()  // closing a pipe never fails
	_ = s.stdout.Close() // as above
	s.close()
	return nil
}

// Turn is the running turn of a Script. The Script calls its methods to write text and blocks to the runner's journal.
type Turn struct {
	r         *fakeRunner
	execution string
}

// appendEvent appends an event of the turn to the runner's journal.
func (t *Turn) appendEvent(typ events.Type, data any) {
	raw, err := json.Marshal(data)
	if err != nil {
		panic(err) // the types can be encoded
	}
	t.r.appendLine(runner.JournalLine{Type: typ, ExecutionID: t.execution, ConversationID: events.MainConversation, Data: raw})
}

// OpenBlock writes the start of a block of the assistant's text to the journal. block is the id of the block.
func (t *Turn) OpenBlock(block string) {
	t.appendEvent(events.BlockStart{}.EventType(), events.BlockStart{Block: events.Block{ID: block, Kind: events.KindAssistantText, Status: events.StatusPending}})
}

// AppendText writes a piece of a block's text to the journal. offset is the piece's position in the text, in bytes.
func (t *Turn) AppendText(block string, offset int, piece string) {
	t.appendEvent(events.TextDelta, runner.TextDelta{BlockID: block, Offset: uint32(offset), Delta: piece}) //nolint:gosec // small
}

// CompleteBlock writes the end of a block to the journal. content is the block's whole text.
func (t *Turn) CompleteBlock(block, content string) {
	t.appendEvent(events.BlockComplete{}.EventType(), events.BlockComplete{Block: events.Block{ID: block, Kind: events.KindAssistantText, Status: events.StatusComplete, Content: content}})
}
