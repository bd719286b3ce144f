package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// Codes of what takes too much; see runner.Ended.
const (
	CodeDiskLimit   = "DISK_LIMIT"
	CodeOutOfMemory = "OUT_OF_MEMORY"
)

// memoryEvery is how often it is looked, during a turn, whether the kernel ended a process.
const memoryEvery = time.Second

// Watch tells of the workspace's files beside the turns, by Tell.
type Watch interface {
	// Flush returns when all that happened before was told, within a bound of its own.
	Flush(ctx context.Context)
}

// Disk knows how much of it is used.
type Disk interface {
	// Wake says that a process was started which may write.
	Wake()
	// Over measures anew if it was too much when last looked at, and tells whether it is.
	Over() (message string, over bool)
	Used() int64 // bytes, as last seen
}

// Tell journals what is no agent's word, with the execution that runs if one
// does, and gives its id. It waits while the journal is full, until ctx ends;
// without payloads it does not wait.
func (s *Supervisor) Tell(ctx context.Context, payloads ...events.Payload) (execution string) {
	if len(payloads) > 0 {
		s.cfg.Journal.Room(ctx)
	}
	// No line may come before the first or after the last of its execution, so
	// the lock is held that the end waits for; there is room, or it is done without.
	at := context.WithoutCancel(ctx)
	at, cancel := context.WithCancel(at)
	cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range payloads {
		raw, err := encode(agent.Redacted(s.hides, p))
		if err != nil {
			s.cfg.Log.Error("journal an event of the runner", "type", p.EventType(), "err", err)
			continue
		}
		s.cfg.Journal.Append(at, runner.Line{
			Type: p.EventType(), Time: s.cfg.Now().UTC(), ExecutionID: s.recording, ConversationID: events.MainConversation, Data: raw,
		})
	}
	return s.recording
}

func encode(v any) (json.RawMessage, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}

// record has what is told from now on be of the run, whose first line was journaled.
func (s *Supervisor) record(r *run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording = r.query.ExecutionID
}

// beforeEnd says what is still to be said of the run, and lets the next query be
// accepted: who reads the end may start it at once.
func (s *Supervisor) beforeEnd(r *run) {
	s.flush()
	now, cancel := context.WithCancel(context.Background())
	cancel() // the end waits for nobody
	s.tellKilled(now, r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording = ""
	if s.active == r {
		s.active = nil
	}
}

// flush has told what happened to the workspace until now.
func (s *Supervisor) flush() {
	if s.cfg.Watch != nil {
		s.cfg.Watch.Flush(context.Background())
	}
}

// Exhaust ends all that an agent has running, at once, because it took too much
// of something. A turn that runs fails with the code; between turns there is a
// line of type error.
func (s *Supervisor) Exhaust(code, message string) {
	s.mu.Lock()
	r, w := s.active, s.warm
	s.mu.Unlock()
	if r != nil {
		r.mu.Lock()
		if r.exhausted == nil {
			r.exhausted = &runner.Ended{Outcome: runner.Failed, Code: code, Message: message}
		}
		r.mu.Unlock()
		r.kill()
		return
	}
	if w == nil && !s.cfg.ProcessGroup.Busy() {
		return // what took it is not an agent's, or is gone
	}
	now, cancel := context.WithCancel(context.Background())
	cancel() // what goes on may not go on for want of a reader
	s.Tell(now, events.Error{Code: code, Message: message + "; the agent's processes are ended"})
	if w != nil {
		s.evictNow(w)
		return
	}
	if err := s.cfg.ProcessGroup.KillAll(); err != nil {
		s.cfg.Log.Error("end what an agent left", "err", err)
	}
}

// evictNow asks Run to end an idle process without grace.
func (s *Supervisor) evictNow(w *warm) {
	w.urgent.Store(true)
	select {
	case s.evict <- w:
	default: // asked for already
	}
}

// OOM counts the processes that the kernel ended for lack of memory.
type OOM interface {
	// Kills is how many there were so far in the runner's memory group; false where it cannot be told.
	Kills() (uint64, bool)
	// Own tells whether the group holds nothing but the sandbox.
	Own() bool
}

// countKilled remembers how many there were before the run.
func (s *Supervisor) countKilled(r *run) {
	if s.cfg.OOM != nil {
		r.oomBefore, _ = s.cfg.OOM.Kills()
		r.oomTold = r.oomBefore
	}
}

// killedForMemory tells whether the kernel ended processes since the run began.
// That is then the turn's end, and no line of its own.
func (s *Supervisor) killedForMemory(r *run) bool {
	if s.cfg.OOM == nil {
		return false
	}
	n, ok := s.cfg.OOM.Kills()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !ok || n <= r.oomBefore {
		return false
	}
	r.oomTold = n
	return true
}

// tellKilled tells of tool processes that the kernel ended, while the agent lives.
func (s *Supervisor) tellKilled(ctx context.Context, r *run) {
	if s.cfg.OOM == nil || !s.cfg.OOM.Own() {
		return
	}
	n, ok := s.cfg.OOM.Kills()
	r.mu.Lock()
	more := n - r.oomTold
	if ok = ok && n > r.oomTold; ok {
		r.oomTold = n
	}
	r.mu.Unlock()
	if ok {
		s.Tell(ctx, events.Error{Code: CodeOutOfMemory, Message: fmt.Sprintf("the kernel ended %d of the agent's processes, as the sandbox has no memory left", more)})
	}
}
