package references_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

const tenant = "default"

func digest(n int) string { return strings.Repeat("0", 56) + fmt.Sprintf("%08x", n) }

// bench is a resolver over a catalogue in memory.
type bench struct {
	t        *testing.T
	log      *memlog.Log
	reported []events.Error
	references.Resolver
}

func newBench(t *testing.T) *bench {
	t.Helper()
	log, err := memlog.New(memlog.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return &bench{t: t, log: log, Resolver: references.Resolver{
		Log: log, Provider: "local", Skills: folder{}, Secrets: vault{tenant + "/key": "hunter2"}, Logger: slog.New(slog.DiscardHandler),
	}}
}

// define stores version n of a catalogue entry, and returns the reference to it.
func (b *bench) define(kind events.Aspect, slug string, n int, payload func(events.Reference) events.Payload) events.Reference {
	b.t.Helper()
	ref := events.Reference{Slug: slug, Version: digest(n)}
	entries := eventlog.Catalogue{Log: b.log}
	e, err := entries.Load(b.t.Context(), ref.Subject(kind, tenant), eventlog.LeaderOnly)
	if err != nil {
		b.t.Fatal(err)
	}
	list, err := versions.Decide(e.State, versions.ApplyVersion{Version: ref.Version, Data: payload(ref)})
	if err == nil {
		err = entries.Append(b.t.Context(), &e, events.Actor{Kind: "service", ID: "test"}, events.DeriveID(events.KindCommand, slug, ref.Version), list)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return ref
}

func (b *bench) agent(n int, spec events.AgentSpec) events.Reference {
	return b.define(events.Agent, "coder", n, func(r events.Reference) events.Payload { return events.AgentApplied{Ref: r, Spec: spec} })
}

func (b *bench) skill(slug string, n int) events.Reference {
	return b.define(events.Skill, slug, n, func(r events.Reference) events.Payload {
		return events.SkillPushed{Ref: r, Name: slug, Description: "Describes " + slug + ".", Document: "---\nname: " + slug + "\n---\n"}
	})
}

// resolve resolves an execution of a session with an agent.
func (b *bench) resolve(agent events.Reference, message events.MessageAccepted) (*references.Resolved, error) {
	e := references.Execution{
		ID: "exe_1", Session: &eventlog.SessionState{Tenant: tenant, ID: "ses_1"}, Message: message,
		Report: func(_ context.Context, e events.Error) error { b.reported = append(b.reported, e); return nil },
	}
	e.Session.Life.AgentRef = agent
	return b.Resolve(b.t.Context(), e)
}

// folder is the Skills of a test; a skill with the digest of 404 has no archive.
type folder struct{}

func (folder) Provide(_ context.Context, d string) (string, error) {
	if d == digest(404) {
		return "", fmt.Errorf("%w: %s", references.ErrNoArchive, d)
	}
	return "/skills/" + d, nil
}

// vault is the Secrets of a test.
type vault map[string]string

func (v vault) Open(_ context.Context, tenant, key string) (string, error) {
	if key == "later" {
		return "", secret.ErrUnavailable
	}
	if value, ok := v[tenant+"/"+key]; ok {
		return value, nil
	}
	return "", errors.New("no such value")
}

// TestResolve_Nothing: an execution of the built-in agent without variables refers to nothing.
func TestResolve_Nothing(t *testing.T) {
	t.Parallel()
	r, err := newBench(t).resolve(events.Reference{}, events.MessageAccepted{})
	if err != nil || !r.IsEmpty() || r.Allowlist() == nil || len(r.SkillDigests()) != 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestResolve_Query: the query has the agent's definition with variables and skills; through a proxy, it has no headers of MCP servers.
func TestResolve_Query(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Containers = true
	agent := b.agent(1, events.AgentSpec{
		Instructions: "Be kind.",
		Skills:       []events.Reference{b.skill("greet", 11), b.skill("lost", 404)},
		Subagents:    []events.SubagentSpec{{Name: "helper", Instructions: "Help.", Skills: []events.Reference{b.skill("count", 12)}}},
		MCPServers: []events.MCPServer{
			{Name: "web", Type: events.MCPTypeHTTP, URL: "https://mcp.example/${PATH_PART}", Headers: map[string]string{"Authorization": "Bearer ${TOKEN}"}},
			{Name: "box", Type: events.MCPTypeDocker, Image: "mcp:1", Command: []string{"serve", "${PATH_PART}"}},
		},
	})
	r, err := b.resolve(agent, events.MessageAccepted{Environment: map[string]events.Variable{"TOKEN": {Sealed: "key", Secret: true}, "PATH_PART": {Value: "x"}, "SET": {Value: "mine"}}})
	if err != nil {
		t.Fatal(err)
	}
	if c := r.Containers(); len(c) != 1 || c[0].Name != "box" || c[0].Field != "mcpServers[1]" {
		t.Errorf("containers %+v", c)
	}
	if d := r.SkillDigests(); !slices.Equal(d, []string{digest(11), digest(12)}) {
		t.Errorf("skills on the engine: %v", d)
	}
	if len(b.reported) != 1 || b.reported[0].Code != "SKILL_ARCHIVE_MISSING" {
		t.Errorf("reported %+v", b.reported)
	}
	q := runner.Query{Env: map[string]string{"SET": "by the executor"}}
	r.AddToQuery(&q, true, []string{"/run/box.sock"})
	if !strings.HasPrefix(q.SystemPrompt, "Be kind.\n\n") || !strings.Contains(q.SystemPrompt, "SKILL: greet") || strings.Contains(q.SystemPrompt, "SKILL: count") {
		t.Errorf("system prompt %q", q.SystemPrompt)
	}
	if len(q.Subagents) != 1 || !strings.Contains(q.Subagents[0].Instructions, "SKILL: count") || q.Subagents[0].Skills != nil {
		t.Errorf("sub-agents %+v", q.Subagents)
	}
	if q.Env["TOKEN"] != "hunter2" || q.Env["SET"] != "by the executor" || !slices.Equal(q.Redact, []string{"hunter2"}) {
		t.Errorf("environment %v, redacted %v", q.Env, q.Redact)
	}
	if m := q.MCPServers[0]; m.URL != runner.EgressURL+runner.EgressMCPPath+"web" || m.Headers != nil || m.TimeoutMs != 30_000 {
		t.Errorf("MCP server behind the proxy: %+v", m)
	}
	if m := q.MCPServers[1]; m.Socket != "/run/box.sock" || !slices.Equal(m.Command, []string{"serve", "x"}) {
		t.Errorf("MCP server in a container: %+v", m)
	}
	q = runner.Query{Env: map[string]string{}}
	r.AddToQuery(&q, false, nil)
	if m := q.MCPServers[0]; m.URL != "https://mcp.example/x" || m.Headers["Authorization"] != "Bearer hunter2" {
		t.Errorf("MCP server without a proxy: %+v", m)
	}
}

// TestResolve_Errors: what keeps an execution from starting has a code; an unavailable store of secrets does not end it.
func TestResolve_Errors(t *testing.T) {
	t.Parallel()
	docker := events.MCPServer{Name: "box", Type: events.MCPTypeDocker, Image: "mcp:1", Command: []string{"${TOKEN}"}}
	for name, c := range map[string]struct {
		spec     events.AgentSpec
		variable events.Variable
		change   func(*bench)
		code     string
	}{
		"unknown skill":         {spec: events.AgentSpec{Skills: []events.Reference{{Slug: "none"}}}, code: "SKILL_NOT_FOUND"},
		"no secrets identity":   {variable: events.Variable{Sealed: "key", Secret: true}, change: func(b *bench) { b.Secrets = nil }, code: "SECRETS_UNAVAILABLE"},
		"value that is gone":    {variable: events.Variable{Sealed: "gone", Secret: true}, code: "SECRET_UNREADABLE"},
		"secrets not available": {variable: events.Variable{Sealed: "later", Secret: true}},
		"no containers":         {spec: events.AgentSpec{MCPServers: []events.MCPServer{docker}}, variable: events.Variable{Value: "x"}, code: "MCP_SERVER_UNSUPPORTED"},
		"secret in an argument": {spec: events.AgentSpec{MCPServers: []events.MCPServer{docker}}, variable: events.Variable{Sealed: "key", Secret: true}, change: func(b *bench) { b.Containers = true }, code: "SECRET_EXPOSED"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			if c.change != nil {
				c.change(b)
			}
			_, err := b.resolve(b.agent(1, c.spec), events.MessageAccepted{Environment: map[string]events.Variable{"TOKEN": c.variable}})
			var unresolved *references.Error
			switch {
			case err == nil:
				t.Fatal("resolved")
			case c.code == "":
				if errors.As(err, &unresolved) || !errors.Is(err, secret.ErrUnavailable) {
					t.Errorf("%v ends the execution", err)
				}
			case !errors.As(err, &unresolved) || unresolved.Code != c.code || unresolved.FailedEvent().Code != c.code:
				t.Errorf("%v, want code %s", err, c.code)
			}
		})
	}
}

// TestResolve_SkillsWithoutAStore: an execution with skills fails where there is no store of skills.
func TestResolve_SkillsWithoutAStore(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Skills = nil
	_, err := b.resolve(b.agent(1, events.AgentSpec{Skills: []events.Reference{b.skill("greet", 11)}}), events.MessageAccepted{})
	var unresolved *references.Error
	if !errors.As(err, &unresolved) || unresolved.Code != "SKILL_UNAVAILABLE" {
		t.Errorf("%v", err)
	}
}

// TestResolve_Hosts: the allowlist has the session's hosts, each with the layer that it is from.
func TestResolve_Hosts(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := references.Execution{ID: "exe_1", Session: &eventlog.SessionState{Tenant: tenant, ID: "ses_1"}}
	e.Session.Life.AgentRef = b.agent(1, events.AgentSpec{Egress: []string{"a.example:443"}})
	e.Session.Life.Options.Egress = []string{"a.example:443", "GET b.example:443"}
	r, err := b.Resolve(t.Context(), e)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Egress) != 2 || !r.InspectsRequests || r.IsEmpty() {
		t.Errorf("egress %+v, inspects requests: %v", r.Egress, r.InspectsRequests)
	}
	for _, h := range r.Egress {
		want := "session"
		if h.Entry == "a.example:443" {
			want = "agent"
		}
		if h.From != want {
			t.Errorf("%s is from %v, want %s", h.Entry, h.From, want)
		}
	}
}
