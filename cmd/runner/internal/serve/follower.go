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
	// batchBytes is the number of bytes of lines that are written at once.
	batchBytes = 256 << 10
	// maxReplies is the number of replies that may wait for a follower that does not read. While as many wait, no
	// further command of the follower is read.
	maxReplies = 64
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
	f := &follower{s: s, conn: c, attach: a, replies: make(chan runner.Reply, maxReplies), last: make(chan struct{}), sent: make(chan struct{})}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

// run serves the connection until it closes.
func (f *follower) run(in *bufio.Reader) {
	go func() {
		defer close(f.sent)
		if err := f.write(); err != nil && !errors.Is(err, net.ErrClosed) {
			f.s.cfg.Log.Debug("follower is gone", "err", err)
		}
		_ = f.conn.Close() // ends the reader; Server.forget reports
	}()
	f.read(in)
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

// replace ends a follower because a newer one attached.
func (f *follower) replace() {
	f.cancel()
	_ = f.conn.Close()
}

// finish sends the last lines, within a time limit.
func (f *follower) finish(within time.Duration) {
	f.once.Do(func() { close(f.last) })
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-f.sent:
	case <-timer.C:
	}
	f.cancel()
}

// write sends Hello, then lines and replies as they come.
func (f *follower) write() error {
	j := f.s.cfg.Journal
	h := runner.Hello{Protocol: runner.ProtocolVersion, Journal: j.Name(), Status: f.s.cfg.Supervisor.Status()}
	h.First, h.Last = j.Bounds()
	if _, err := f.conn.Write(encode(runner.Message{Hello: &h})); err != nil {
		return err
	}
	out := bufio.NewWriterSize(f.conn, batchBytes)
	after, last := f.attach.After, f.last
	for {
		lines, changed := j.After(after, batchBytes)
		for _, raw := range lines {
			for _, piece := range [][]byte{[]byte(`{"line":`), raw, []byte("}\n")} {
				if _, err := out.Write(piece); err != nil {
					return err
				}
			}
		}
		after = f.advance(after, lines)
		if err := f.answer(out); err != nil {
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
			if _, err := out.Write(encode(runner.Message{Reply: &r})); err != nil {
				return err
			}
		case <-last:
			last = nil // one more pass, then it returns
		case <-f.ctx.Done():
			return nil
		}
	}
}

// advance returns the number of the last of the lines that were just sent; after is the number of the last line before
// them. Lines that were acknowledged before the follower attached may be missing in between.
func (f *follower) advance(after uint64, lines [][]byte) uint64 {
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

// answer writes all queued replies to the follower's connection.
func (f *follower) answer(out io.Writer) error {
	for {
		select {
		case r := <-f.replies:
			if _, err := out.Write(encode(runner.Message{Reply: &r})); err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

// read executes commands until the connection ends.
func (f *follower) read(in *bufio.Reader) {
	for {
		raw, err := readLine(in)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				f.reply(runner.Reply{Error: &runner.CommandError{Code: "INVALID_COMMAND", Message: err.Error()}})
			}
			return
		}
		if len(raw) == 0 {
			continue
		}
		var c runner.Command
		if err := json.Unmarshal(raw, &c); err != nil {
			f.reply(runner.Reply{ID: c.ID, Error: &runner.CommandError{Code: "INVALID_COMMAND", Message: err.Error()}})
			continue
		}
		if refusal := f.s.fence(c.Epoch); refusal != nil {
			f.reply(runner.Reply{ID: c.ID, Error: refusal})
			continue
		}
		f.executeCommand(c)
	}
}

// executeCommand executes a command of the follower, unless it is fenced, and queues the reply.
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
			sup.Decide(*c.Verdict)
		}
	case runner.OpAck:
		f.s.cfg.Journal.Trim(c.Ack)
	case runner.OpStatus:
		st := sup.Status()
		r.Status = &st
	case runner.OpKill:
		// It can take long; acknowledgements must not wait for it.
		f.work.Go(func() {
			sup.Kill(f.ctx)
			st := sup.Status()
			f.reply(runner.Reply{ID: c.ID, Status: &st})
		})
		return
	case runner.OpWarm:
		if c.Query == nil {
			r.Error = &runner.CommandError{Code: "INVALID_COMMAND", Message: "warm: query is missing"}
			break
		}
		f.work.Go(func() {
			if r.Error = sup.Warm(f.ctx, *c.Query); r.Error == nil {
				st := sup.Status()
				r.Status = &st
			}
			f.reply(r)
		})
		return
	case runner.OpShutdown:
		f.reply(r)
		f.s.shutdown()
		return
	default:
		r.Error = &runner.CommandError{Code: "INVALID_COMMAND", Message: fmt.Sprintf("op: %q is not known", c.Op)}
	}
	f.reply(r)
}

// reply queues a reply. A command with id 0 gets a reply only if it failed.
func (f *follower) reply(r runner.Reply) {
	if r.ID == 0 && r.Error == nil {
		return
	}
	select {
	case f.replies <- r:
	case <-f.ctx.Done():
	case <-f.sent:
	}
}
