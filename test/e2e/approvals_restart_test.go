package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// newCautious starts a cluster whose NATS and Postgres can be stopped, and begins a session of the built-in agent that asks about commands.
func newCautious(t *testing.T) cautious {
	t.Helper()
	c := harness.New(t, harness.Options{Outages: true, Script: script(t, "approvals.yaml"), Executor: executor.Config{AnthropicModel: "known-model", Slots: 2}})
	return asker{architecture: "spool", comment: true}.begin(t, c, "asks", map[string]any{"preset": "ask"})
}

// isAlive reports whether the process runs that the agent of the last execution has.
func (k cautious) isAlive() bool {
	pid := uint32(0)
	for _, w := range k.s.Events {
		if s, ok := w.Event().Data.(events.ExecutionStarted); ok {
			pid = s.PID
		}
	}
	return pid > 0 && syscall.Kill(int(pid), 0) == nil
}

// shownApproval is an approval request as the read models have it.
type shownApproval struct {
	Status    string
	Cause     string
	DecidedBy *struct{ Kind string }
}

// approval returns an approval request as the read models have it; the zero value if the gateway has no answer.
func (k cautious) approval(r events.ApprovalRequested) (a shownApproval) {
	k.t.Helper()
	var answer json.RawMessage
	if status := k.c.Call(0, "GET", "/api/approvals/"+r.ApprovalID, nil, &answer); status != http.StatusOK {
		return a
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		k.t.Fatal(err)
	}
	return a
}

// asksUnseen posts a text, and returns the request of the agent from the log: without a projector no stream has it.
func (k cautious) asksUnseen(text string) (execution string, r events.ApprovalRequested) {
	k.t.Helper()
	execution = k.c.PostMessage(k.session, text)
	harness.Eventually(k.t, "the log has the request", func() bool {
		l, err := eventlog.Sessions{Log: k.c.Servers.Log}.Load(k.t.Context(), harness.DefaultTenant, k.session, eventlog.LeaderOnly)
		if err != nil {
			k.t.Fatal(err)
		}
		if l.Run.Execution != execution || len(l.Run.Approvals) == 0 {
			return false
		}
		r.ApprovalID = l.Run.Approvals[0].ID
		return true
	})
	return execution, r
}

// rejoin opens a new stream, because the former one ended with its gateway.
func (k cautious) rejoin() {
	k.t.Helper()
	harness.Eventually(k.t, "a stream opens", func() bool {
		s, err := k.c.JoinSocket(0, k.session, k.s)
		if err == nil {
			k.s.Close()
			k.s = s
		}
		return err == nil
	})
}

// mustHaveRunOnce reads the stream to the end of an execution that appends a line to a file. The agent must have been started once, have asked once,
// and have received one decision.
func (k cautious) mustHaveRunOnce(execution, file string) {
	k.t.Helper()
	k.rejoin()
	x := k.mustEnd(execution)
	starts, asked := len(of[events.ExecutionStarted](x)), len(of[events.ApprovalRequested](x))
	decided, resolved := len(of[events.ApprovalDecided](x)), len(of[events.ApprovalResolved](x))
	if starts != 1 || asked != 1 || decided != 1 || resolved != 1 {
		k.t.Errorf("%d starts, %d requests, %d decisions, %d received, want one of each", starts, asked, decided, resolved)
	}
	if raw, err := os.ReadFile(filepath.Join(k.c.WorkspaceFolder(k.session), file)); err != nil || string(raw) != "ran\n" {
		k.t.Errorf("the command left %q, %v, want one line", raw, err)
	}
}

// TestApprovals_SurviveRestarts tests that a request waits while every service, NATS and Postgres are restarted, and that the decision then reaches
// the same process of the agent, once.
func TestApprovals_SurviveRestarts(t *testing.T) {
	t.Parallel()
	k := newCautious(t)
	execution, list := k.asks("run echo ran >> once.txt", 1)
	for _, r := range []struct {
		what        string
		stop, start func()
	}{
		{"the gateway", k.c.StopGateways, func() { k.c.StartGateway() }},
		{"the session service", k.c.StopSessions, func() { k.c.StartSessionService("again") }},
		{"the projector", k.c.StopProjectors, func() { k.c.StartProjector() }},
		{"NATS", k.c.Outage.StopNATS, k.c.Outage.StartNATS},
		{"Postgres", k.c.Outage.StopPostgres, k.c.Outage.StartPostgres},
		{"the executor", k.c.StopExecutors, func() { k.c.StartExecutor() }},
	} {
		r.stop()
		if !k.isAlive() || k.created("once.txt") {
			t.Fatalf("without %s the agent is alive: %v, the command ran: %v", r.what, k.isAlive(), k.created("once.txt"))
		}
		r.start()
		harness.Eventually(t, "after a restart of "+r.what+" the request is pending", func() bool { return k.approval(list[0]).Status == "pending" })
	}
	k.decideEventually("everything has been restarted", list[0], http.StatusServiceUnavailable)
	k.mustHaveRunOnce(execution, "once.txt")
	harness.Eventually(t, "the read models have the approval with its actor", func() bool {
		a := k.approval(list[0])
		return a.Status == "approved" && a.Cause == events.ResolvedByPerson && a.DecidedBy != nil && a.DecidedBy.Kind != ""
	})
	k.c.DeleteSession(k.session) // the services that were started last end before the cleanup of sessions
}

// TestApprovals_DecidedDuringOutages tests decisions while NATS has just come back, while no executor runs and while no projector runs.
func TestApprovals_DecidedDuringOutages(t *testing.T) {
	t.Parallel()
	k := newCautious(t)
	for _, c := range []struct {
		what, file string
		stop       func() // called before the decision
		start      func() // called after it; nil for nothing
	}{
		{"NATS has just come back", "nats.txt", func() { k.c.Outage.StopNATS(); k.c.Outage.StartNATS() }, nil},
		{"no executor runs", "executor.txt", k.c.StopExecutors, func() { k.c.StartExecutor() }},
		{"no projector runs", "projector.txt", k.c.StopProjectors, func() { k.c.StartProjector() }},
	} {
		execution, list := k.asks("run echo ran >> "+c.file, 1)
		c.stop()
		k.decideEventually(c.what, list[0], http.StatusServiceUnavailable)
		if c.start != nil {
			c.start()
		}
		k.mustHaveRunOnce(execution, c.file)
	}
	k.c.StopProjectors()
	execution, unseen := k.asksUnseen("run echo ran >> behind.txt")
	status, code := k.decide(unseen, map[string]any{"decision": "approve"})
	if status != http.StatusServiceUnavailable && status != http.StatusNotFound {
		t.Errorf("a decision on a request that the read models do not have: %d %s, want 503 or 404", status, code)
	}
	k.c.StartProjector()
	k.decideEventually("the projector is back", unseen, http.StatusServiceUnavailable, http.StatusNotFound)
	k.mustHaveRunOnce(execution, "behind.txt")
	k.c.DeleteSession(k.session)
}

// decideEventually approves a request. It repeats a decision that is refused with one of the statuses.
func (k cautious) decideEventually(what string, r events.ApprovalRequested, refusals ...int) {
	k.t.Helper()
	harness.Eventually(k.t, what+", and the decision is accepted", func() bool {
		status, code := k.decide(r, map[string]any{"decision": "approve"})
		if status != http.StatusAccepted && !slices.Contains(refusals, status) {
			k.t.Fatalf("%s: %d %s", what, status, code)
		}
		return status == http.StatusAccepted
	})
}
