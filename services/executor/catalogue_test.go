package executor_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

// digestOf returns a digest for a definition. It only has to differ from others.
func digestOf(n int) string { return strings.Repeat("0", 56) + fmt.Sprintf("%08x", n) }

// define stores a version of a catalogue entry, as the session and skills services do.
func (b *bench) define(kind events.Aspect, slug string, n int, payload func(events.Reference) events.Payload) events.Reference {
	b.t.Helper()
	ref := events.Reference{Slug: slug, Version: digestOf(n)}
	b.defineAt(kind, ref, payload(ref))
	return ref
}

func (b *bench) defineAt(kind events.Aspect, ref events.Reference, payload events.Payload) {
	b.t.Helper()
	entries := eventlog.Catalogue{Log: b.log}
	e, err := entries.Load(b.ctx, ref.Subject(kind, tenant), eventlog.LeaderOnly)
	if err != nil {
		b.t.Fatal(err)
	}
	id := mint(b.t, events.KindCommand)
	list, err := versions.Decide(e.State, versions.ApplyVersion{Version: ref.Version, Data: payload})
	if err == nil {
		err = entries.Append(b.ctx, &e, events.Actor{Kind: "service", ID: "test"}, id, list)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) agent(slug string, n int, spec events.AgentSpec) events.Reference {
	return b.define(events.Agent, slug, n, func(r events.Reference) events.Payload { return events.AgentApplied{Ref: r, Spec: spec} })
}

func (b *bench) environment(slug string, n int, variables map[string]events.Variable) events.Reference {
	return b.define(events.Environment, slug, n, func(r events.Reference) events.Payload {
		return events.EnvironmentApplied{Ref: r, Spec: events.EnvironmentSpec{Variables: variables}}
	})
}

func of1(refs ...events.Reference) func(*events.SessionCreated) {
	return func(c *events.SessionCreated) {
		c.AgentRef, c.Agent = refs[0], refs[0].Slug
		c.Environments = refs[1:]
	}
}

// postWith posts a message with its own variables.
func (s *talk) postWith(text string, variables map[string]events.Variable) string {
	s.b.t.Helper()
	execution := mint(s.b.t, events.KindExecution)
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.PostQuery{CommandBase: base, ExecutionID: execution, Content: text, ActiveEnded: l.RunView().ActiveEnded, Environment: variables}
	})
	s.job()
	return execution
}

// vault is references.Secrets in memory.
type vault struct {
	mu     sync.Mutex
	values map[string]string
	away   int // number of calls that fail
}

func (v *vault) Open(_ context.Context, tenant, key string) (string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.away > 0 {
		v.away--
		return "", secret.ErrUnavailable
	}
	value, ok := v.values[tenant+"/"+key]
	if !ok {
		return "", errors.New("the secret's value is gone")
	}
	return value, nil
}

// fakeSkills is references.Skills in memory.
type fakeSkills struct{ lost string }

func (s fakeSkills) Provide(_ context.Context, digest string) (string, error) {
	if digest == s.lost {
		return "", references.ErrNoArchive
	}
	return "/bin/skills/" + digest, nil
}

