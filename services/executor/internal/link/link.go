// Package link is the executor's end of the stream to a runner: it sends commands, matches replies, and queues the
// journal's lines.
package link

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Errors that callers distinguish.
var (
	// ErrFenced is returned when the runner has seen a higher epoch, and so refuses this executor.
	ErrFenced = errors.New("the runner obeys a higher epoch")
	// ErrClosed is returned when the stream to a runner has ended.
	ErrClosed = errors.New("the stream to the runner has ended")
)

// helloTimeout is the maximum time that a runner may take to send its Hello.
const helloTimeout = 10 * time.Second

// Limits for acknowledgements that wait for the next command.
const (
	maxAckDelay            = time.Second
	maxUnacknowledgedBytes = 1 << 20 // bytes of lines that arrived meanwhile: the runner's journal has a limit
)

// codeFenced is the code of the error with which a runner refuses an epoch that is lower than one it has seen.
const codeFenced = "FENCED"

// Link is an open stream to a runner. It receives the runner's journal and sends commands. It is safe for concurrent
// use, except that only one goroutine may call NextItem.
type Link struct {
	proc  sandbox.Process
	in    io.Writer // to the runner
	from  io.Reader // from the runner
	hello runner.Hello
	log   *slog.Logger

	lines *itemQueue
	out   chan []byte
	acked chan struct{} // signalled when ack was set
	came  atomic.Int64  // bytes of lines since the last acknowledgement was sent
	late  time.Duration // maxAckDelay, except in tests
	done  chan struct{} // closed when nothing more will be queued
	stop  chan struct{} // closed by Close
	once  sync.Once
	all   sync.WaitGroup

	mu      sync.Mutex
	calls   map[uint64]chan runner.Reply
	lastID  uint64
	ack     []byte // the acknowledgement that waits for the next command; nil for none
	refused error  // the runner's reason for ending the stream, if it sent one
}

// Open attaches to the runner in a sandbox, and blocks until the runner has sent its hello. The Link then receives the
// journal lines after line attach.After.
func Open(ctx context.Context, sb sandbox.Sandbox, attach runner.Attach, log *slog.Logger) (*Link, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	l, err := openStream(ctx, sb, attach, log)
	if err != nil {
		return nil, fmt.Errorf("attach to the runner of %s: %w", sb.ID(), err)
	}
	hello := make(chan runner.Hello, 1)
	l.all.Go(l.writeCommands)
	l.all.Go(l.logStderr)
	l.all.Go(func() { l.readStream(hello) })
	select {
	case l.hello = <-hello:
	case <-l.done:
		err = l.Err()
	case <-ctx.Done():
		err = fmt.Errorf("no hello: %w", ctx.Err())
	}
	if err == nil && l.hello.Protocol != runner.ProtocolVersion {
		err = fmt.Errorf("the runner speaks protocol %d, this executor %d", l.hello.Protocol, runner.ProtocolVersion)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("attach to the runner of %s: %w", sb.ID(), err)
	}
	return l, nil
}

// openStream runs "runner attach" in the sandbox and returns the Link over its streams. If the sandbox has a secret, it
// attaches through a sealed stream, by which the executor proves that it knows the secret. Sandboxes of earlier releases
// have no secret.
func openStream(ctx context.Context, sb sandbox.Sandbox, attach runner.Attach, log *slog.Logger) (*Link, error) {
	args := []string{"runner", "attach", "--epoch", strconv.FormatUint(attach.Epoch, 10), "--after", strconv.FormatUint(attach.After, 10)}
	if sb.Secret() != "" {
		args = []string{"runner", "attach", "--sealed"}
	}
	proc, err := sb.Exec(ctx, sandbox.Command{Args: args})
	if err != nil {
		return nil, err
	}
	l := &Link{
		proc: proc, in: proc.Stdin(), from: proc.Stdout(), log: log, lines: newItemQueue(), out: make(chan []byte, 16), acked: make(chan struct{}, 1), late: maxAckDelay,
		done: make(chan struct{}), stop: make(chan struct{}), calls: map[uint64]chan runner.Reply{},
	}
	if sb.Secret() == "" {
		return l, nil
	}
	if err := l.attachSealed(ctx, sb.Secret(), attach); err != nil {
		_, werr := proc.Wait()
		return nil, errors.Join(err, ctx.Err(), werr)
	}
	return l, nil
}

