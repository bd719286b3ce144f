package serve

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
)

const (
	// writeBatchBytes is the number of bytes of journal lines that are written to the follower at once.
	writeBatchBytes = 256 << 10
	// maxQueuedReplies is the maximum number of replies that wait for a follower that does not read. While as many
	// wait, no further command of the follower is read.
	maxQueuedReplies = 64
)

// follower is the connection of an executor that receives the journal and sends commands.
type follower struct {
	s       *Server
	conn    net.Conn
	attach  runner.Attach
	replies chan runner.Reply
	ctx     context.Context // ends with the connection
	cancel  context.CancelFunc
	last    chan struct{} // closed when only the lines that are journaled by now are to be sent
	once    sync.Once
	sent    chan struct{} // closed when the writer has ended
	work    sync.WaitGroup
}

// newFollower returns the follower of a connection that has sent its Attach line.
func newFollower(s *Server, c net.Conn, a runner.Attach) *follower {
	f := &follower{s: s, conn: c, attach: a, replies: make(chan runner.Reply, maxQueuedReplies), last: make(chan struct{}), sent: make(chan struct{})}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

// serveCommands sends the journal to the follower and executes the follower's commands until the connection closes.
func (f *follower) serveCommands(in *bufio.Reader) {
	go func() {
		defer close(f.sent)
		if err := f.writeLines(); err != nil && !errors.Is(err, net.ErrClosed) {
			f.s.cfg.Log.Debug("follower is gone", "err", err)
		}
		_ = f.conn.Close() // ends the reader; Server.forget reports
	}()
	f.readCommands(in)
	select {
	case <-f.last: // finish is still writing
	default:
		f.cancel()
		_ = f.conn.Close()
	}
	<-f.sent
	f.cancel()
	f.work.Wait()
}

// closeReplaced closes the connection of a follower because a newer one has attached.
func (f *follower) closeReplaced() {
	f.cancel()
	_ = f.conn.Close()
}

// sendLastLines waits until the last lines of the journal are sent, for within at most, and then ends the follower.
func (f *follower) sendLastLines(within time.Duration) {
	f.once.Do(func() { close(f.last) })
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-f.sent:
	case <-timer.C:
	}
	f.cancel()
}

// writeLines sends Hello, then journal lines and replies as they come.
func (f *follower) writeLines() error {
	j := f.s.cfg.Journal
	h := runner.Hello{Protocol: runner.ProtocolVersion, Journal: j.Name(), Status: f.s.cfg.Supervisor.Status()}
	h.First, h.Last = j.LineRange()
	if _, err := f.conn.Write(encodeMessage(runner.Message{Hello: &h})); err != nil {
		return err
	}
	out := bufio.NewWriterSize(f.conn, writeBatchBytes)
	after, last := f.attach.After, f.last
	for {
		lines, changed := j.LinesAfter(after, writeBatchBytes)
		for _, raw := range lines {
			for _, piece := range [][]byte{[]byte(`{"line":`), raw, []byte("}\n")} {
				if _, err := out.Write(piece); err != nil {
					return err
				}
			}
		}
		after = f.lastSentNumber(after, lines)
		if err := f.writeReplies(out); err != nil {
			return err
		}
		if len(lines) > 0 {
			continue
		}
		if err := out.Flush(); err != nil {
			return err
		}
		if last == nil {
			return nil
		}
		select {
		case <-changed:
		case r := <-f.replies:
			if _, err := out.Write(encodeMessage(runner.Message{Reply: &r})); err != nil {
				return err
			}
		case <-last:
			last = nil // one more pass, then it returns
		case <-f.ctx.Done():
			return nil
		}
	}
}

// lastSentNumber returns the number of the last line of lines, which were just sent; after is the number of the last
// line before them. Lines that were acknowledged before the follower attached may be missing in between.
func (f *follower) lastSentNumber(after uint64, lines [][]byte) uint64 {
	if len(lines) == 0 {
		return after
	}
	var l struct {
		N uint64 `json:"n"`
	}
	if err := json.Unmarshal(lines[len(lines)-1], &l); err != nil {
		f.s.cfg.Log.Error("a journal line does not decode", "err", err)
		return after + uint64(len(lines))
	}
	return l.N
}

// writeReplies writes all queued replies to the follower's connection.
func (f *follower) writeReplies(out io.Writer) error {
	for {
		select {
		case r := <-f.replies:
			if _, err := out.Write(encodeMessage(runner.Message{Reply: &r})); err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

// readCommands reads and executes commands of the follower until the connection ends.
func (f *follower) readCommands(in *bufio.Reader) {
	for {
		raw, err := readLine(in)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				f.queueReply(runner.Reply{Error: &runner.CommandError{Code: "INVALID_COMMAND", Message: err.Error()}})
			}
			return
		}
		if len(raw) == 0 {
			continue
		}
		var c runner.Command
		if err := json.Unmarshal(raw, &c); err != nil {
			f.queueReply(runner.Reply{ID: c.ID, Error: &runner.CommandError{Code: "INVALID_COMMAND", Message: err.Error()}})
			continue
		}
		if refusal := f.s.checkEpoch(c.Epoch); refusal != nil {
			f.queueReply(runner.Reply{ID: c.ID, Error: refusal})
			continue
		}
		f.executeCommand(c)
	}
}

// executeCommand executes a command of the follower, unless a follower with a higher epoch has attached, and queues the
// reply.
func (f *follower) executeCommand(c runner.Command) {
	sup := f.s.cfg.Supervisor
	r := runner.Reply{ID: c.ID}
	switch c.Op {
	case runner.OpStart:
		if c.Query == nil {
			r.Error = &runner.CommandError{Code: "INVALID_COMMAND", Message: "start: query is missing"}
		} else if r.Error = sup.Start(*c.Query); r.Error == nil {
			st := sup.Status()
			r.Status = &st
		}
	case runner.OpInterrupt:
		sup.Interrupt()
	case runner.OpDecide:
		if c.Verdict == nil {
			r.Error = &runner.CommandError{Code: "INVALID_COMMAND", Message: "decide: verdict is missing"}
		} else {
			sup.ApplyVerdict(*c.Verdict)
		}
	case runner.OpAck:
		f.s.cfg.Journal.TrimUpTo(c.Ack)
	case runner.OpStatus:
		st := sup.Status()
		r.Status = &st
	case runner.OpKill:
		// It can take long; acknowledgements must not wait for it.
		f.work.Go(func() {
			sup.Kill(f.ctx)
			st := sup.Status()
			f.queueReply(runner.Reply{ID: c.ID, Status: &st})
		})
		return
	case runner.OpWarm:
		if c.Query == nil {
			r.Error = &runner.CommandError{Code: "INVALID_COMMAND", Message: "warm: query is missing"}
			break
		}
		f.work.Go(func() {
			if r.Error = sup.WarmUp(f.ctx, *c.Query); r.Error == nil {
				st := sup.Status()
				r.Status = &st
			}
			f.queueReply(r)
		})
		return
	case runner.OpShutdown:
		f.queueReply(r)
		f.s.shutdown()
		return
	default:
		r.Error = &runner.CommandError{Code: "INVALID_COMMAND", Message: fmt.Sprintf("op: %q is not known", c.Op)}
	}
	f.queueReply(r)
}

// queueReply queues a reply to a command. A command with id 0 gets a reply only if it failed.
func (f *follower) queueReply(r runner.Reply) {
	if r.ID == 0 && r.Error == nil {
		return
	}
	select {
	case f.replies <- r:
	case <-f.ctx.Done():
	case <-f.sent:
	}
}
