package session_test

import (
	"context"
	"encoding/json"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session"
)

func agentSpec(change ...func(*events.AgentSpec)) events.AgentSpec {
	s := events.AgentSpec{Architecture: "claude-code", Instructions: "You review code with care.", Model: "m-1", Egress: []string{"pypi.org"}}
	for _, f := range change {
		f(&s)
	}
	return s
}

var reviewer = events.Reference{Slug: "reviewer"}

func (s *stack) mustApply(a command.Answer) events.Reference {
	s.t.Helper()
	if a.Error != nil || a.Ref == nil || !events.IsDigest(a.Ref.Version) || a.Position == "" {
		s.t.Fatalf("applied: %+v, %v", a, a.Error)
	}
	return *a.Ref
}

func (s *stack) mustCreate(sid string, c command.CreateSession) {
	s.t.Helper()
	if a := s.send(command.TypeCreateSession, sid, "", c); a.Error != nil {
		s.t.Fatal(a.Error)
	}
}

func (s *stack) mustRefuse(c command.CreateSession, code, field string) {
	s.t.Helper()
	if a := s.send(command.TypeCreateSession, id(events.KindSession), "", c); a.Error == nil || a.Error.Code != code || a.Error.Field != field {
		s.t.Errorf("the answer to %+v is %+v, want %s of %s", c, a.Error, code, field)
	}
}

func (s *stack) load(sid string) *eventlog.SessionState {
	s.t.Helper()
	l, err := s.ses.Load(s.t.Context(), "default", sid, eventlog.LeaderOnly)
	must(s.t, err)
	return l
}

// redeliver sends a command once more under its id, as a new message.
func (s *stack) redeliver(cmd string, typ command.Type, body any) command.Answer {
	s.t.Helper()
	raw, err := json.Marshal(body)
	must(s.t, err)
	payload, err := json.Marshal(command.Command{Type: typ, ID: cmd, Tenant: "default", Actor: events.Actor{Kind: "user"}, Body: raw})
	must(s.t, err)
	ctx, cancel := context.WithTimeout(s.t.Context(), 20*time.Second)
	defer cancel()
	reply, err := bus.Request(ctx, s.js, bus.Command{Subject: topology.CommandSubject(topology.ServiceSession, "default", "key"), ID: id(events.KindCommand), Payload: payload})
	must(s.t, err)
	var a command.Answer
	must(s.t, json.Unmarshal(reply.Payload, &a))
	return a
}

// TestAgents_VersionsAndPins tests that the same spec is the same version, and that a session pins the latest version
// and takes the settings of the agent.
func TestAgents_VersionsAndPins(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	first := s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Tags: []string{"stable"}, Spec: agentSpec()}))
	want, err := definition.Digest(agentSpec())
	if err != nil || first.Version != want {
		t.Errorf("version %s, want %s, %v", first.Version, want, err)
	}
	if again := s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec()}); !again.Same || again.Ref.Version != first.Version {
		t.Errorf("applied again: %+v", again)
	}
	pinned := id(events.KindSession)
	s.mustCreate(pinned, command.CreateSession{Agent: "reviewer", Options: events.Options{Egress: []string{"example.com"}}})
	second := s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec(func(a *events.AgentSpec) { a.Model = "m-2" })}))
	l := s.load(pinned)
	if l.Life.AgentRef != first || l.Life.Agent != "reviewer" || l.Life.AgentVersion != first.Version || l.Life.Architecture != "claude-code" || l.Life.Options.Model != "m-1" ||
		strings.Join(l.Life.Options.Egress, " ") != "example.com pypi.org" {
		t.Errorf("the session has %+v", l.Life)
	}
	for name, version := range map[string]string{"reviewer": second.Version, "reviewer@latest": second.Version, "reviewer@stable": first.Version, "reviewer@" + first.Version: first.Version} {
		sid := id(events.KindSession)
		s.mustCreate(sid, command.CreateSession{Agent: name, Architecture: "claude-sdk"})
		if l := s.load(sid); l.Life.AgentVersion != version {
			t.Errorf("%s is %s", name, l.Life.AgentVersion)
		}
	}
	s.mustRefuse(command.CreateSession{Agent: "reviewer", Architecture: "codex"}, "INVALID_REQUEST", "architecture")
	s.mustRefuse(command.CreateSession{Agent: "reviewer@beta"}, "AGENT_NOT_FOUND", "agent")
	s.mustRefuse(command.CreateSession{Agent: "acme/reviewer"}, "AGENT_NOT_FOUND", "agent")
	s.mustRefuse(command.CreateSession{Agent: "Reviewer*"}, "INVALID_REQUEST", "agent")
	s.mustRefuse(command.CreateSession{Agent: "reviewer", Environments: []string{"none"}}, "ENVIRONMENT_NOT_FOUND", "environments[0]")
	if a := s.send(command.TypeRemoveAgent, "", "", command.RemoveEntry{Ref: reviewer}); a.Error != nil {
		t.Fatalf("remove: %v", a.Error)
	}
	s.mustRefuse(command.CreateSession{Agent: "reviewer"}, "AGENT_NOT_FOUND", "agent")
	if a := s.send(command.TypeRemoveAgent, "", "", command.RemoveEntry{Ref: reviewer}); a.Error == nil || a.Error.Code != "AGENT_NOT_FOUND" || a.Error.Field != "ref" {
		t.Errorf("removed again: %+v", a.Error)
	}
	s.post(pinned) // a session that pinned the agent continues to work
}