// attachSealed proves to the runner that the executor knows the sandbox's secret, and attaches through the sealed
// stream. If that fails, it kills the command.
func (l *Link) attachSealed(ctx context.Context, secret string, attach runner.Attach) (err error) {
	kill := func() {
		if err := l.proc.Kill(); err != nil {
			l.log.Debug("end the attached stream", "error", err)
		}
	}
	stop := context.AfterFunc(ctx, kill)
	defer func() {
		if !stop() {
			err = errors.Join(err, ctx.Err())
		} else if err != nil {
			kill()
		}
	}()
	conn, err := runner.OpenSealedStream(secret, l.proc.Stdout(), l.proc.Stdin())
	if err != nil {
		return err
	}
	raw, err := json.Marshal(attach)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(raw, '\n')); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	l.in, l.from = conn, conn
	return nil
}

// Hello returns the first message of the runner.
func (l *Link) Hello() runner.Hello { return l.hello }

// Done returns a channel that is closed when the stream has ended. NextItem may still return lines that arrived before.
func (l *Link) Done() <-chan struct{} { return l.done }

// Err returns the reason why the stream ended: ErrFenced, a refusal of the runner, or ErrClosed.
func (l *Link) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.refused != nil {
		return l.refused
	}
	return ErrClosed
}

// Ready returns a channel that is signalled when NextItem may return an item. One signal may stand for many items.
func (l *Link) Ready() <-chan struct{} { return l.lines.ready }

// NextItem returns the next item that was received, and false if there is none yet.
func (l *Link) NextItem() (JournalItem, bool) { return l.lines.pop() }

// Call sends a command to the runner and blocks until the runner replies. If the runner refuses the command, the error
// is a *runner.CommandError, or ErrFenced.
func (l *Link) Call(ctx context.Context, c runner.Command) (runner.Reply, error) {
	l.mu.Lock()
	l.lastID++
	c.ID = l.lastID
	answer := make(chan runner.Reply, 1)
	l.calls[c.ID] = answer
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.calls, c.ID)
		l.mu.Unlock()
	}()
	if err := l.enqueueCommand(ctx, c); err != nil {
		return runner.Reply{}, fmt.Errorf("%s: %w", c.Op, err)
	}
	select {
	case r := <-answer:
		if r.Error == nil {
			return r, nil
		}
		if r.Error.Code == codeFenced {
			return r, fmt.Errorf("%s: %w", c.Op, ErrFenced)
		}
		return r, fmt.Errorf("%s: %w", c.Op, r.Error)
	case <-l.done:
		return runner.Reply{}, fmt.Errorf("%s: %w", c.Op, l.Err())
	case <-ctx.Done():
		return runner.Reply{}, fmt.Errorf("%s: no answer from the runner: %w", c.Op, ctx.Err())
	}
}

// Acknowledge allows the runner to remove the lines of its journal up to a line number. It does not block: the
// acknowledgement is sent with the next command, or after a second at the latest. On a stream to a remote engine a
// command waits until the previous one has arrived, so a separate message would delay the next command.
func (l *Link) Acknowledge(epoch, line uint64) error {
	raw, err := encodeCommand(runner.Command{Op: runner.OpAck, Epoch: epoch, Ack: line})
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.ack = raw // it covers earlier acknowledgements
	l.mu.Unlock()
	select {
	case l.acked <- struct{}{}:
	default:
	}
	return nil
}

// Close ends the stream and blocks until all its goroutines have ended. The runner continues to run.
func (l *Link) Close() {
	l.once.Do(func() {
		close(l.stop)
		l.lines.close()
		if err := l.proc.Kill(); err != nil {
			l.log.Debug("end the attached stream", "error", err)
		}
	})
	l.all.Wait()
}

// encodeCommand returns a command as a line of JSON.
func encodeCommand(c runner.Command) ([]byte, error) {
	raw, err := json.Marshal(c)
	return append(raw, '\n'), err
}

