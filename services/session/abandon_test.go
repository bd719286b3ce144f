package session_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/session"
)

// TestExecutorLost_LargerThanACommitIsSplit tests an execution whose open blocks do not fit into one commit. Its end
// is stored in several commits, with the terminal event in the last one. The end states that the agent was not told
// to stop.
func TestExecutorLost_LargerThanACommitIsSplit(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	var ahead atomic.Int64
	clock := func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	svc, err := session.New(session.Config{TurnLimit: time.Minute}, session.Deps{NATS: s.nc, Log: s.log, Logger: slog.New(slog.DiscardHandler), Now: clock, Copy: "one"})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	awaitReady(t, svc.Ready(), done)

	const blocks = 5
	sid := s.create(events.Options{})
	exe := s.post(sid)
	l := s.await(sid, "dispatched", func(l *eventlog.SessionState) bool { return l.Life.Active.ExecutionID == exe })
	store := func(c run.Command) {
		t.Helper()
		d, err := run.Decide(l.Run, c)
		must(t, err)
		must(t, s.ses.AppendRun(t.Context(), l, events.Actor{Kind: "executor"}, id(events.KindCommit), d))
	}
	store(run.ClaimExecution{CommandMeta: events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()}, ExecutionID: exe, Turn: l.Life.Active.Turn, Executor: "xtr_gone"})
	store(run.RecordEvents{Epoch: l.Run.Epoch, Events: []events.Event{{
		ID: id(events.KindEvent), Time: time.Now(), Source: events.FromServer, Data: events.SandboxReady{SandboxID: id(events.KindSandbox), Provider: "local", Engine: "m", Journal: "jnl"},
	}}})
	input := json.RawMessage(`"` + strings.Repeat("x", 228_000) + `"`)
	for i := range blocks {
		store(run.RecordEvents{Epoch: l.Run.Epoch, Events: []events.Event{{
			ID: id(events.KindEvent), Time: time.Now(), ExecutionID: exe, Source: events.FromRunner, N: uint64(i + 1),
			Data: events.BlockStart{Block: events.Block{ID: "b" + strconv.Itoa(i), Kind: events.KindToolUse, Status: events.StatusPending, Input: input}},
		}}})
	}
	ahead.Store(int64(2 * time.Minute))
	s.fireTimer(sid)
	s.await(sid, "failed", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(exe) })
	var completed int
	list := s.history(sid)
	for _, e := range list {
		if d, ok := e.Data.(events.BlockComplete); ok {
			if completed++; len(d.Block.Input) != len(input) {
				t.Errorf("block %s is completed with %d bytes of input", d.Block.ID, len(d.Block.Input))
			}
		}
	}
	if f := last[events.ExecutionFailed](list); completed != blocks || f.Code != "EXECUTOR_LOST" || !f.Unstopped || !strings.Contains(f.Message, "sweep") {
		t.Errorf("%d of %d blocks are completed; the end is %+v", completed, blocks, f)
	}
}
