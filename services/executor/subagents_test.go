package executor_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
)

// A sub-agent's skills are in its own instructions, are copied with the agent's skills, and stay the same in every
// attempt.
func TestSubagentSkills_StayForEveryAttempt(t *testing.T) {
	t.Parallel()
	var b *bench
	push := func(name string, n int) {
		b.define(events.Skill, name, n, func(r events.Reference) events.Payload {
			return events.SkillPushed{Ref: r, Name: name, Description: "What " + name + " is for.", Document: "---\nname: " + name + "\n---\nHow to " + name + "."}
		})
	}
	var brought []string // digests of the skills in the sandbox before the first attempt's agent began
	b = newBench(t, func(f *fakeTurn) {
		if f.Query.Attempt == 1 {
			brought = b.provider.hasStock()
			push("pdf", 29)
		}
		exits(2)(f)
	})
	b.skills = fakeSkills{lost: digestOf(23)}
	b.run()
	for i, name := range []string{"pdf", "csv", "lost"} {
		push(name, 21+i)
	}
	refs := func(slugs ...string) (out []events.Reference) {
		for _, s := range slugs {
			out = append(out, events.Reference{Slug: s})
		}
		return out
	}
	s := b.session(of1(b.agent("reviewer", 11, events.AgentSpec{
		Architecture: "claude-code", Instructions: "You review code.", Skills: refs("csv", "lost"), Retries: events.Retries{Attempts: 2, BackoffMs: 2000}, // so that it is claimed again
		MCPServers: []events.MCPServer{{Name: "db", Type: events.MCPTypeStdio, Command: []string{"db"}}},
		Subagents: []events.SubagentSpec{
			{Name: "printer", Instructions: "You print.", Skills: refs("pdf", "csv", "lost"), MCPServers: []string{"db"}}, {Name: "plain", Instructions: "You do nothing."},
		},
	})))
	if l := s.untilEnded(s.post("go")); l.Run.Phase != run.Completed || l.Run.Attempt != 2 {
		t.Fatalf("it ended as %+v", l.Run)
	}
	slices.Sort(brought)
	want := []string{digestOf(21), digestOf(22)}
	slices.Sort(want)
	if !slices.Equal(slices.Compact(brought), want) {
		t.Errorf("the sandbox got the skills %q, want %q", brought, want)
	}
	at := func(n int) string { return "LOCATION: /bin/skills/" + digestOf(n) + "/\n" }
	for i, q := range b.provider.onlyBox().runner.receivedQueries() {
		printer, plain := q.Subagents[0], q.Subagents[1]
		for text, wants := range map[string][]string{
			q.SystemPrompt:       {"You review code.", "### SKILL: csv\n" + at(22), "### SKILL: lost\n\nHow to lost."},
			printer.Instructions: {"You print.\n\n## Available Skills", "### SKILL: pdf\n" + at(21), "### SKILL: csv\n" + at(22), "### SKILL: lost\n\nHow to lost."},
		} {
			for _, want := range wants {
				if !strings.Contains(text, want) {
					t.Errorf("attempt %d: %q is not in %q", i+1, want, text)
				}
			}
		}
		if strings.Contains(q.SystemPrompt, "pdf") || plain.Instructions != "You do nothing." || printer.Skills != nil || len(printer.MCPServers) != 1 {
			t.Errorf("attempt %d: the agent is told %q, the sub-agents are %+v", i+1, q.SystemPrompt, q.Subagents)
		}
		if len(q.Skills) != 2 || q.Skills[0].Unlisted || q.Skills[0].Name != "csv" ||
			q.Skills[1] != (runner.Skill{Name: "pdf", Description: "What pdf is for.", Dir: "/bin/skills/" + digestOf(21), Version: digestOf(21), Unlisted: true}) {
			t.Errorf("attempt %d: skills %+v", i+1, q.Skills)
		}
	}
	is := of[events.ExecutionResolved](s)
	if len(is) != 1 || len(is[0].Skills) != 5 {
		t.Fatalf("resolved %+v", is)
	}
	for i, want := range []struct {
		name, subagent string
		n              int
	}{{"csv", "", 22}, {"lost", "", 23}, {"pdf", "printer", 21}, {"csv", "printer", 22}, {"lost", "printer", 23}} {
		if got := is[0].Skills[i]; got.Name != want.name || got.Subagent != want.subagent || got.Ref.Version != digestOf(want.n) {
			t.Errorf("skill %d: %+v, want %+v", i, got, want)
		}
	}
	told := 0
	for _, e := range of[events.Error](s) {
		if e.Code == "SKILL_ARCHIVE_MISSING" {
			told++
		}
	}
	if told != 2 {
		t.Errorf("that an archive is missing was told %d times in two attempts", told)
	}
	b.noJobs()
}
