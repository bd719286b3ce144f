package gateway_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/gateway"
)

// queue adds an execution to a session and returns its id.
func (w *world) queue(tenant, session string) string {
	w.t.Helper()
	id := newID(w.t, events.KindExecution)
	w.emit(tenant, session, events.Event{ExecutionID: id, Data: events.MessageAccepted{Content: "go"}})
	return id
}

// dispatch makes an execution the active one of its session.
func (w *world) dispatch(session, execution string) {
	w.t.Helper()
	w.exec("UPDATE executions SET dispatched_at = '2026-01-02T03:04:09Z' WHERE id = $1", execution)
	w.exec("UPDATE sessions SET active_execution = $2 WHERE id = $1", session, execution)
}

// claim sets the phase of an execution that an executor has claimed.
func (w *world) claim(execution, executor, phase string, attempt int) {
	w.t.Helper()
	w.exec("UPDATE executions SET executor = $2, phase = $3, attempt = $4 WHERE id = $1", execution, executor, phase, attempt)
}

// report writes the wait of an execution, as the executor's user.
func (w *world) report(e waiting.Entry) {
	w.t.Helper()
	w.putAsExecutor(topology.BucketWaits, e.Execution, encode(w.t, e))
}

// putAsExecutor writes a value to a key-value bucket as the executor's user.
func (w *world) putAsExecutor(bucket, key string, value []byte) {
	w.t.Helper()
	js, err := jetstream.New(w.executor)
	must(w.t, err)
	kv, err := js.KeyValue(w.t.Context(), bucket)
	must(w.t, err)
	_, err = kv.Put(w.t.Context(), key, value)
	must(w.t, err)
}

// lease writes the lease of an executor until the test ends.
func (w *world) lease(l topology.Lease) {
	w.t.Helper()
	js, err := jetstream.New(w.executor)
	must(w.t, err)
	kv, err := js.KeyValue(w.t.Context(), topology.BucketLeases)
	must(w.t, err)
	raw, done := encode(w.t, l), make(chan struct{})
	put := func() { _, err := kv.Put(w.t.Context(), l.Executor, raw); must(w.t, err) }
	put()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(topology.LeaseTTL / 6)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				if _, err := kv.Put(w.t.Context(), l.Executor, raw); err != nil {
					w.t.Error(err)
				}
			}
		}
	}()
	w.t.Cleanup(func() { close(done); <-ended })
}

// waiting returns the field waiting of an execution, or nil if it has none.
func (s *served) waiting(execution string) map[string]any {
	s.t.Helper()
	var e struct {
		Waiting map[string]any `json:"waiting"`
	}
	must(s.t, json.Unmarshal(s.get("/api/executions/"+execution).want(s.t, http.StatusOK).body, &e))
	return e.Waiting
}

// requireWaiting fails the test unless an execution waits for a reason with the wanted fields, and has the remedy of the reason.
func (s *served) requireWaiting(execution string, reason waiting.Reason, want map[string]any) {
	s.t.Helper()
	got := s.waiting(execution)
	d, ok := waiting.Describe(reason)
	if !ok || got["reason"] != string(reason) || got["remedy"] != d.Remedy || got["detail"] == "" {
		s.t.Errorf("%s waits for %v, want %s", execution, got, reason)
	}
	for field, value := range want {
		if got[field] != value {
			s.t.Errorf("%s of %v is %v, want %v", field, got, got[field], value)
		}
	}
}

// requireNoWaiting fails the test if an execution has a reason to wait.
func (s *served) requireNoWaiting(execution, when string) {
	s.t.Helper()
	if got := s.waiting(execution); got != nil {
		s.t.Errorf("%s waits for %v %s", execution, got, when)
	}
}

