package executor_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

func (b *bench) hosts(slug string, n int, egress ...string) events.Reference {
	return b.define(events.Environment, slug, n, func(r events.Reference) events.Payload {
		return events.EnvironmentApplied{Ref: r, Spec: events.EnvironmentSpec{Variables: map[string]events.Variable{}, Egress: egress}}
	})
}

// allowlists returns the allowlists of all registrations; equal ones in a row are listed once.
func (e *fakeEgress) allowlists() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for _, g := range e.grants {
		out = append(out, strings.Join(g.Allow, "; "))
	}
	return slices.Compact(out)
}

func (e *fakeEgress) vouch(authority string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.authority = authority
}

// An execution may reach the hosts that its session and its environments named when it began, also after another
// executor took it over. Its log says where each host comes from.
func TestEgress_AllowlistIsThatOfTheStart(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	b.egress = &fakeEgress{authority: "the certificate"}
	a := b.run()
	agent := b.agent("a", 1, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things.", Egress: []string{"pypi.org"}})
	first, second := b.hosts("e", 2, "HEAD,GET Api.example.com", "PyPI.org."), b.hosts("f", 3, "c.example.com", "GET,HEAD api.example.com")
	s := b.session(of1(agent, first.WithoutVersion(), second.WithoutVersion()), func(c *events.SessionCreated) { c.Options.Egress = []string{"own.example.com", "pypi.org"} })
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	b.hosts("e", 4, "another.example.com")
	a.wire.kill()
	b.run()
	s.until("the other has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
	allow <- struct{}{}
	s.untilEnded(execution)
	want := []events.AllowedHost{
		{Entry: "own.example.com", From: "session"}, {Entry: "pypi.org", From: "agent"}, {Entry: "GET,HEAD api.example.com", From: first.String()}, {Entry: "c.example.com", From: second.String()},
	}
	if got := of[events.ExecutionResolved](s); len(got) != 1 || !slices.Equal(got[0].Egress, want) {
		t.Errorf("resolved %+v", got)
	}
	if got := b.egress.allowlists(); !slices.Equal(got, []string{"own.example.com; pypi.org; GET,HEAD api.example.com; c.example.com"}) {
		t.Errorf("granted %q", got)
	}
	// The next execution gets the present versions.
	next := s.post("again")
	allow <- struct{}{}
	allow <- struct{}{}
	s.untilEnded(next)
	if got := of[events.ExecutionResolved](s); len(got) != 2 || len(got[1].Egress) != 5 || got[1].Egress[2].Entry != "another.example.com" {
		t.Errorf("the next execution resolved %+v", got)
	}
	if got := b.egress.allowlists(); len(got) != 2 || got[1] != "own.example.com; pypi.org; another.example.com; c.example.com; GET,HEAD api.example.com" {
		t.Errorf("granted %q", got)
	}
	s.check()
}

// An agent trusts the proxy's certificate only if its allowlist has methods. When the proxy has a new certificate, the
// next turn uses that one.
func TestEgress_AuthorityIsTrustedWithMethodsOnly(t *testing.T) {
	t.Parallel()
	b := newBench(t, quick)
	b.egress = &fakeEgress{authority: "one"}
	b.run()
	ask := func(s *talk) string {
		s.untilEnded(s.post("go"))
		l := s.load()
		list := b.provider.box(l.Run.Sandbox.ID).runner.receivedQueries()
		return list[len(list)-1].Authority
	}
	plain := b.session(func(c *events.SessionCreated) { c.Options.Egress = []string{"example.com"} })
	if got := ask(plain); got != "" {
		t.Errorf("without methods it trusts %q", got)
	}
	s := b.session(func(c *events.SessionCreated) { c.Options.Egress = []string{"GET example.com"} })
	if got := ask(s); got != "one" {
		t.Errorf("it trusts %q", got)
	}
	b.egress.vouch("two")
	if got := ask(s); got != "two" {
		t.Errorf("after the proxy has another one it trusts %q", got)
	}
}

// A sandbox is replaced if its registration was lost with the proxy's data.
func TestEgress_UnknownSandboxIsReplaced(t *testing.T) {
	t.Parallel()
	b := newBench(t, quick)
	b.egress = &fakeEgress{authority: "one"}
	b.run()
	s := b.session(func(c *events.SessionCreated) { c.Options.Egress = []string{"GET example.com"} })
	s.untilEnded(s.post("go"))
	before := s.load().Run.Sandbox.ID
	b.egress.mu.Lock()
	b.egress.gone, b.egress.authority = map[string]bool{before: true}, "two"
	b.egress.mu.Unlock()
	execution := s.post("again")
	l := s.untilEnded(execution)
	if _, ok := s.last(execution).(events.ExecutionCompleted); !ok || l.Run.Sandbox.ID == before {
		t.Errorf("end %+v, in sandbox %s after %s", s.last(execution), l.Run.Sandbox.ID, before)
	}
	if list := b.provider.box(l.Run.Sandbox.ID).runner.receivedQueries(); len(list) != 1 || list[0].Authority != "two" {
		t.Errorf("asked %+v", list)
	}
	if got := of[events.SandboxReplaced](s); len(got) != 1 || got[0].SandboxID != before {
		t.Errorf("replaced %+v", got)
	}
}

// An execution whose combined allowlist is too long fails before a sandbox is created.
func TestEgress_TooLongAllowlistEndsTheExecution(t *testing.T) {
	t.Parallel()
	b := newBench(t, quick)
	b.run()
	names := func(letter string) []string {
		out := make([]string, 0, 200)
		for i := range 200 {
			out = append(out, letter+strings.Repeat("x", i%40)+string(rune('a'+i/40))+".example.com")
		}
		return out
	}
	agent := b.agent("a", 1, events.AgentSpec{Architecture: "claude-code", Instructions: "You do things."})
	env := b.hosts("e", 2, names("b")...)
	s := b.session(of1(agent, env.WithoutVersion()), func(c *events.SessionCreated) { c.Options.Egress = names("a") })
	execution := s.post("go")
	s.untilEnded(execution)
	if failed, _ := s.last(execution).(events.ExecutionFailed); failed.Code != "EGRESS_INVALID" || !strings.Contains(failed.Message, "egress of "+env.String()) || !strings.Contains(failed.Message, "256") {
		t.Errorf("end %+v", s.last(execution))
	}
	if n := len(of[events.SandboxCreating](s)); n != 0 {
		t.Errorf("%d sandboxes were made", n)
	}
}
