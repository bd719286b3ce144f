package session_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session"
)

// instance returns the instance that a reference names, and the number of commits of its entry.
func (s *stack) instance(ref events.Reference) (applied events.InstanceApplied, commits int) {
	s.t.Helper()
	entries := eventlog.Catalogue{Log: s.ses.Log}
	p, err := entries.Resolve(s.t.Context(), events.Instance, "default", ref)
	must(s.t, err)
	applied, ok := p.(events.InstanceApplied)
	if !ok {
		s.t.Fatalf("%s is a %T", ref, p)
	}
	e, err := entries.Load(s.t.Context(), ref.Subject(events.Instance, "default"), eventlog.LeaderOnly)
	must(s.t, err)
	return applied, len(e.State.Commands)
}

// TestCreateSession_OfAnAgentGetsADefaultInstance tests that a session or an execution that names only an agent gets
// the agent's default instance, which the service creates once.
func TestCreateSession_OfAnAgentGetsADefaultInstance(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	s.startCopy("b", session.Config{})
	agent := s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Tags: []string{"stable"}, Spec: agentSpec()}))
	want := events.Reference{Slug: "reviewer.default"}

	// Refused requests create no instance.
	s.mustRefuse(command.CreateSession{Agent: "reviewer", Architecture: "codex"}, "INVALID_REQUEST", "architecture")
	bad := command.StartExecution{Create: command.CreateSession{Agent: "reviewer"}, Post: command.PostMessage{Content: " "}}
	if a := s.send(command.TypeStartExecution, id(events.KindSession), id(events.KindExecution), bad); a.Error == nil {
		t.Errorf("the answer to an empty message is %+v", a)
	}
	if e, err := (eventlog.Catalogue{Log: s.ses.Log}).Load(t.Context(), want.Subject(events.Instance, "default"), eventlog.LeaderOnly); err != nil || e.Head.Seq != 0 {
		t.Fatalf("a refused request created %+v, %v", e, err)
	}

	const n = 8
	sids := make([]string, n)
	var wg sync.WaitGroup
	for i := range sids {
		sids[i] = id(events.KindSession)
		wg.Go(func() {
			create := command.CreateSession{Agent: "reviewer@stable"}
			var a command.Answer
			if i%2 == 0 {
				a = s.send(command.TypeCreateSession, sids[i], "", create)
			} else {
				a = s.send(command.TypeStartExecution, sids[i], id(events.KindExecution), command.StartExecution{Create: create, Post: command.PostMessage{Content: "q"}})
			}
			if a.Error != nil {
				t.Error(a.Error)
			}
		})
	}
	wg.Wait()
	applied, commits := s.instance(want)
	if commits != 1 || applied.Spec.Agent != reviewer || len(applied.Spec.Environments) != 0 {
		t.Errorf("the log has %d versions, the last is %+v", commits, applied)
	}
	for _, sid := range sids {
		if l := s.load(sid); l.Life.Instance != applied.Ref || l.Life.AgentRef != agent {
			t.Errorf("session %s has instance %s and agent %s, want %s", sid, l.Life.Instance, l.Life.AgentRef, applied.Ref)
		}
	}
	head, err := s.ses.Log.Last(t.Context(), want.Subject(events.Instance, "default"), eventlog.LeaderOnly)
	actor := head.Commit.Actor
	if service, copied, _ := strings.Cut(actor.Service, "/"); err != nil || actor.Kind != "service" || actor.ID != "session" || service != "session" || copied == "" {
		t.Errorf("the instance was created by %+v, %v", head.Commit.Actor, err)
	}

	builtIn := id(events.KindSession)
	s.mustCreate(builtIn, command.CreateSession{Architecture: "spool"})
	if l := s.load(builtIn); l.Life.Instance != (events.Reference{}) {
		t.Errorf("the built-in agent has the instance %s", l.Life.Instance)
	}
}

// TestDefaultInstance_CanBeChangedAndRemoved tests that a default instance is changed and removed like any other: a
// version of the tenant is used, and a removed instance is created again.
func TestDefaultInstance_CanBeChangedAndRemoved(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec()}))
	s.mustApply(s.send(command.TypeApplyEnvironment, "", "", command.ApplyEnvironment{Ref: events.Reference{Slug: "staging"}, Spec: events.EnvironmentSpec{Variables: map[string]events.Variable{"A": {Value: "1"}}}}))
	of := func() events.Reference {
		sid := id(events.KindSession)
		s.mustCreate(sid, command.CreateSession{Agent: "reviewer"})
		return s.load(sid).Life.Instance
	}
	made := of()
	bare := events.Reference{Slug: "reviewer.default"}
	own := s.mustApply(s.send(command.TypeApplyInstance, "", "", command.ApplyInstance{Ref: bare, Spec: events.InstanceSpec{Agent: reviewer, Environments: []events.Reference{{Slug: "staging"}}}}))
	if got := of(); got != own || got == made {
		t.Errorf("after the tenant's own version a session gets %s, want %s", got, own)
	}
	if a := s.send(command.TypeRemoveInstance, "", "", command.RemoveEntry{Ref: bare}); a.Error != nil {
		t.Fatal(a.Error)
	}
	if got := of(); got != made {
		t.Errorf("after its removal a session gets %s, want %s", got, made)
	}
	if _, commits := s.instance(bare); commits != 4 {
		t.Errorf("the log has %d commits of the instance, want 4", commits)
	}
	other := events.Reference{Slug: "writer"}
	s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: other, Spec: agentSpec()}))
	s.mustApply(s.send(command.TypeApplyInstance, "", "", command.ApplyInstance{Ref: bare, Spec: events.InstanceSpec{Agent: other}}))
	s.mustRefuse(command.CreateSession{Agent: "reviewer"}, "INVALID_REQUEST", "agent")
}

// TestDefaultInstance_OfOrganizationsAndLongSlugs tests that the default instance of an organization's agent belongs
// to the organization, and that a long slug is shortened.
func TestDefaultInstance_OfOrganizationsAndLongSlugs(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("a", session.Config{})
	long := strings.Repeat("l", 64)
	for slug, want := range map[string]string{"short": "acme/short.default@", long: "acme/" + strings.Repeat("l", 43) + "-"} {
		s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: events.Reference{Org: "acme", Slug: slug}, Spec: agentSpec()}))
		sid := id(events.KindSession)
		s.mustCreate(sid, command.CreateSession{Agent: "acme/" + slug})
		if got := s.load(sid).Life.Instance; !strings.HasPrefix(got.String(), want) || got.Check() != nil || !strings.HasSuffix(got.Slug, ".default") {
			t.Errorf("agent %s has the instance %s, want %s…", slug, got, want)
		}
	}
}