// The query has every field of the agent's definition, and the log has the resolved references before the agent begins.
func TestResolution_QueryHasTheWholeDefinition(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, answers)
	b.secrets = &vault{values: map[string]string{tenant + "/s1": "hunter2-hunter2"}}
	b.skills = fakeSkills{lost: digestOf(22)}
	b.run()
	for i, name := range []string{"pdf", "lost"} {
		b.define(events.Skill, name, 21+i, func(r events.Reference) events.Payload {
			return events.SkillPushed{Ref: r, Name: name, Description: "What " + name + " is for.", Document: "---\nname: " + name + "\n---\nHow to " + name + "."}
		})
	}
	env := b.environment("staging", 31, map[string]events.Variable{
		"HOST": {Value: "staging.example"}, "TOKEN": {Secret: true, Sealed: "s1"}, "COLOR": {Value: "green"},
	})
	agent := b.agent("reviewer", 11, events.AgentSpec{
		Architecture: "claude-code", Instructions: "You review code.", MemoryFile: "Mind the tests.", Skills: []events.Reference{{Slug: "pdf"}, {Slug: "lost"}},
		Tools: events.ToolChoice{Deny: []string{"WebSearch"}}, Subagents: []events.SubagentSpec{{Name: "helper"}}, Commands: []events.CommandSpec{{Name: "go", Prompt: "Go."}},
		MCPServers: []events.MCPServer{
			{Name: "db", Type: events.MCPTypeStdio, Command: []string{"db", "--host=${HOST}"}, Env: map[string]string{"T": "x${TOKEN}"}},
			{Name: "web", Type: events.MCPTypeHTTP, URL: "https://${HOST}/mcp", Headers: map[string]string{"Authorization": "Bearer ${TOKEN}"}, TimeoutMs: 1000},
		},
		Environment: map[string]events.Declaration{"COLOR": {Value: "red"}, "SIZE": {Value: "big"}, "HOST": {Required: true}},
		Limits:      events.Limits{Turns: 7},
	})
	s := b.session(of1(agent, env.WithoutVersion()))
	execution := s.postWith("go", map[string]events.Variable{"SIZE": {Value: "small"}})
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed {
		t.Fatalf("it ended as %s", l.Run.Phase)
	}
	q := b.provider.onlyBox().runner.receivedQueries()[0]
	wantPrompt := "You review code.\n\n## Available Skills\n\n### SKILL: pdf\nLOCATION: /bin/skills/" + digestOf(21) + "/\n\nHow to pdf.\n\n### SKILL: lost\n\nHow to lost.\n"
	if q.SystemPrompt != wantPrompt {
		t.Errorf("the prompt is %q, want %q", q.SystemPrompt, wantPrompt)
	}
	if q.MemoryFile != "Mind the tests." || q.Tools.Deny[0] != "WebSearch" || q.Subagents[0].Name != "helper" || q.Commands[0].Prompt != "Go." || q.MaxTurns != 7 {
		t.Errorf("the query is %+v", q)
	}
	if len(q.Skills) != 1 || q.Skills[0] != (runner.Skill{Name: "pdf", Description: "What pdf is for.", Dir: "/bin/skills/" + digestOf(21), Version: digestOf(21)}) {
		t.Errorf("skills %+v", q.Skills)
	}
	for name, want := range map[string]string{"HOST": "staging.example", "TOKEN": "hunter2-hunter2", "COLOR": "green", "SIZE": "small"} {
		if q.Env[name] != want {
			t.Errorf("%s is %q, want %q", name, q.Env[name], want)
		}
	}
	if !slices.Equal(q.Redact, []string{"hunter2-hunter2"}) {
		t.Errorf("to be redacted: %q", q.Redact)
	}
	db, web := q.MCPServers[0], q.MCPServers[1]
	if db.Command[1] != "--host=staging.example" || db.Env["T"] != "xhunter2-hunter2" || db.TimeoutMs != 30_000 {
		t.Errorf("the stdio server is %+v", db)
	}
	if web.URL != "https://staging.example/mcp" || web.Headers["Authorization"] != "Bearer hunter2-hunter2" || web.TimeoutMs != 1000 {
		t.Errorf("the http server is %+v", web)
	}
	is := of[events.ExecutionResolved](s)
	if len(is) != 1 || is[0].Agent != agent || !slices.Equal(is[0].Environments, []events.Reference{env}) || is[0].Skills[0].Ref.Version != digestOf(21) ||
		!slices.Equal(is[0].MCPServers, []string{"db", "web"}) {
		t.Fatalf("resolved %+v", is)
	}
	from := map[string]string{}
	for _, v := range is[0].Variables {
		from[v.Name] = v.From
		if v.Secret != (v.Name == "TOKEN") || v.Secret && v.Value != "" {
			t.Errorf("variable %+v", v)
		}
	}
	if want := map[string]string{"COLOR": env.String(), "HOST": env.String(), "TOKEN": env.String(), "SIZE": "run"}; !maps.Equal(from, want) {
		t.Errorf("they come from %v, want %v", from, want)
	}
	all := types(s.events())
	if strings.Index(all, "execution_resolved") > strings.Index(all, "execution_started") {
		t.Errorf("the agent began before: %s", all)
	}
	var told []string
	for _, e := range of[events.Error](s) {
		told = append(told, e.Code)
	}
	if !slices.Equal(told, []string{"SKILL_ARCHIVE_MISSING"}) {
		t.Errorf("told %v", told)
	}
	b.noJobs()
}