// TestCreateSession_InheritsTheModelProvider tests that a session has the model provider of its agent unless it names
// one, and that the architecture must support the provider.
func TestCreateSession_InheritsTheModelProvider(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{
		Ref: events.Reference{Slug: "coder"}, Spec: events.AgentSpec{Architecture: "codex", ModelProvider: "nvidia", Instructions: "You write programs."},
	}))
	for asked, want := range map[string]string{"": "nvidia", "openai": "openai"} {
		sid := id(events.KindSession)
		s.mustCreate(sid, command.CreateSession{Agent: "coder", Options: events.Options{ModelProvider: asked}})
		if got := s.load(sid).Life.Options.ModelProvider; got != want {
			t.Errorf("with provider %q the session has %q, want %q", asked, got, want)
		}
	}
	s.mustRefuse(command.CreateSession{Agent: "coder", Options: events.Options{ModelProvider: "anthropic"}}, "INVALID_REQUEST", "sessionOptions.modelProvider")
	s.mustRefuse(command.CreateSession{Architecture: "claude-code", Options: events.Options{ModelProvider: "openai"}}, "INVALID_REQUEST", "sessionOptions.modelProvider")
	plain := id(events.KindSession)
	s.mustCreate(plain, command.CreateSession{Architecture: "spool", Options: events.Options{Model: "vendor/x"}})
	if got := s.load(plain).Life.Options.ModelProvider; got != "" {
		t.Errorf("a session without a provider has %q", got)
	}
}

// TestCreateSession_InheritsModelSettings tests that a session has all model settings of its agent unless it has its
// own, and that only architecture acp accepts them.
func TestCreateSession_InheritsModelSettings(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	agents := events.ModelSettings{Preset: "qwen", Env: map[string]string{"A": "${MODEL}"}}
	s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{
		Ref: events.Reference{Slug: "porter"}, Spec: events.AgentSpec{Architecture: "acp", Command: []string{"qwen", "--acp"}, ModelSettings: agents, Instructions: "You sort the files."},
	}))
	own := events.ModelSettings{Args: []string{"--url", "${MODEL_BASE_URL}"}}
	for name, c := range map[string]struct{ asked, want events.ModelSettings }{
		"the agent's":   {events.ModelSettings{}, agents},
		"the session's": {own, own},
	} {
		sid := id(events.KindSession)
		s.mustCreate(sid, command.CreateSession{Agent: "porter", Options: events.Options{ModelSettings: c.asked}})
		if got := s.load(sid).Life.Options.ModelSettings; !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: the session has %+v, want %+v", name, got, c.want)
		}
	}
	acp := []string{"qwen", "--acp"}
	s.mustRefuse(command.CreateSession{Architecture: "codex", Options: events.Options{ModelSettings: own}}, "INVALID_REQUEST", "sessionOptions.modelSettings")
	s.mustRefuse(command.CreateSession{Agent: "porter", Options: events.Options{ModelProvider: "anthropic"}}, "INVALID_REQUEST", "sessionOptions.modelProvider")
	s.mustRefuse(command.CreateSession{Architecture: "acp", Options: events.Options{Command: acp, ModelSettings: events.ModelSettings{Args: []string{"${MODEL}"}}}}, "INVALID_REQUEST", "sessionOptions.model")
	s.mustRefuse(command.CreateSession{Architecture: "acp", Options: events.Options{Command: acp, ModelSettings: events.ModelSettings{Args: []string{"${MODEL_KEY}"}}}}, "INVALID_REQUEST", "sessionOptions.modelSettings.args[0]")
}