// TestWaiting_ReportedReasons tests that a report of an executor is shown while it applies: not to a later claim or attempt, and
// not after the end.
func TestWaiting_ReportedReasons(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	w.lease(topology.Lease{Executor: "xtr_1", Provider: "local", Engine: "here"})
	since, until := time.Date(2026, 1, 2, 3, 5, 0, 0, time.UTC), time.Date(2026, 1, 2, 3, 6, 0, 0, time.UTC)
	for reason, c := range map[waiting.Reason]struct {
		entry waiting.Entry
		want  map[string]any
	}{
		waiting.Slot:        {waiting.Entry{Limit: 4}, map[string]any{"limit": 4.0, "used": nil, "until": nil}},
		waiting.TenantLimit: {waiting.Entry{Limit: 1, Used: 1}, map[string]any{"limit": 1.0, "used": 1.0}},
		waiting.Budget:      {waiting.Entry{}, map[string]any{"limit": nil}},
		waiting.Disk:        {waiting.Entry{}, nil},
		waiting.EngineGone:  {waiting.Entry{}, nil},
		waiting.NotBefore:   {waiting.Entry{Until: until}, map[string]any{"until": "2026-01-02T03:06:00Z"}},
	} {
		session := w.session("default")
		execution := w.queue("default", session)
		w.dispatch(session, execution)
		e := c.entry
		e.Execution, e.Reason, e.Since, e.Seen, e.Detail = execution, reason, since, since, "because"
		w.report(e)
		g.requireWaiting(execution, reason, map[string]any{"since": "2026-01-02T03:05:00Z", "detail": "because"})
		g.requireWaiting(execution, reason, c.want)
		w.claim(execution, "xtr_1", "starting", 0)
		g.requireNoWaiting(execution, "after its claim")
		e.Holder, e.Attempt = "xtr_1", 1
		w.report(e)
		g.requireNoWaiting(execution, "before attempt 1")
		w.claim(execution, "xtr_1", "starting", 1)
		g.requireWaiting(execution, reason, nil)
		w.emit("default", session, events.Event{ExecutionID: execution, Data: events.ExecutionCancelled{Reason: "cancel"}})
		g.requireNoWaiting(execution, "after its end")
	}
}

// TestWaiting_DerivedReasons tests the reasons that the gateway reads from the read models and the leases.
func TestWaiting_DerivedReasons(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	session := w.session("default")
	first, second := w.queue("default", session), w.queue("default", session)
	g.requireNoWaiting(first, "before its dispatch")
	w.dispatch(session, first)
	g.requireWaiting(first, waiting.EngineGone, map[string]any{"since": "2026-01-02T03:04:09Z", "detail": "No executor of provider local is alive."})
	w.lease(topology.Lease{Executor: "xtr_other", Provider: "docker", Engine: "here"})
	w.lease(topology.Lease{Executor: "xtr_1", Provider: "local", Engine: "here"})
	g.untilNoWaiting(first)
	w.claim(first, "xtr_1", "running", 1)
	g.requireNoWaiting(first, "while it runs")
	g.requireWaiting(second, waiting.EarlierExecution, map[string]any{"executionId": first, "detail": "Execution " + first + " of the session has phase running."})

	w.exec(`INSERT INTO sandboxes (tenant, session, id, provider, engine, status, created_at) VALUES ('default', $1, 'sbx_1', 'local', 'there', 'ready', now())`, session)
	g.requireNoWaiting(first, "while its executor is alive")
	w.claim(first, "xtr_dead", "running", 1)
	g.requireWaiting(first, waiting.EngineGone, map[string]any{"since": nil, "detail": "The sandbox of the session is on engine there of provider local, for which no executor is alive."})
	w.lease(topology.Lease{Executor: "xtr_2", Provider: "local", Engine: "there"})
	g.untilNoWaiting(first)

	asked, other := newID(t, events.KindApproval), newID(t, events.KindApproval)
	for _, id := range []string{asked, other} {
		w.emit("default", session, events.Event{ExecutionID: first, ConversationID: "main", Data: events.ApprovalRequested{ApprovalID: id, Kind: events.ApprovalTool, ToolName: "Bash"}})
	}
	w.claim(first, "xtr_2", "waiting_for_approval", 1)
	g.requireWaiting(first, waiting.Approval, map[string]any{"approvalId": asked})
	for _, id := range []string{asked, other} {
		w.emit("default", session, events.Event{ExecutionID: first, Data: events.ApprovalDecided{ApprovalID: id, Decision: events.DecisionApprove}})
	}
	g.requireNoWaiting(first, "after the decisions")

	w.claim(first, "xtr_2", "paused", 1)
	g.requireWaiting(first, waiting.Paused, map[string]any{"since": nil})
	w.emit("default", session, events.Event{ExecutionID: first, Data: events.ExecutionPaused{}, Time: time.Date(2026, 1, 2, 4, 0, 0, 0, time.UTC)})
	g.requireWaiting(first, waiting.Paused, map[string]any{"since": "2026-01-02T04:00:00Z"})
}