// The resolution of an execution stays the same for all its attempts and claims, although catalogue entries change
// meanwhile.
func TestResolution_StaysForAllAttempts(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	a := b.run()
	env := b.environment("e", 1, map[string]events.Variable{"V": {Value: "one"}})
	agent := b.agent("a", 2, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things."})
	s := b.session(of1(agent, env.WithoutVersion()))
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	b.environment("e", 3, map[string]events.Variable{"V": {Value: "two"}})
	a.wire.kill()
	b.run()
	s.until("the other has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
	first := b.provider.onlyBox().runner
	first.die() // its sandbox goes too
	s.until("it starts again", func(l *eventlog.SessionState) bool { return l.Run.Attempt == 2 })
	allow <- struct{}{}
	allow <- struct{}{}
	s.untilEnded(execution)
	if got := of[events.ExecutionResolved](s); len(got) != 1 || got[0].Environments[0] != env {
		t.Errorf("resolved %+v", got)
	}
	var seen []string
	for _, r := range append(first.receivedQueries(), b.provider.onlyBox().runner.receivedQueries()...) {
		seen = append(seen, r.Env["V"])
	}
	if !slices.Equal(seen, []string{"one", "one"}) {
		t.Errorf("V was %v", seen)
	}
	next := s.post("again")
	allow <- struct{}{}
	allow <- struct{}{}
	s.untilEnded(next)
	if got := of[events.ExecutionResolved](s); len(got) != 2 || got[1].Environments[0].Version != digestOf(3) {
		t.Errorf("the next execution resolved %+v", got)
	}
}

// An execution whose references do not resolve fails before a sandbox is created, and the error says why.
func TestResolution_FailureEndsTheExecution(t *testing.T) {
	t.Parallel()
	base := events.AgentSpec{Architecture: "claude-code", Instructions: "You do things."}
	for name, c := range map[string]struct {
		spec      func(*events.AgentSpec)
		layers    []events.Reference
		variables map[string]events.Variable
		code      string
		says      string
	}{
		"a missing environment": {layers: []events.Reference{{Slug: "none"}}, code: "ENVIRONMENT_NOT_FOUND", says: "none"},
		"a missing skill":       {spec: func(s *events.AgentSpec) { s.Skills = []events.Reference{{Slug: "gone"}} }, code: "SKILL_NOT_FOUND", says: "gone"},
		"a missing variable": {spec: func(s *events.AgentSpec) {
			s.Environment = map[string]events.Declaration{"WANTED": {Required: true}}
		}, code: "ENVIRONMENT_MISSING", says: "WANTED"},
		"a placeholder without a value": {spec: func(s *events.AgentSpec) {
			s.MCPServers = []events.MCPServer{{Name: "m", Type: "stdio", Command: []string{"m", "${NOWHERE}"}}}
		}, code: "ENVIRONMENT_MISSING", says: "NOWHERE"},
		"a reserved name":         {variables: map[string]events.Variable{"SPOOL_X": {Value: "1"}}, code: "ENVIRONMENT_RESERVED", says: "SPOOL_X"},
		"a secret that is gone":   {variables: map[string]events.Variable{"S": {Secret: true, Sealed: "none"}}, code: "SECRET_UNREADABLE", says: "variable S"},
		"two versions of the one": {layers: []events.Reference{{Slug: "e", Version: digestOf(1)}, {Slug: "e"}}, code: "ENVIRONMENT_CONFLICT", says: "two versions"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, answers)
			b.secrets = &vault{}
			b.run()
			b.environment("e", 1, map[string]events.Variable{"A": {Value: "1"}})
			b.environment("e", 2, map[string]events.Variable{"A": {Value: "2"}})
			spec := base
			if c.spec != nil {
				c.spec(&spec)
			}
			s := b.session(of1(append([]events.Reference{b.agent("a", 5, spec)}, c.layers...)...))
			execution := s.postWith("go", c.variables)
			s.untilEnded(execution)
			failed := of[events.ExecutionFailed](s)
			if len(failed) != 1 || failed[0].Code != c.code || !strings.Contains(failed[0].Message, c.says) {
				t.Errorf("it failed with %+v", failed)
			}
			if b.provider.made != 0 {
				t.Errorf("%d sandboxes were made", b.provider.made)
			}
			b.noJobs()
		})
	}
}