// TestInstances_PinTheirAgent tests that an instance pins its agent for a session and names its environments.
func TestInstances_PinTheirAgent(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	env := func(slug string, v map[string]events.Variable) command.Answer {
		return s.send(command.TypeApplyEnvironment, "", "", command.ApplyEnvironment{Ref: events.Reference{Slug: slug}, Spec: events.EnvironmentSpec{Variables: v}})
	}
	s.mustApply(env("staging", map[string]events.Variable{"HOST": {Value: "h"}, "TOKEN": {Secret: true, Sealed: "default.e.x"}}))
	agent := s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec()}))
	instance := command.ApplyInstance{Ref: events.Reference{Slug: "night"}, Spec: events.InstanceSpec{Agent: reviewer, Environments: []events.Reference{{Slug: "staging"}}}}
	ref := s.mustApply(s.send(command.TypeApplyInstance, "", "", instance))
	sid := id(events.KindSession)
	s.mustCreate(sid, command.CreateSession{Instance: "night", Environments: []string{"staging"}})
	if l := s.load(sid); l.Life.Instance != ref || l.Life.AgentRef != agent || len(l.Life.Environments) != 1 || l.Life.Environments[0] != (events.Reference{Slug: "staging"}) {
		t.Errorf("the session has %+v", l.Life)
	}
	s.mustRefuse(command.CreateSession{Instance: "night", Agent: "reviewer"}, "INVALID_REQUEST", "instance")
	s.mustRefuse(command.CreateSession{Instance: "day"}, "INSTANCE_NOT_FOUND", "instance")
	for name, c := range map[string]struct {
		answer      command.Answer
		code, field string
	}{
		"a secret's value": {env("staging", map[string]events.Variable{"TOKEN": {Secret: true, Value: "oops-plain"}}), "INVALID_REQUEST", "spec.variables.TOKEN.value"},
		"a bad name":       {env("staging", map[string]events.Variable{"A B": {Value: "x"}}), "INVALID_REQUEST", "spec.variables"},
		"no such agent": {s.send(command.TypeApplyInstance, "", "", command.ApplyInstance{Ref: events.Reference{Slug: "x"}, Spec: events.InstanceSpec{Agent: events.Reference{Slug: "none"}}}),
			"AGENT_NOT_FOUND", "spec.agent"},
		"no such environment": {s.send(command.TypeApplyInstance, "", "", command.ApplyInstance{Ref: events.Reference{Slug: "x"}, Spec: events.InstanceSpec{Agent: reviewer, Environments: []events.Reference{{Slug: "none"}}}}),
			"ENVIRONMENT_NOT_FOUND", "spec.environments[0]"},
		"short instructions": {s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec(func(a *events.AgentSpec) { a.Instructions = "short" })}), "INVALID_REQUEST", "spec.instructions"},
		"a bad slug":         {s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: events.Reference{Slug: "A>"}, Spec: agentSpec()}), "INVALID_REQUEST", "ref.slug"},
		"a bad tag":          {s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Tags: []string{"*"}, Spec: agentSpec()}), "INVALID_REQUEST", "tags[0]"},
		"the built-in one":   {s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: events.Reference{Slug: "default"}, Spec: agentSpec()}), "INVALID_REQUEST", "ref.slug"},
	} {
		if e := c.answer.Error; e == nil || e.Code != c.code || !strings.HasPrefix(e.Field, c.field) || strings.Contains(e.Detail, "oops-plain") {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

// TestApply_ConcurrentVersions tests that, when several copies of the service receive many versions at once, each
// version is stored once, and the last one is the latest.
func TestApply_ConcurrentVersions(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	s.startCopy("b", session.Config{})
	var all sync.WaitGroup
	const versions = 10
	for i := range versions {
		for range 2 {
			all.Go(func() {
				a, err := s.trySend(id(events.KindCommand), command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec(func(a *events.AgentSpec) { a.Model = string(rune('a' + i)) })})
				if err != nil || a.Error != nil {
					t.Errorf("%v, %v", err, a.Error)
				}
			})
		}
	}
	all.Wait()
	e, err := eventlog.Catalogue{Log: s.log}.Load(t.Context(), reviewer.Subject(events.Agent, "default"), eventlog.LeaderOnly)
	must(t, err)
	seen := map[string]bool{}
	for _, v := range e.State.Versions {
		seen[v.Digest] = true
	}
	if len(e.State.Versions) != versions || len(seen) != versions || !seen[e.State.Tags[events.LatestTag]] {
		t.Errorf("%d versions, %d of them different, latest %s", len(e.State.Versions), len(seen), e.State.Tags[events.LatestTag])
	}
}

// TestApply_RedeliveredCommandChangesNothing tests that a command that is delivered again after others changes
// nothing.
func TestApply_RedeliveredCommandChangesNothing(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	cmd := id(events.KindCommand)
	body := command.ApplyAgent{Ref: reviewer, Spec: agentSpec()}
	first, err := s.trySend(cmd, command.TypeApplyAgent, "", "", body)
	must(t, err)
	s.mustApply(first)
	second := s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec(func(a *events.AgentSpec) { a.Model = "m-2" })}))
	again := s.redeliver(cmd, command.TypeApplyAgent, body)
	if again.Error != nil || again.Ref.Version != first.Ref.Version {
		t.Errorf("answered %+v, %v", again, again.Error)
	}
	e, err := eventlog.Catalogue{Log: s.log}.Load(t.Context(), reviewer.Subject(events.Agent, "default"), eventlog.LeaderOnly)
	must(t, err)
	if e.State.Tags[events.LatestTag] != second.Version {
		t.Errorf("the latest is %s again", e.State.Tags[events.LatestTag])
	}
}

