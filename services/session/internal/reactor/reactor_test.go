package reactor

import (
	"testing"

	"github.com/spoolhq/spool/pkg/bus/bustest"
	"github.com/spoolhq/spool/pkg/events"
)

// TestHandlers_RefuseToRunWithoutTheRouter tests that the handlers do nothing when they are called without the
// Router.
func TestHandlers_RefuseToRunWithoutTheRouter(t *testing.T) {
	r := New(Config{})
	bustest.RefusesUnrouted(t, r.Commit, []byte(`{"events":[{"type":"session_created"}]}`))
	bustest.RefusesUnrouted(t, r.Timer, []byte(`{"tenant":"default","session":"ses_01JGK0000000000000000000AA"}`))
}

// TestMatters_ReportsEventsThatMakeWorkDue tests that the reactor looks at events that can make something due, and
// skips all others.
func TestMatters_ReportsEventsThatMakeWorkDue(t *testing.T) {
	t.Parallel()
	quiet := map[events.Type]bool{}
	for _, p := range []events.Payload{
		events.ExecutionStarted{}, events.AttemptFailed{}, events.SandboxReplaced{}, events.SandboxTerminated{}, events.SandboxFailed{},
		events.BlockStart{}, events.BlockUpdate{}, events.BlockComplete{}, events.SubagentSpawned{}, events.SubagentCompleted{},
		events.PermissionDecided{}, events.TranscriptWritten{}, events.MetadataUpdate{}, events.Log{}, events.Error{}, events.WatchdogWarned{},
		events.SandboxPaused{}, events.SandboxResumed{}, events.SandboxHealth{}, events.SandboxUsage{}, events.FileCreated{}, events.FileModified{}, events.FileDeleted{},
		events.FilesApplied{}, events.WorkspaceSyncStarted{}, events.WorkspaceSynced{}, events.WorkspaceTrimmed{}, events.WorkspaceRestored{}, events.EgressDenied{}, events.ModelCalled{},
		events.KeyCreated{}, events.KeyRevoked{}, events.AgentApplied{}, events.AgentRemoved{}, events.InstanceApplied{}, events.InstanceRemoved{},
		events.EnvironmentApplied{}, events.EnvironmentRemoved{}, events.SkillPushed{}, events.SkillTagged{}, events.SkillRemoved{}, events.ExecutionResolved{},
		events.TenantBudgetSet{}, events.TenantBudgetRemoved{}, events.TenantLimitsSet{}, events.TenantLimitsRemoved{}, events.ExecutionAttached{}, events.ExecutionHandedOver{},
		events.RunRetired{}, events.ContentRemoved{},
	} {
		quiet[p.EventType()] = true
	}
	for _, entry := range events.Catalogue() {
		got, err := summarize([]byte(`{"events":[{"type":"` + string(entry.Type) + `","executionId":"x"}]}`))
		if err != nil || got.matters == quiet[entry.Type] || (len(got.ended) == 1) != events.Terminal(entry.Type) {
			t.Errorf("%s is read as %+v, %v", entry.Type, got, err)
		}
	}
	if got, err := summarize([]byte(`{"events":[{"type":"something_new"}]}`)); got.matters || err != nil {
		t.Errorf("an unknown type matters: %v, %v", got, err)
	}
	if _, err := summarize([]byte(`{`)); err == nil {
		t.Error("half a commit was read")
	}
}