// A store of secrets that does not answer for some time does not end an execution.
func TestSecrets_WaitForTheStore(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	v := &vault{values: map[string]string{tenant + "/own": "own-value"}, away: 2}
	b.secrets = v
	b.run()
	s := b.session(of1(b.agent("a", 2, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things."})))
	s.untilEnded(s.postWith("go", map[string]events.Variable{"X": {Secret: true, Sealed: "own"}}))
	if failed := of[events.ExecutionFailed](s); len(failed) != 0 || len(of[events.ExecutionCompleted](s)) != 1 || v.away != 0 {
		t.Errorf("it failed with %+v; %d times away are left", failed, v.away)
	}
}

// The secrets of an execution and of an environment are not in the log.
func TestSecrets_AreNotInTheLog(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	v := &vault{values: map[string]string{tenant + "/own": "own-value", tenant + "/env": "env-value"}}
	b.secrets = v
	b.run()
	env := b.environment("e", 1, map[string]events.Variable{"E": {Secret: true, Sealed: "env"}})
	s := b.session(of1(b.agent("a", 2, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things."}), env))
	s.untilEnded(s.postWith("go", map[string]events.Variable{"X": {Secret: true, Sealed: "own"}}))
	for _, e := range s.events() {
		raw, err := e.MarshalJSON()
		if err != nil || strings.Contains(string(raw), "own-value") || strings.Contains(string(raw), "env-value") {
			t.Errorf("the log has %s, %v", raw, err)
		}
	}
}

// With a proxy, only the proxy gets the headers of MCP servers, and it gets them again after it has forgotten them.
func TestServers_OnlyTheProxyGetsHeaders(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.egress = &fakeEgress{}
	b.secrets = &vault{values: map[string]string{tenant + "/s1": "hunter2-hunter2"}}
	b.run()
	env := b.environment("e", 1, map[string]events.Variable{"TOKEN": {Secret: true, Sealed: "s1"}})
	agent := b.agent("a", 2, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things.", MCPServers: []events.MCPServer{
		{Name: "web", Type: events.MCPTypeHTTP, URL: "https://mcp.example/x", Headers: map[string]string{"Authorization": "Bearer ${TOKEN}", "Accept": "application/json"}},
		{Name: "own", Type: events.MCPTypeStdio, Command: []string{"own"}},
	}})
	s := b.session(of1(agent, env))
	execution := s.post("go")
	s.untilStarted()
	q := b.provider.onlyBox().runner.receivedQueries()[0]
	if web := q.MCPServers[0]; web.URL != "http://127.0.0.1:7070/mcp/web" || len(web.Headers) != 0 {
		t.Errorf("the agent is told %+v", web)
	}
	want := api.MCPServer{Name: "web", URL: "https://mcp.example/x", Headers: map[string]string{"Authorization": "Bearer hunter2-hunter2", "Accept": "application/json"}, Secrets: []string{"hunter2-hunter2"}}
	told := func() (n int) {
		b.egress.mu.Lock()
		defer b.egress.mu.Unlock()
		for _, g := range b.egress.grants {
			if len(g.Upstreams) == 1 && g.Upstreams[0].Name == want.Name && g.Upstreams[0].URL == want.URL && maps.Equal(g.Upstreams[0].Headers, want.Headers) && slices.Equal(g.Upstreams[0].Secrets, want.Secrets) {
				n++
			}
		}
		return n
	}
	if told() != 1 {
		t.Errorf("the proxy was told %+v", b.egress.grants)
	}
	b.egress.say(execution, events.EgressDenied{Code: "UNKNOWN_SERVER", Host: "mcp/other"}, events.EgressDenied{Code: "UNKNOWN_SERVER", Host: "mcp/web"})
	b.until("it is told again", func() bool { return told() == 2 })
	s.interrupt()
	s.untilEnded(execution)
	b.noJobs()
}

// An execution that has exhausted a limit of its agent is stopped, and the error names the limit. The proxy gets the
// limits.
func TestBudgets_StopTheExecution(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limits events.Limits
		line   events.Payload
		code   string
		says   string
	}{
		"tokens":                 {events.Limits{Tokens: 100}, events.ModelCalled{Usage: events.Usage{InputTokens: 90, CacheReadTokens: 10}}, "BUDGET_EXCEEDED", "100 tokens, and its budget is 100"},
		"dollars":                {events.Limits{BudgetUSD: 0.5}, events.ModelCalled{CostUSD: 0.75}, "BUDGET_EXCEEDED", "$0.7500, and its budget is $0.5000"},
		"as the proxy says":      {events.Limits{BudgetUSD: 0.5}, events.EgressDenied{Code: "BUDGET_EXHAUSTED", Message: "no price for it"}, "BUDGET_EXCEEDED", "no price for it"},
		"not yet":                {events.Limits{Tokens: 101}, events.ModelCalled{Usage: events.Usage{InputTokens: 100}}, "", ""},
		"none":                   {events.Limits{}, events.ModelCalled{Usage: events.Usage{InputTokens: 4e9}}, "", ""},
		"of another execution's": {events.Limits{Tokens: 100}, nil, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, polite)
			b.egress = &fakeEgress{}
			b.run()
			s := b.session(of1(b.agent("a", 2, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things.", Limits: c.limits})))
			if c.line == nil { // what came before does not count
				first := s.post("before")
				s.untilStarted()
				b.egress.say(first, events.ModelCalled{Usage: events.Usage{InputTokens: 99}})
				b.until("it is counted", func() bool { return s.load().Run.Metered.Tokens == 99 })
				s.interrupt()
				s.untilEnded(first)
				c.line = events.ModelCalled{Usage: events.Usage{InputTokens: 50}}
			}
			execution := s.post("go")
			b.until("it runs", func() bool { l := s.load(); return l.Run.Execution == execution && l.Run.Phase == run.Running })
			b.egress.mu.Lock()
			told := b.egress.grants[len(b.egress.grants)-1].Budgets
			b.egress.mu.Unlock()
			if want := c.limits.Tokens > 0 || c.limits.BudgetUSD > 0; want != (len(told) == 1) || want && (told[0].Account != execution || told[0].Limit != events.Budget{Tokens: uint64(c.limits.Tokens), CostUSD: c.limits.BudgetUSD}) {
				t.Errorf("the proxy is told %+v", told)
			}
			b.egress.say(execution, c.line)
			if c.code == "" {
				b.until("it is counted", func() bool { return s.load().Run.Metered.Tokens > 0 })
				s.interrupt()
			}
			s.untilEnded(execution)
			failed := of[events.ExecutionFailed](s)
			if c.code == "" && len(failed) > 0 || c.code != "" && (len(failed) != 1 || failed[0].Code != c.code || !strings.Contains(failed[0].Message, c.says)) {
				t.Errorf("it failed with %+v", failed)
			}
			b.noJobs()
		})
	}
}

// Of a removed version of a skill only SKILL.md is used, if the agent names the version by its digest. A reference by
// tag or without a version fails.
func TestRemovedSkill_OnlyItsTextIsUsed(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.skills = fakeSkills{}
	b.run()
	ref := b.define(events.Skill, "pdf", 7, func(r events.Reference) events.Payload {
		return events.SkillPushed{Ref: r, Name: "pdf", Description: "PDFs.", Document: "---\nname: pdf\n---\nHow to pdf."}
	})
	entries := eventlog.Catalogue{Log: b.log}
	e, err := entries.Load(b.ctx, ref.Subject(events.Skill, tenant), eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	id := mint(t, events.KindCommand)
	list, err := versions.Decide(e.State, versions.RemoveEntry{Version: ref.Version, Data: events.SkillRemoved{Ref: ref}})
	if err == nil {
		err = entries.Append(b.ctx, &e, events.Actor{Kind: "service", ID: "test"}, id, list)
	}
	if err != nil {
		t.Fatal(err)
	}
	spec := events.AgentSpec{Architecture: "claude-code", Instructions: "You do things.", Skills: []events.Reference{ref}}
	s := b.session(of1(b.agent("pinned", 8, spec)))
	s.untilEnded(s.post("go"))
	q := b.provider.onlyBox().runner.receivedQueries()[0]
	if !strings.Contains(q.SystemPrompt, "How to pdf.") || strings.Contains(q.SystemPrompt, "LOCATION") || len(q.Skills) != 0 {
		t.Errorf("the agent is told %q and has %+v", q.SystemPrompt, q.Skills)
	}
	if told := of[events.Error](s); len(told) != 1 || told[0].Code != "SKILL_REMOVED" {
		t.Errorf("told %+v", told)
	}
	spec.Skills = []events.Reference{ref.WithoutVersion()}
	loose := b.session(of1(b.agent("loose", 9, spec)))
	loose.untilEnded(loose.post("go"))
	if failed := of[events.ExecutionFailed](loose); len(failed) != 1 || failed[0].Code != "SKILL_NOT_FOUND" {
		t.Errorf("it failed with %+v", failed)
	}
	b.noJobs()
}

// Every tenant can use an environment of the platform, with its secrets, and no environment of another tenant.
func TestPlatformEnvironment_IsForEveryTenant(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.secrets = &vault{values: map[string]string{"platform/platform.e.s1": "shared-value", "other/other.e.s2": "foreign-value"}}
	b.run()
	shared := events.Reference{Scope: events.ScopePlatform, Slug: "shared", Version: digestOf(1)}
	b.defineAt(events.Environment, shared, events.EnvironmentApplied{Ref: shared, Spec: events.EnvironmentSpec{Variables: map[string]events.Variable{"S": {Secret: true, Sealed: "platform.e.s1"}}}})
	agent := b.agent("a", 2, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things."})
	s := b.session(of1(agent, shared.WithoutVersion()))
	s.untilEnded(s.post("go"))
	if q := b.provider.onlyBox().runner.receivedQueries()[0]; q.Env["S"] != "shared-value" {
		t.Errorf("S is %q", q.Env["S"])
	}
	for _, sealed := range []string{"other.e.s2", "platform.e.s1"} { // an environment of the tenant names a secret that is not the tenant's
		own := b.environment("own", 3+len(sealed), map[string]events.Variable{"S": {Secret: true, Sealed: sealed}})
		thief := b.session(of1(agent, own))
		thief.untilEnded(thief.post("go"))
		if failed := of[events.ExecutionFailed](thief); len(failed) != 1 || failed[0].Code != "SECRET_UNREADABLE" {
			t.Errorf("%s: %+v", sealed, failed)
		}
	}
	b.noJobs()
}
