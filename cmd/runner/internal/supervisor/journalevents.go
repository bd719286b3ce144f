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

// The codes of turns that used too much of a resource; see runner.TurnEnd.
const (
	CodeDiskLimit   = "DISK_LIMIT"
	CodeOutOfMemory = "OUT_OF_MEMORY"
)

// memoryEvery is the interval at which a turn checks whether the kernel has killed a process because the memory limit
// was reached.
const memoryEvery = time.Second

// Watch is a watcher of the workspace that journals changes of files by Supervisor.JournalEvents.
type Watch interface {
	// Flush returns when all earlier changes were reported, or after a limit of its own.
	Flush(ctx context.Context)
}

// Disk measures the disk usage of the workspace and the agent's records.
type Disk interface {
	// Wake is called when a process was started that may write.
	Wake()
	// Over reports whether the limit is exceeded. It measures again if it was at the last measurement.
	Over() (message string, over bool)
	Used() int64 // bytes, as last measured or estimated
}

// JournalEvents journals events of the runner itself, such as changes of files, as part of the running execution. It
// returns the id of that execution, or "" if none runs. It blocks while the journal is full, until ctx ends. Without
// payloads it only returns the id and does not block.
func (s *Supervisor) JournalEvents(ctx context.Context, payloads ...events.Payload) (execution string) {
	if len(payloads) > 0 {
		s.cfg.Journal.Room(ctx)
	}
	// No line may come before the first or after the last line of its execution. So JournalEvents holds the lock that
	// the end waits for; it has waited for room before.
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
		s.cfg.Journal.Append(at, runner.JournalLine{
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

// record makes JournalEvents add its events to the execution of r. It is called once the first line of r is in the
// journal.
func (s *Supervisor) record(r *run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording = r.query.ExecutionID
}

// beforeEnd is called before the line that ends the run is journaled. It journals the last events of the runner about
// the run and allows the next query, because a reader of the end may start one at once.
func (s *Supervisor) beforeEnd(r *run) {
	s.flush()
	now, cancel := context.WithCancel(context.Background())
	cancel() // the end does not wait for readers of the journal
	s.reportKilled(now, r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording = ""
	if s.active == r {
		s.active = nil
	}
}

// flush waits until all changes of the workspace so far are journaled, or the watcher's time limit has passed.
func (s *Supervisor) flush() {
	if s.cfg.Watch != nil {
		s.cfg.Watch.Flush(context.Background())
	}
}

// Exhaust kills all processes of the agent at once, because they use too much of a resource. A running turn fails with
// the code and the message. If no turn runs, Exhaust journals them as an event of type error.
func (s *Supervisor) Exhaust(code, message string) {
	s.mu.Lock()
	r, w := s.active, s.warm
	s.mu.Unlock()
	if r != nil {
		r.mu.Lock()
		if r.exhausted == nil {
			r.exhausted = &runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: code, Message: message}
		}
		r.mu.Unlock()
		r.kill()
		return
	}
	if w == nil && !s.cfg.ProcessGroup.Busy() {
		return // no process of an agent runs
	}
	now, cancel := context.WithCancel(context.Background())
	cancel() // a journal without a reader must not block this
	s.JournalEvents(now, events.Error{Code: code, Message: message + "; the agent's processes are ended"})
	if w != nil {
		s.evictNow(w)
		return
	}
	if err := s.cfg.ProcessGroup.KillAll(); err != nil {
		s.cfg.Log.Error("end what an agent left", "err", err)
	}
}

// evictNow requests that Run kill an idle process without a grace time.
func (s *Supervisor) evictNow(w *warmProcess) {
	w.urgent.Store(true)
	select {
	case s.evict <- w:
	default: // requested already
	}
}

// OOM counts the processes that the kernel has killed because the memory limit of the sandbox was reached.
type OOM interface {
	// Kills returns the number of such processes in the runner's memory group so far, or false if it is unknown.
	Kills() (uint64, bool)
	// IsExclusive reports whether the group contains only processes of the sandbox.
	IsExclusive() bool
}

// countKilled stores how many processes the kernel had killed for lack of memory before the run began.
func (s *Supervisor) countKilled(r *run) {
	if s.cfg.OOM != nil {
		r.oomBefore, _ = s.cfg.OOM.Kills()
		r.oomTold = r.oomBefore
	}
}

// killedForMemory reports whether the kernel has killed processes for lack of memory since the run began. If so, the
// caller ends the turn for that reason, and reportKilled no longer reports these processes.
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

// reportKilled journals how many processes the kernel has killed for lack of memory since the last report, while the
// agent itself is alive.
func (s *Supervisor) reportKilled(ctx context.Context, r *run) {
	if s.cfg.OOM == nil || !s.cfg.OOM.IsExclusive() {
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
		s.JournalEvents(ctx, events.Error{Code: CodeOutOfMemory, Message: fmt.Sprintf("the kernel ended %d of the agent's processes, as the sandbox has no memory left", more)})
	}
}
