package executor_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor"
)

// safeBuffer is a buffer that may be written and read concurrently.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) lines() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Split(strings.TrimSpace(s.b.String()), "\n")
}

// Log messages about an execution, also about its loss, have the ids of its tenant, session, sandbox and epoch.
func TestLogsHaveIDs(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, func(t *fakeTurn) {
		t.Start()
		if t.Query.Attempt == 1 {
			go t.r.die()
			<-t.killed
			return
		}
		t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	log := &safeBuffer{}
	b.logger = slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	a := b.run(func(c *executor.Config) { c.Slots = 1 })
	s := b.session()
	execution := s.post("x")
	box := s.untilEnded(execution).Run.Sandbox.ID
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for _, raw := range log.lines() {
		var line struct {
			Msg, Executor, Session, Execution, Sandbox string
			Epoch                                      uint64
		}
		if err := json.Unmarshal([]byte(raw), &line); err != nil || line.Executor == "" {
			t.Errorf("%s: %v", raw, err)
		}
		if line.Execution == "" {
			continue
		}
		said[line.Msg] = true
		if line.Execution != execution || line.Session != s.id || line.Epoch == 0 {
			t.Errorf("ids are missing: %s", raw)
		}
		if line.Msg == "execution ended" && line.Sandbox != box || line.Msg == "the sandbox was lost in mid-execution" && line.Sandbox == "" {
			t.Errorf("sandbox is not %s: %s", box, raw)
		}
	}
	for _, msg := range []string{"execution claimed", "the sandbox was lost in mid-execution", "execution ended"} {
		if !said[msg] {
			t.Errorf("nothing said %q", msg)
		}
	}
}
