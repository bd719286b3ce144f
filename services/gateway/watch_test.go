package gateway_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

// watch is a stream of WatchExecution.
type watch struct {
	t      *testing.T
	stream grpc.ServerStreamingClient[spoolv1.ExecutionStatus]
	cancel context.CancelFunc
}

// in returns the same client for a subtest.
func (s *served) in(t *testing.T) *served {
	t.Helper()
	copied := *s
	copied.t = t
	return &copied
}

func (s *served) watch(r *spoolv1.WatchExecutionRequest) *watch { return s.watchOn(s.conn(), r) }

func (s *served) watchOn(conn *grpc.ClientConn, r *spoolv1.WatchExecutionRequest) *watch {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	s.t.Cleanup(cancel)
	stream, err := spoolv1.NewExecutionsClient(conn).WatchExecution(s.context(ctx), r)
	must(s.t, err)
	return &watch{s.t, stream, cancel}
}

// next returns the next status.
func (w *watch) next() *spoolv1.ExecutionStatus {
	w.t.Helper()
	m, err := w.stream.Recv()
	must(w.t, err)
	return m
}

// want fails the test unless the next status has a seq and a phase, and returns the status.
func (w *watch) want(seq uint32, phase string) *spoolv1.ExecutionStatus {
	w.t.Helper()
	m := w.next()
	if m.Seq != seq || m.Phase != phase {
		w.t.Fatalf("the status is %s at seq %d, want %s at %d: %v", m.Phase, m.Seq, phase, seq, m)
	}
	return m
}

// wantEnd fails the test unless the stream ends without an error.
func (w *watch) wantEnd() {
	w.t.Helper()
	if m, err := w.stream.Recv(); !errors.Is(err, io.EOF) {
		w.t.Errorf("after the final status: %v, %v", m, err)
	}
}

// error returns the error with which the stream ends.
func (w *watch) error() error {
	for {
		if _, err := w.stream.Recv(); err != nil {
			return err
		}
	}
}

// slowConn returns a connection whose client receives at most 64 KiB that it has not read. By default gRPC lets this grow.
func (s *served) slowConn() *grpc.ClientConn {
	s.t.Helper()
	conn, err := grpc.NewClient(s.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	must(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// queued returns a new execution of a session, which waits.
func (w *world) queued(tenant, session string) (execution string) {
	w.t.Helper()
	execution = newID(w.t, events.KindExecution)
	w.emit(tenant, session, events.Event{ExecutionID: execution, Data: events.MessageAccepted{BlockID: events.DeriveID(events.KindBlock, execution, "message"), Content: "do it"}})
	return execution
}

// emitEach commits each event of an execution singly.
func (w *world) emitEach(session, execution string, list ...events.Payload) {
	w.t.Helper()
	for _, d := range list {
		w.emit("default", session, events.Event{ExecutionID: execution, ConversationID: events.MainConversation, Data: d})
	}
}

// logs returns n events that change nothing in a status except its seq.
func logs(n int) (list []events.Payload) {
	for range n {
		list = append(list, events.Log{Message: "x"})
	}
	return list
}

// TestWatch_SendsStatuses tests when a status is sent: at once, after every N events of the execution, at a change of the phase,
// and at the end.
func TestWatch_SendsStatuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	for _, every := range []uint32{0, 1, 3} {
		n := int(every)
		if n == 0 {
			n = 10
		}
		for phase, end := range map[string]events.Payload{
			"completed": events.ExecutionCompleted{Result: "done"}, "failed": events.ExecutionFailed{Code: "C", Message: "why"}, "cancelled": events.ExecutionCancelled{Reason: "interrupted"},
		} {
			t.Run(fmt.Sprintf("every %d, %s", every, phase), func(t *testing.T) {
				session := w.session("default")
				execution, other := w.queued("default", session), newID(t, events.KindExecution)
				one := g.in(t).watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: every})
				first := one.want(2, "queued")
				if first.SessionId != session || first.ExecutionId != execution || first.MessageCounts.User != 1 || first.Messages[0].Text != "do it" || first.Final {
					t.Errorf("the first status is %v", first)
				}
				w.emitEach(session, other, logs(n)...)
				w.emitEach(session, execution, events.ExecutionDispatched{})
				if n > 1 {
					w.emitEach(session, execution, logs(n-1)...)
				}
				seq := uint32(2 + n + n)
				one.want(seq, "queued")
				w.emitEach(session, execution, events.ExecutionClaimed{Epoch: 1})
				one.want(seq+1, "starting")
				w.emitEach(session, execution, events.ExecutionStarted{Attempt: 1})
				one.want(seq+2, "running")
				w.emitEach(session, execution, logs(n)...)
				one.want(seq+2+uint32(n), "running")
				w.emitEach(session, execution, end)
				last := one.want(seq+3+uint32(n), phase)
				if !last.Final || last.Attempt != 1 || last.EndedAt == nil || last.GetResult()+last.GetCode()+last.GetReason() == "" {
					t.Errorf("the last status is %v", last)
				}
				one.wantEnd()
			})
		}
	}
}

