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

// memoryCheckInterval is the interval at which a turn checks whether the kernel has killed a process because the memory limit
// was reached.
const memoryCheckInterval = time.Second

// WorkspaceWatcher watches the files of the workspace and journals their changes by Supervisor.JournalEvents.
type WorkspaceWatcher interface {
	// Flush returns when all earlier changes were reported, or after a limit of its own.
	Flush(ctx context.Context)
}

// DiskMeter measures the disk usage of the workspace and the state folder.
type DiskMeter interface {
	// Wake is called when a process was started that may write.
	CheckNow()
	// Over reports whether the limit is exceeded. It measures again if it was at the last measurement.
	CheckLimit() (message string, over bool)
	UsedBytes() int64 // bytes, as last measured or estimated
}

// JournalEvents journals events that the runner itself has observed, such as changes of files, as part of the running execution. It returns the id
// of that execution, or "" if none runs. It blocks while the journal is full, until ctx ends. Without payloads it only returns the id and does not
// block.
func (s *Supervisor) JournalEvents(ctx context.Context, payloads ...events.Payload) (execution string) {
	if len(payloads) > 0 {
		s.cfg.Journal.AwaitRoom(ctx)
	}
	// No line may come before the first or after the last line of its execution. So JournalEvents holds the lock that
	// the end waits for; it has waited for room before.
	at := context.WithoutCancel(ctx)
	at, cancel := context.WithCancel(at)
	cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range payloads {
		raw, err := encodeJSON(agent.RedactPayload(s.hides, p))
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

// encodeJSON returns v as JSON without HTML escapes.
func encodeJSON(v any) (json.RawMessage, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}

// startJournalingEvents makes JournalEvents add its events to the execution of r. It is called once the first line of the execution is in the journal.
func (s *Supervisor) startJournalingEvents(r *acceptedQuery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording = r.query.ExecutionID
}

// journalLastEvents is called before the line that ends the execution of r is journaled. It journals the runner's last events about the execution
// and allows the next query, because a reader of the end may start one at once.
func (s *Supervisor) journalLastEvents(r *acceptedQuery) {
	s.flushWatcher()
	now, cancel := context.WithCancel(context.Background())
	cancel() // the end does not wait for readers of the journal
	s.reportOOMKills(now, r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording = ""
	if s.active == r {
		s.active = nil
	}
}

// flushWatcher waits until all changes of the workspace so far are journaled, or the watcher's time limit has passed.
func (s *Supervisor) flushWatcher() {
	if s.cfg.Watch != nil {
		s.cfg.Watch.Flush(context.Background())
	}
}

// KillForResource kills all processes of the agent at once, because they use too much of a resource, such as disk space. A running turn fails with
// the code and the message. If no turn runs, KillForResource journals them as an event of type error.
func (s *Supervisor) KillForResource(code, message string) {
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
	if w == nil && !s.cfg.ProcessGroup.HasProcesses() {
		return // no process of an agent runs
	}
	now, cancel := context.WithCancel(context.Background())
	cancel() // a journal without a reader must not block this
	s.JournalEvents(now, events.Error{Code: code, Message: message + "; the agent's processes are ended"})
	if w != nil {
		s.requestImmediateKill(w)
		return
	}
	if err := s.cfg.ProcessGroup.KillAll(); err != nil {
		s.cfg.Log.Error("end the processes that an agent left", "err", err)
	}
}

// requestImmediateKill requests that Run kill an idle process without a grace time.
func (s *Supervisor) requestImmediateKill(w *warmProcess) {
	w.urgent.Store(true)
	select {
	case s.evict <- w:
	default: // requested already
	}
}

// OOMCounter counts the processes that the kernel has killed because the memory limit of the sandbox was reached.
type OOMCounter interface {
	// Kills returns the number of such processes in the runner's memory group so far, or false if it is unknown.
	OOMKills() (uint64, bool)
	// IsExclusive reports whether the group contains only processes of the sandbox.
	IsExclusive() bool
}

// storeOOMKills stores in r how many processes the kernel had killed for lack of memory before the turn began.
func (s *Supervisor) storeOOMKills(r *acceptedQuery) {
	if s.cfg.OOM != nil {
		r.oomBefore, _ = s.cfg.OOM.OOMKills()
		r.oomTold = r.oomBefore
	}
}

// wasKilledForMemory reports whether the kernel has killed processes for lack of memory since the turn of r began. If so, the caller ends the turn
// for that reason, and reportOOMKills no longer reports these processes.
func (s *Supervisor) wasKilledForMemory(r *acceptedQuery) bool {
	if s.cfg.OOM == nil {
		return false
	}
	n, ok := s.cfg.OOM.OOMKills()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !ok || n <= r.oomBefore {
		return false
	}
	r.oomTold = n
	return true
}

// reportOOMKills journals how many processes the kernel has killed for lack of memory since the last report, while the agent's own process is
// alive.
func (s *Supervisor) reportOOMKills(ctx context.Context, r *acceptedQuery) {
	if s.cfg.OOM == nil || !s.cfg.OOM.IsExclusive() {
		return
	}
	n, ok := s.cfg.OOM.OOMKills()
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
