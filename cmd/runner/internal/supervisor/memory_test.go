package supervisor_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shell is an agent whose queries are commands of one shell. A printed line {"end":true} ends the turn.
type shell struct{ in agent.Stdin }

func (shell) Command(l agent.Launch) (agent.Command, error) {
	return agent.Command{Path: "/bin/sh", Args: []string{"-c", `while read -r line; do eval "$(printf %s "$line" | tr -d '"')"; done`}, Env: l.Environment(nil)}, nil
}
func (shell) OpenSession(_ agent.Launch, in agent.Stdin) agent.Session { return shell{in} }
func (shell) TranscriptPath(agent.Folders, string) (string, error) {
	return "", errors.New("none is kept")
}
func (s shell) BeginTurn(q runner.Query, _ *agent.Turn) error { return s.in.Send(q.Content) }
func (s shell) Interrupt() error                              { return nil }
func (s shell) HandleLine(_ []byte, t *agent.Turn) error {
	t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	return nil
}

// group is a memory group whose counter the test sets.
type group struct {
	kills atomic.Uint64
	own   bool
}

func (g *group) OOMKills() (uint64, bool) { return g.kills.Load(), true }
func (g *group) IsExclusive() bool        { return g.own }

// scene is a supervisor and its journal.
type scene struct {
	t   *testing.T
	sup *supervisor.Supervisor
	j   *journal.Journal
	at  uint64 // number of the last line that was read
}

func begin(t *testing.T, g *group) *scene {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	j, err := journal.New(time.Now(), rand.Reader, 0)
	if err != nil {
		t.Fatal(err)
	}
	sup, err := supervisor.New(supervisor.Config{
		Adapters: map[string]agent.Adapter{"shell": shell{}}, Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}, Journal: j,
		ProcessGroup: process.NewGroup(log), Environ: os.Environ(), Executable: "/bin/false", Log: log, OOM: g,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- sup.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return &scene{t: t, sup: sup, j: j}
}

func (s *scene) start(execution, script string) {
	s.t.Helper()
	if refusal := s.sup.Start(runner.Query{SessionID: "ses_1", ExecutionID: execution, Architecture: "shell", Content: script}); refusal != nil {
		s.t.Fatal(refusal)
	}
}

// until reads lines up to one of the type, and returns it.
func (s *scene) until(typ events.Type) runner.JournalLine {
	s.t.Helper()
	limit := time.NewTimer(30 * time.Second)
	defer limit.Stop()
	for {
		lines, changed := s.j.LinesAfter(s.at, 1)
		for _, raw := range lines {
			var l runner.JournalLine
			if err := json.Unmarshal(raw, &l); err != nil {
				s.t.Fatal(err)
			}
			if s.at = l.N; l.Type == typ {
				return l
			}
		}
		if changed == nil {
			continue
		}
		select {
		case <-changed:
		case <-limit.C:
			s.t.Fatalf("no line of type %s", typ)
		}
	}
}

func decode[T any](t *testing.T, l runner.JournalLine) (v T) {
	t.Helper()
	if err := json.Unmarshal(l.Data, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestAgentKilled_ForMemoryHasItsCode(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		kernel bool // the kernel killed the process for lack of memory
		signal syscall.Signal
		want   string
	}{
		"by the kernel":         {true, syscall.SIGKILL, "OUT_OF_MEMORY"},
		"by somebody else":      {false, syscall.SIGKILL, "AGENT_EXITED"},
		"by itself, in trouble": {true, syscall.SIGSEGV, "AGENT_EXITED"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := &group{own: true}
			g.kills.Store(7) // earlier kills
			s := begin(t, g)
			s.start("exe_1", "sleep 600")
			pid := decode[runner.TurnStart](t, s.until(runner.AgentStarted)).PID
			if tc.kernel {
				g.kills.Add(1)
			}
			if err := syscall.Kill(pid, tc.signal); err != nil {
				t.Fatal(err)
			}
			l := s.until(runner.TurnEnded)
			if e := decode[runner.TurnEnd](t, l); e.Outcome != runner.OutcomeFailed || e.Code != tc.want || tc.want == "OUT_OF_MEMORY" && l.N != 2 {
				t.Errorf("end %+v in line %d", e, l.N)
			}
			// Earlier kills do not affect the next turn.
			s.start("exe_2", "kill -9 $$")
			if e := decode[runner.TurnEnd](t, s.until(runner.TurnEnded)); e.Code != "AGENT_EXITED" {
				t.Errorf("the next turn: %+v", e)
			}
		})
	}
}

func TestToolKilled_ForMemoryIsReported(t *testing.T) {
	t.Parallel()
	g := &group{own: true}
	s := begin(t, g)
	s.start("exe_1", "read wait; echo 1")
	s.until(runner.AgentStarted)
	g.kills.Add(2)
	l := s.until("error")
	if e := decode[events.Error](t, l); e.Code != "OUT_OF_MEMORY" || l.ExecutionID != "exe_1" {
		t.Errorf("told %+v of %q", e, l.ExecutionID)
	}
	s.sup.Kill(t.Context())
	if e := decode[runner.TurnEnd](t, s.until(runner.TurnEnded)); e.Outcome != runner.OutcomeKilled {
		t.Errorf("end %+v", e)
	}
	// A kill at the end of the turn is reported before the end.
	s.start("exe_2", "sleep 600")
	pid := decode[runner.TurnStart](t, s.until(runner.AgentStarted)).PID
	g.kills.Add(1)
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	told := s.until("error")
	end := s.until(runner.TurnEnded)
	if told.ExecutionID != "exe_2" || decode[runner.TurnEnd](t, end).Code != "AGENT_EXITED" {
		t.Errorf("told %+v, end %s", told, end.Data)
	}
	// In a group that other programs share, kills are not reported.
	g = &group{}
	s = begin(t, g)
	s.start("exe_1", "sleep 0.05; echo 1")
	s.until(runner.AgentStarted)
	g.kills.Add(1)
	if end := s.until(runner.TurnEnded); end.N != 2 {
		t.Errorf("the end is line %d", end.N)
	}
}