// TestWatch_BeginsWithTheReadModels tests that the first status has what the read models have, and that the status after further
// events is the one that a client has which followed the execution from its beginning.
func TestWatch_BeginsWithTheReadModels(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	session := w.session("default")
	earlier := w.queued("default", session)
	w.finish(session, earlier, events.ExecutionCompleted{Result: "earlier"})
	execution := w.queued("default", session)
	early := g.watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 1000})
	early.want(4, "queued")
	block := func(b events.Block) events.BlockComplete { return events.BlockComplete{Block: b} }
	w.emitEach(session, execution,
		events.ExecutionDispatched{}, events.ExecutionStarted{Attempt: 2},
		events.BlockStart{Block: events.Block{ID: "blk_a", Kind: events.KindAssistantText}},
		block(events.Block{ID: "blk_b", Kind: events.KindAssistantText, Content: strings.Repeat("x", 2000)}),
		block(events.Block{ID: "blk_t", Kind: events.KindTodo, Todos: []events.TodoItem{{Content: "first", Status: "pending"}}}),
		block(events.Block{ID: "blk_u", Kind: events.KindPlan, Plan: &events.Plan{Items: []events.PlanItem{{Content: "first", Status: events.PlanCompleted}, {Content: "second", Status: events.PlanPending}}}}),
		events.BlockStart{Block: events.Block{ID: "blk_c", Kind: events.KindToolUse, ToolUseID: "call_1", ToolName: "Bash"}},
		block(events.Block{ID: "blk_r", Kind: events.KindToolResult, ToolUseID: "call_1", DurationMs: 7}),
		events.BlockStart{Block: events.Block{ID: "blk_d", Kind: events.KindToolUse, ToolUseID: "call_2", ToolName: "Task"}},
		events.SubagentSpawned{SubagentID: "sub", Conversation: "con", Name: "searcher", ToolUseID: "call_2"},
		events.MetadataUpdate{Usage: events.Usage{InputTokens: 10, OutputTokens: 5}, CostUSD: 0.5, Model: "m"},
		events.ModelCalled{Provider: "anthropic", Model: "m", Status: 200, Usage: events.Usage{InputTokens: 9, OutputTokens: 4}, CostUSD: 0.25},
		events.SandboxUsage{DurationMs: 100, CostUSD: 0.125},
		events.ApprovalRequested{ApprovalID: "apr_1", Kind: events.ApprovalTool, ToolName: "Task", Title: "start a sub-agent"},
	)
	// The rows of these events that the test's own projector does not write.
	w.exec(`UPDATE executions SET phase = 'waiting_for_approval', attempt = 2, model = 'm', input_tokens = 10, output_tokens = 5, cost_usd = 0.5, sandbox_ms = 100, sandbox_cost_usd = 0.125,
		dispatched_at = (SELECT (event::json->>'time')::timestamptz FROM events WHERE session = $1 AND type = 'execution_dispatched'),
		started_at = (SELECT (event::json->>'time')::timestamptz FROM events WHERE session = $1 AND type = 'execution_started') WHERE id = $2`, session, execution)
	w.exec(`UPDATE sessions SET updated_at = (SELECT (event::json->>'time')::timestamptz FROM events e WHERE e.session = $1 AND e.seq = tip) WHERE id = $1`, session)
	for _, call := range []struct{ id, block, result, status, tool string }{{"call_1", "blk_c", "blk_r", "complete", "Bash"}, {"call_2", "blk_d", "", "pending", "Task"}} {
		w.exec(`INSERT INTO tool_calls SELECT b.tenant, b.session, $2, b.id, b.execution, b.conversation, $4, '', $5, (b.block::json->>'timestamp')::timestamptz,
			(SELECT (event::json->>'time')::timestamptz FROM events e JOIN blocks r ON r.session = e.session AND r.id = $6 AND r.first_seq = e.seq WHERE e.session = $1),
			CASE WHEN $5 = 'complete' THEN 7 ELSE 0 END, b.first_seq FROM blocks b WHERE b.session = $1 AND b.id = $3`, session, call.id, call.block, call.tool, call.status, call.result)
	}
	w.exec(`INSERT INTO usage VALUES ('default', $1, 'u', $2, 'anthropic', 'm', '2026-01-02', 1, 0, 9, 4, 0, 0, 0.25, '', 0, 0)`, session, execution)

	late := g.watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution})
	first := late.want(18, "waiting_for_approval")
	folded := early.next()
	for folded.Seq < first.Seq {
		folded = early.next()
	}
	if !proto.Equal(folded, first) {
		t.Errorf("the first status is %v\nfor a client that began early it is %v", first, folded)
	}
	if len(first.Messages) != 3 || !first.Messages[2].Cut || first.ToolCallCounts.Complete != 1 || first.ToolCallCounts.Pending != 1 || first.TodoCount != 2 || first.SubagentCounts.Running != 1 ||
		first.PendingApprovalCount != 1 || first.Metered.Requests != 1 || first.Usage.InputTokens != 10 || first.SandboxMs != 100 {
		t.Errorf("the first status is %v", first)
	}
	w.emitEach(session, execution,
		events.ApprovalDecided{ApprovalID: "apr_1", Decision: events.DecisionApprove},
		events.ApprovalResolved{ApprovalID: "apr_1", Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson},
		block(events.Block{ID: "blk_a", Kind: events.KindAssistantText, Content: "done"}),
		block(events.Block{ID: "blk_s", Kind: events.KindToolResult, ToolUseID: "call_2", IsError: true}),
		events.ModelCalled{Provider: "anthropic", Model: "m", Status: 500},
		events.ExecutionCompleted{DurationMs: 9, Usage: events.Usage{InputTokens: 11}, Result: "done"},
	)
	last := func(one *watch) *spoolv1.ExecutionStatus {
		for {
			if m := one.next(); m.Final {
				one.wantEnd()
				return m
			}
		}
	}
	a, b := last(early), last(late)
	if !proto.Equal(a, b) {
		t.Errorf("the last status is %v\nfor a client that began late it is %v", a, b)
	}
	if a.ToolCallCounts.Error != 1 || a.SubagentCounts.Failed != 1 || a.Messages[1].Text != "done" || a.Metered.Failed != 1 {
		t.Errorf("the last status is %v", a)
	}
}

