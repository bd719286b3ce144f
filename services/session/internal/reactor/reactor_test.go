package reactor

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/spoolhq/spool/pkg/bus/bustest"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
)

// TestHandlers_RefuseToRunWithoutTheRouter tests that the handlers do nothing when they are called without the
// Router.
func TestHandlers_RefuseToRunWithoutTheRouter(t *testing.T) {
	r := New(Config{})
	bustest.RequireUnroutedRefused(t, r.HandleCommit, []byte(`{"events":[{"type":"session_created"}]}`))
	bustest.RequireUnroutedRefused(t, r.HandleTimer, []byte(`{"tenant":"default","session":"ses_01JGK0000000000000000000AA"}`))
}

// TestMatters_ReportsEventsThatMakeWorkDue tests that the reactor looks at events that can make something due, and
// skips all others.
func TestMatters_ReportsEventsThatMakeWorkDue(t *testing.T) {
	t.Parallel()
	quiet := map[events.Type]bool{}
	for _, p := range []events.Payload{
		events.ExecutionStarted{}, events.AttemptFailed{}, events.SandboxReplaced{}, events.SandboxTerminated{}, events.SandboxFailed{},
		events.BlockStart{}, events.BlockUpdate{}, events.BlockComplete{}, events.SubagentSpawned{}, events.SubagentCompleted{},
		events.PermissionDecided{}, events.TranscriptWritten{}, events.MetadataUpdate{}, events.Log{}, events.Error{}, events.WatchdogWarned{}, events.LoopDetected{},
		events.SandboxPaused{}, events.SandboxResumed{}, events.SandboxHealth{}, events.SandboxUsage{}, events.FileCreated{}, events.FileModified{}, events.FileDeleted{},
		events.FilesApplied{}, events.WorkspaceSyncStarted{}, events.WorkspaceSynced{}, events.WorkspaceTrimmed{}, events.WorkspaceRestored{}, events.EgressDenied{}, events.ModelCalled{},
		events.KeyCreated{}, events.KeyRevoked{}, events.AgentApplied{}, events.AgentRemoved{}, events.InstanceApplied{}, events.InstanceRemoved{},
		events.EnvironmentApplied{}, events.EnvironmentRemoved{}, events.SkillPushed{}, events.SkillTagged{}, events.SkillRemoved{}, events.ExecutionResolved{},
		events.TenantBudgetSet{}, events.TenantBudgetRemoved{}, events.TenantLimitsSet{}, events.TenantLimitsRemoved{}, events.ExecutionAttached{}, events.ExecutionHandedOver{},
		events.RunRetired{}, events.ContentRemoved{}, events.ApprovalRequested{}, events.AgentDenied{},
	} {
		quiet[p.EventType()] = true
	}
	for _, entry := range events.EventTypes() {
		got, err := summarizeCommit([]byte(`{"events":[{"type":"` + string(entry.Type) + `","executionId":"x"}]}`))
		if err != nil || got.matters == quiet[entry.Type] || (len(got.ended) == 1) != events.IsTerminal(entry.Type) {
			t.Errorf("%s is read as %+v, %v", entry.Type, got, err)
		}
	}
	if got, err := summarizeCommit([]byte(`{"events":[{"type":"something_new"}]}`)); got.matters || err != nil {
		t.Errorf("an unknown type matters: %v, %v", got, err)
	}
	if _, err := summarizeCommit([]byte(`{`)); err == nil {
		t.Error("half a commit was read")
	}
}

// goneFor is the time for which docker's engine "e" has had no lease.
type goneFor time.Duration

func (g goneFor) EngineGoneFor(provider, engine string) time.Duration {
	if provider == "docker" && engine == "e" {
		return time.Duration(g)
	}
	return 0
}

func (goneFor) HasLease(context.Context, string) (bool, error) { return false, nil }

// subjects is a publisher that records the subjects.
type subjects []string

func (s *subjects) Publish(topic string, _ ...*message.Message) error {
	*s = append(*s, topic)
	return nil
}

func (*subjects) Close() error { return nil }

func TestPut_OffersTheJobToOthersAfterEngineGone(t *testing.T) {
	t.Parallel()
	const limit = time.Minute
	l := &eventlog.SessionState{Life: session.State{Provider: "docker"}, Run: run.State{Sandbox: run.Sandbox{Provider: "docker", Engine: "e"}}}
	for name, c := range map[string]struct {
		gone time.Duration
		want string
	}{
		"just before the limit": {limit - 1, topology.EngineJobSubject("docker", "e")},
		"at the limit":          {limit, topology.ProviderJobSubject("docker")},
	} {
		var jobs subjects
		r := New(Config{Publisher: &jobs, Leases: goneFor(c.gone), EngineGone: limit, Published: func() {}})
		if err := r.storeJob(t.Context(), l, "job"); err != nil || len(jobs) != 1 || jobs[0] != c.want {
			t.Errorf("%s: jobs on %v, error %v, want one on %s", name, jobs, err, c.want)
		}
	}
}