// enqueueCommand passes a command to the goroutine that writes to the runner.
func (l *Link) enqueueCommand(ctx context.Context, c runner.Command) error {
	raw, err := encodeCommand(c)
	if err != nil {
		return err
	}
	select {
	case l.out <- raw:
		return nil
	case <-l.stop:
		return ErrClosed
	case <-l.done:
		return l.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// writeCommands writes commands and acknowledgements to the runner until the stream ends.
func (l *Link) writeCommands() {
	defer l.proc.Stdin().Close() //nolint:errcheck // the stream is over
	late := time.NewTimer(l.late)
	late.Stop() // it runs only while an acknowledgement waits
	defer late.Stop()
	waits := false // an acknowledgement waits
	for {
		var command []byte
		select {
		case command = <-l.out:
		case <-l.acked:
			if !waits {
				late.Reset(l.late)
			}
			if waits = true; l.came.Load() < maxUnacknowledgedBytes {
				continue
			}
		case <-late.C:
		case <-l.stop:
			return
		case <-l.done:
			return
		}
		waits = false
		late.Stop()
		if err := l.writeWithAck(command); err != nil {
			l.log.Debug("write to the runner", "error", err)
			return
		}
	}
}

// writeWithAck writes the pending acknowledgement, if there is one, and a command to the runner.
func (l *Link) writeWithAck(command []byte) error {
	l.mu.Lock()
	raw := append(l.ack, command...)
	if l.ack != nil {
		l.ack = nil
		l.came.Store(0)
	}
	l.mu.Unlock()
	if len(raw) == 0 {
		return nil
	}
	_, err := l.in.Write(raw)
	return err
}

// logStderr logs what "runner attach" writes to its stderr.
func (l *Link) logStderr() {
	lines := newLineReader(l.proc.Stderr(), 4<<10, 512)
	for {
		text, _, err := lines.readLine()
		if len(text) > 0 {
			l.log.Debug("runner attach", "stderr", string(text))
		}
		if err != nil {
			return
		}
	}
}

// readStream reads messages of the runner until the stream ends.
func (l *Link) readStream(hello chan<- runner.Hello) {
	defer func() {
		close(l.done)
		if code, err := l.proc.Wait(); err != nil {
			l.log.Debug("wait for the attached stream", "error", err, "code", code)
		}
	}()
	lines := newLineReader(l.from, runner.MaxLineLength, initialBufferBytes)
	for {
		raw, cut, err := lines.readLine()
		if len(raw) > 0 && !l.handleLine(raw, cut, hello) {
			return
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				l.log.Debug("read from the runner", "error", err)
			}
			return
		}
	}
}

// handleLine handles one line that the runner sent: the hello, a reply, a journal line, or garbage. It returns false to
// end the stream. cut is true if the line is too long.
func (l *Link) handleLine(raw []byte, cut bool, hello chan<- runner.Hello) bool {
	var m runner.Message
	bad := cut
	if !bad {
		var err error
		m, err = runner.DecodeMessage(raw)
		bad = err != nil
	}
	if bad {
		return l.lines.push(JournalItem{Garbage: truncate.ValidText(string(raw), maxGarbageBytes), TooLong: cut}, len(raw))
	}
	switch {
	case m.Hello != nil:
		select {
		case hello <- *m.Hello:
		default: // only the first counts
		}
		return true
	case m.Reply != nil:
		l.deliverReply(*m.Reply)
		return true
	case m.Line != nil:
		l.came.Add(int64(len(raw)))
		return l.lines.push(JournalItem{Line: m.Line}, len(raw))
	}
	return l.lines.push(JournalItem{Garbage: truncate.ValidText(string(raw), maxGarbageBytes)}, len(raw))
}

// deliverReply passes the runner's reply to the call that waits for it.
func (l *Link) deliverReply(r runner.Reply) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.Error != nil && r.ID == 0 { // refuses the attach, or an acknowledgement
		l.refused = r.Error
		if r.Error.Code == codeFenced {
			l.refused = ErrFenced
		}
	}
	if answer, ok := l.calls[r.ID]; ok {
		delete(l.calls, r.ID)
		answer <- r
	}
}