// TestWatch_SlowClientGetsTheNewest tests that the statuses of a client that does not read are neither kept nor waited for, and
// that the client receives the final one.
func TestWatch_SlowClientGetsTheNewest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{WriteTimeout: time.Hour})
	session := w.session("default")
	execution := w.queued("default", session)
	one := g.watchOn(g.slowConn(), &spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 1})
	one.want(2, "queued")
	g.wantReaders(t, 1)
	const commits, events100 = 100, 100
	for i := range commits {
		var list []events.Event
		for j := range events100 {
			list = append(list, events.Event{ExecutionID: execution, ConversationID: events.MainConversation, Data: events.BlockComplete{
				Block: events.Block{ID: fmt.Sprintf("blk_%d_%d", i, j), Kind: events.KindAssistantText, Content: strings.Repeat("x", 1000)},
			}})
		}
		w.emit("default", session, list...)
	}
	end := w.finish(session, execution, events.ExecutionCompleted{Result: "done"})
	g.wantReaders(t, 0) // all events were read, although the client has read no status
	seq, received := uint32(2), 0
	for {
		m := one.next()
		if m.Seq <= seq {
			t.Fatalf("the status at %d comes after that at %d", m.Seq, seq)
		}
		seq = m.Seq
		received++
		if m.Final {
			break
		}
	}
	one.wantEnd()
	t.Logf("%d statuses were received", received)
	if seq != end || received > 30 {
		t.Errorf("%d statuses were received for %d events, the last at %d, want %d", received, commits*events100, seq, end)
	}
}