// TestSecrets_AreForgottenAtTheEndOfTheirExecution tests that the secrets of an execution are removed when the log
// holds its end, whichever event ends it and whichever service wrote it, and that other secrets stay.
func TestSecrets_AreForgottenAtTheEndOfTheirExecution(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	kv, err := secret.OpenBucket(t.Context(), s.js)
	must(t, err)
	identity, _, err := secret.GenerateKeyPair()
	must(t, err)
	keys, err := secret.ParseIdentities(identity)
	must(t, err)
	recipients, err := secret.RecipientsOf(keys)
	must(t, err)
	sealer, err := secret.NewSealer(kv, recipients...)
	must(t, err)
	there := func(key string) bool {
		_, err := kv.Get(t.Context(), key)
		return err == nil
	}
	sid := s.create(events.Options{})
	sealed := map[string]string{}
	post := func() string {
		exe := id(events.KindExecution)
		key, err := sealer.Seal(t.Context(), "default", exe, []byte("some-value"))
		must(t, err)
		a := s.send(command.TypePostMessage, sid, exe, command.PostMessage{Content: "hello", Environment: map[string]events.Variable{"S": {Secret: true, Sealed: key}}})
		if a.Error != nil {
			t.Fatal(a.Error)
		}
		sealed[exe] = key
		return exe
	}
	gone := func(exe string) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); there(sealed[exe]); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("a secret of an ended execution still exists")
			}
		}
	}
	first, second, third := post(), post(), post()
	s.send(command.TypeCancel, sid, third, nil) // the execution is queued, so it is withdrawn
	gone(third)
	if !there(sealed[first]) || !there(sealed[second]) {
		t.Error("secrets of executions that have not ended were removed")
	}
	// An end in a message that is not part of the log removes nothing.
	end, err := events.Draft{ID: id(events.KindCommit), Actor: events.Actor{Kind: "service", ID: "forger"}, Events: []events.Event{{
		ID: id(events.KindEvent), Time: time.Now().UTC(), ExecutionID: first, ConversationID: events.MainConversation, Source: events.FromServer, Data: events.ExecutionCancelled{},
	}}}.Seal(events.RunSubject("default", sid), "")
	must(t, err)
	data, err := end.Encode()
	must(t, err)
	_, err = s.js.PublishMsg(t.Context(), &nats.Msg{Subject: s.log.Partitioning().Subject(events.RunSubject("default", sid)), Header: nats.Header{jetstream.StreamHeader: {"SKILLS"}}, Data: data})
	must(t, err)
	dead, err := s.js.Stream(t.Context(), topology.StreamDead)
	must(t, err)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		info, err := dead.Info(t.Context())
		must(t, err)
		if info.State.Msgs > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the reactor has not given up the foreign message")
		}
	}
	if !there(sealed[first]) {
		t.Error("a message that is not part of the log removed a secret")
	}
	s.executors(1)
	gone(first)
	gone(second)
	for _, bad := range []map[string]events.Variable{{"S": {Secret: true, Value: "plain"}}, {"S": {Sealed: "default.x"}}, {"SPOOL_X": {Value: "1"}}} {
		if a := s.send(command.TypePostMessage, sid, id(events.KindExecution), command.PostMessage{Content: "x", Environment: bad}); a.Error == nil || !strings.HasPrefix(a.Error.Field, "environment.") {
			t.Errorf("%v: %+v", bad, a.Error)
		}
	}
}