// untilNoWaiting polls an execution until it has no reason to wait, because the gateway may use leases that are a second old.
func (s *served) untilNoWaiting(execution string) {
	s.t.Helper()
	for deadline := time.Now().Add(time.Minute); s.waiting(execution) != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("%s waits for %v", execution, s.waiting(execution))
		}
	}
}

// TestWaiting_OfAnotherTenant tests that a tenant sees neither the execution nor the wait of another one.
func TestWaiting_OfAnotherTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	acme, other := g.withNewKey(root, "acme"), g.withNewKey(root, "other")
	session := w.session("acme")
	execution := w.queue("acme", session)
	w.dispatch(session, execution)
	w.report(waiting.Entry{Execution: execution, Reason: waiting.Slot, Since: time.Now(), Seen: time.Now(), Detail: "because", Limit: 1})
	acme.requireWaiting(execution, waiting.Slot, nil)
	other.get("/api/executions/"+execution).wantProblem(t, http.StatusNotFound, "EXECUTION_NOT_FOUND", "executionId")
}

// TestWaiting_HostileReports tests that entries that no executor of this build writes are not shown, and break nothing.
func TestWaiting_HostileReports(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	w.lease(topology.Lease{Executor: "xtr_1", Provider: "local", Engine: "here"})
	session := w.session("default")
	execution := w.queue("default", session)
	w.dispatch(session, execution)
	for name, value := range map[string]string{
		"no JSON":                  "{",
		"nothing":                  "",
		"an unknown reason":        string(encode(t, waiting.Entry{Execution: execution, Reason: "magic", Detail: "x"})),
		"of another execution":     string(encode(t, waiting.Entry{Execution: "exe_other", Reason: waiting.Slot, Detail: "x"})),
		"a time of another format": `{"execution":"` + execution + `","reason":"slot","since":"yesterday"}`,
	} {
		w.putAsExecutor(topology.BucketWaits, execution, []byte(value))
		g.requireNoWaiting(execution, "with an entry that is "+name)
	}
	w.report(waiting.Entry{Execution: execution, Reason: waiting.Slot, Detail: strings.Repeat("é", 1<<20)})
	if detail, _ := g.waiting(execution)["detail"].(string); len(detail) == 0 || len(detail) > 2048 {
		t.Errorf("a detail of 2 MiB has %d bytes in the answer", len(detail))
	}
}

// TestWaiting_WithoutTheBucket tests that a gateway whose NATS has only the buckets of an earlier build shows no reported reasons,
// and those of the read models.
func TestWaiting_WithoutTheBucket(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, w.js.DeleteKeyValue(t.Context(), topology.BucketWaits))
	g := w.gateway(gateway.Config{})
	session := w.session("default")
	first, second := w.queue("default", session), w.queue("default", session)
	w.dispatch(session, first)
	g.requireWaiting(first, waiting.EngineGone, nil)
	g.requireWaiting(second, waiting.EarlierExecution, map[string]any{"executionId": first})
	must(t, topology.Provision(t.Context(), w.js, topology.ProvisionConfig{Partitions: topology.DefaultPartitions}))
	w.report(waiting.Entry{Execution: first, Reason: waiting.Slot, Detail: "because", Since: time.Now(), Seen: time.Now()})
	g.requireWaiting(first, waiting.Slot, nil)
}

// TestWaiting_OverGRPC tests that gRPC has the same field, and that lists have none.
func TestWaiting_OverGRPC(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	session := w.session("default")
	execution := w.queue("default", session)
	w.dispatch(session, execution)
	client := spoolv1.NewExecutionsClient(g.conn())
	e, err := client.GetExecution(t.Context(), &spoolv1.GetExecutionRequest{ExecutionId: execution})
	must(t, err)
	if got := e.GetWaiting(); got.GetReason() != string(waiting.EngineGone) || got.GetSince().AsTime() != e.GetDispatchedAt().AsTime() {
		t.Errorf("GetExecution: %v", got)
	}
	list, err := client.ListExecutions(t.Context(), &spoolv1.ListExecutionsRequest{})
	must(t, err)
	if len(list.Executions) != 1 || list.Executions[0].Waiting != nil {
		t.Errorf("ListExecutions: %v", list.Executions)
	}
}