// TestWatch_DisconnectsAtTheEnd tests that a client that does not read the final status in time is disconnected.
func TestWatch_DisconnectsAtTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{WriteTimeout: time.Second})
	session := w.session("default")
	execution := w.queued("default", session)
	one := g.watchOn(g.slowConn(), &spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 1})
	one.want(2, "queued")
	for i := range 100 { // each status has about 12 KiB
		w.emitEach(session, execution, events.BlockComplete{Block: events.Block{ID: fmt.Sprint("blk_", i), Kind: events.KindAssistantText, Content: strings.Repeat("x", 1000)}})
	}
	w.finish(session, execution, events.ExecutionCompleted{Result: "done"})
	g.wantMetric(t, `spool_gateway_clients_cut_total{code="SLOW_CLIENT",kind="watch"} 1`)
	wantCode(t, one.error(), codes.ResourceExhausted, "SLOW_CLIENT", "")
}

// TestWatch_EndedExecution tests that the only status of an ended execution is the final one.
func TestWatch_EndedExecution(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	session := w.session("default")
	execution := w.queued("default", session)
	end := w.finish(session, execution, events.ExecutionFailed{Code: "MODEL_ERROR", Message: "no model"})
	one := g.watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution, MinPosition: "0-3"})
	if m := one.want(end, "failed"); !m.Final || m.GetCode() != "MODEL_ERROR" || m.GetMessage() != "no model" {
		t.Errorf("the status is %v", m)
	}
	one.wantEnd()
	g.wantMetric(t, `spool_gateway_streams{kind="watch"} 0`)
}

// TestWatch_FindsLostAnnouncements tests that events whose announcement was lost are counted and folded.
func TestWatch_FindsLostAnnouncements(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	session := w.session("default")
	execution := w.queued("default", session)
	one := g.watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 4})
	one.want(2, "queued")
	g.wantReaders(t, 1)
	w.unannounced = true
	w.emitEach(session, execution, logs(3)...)
	w.unannounced = false
	w.emitEach(session, execution, logs(1)...)
	one.want(6, "queued")
}

// TestWatch_LeavesOutText tests that text in flight does not count as events.
func TestWatch_LeavesOutText(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	session := w.session("default")
	execution := w.queued("default", session)
	one := g.watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 3})
	one.want(2, "queued")
	text := g.rpc(session, 2)
	defer text.close()
	block := events.Block{ID: "blk_t", Kind: events.KindAssistantText}
	w.emitEach(session, execution, events.BlockStart{Block: block})
	received, view := "", newWatcher()
	view.seq = 2
	for range 5 { // each piece is sent after a client has received the one before
		w.emitText("default", session, block.ID, "piece")
		received += "piece"
		for list := view.view.Blocks(); len(list) != 1 || list[0].Content != received; list = view.view.Blocks() {
			e, err := text.next()
			must(t, err)
			must(t, view.take(e))
		}
	}
	block.Content = received
	w.emitEach(session, execution, events.Log{Message: "x"}, events.BlockComplete{Block: block})
	if m := one.want(5, "queued"); m.Messages[1].Text != received {
		t.Errorf("the status is %v", m)
	}
}

