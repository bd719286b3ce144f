package command

import (
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

func TestSummarizeBlock(t *testing.T) {
	t.Parallel()
	for want, b := range map[string]events.Block{
		"plan Fix it 1 of 2 completed": {Kind: events.KindPlan, Plan: &events.Plan{Title: "Fix it", Items: []events.PlanItem{{Status: events.PlanCompleted}, {Status: events.PlanPending}}}},
		"step write failed too long":   {Kind: events.KindStep, Step: &events.Step{Title: "write", Status: events.StepFailed, ErrorMessage: "too long"}},
		"skill_load pdf":               {Kind: events.KindSkillLoad, Skill: &events.LoadedSkill{Name: "pdf"}},
		"plan 0 of 0 completed":        {Kind: events.KindPlan, Plan: &events.Plan{}},
	} {
		if got := shortenSummary(summarizeBlock(b)); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