// TestWatch_ReportsLag tests that a status is sent when the read models fall behind the log, and when they have caught up.
func TestWatch_ReportsLag(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{LagAfter: 500 * time.Millisecond})
	session := w.session("default")
	one := g.watch(&spoolv1.WatchExecutionRequest{ExecutionId: w.queued("default", session)})
	one.want(2, "queued")
	setLag := func(ms int) {
		w.exec("UPDATE checkpoints SET lag_ms = $2 WHERE grp = $1", events.Partitioning(topology.DefaultPartitions).GroupOfID(session), ms)
	}
	setLag(5000)
	if m := one.want(2, "queued"); !m.Lag.GetLagging() || m.Lag.LagMs != 5000 {
		t.Errorf("the status is %v", m)
	}
	setLag(0)
	if m := one.want(2, "queued"); m.Lag != nil {
		t.Errorf("the status is %v", m)
	}
}

// TestWatch_Refusals tests that invalid requests, and executions that the caller must not see, are refused.
func TestWatch_Refusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxTenantStreams: 1})
	one, other := g.withNewKey(root, "one"), g.withNewKey(root, "other")
	session := w.session("one")
	execution := w.queued("one", session)
	for name, c := range map[string]struct {
		as    *served
		r     *spoolv1.WatchExecutionRequest
		grpc  codes.Code
		code  string
		field string
	}{
		"too many events":            {one, &spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 1001}, codes.InvalidArgument, "INVALID_REQUEST", "everyEvents"},
		"not an id":                  {one, &spoolv1.WatchExecutionRequest{ExecutionId: session}, codes.InvalidArgument, "INVALID_REQUEST", "executionId"},
		"not a position":             {one, &spoolv1.WatchExecutionRequest{ExecutionId: execution, MinPosition: "x"}, codes.InvalidArgument, "INVALID_REQUEST", "minPosition"},
		"an unknown execution":       {one, &spoolv1.WatchExecutionRequest{ExecutionId: oldID(t, events.KindExecution)}, codes.NotFound, "EXECUTION_NOT_FOUND", "executionId"},
		"another tenant's execution": {other, &spoolv1.WatchExecutionRequest{ExecutionId: execution}, codes.NotFound, "EXECUTION_NOT_FOUND", "executionId"},
		"a caller without a key":     {g, &spoolv1.WatchExecutionRequest{ExecutionId: execution}, codes.Unauthenticated, "UNAUTHENTICATED", "Authorization"},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, c.as.in(t).watch(c.r).error(), c.grpc, c.code, c.field) })
	}
	open := one.watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 1000})
	open.want(2, "queued")
	wantCode(t, one.watch(&spoolv1.WatchExecutionRequest{ExecutionId: execution}).error(), codes.ResourceExhausted, "TOO_MANY_STREAMS", "")
}

// TestWatch_Ends tests that a stream ends with its session, its API key, its client and the gateway.
func TestWatch_Ends(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, ShutdownGrace: time.Hour})
	w.serveCommands()
	admin := g.withKey(root)
	made := admin.do("POST", "/api/keys", `{"name":"a","tenant":"acme"}`).want(t, 201)
	mine := g.withKey(made.text("key"))
	open := func(as *served) (one *watch, session string) {
		session = w.session("acme")
		one = as.watch(&spoolv1.WatchExecutionRequest{ExecutionId: w.queued("acme", session)})
		one.want(2, "queued")
		admin.wantReaders(t, 1)
		return one, session
	}
	one, session := open(mine)
	w.emit("acme", session, events.Event{Data: events.SessionDeleted{}})
	wantCode(t, one.error(), codes.NotFound, "SESSION_NOT_FOUND", "sessionId")
	admin.wantReaders(t, 0)

	one, _ = open(mine)
	one.cancel()
	admin.wantReaders(t, 0)
	admin.wantMetric(t, `spool_gateway_streams{kind="watch"} 0`)

	one, _ = open(mine)
	admin.do("DELETE", "/api/keys/"+made.text("keyId")+"?tenant=acme", "").want(t, 200)
	wantCode(t, one.error(), codes.Unauthenticated, "UNAUTHENTICATED", "Authorization")

	one, _ = open(g.withNewKey(root, "acme"))
	g.stop()
	wantCode(t, one.error(), codes.Unavailable, "UNAVAILABLE", "")
}
