package projector_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector"
)

// entry returns a writer for an entry of the catalogue.
func (w *world) entry(kind events.Aspect, tenant string, ref events.Reference) *session {
	subject := ref.Subject(kind, tenant)
	return &session{w: w, tenant: subject.Tenant, id: subject.ID, life: eventlog.Head{Subject: subject}}
}

const (
	entriesSQL  = `SELECT coalesce(string_agg(concat_ws(' ', tenant, kind, scope, org, slug, latest, state::json->>'tags', removed), ';' ORDER BY kind, slug), '') FROM catalogue_entries`
	versionsSQL = `SELECT coalesce(string_agg(concat_ws(' ', e.slug, v.version, v.spec, v.document, v.removed, split_part(v.position, '-', 2)::int - (SELECT min(split_part(position, '-', 2)::int) FROM catalogue_versions)), ';'
		ORDER BY e.kind, e.slug, v.version), '') FROM catalogue_versions v JOIN catalogue_entries e USING (tenant, id)`
)

func (w *world) check(wants map[string]string) {
	w.t.Helper()
	for sql, want := range wants {
		if got := queryOne[string](w, sql); got != want {
			w.t.Errorf("%.60s…:\n got %q\nwant %q", sql, got, want)
		}
	}
}

func TestCatalogue_IsProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	stop := w.start()
	agent := events.Reference{Slug: "reviewer"}
	skill := events.Reference{Scope: events.ScopePlatform, Org: "acme", Slug: "pdf"}
	at := func(r events.Reference, version string) events.Reference {
		r.Version = version
		return r
	}
	applied := func(version, name string, tags ...string) events.Payload {
		return events.AgentApplied{Ref: at(agent, version), Tags: tags, Spec: events.AgentSpec{Name: name, Architecture: "spool", Instructions: "say <hi>"}}
	}
	a, s := w.entry(events.Agent, "acme", agent), w.entry(events.Skill, "acme", skill)
	a.append(&a.life, "", applied("a1", "one", "stable"))
	a.append(&a.life, "", applied("a2", "two\x00"))
	a.append(&a.life, "", applied("a2", "two", "beta")) // the version exists, so only the tag moves
	s.append(&s.life, "", events.SkillPushed{Ref: at(skill, "s1"), Name: "pdf", Description: "reads", Document: "# PDF\x00", Bytes: 10, UnpackedBytes: 20, Files: 2})
	s.append(&s.life, "", events.SkillPushed{Ref: at(skill, "s2"), Name: "pdf", Bytes: 11})
	s.append(&s.life, "", events.SkillTagged{Ref: at(skill, "s1"), Tag: "stable"})
	w.awaitProjected(a, s)
	spec := func(name string) string {
		return `{"name":"` + name + `","architecture":"spool","instructions":"say <hi>"}`
	}
	w.check(map[string]string{
		entriesSQL: `acme agent organization  reviewer a2 {"beta":"a2","latest":"a2","stable":"a1"} f;` +
			`platform skill platform acme pdf s2 {"latest":"s2","stable":"s1"} f`,
		versionsSQL: "reviewer a1 " + spec("one") + "  f 0;reviewer a2 " + spec(`two\u0000`) + "  f 1;" +
			`pdf s1 {"name":"pdf","description":"reads","bytes":10,"unpackedBytes":20,"files":2} # PDF` + "\uFFFD f 3;" +
			`pdf s2 {"name":"pdf","description":"","bytes":11,"unpackedBytes":0,"files":0}  f 4`,
	})

	stop() // the next projector starts from rows that it reads from Postgres
	w.start()
	s.append(&s.life, "", events.SkillRemoved{Ref: at(skill, "s2")})
	a.append(&a.life, "", events.AgentRemoved{Ref: agent})
	w.awaitProjected(a, s)
	w.check(map[string]string{
		entriesSQL: "acme agent organization  reviewer  t;" + `platform skill platform acme pdf s1 {"latest":"s1","stable":"s1"} f`,
		"SELECT string_agg(version||' '||removed, ',' ORDER BY version) FROM catalogue_versions": "a1 false,a2 false,s1 false,s2 true",
	})
	// A removed version is restored when it is pushed again.
	s.append(&s.life, "", events.SkillPushed{Ref: at(skill, "s2"), Name: "pdf", Description: "again", Bytes: 11})
	a.append(&a.life, "", applied("a1", "one"))
	w.awaitProjected(a, s)
	w.check(map[string]string{
		entriesSQL: `acme agent organization  reviewer a1 {"latest":"a1"} f;` + `platform skill platform acme pdf s2 {"latest":"s2","stable":"s1"} f`,
		"SELECT removed||' '||(spec::json->>'description')||' '||position FROM catalogue_versions WHERE version = 's2'": "false again " + eventlog.Position{Seq: s.life.Seq}.String(),
		"SELECT position FROM catalogue_versions WHERE version = 'a1'":                                                  "0-1",
	})

	w.sameAsRebuilt()
	before := w.dump()
	w.rebuild()
	if w.dump() != before {
		t.Error("a rebuild without new commits changes the rows")
	}
	for table, plant := range map[string]string{"catalogue_entries": "UPDATE catalogue_entries SET latest = 'x'", "catalogue_versions": "UPDATE catalogue_versions SET spec = '{}'"} {
		w.exec(plant)
		_, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: w.url}, projector.Deps{Log: w.log}, true)
		var d *projector.DifferenceError
		if !errors.As(err, &d) || d.Table != table {
			t.Errorf("after %s: got %v", plant, err)
		}
		w.rebuild()
	}
}

// TestLargeDefinitions_AreReadFromTheObjectStore tests a definition that is stored in the object store, and one that was lost there.
func TestLargeDefinitions_AreReadFromTheObjectStore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	ref := events.Reference{Slug: "large", Version: "v"}
	e := w.entry(events.Agent, "acme", ref)
	e.append(&e.life, "", events.AgentApplied{Ref: ref, Spec: events.AgentSpec{Instructions: strings.Repeat("x", 3<<20)}})
	w.awaitProjected(e)
	if n := queryOne[int](w, "SELECT length(spec) FROM catalogue_versions"); n < 3<<20 {
		t.Errorf("the definition has %d bytes", n)
	}
	w.sameAsRebuilt()
}

// TestResolutions_AreProjected tests that the rows contain the version that a session pinned, and the versions that
// an execution was resolved to.
func TestResolutions_AreProjected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.start()
	s := w.session(-1)
	pinned := events.Reference{Slug: "reviewer", Version: strings.Repeat("a", 64)}
	s.append(&s.life, "", events.SessionCreated{Agent: "reviewer", AgentVersion: pinned.Version, Architecture: "spool", Provider: "local", AgentRef: pinned,
		Instance: events.Reference{Org: "team", Slug: "prod"}, Environments: []events.Reference{{Slug: "base"}, {Scope: events.ScopePlatform, Slug: "net"}}})
	x := s.post(1)
	s.append(&s.run, x, events.ExecutionResolved{Agent: pinned, Variables: []events.Provenance{{Name: "A", From: "agent", Value: "1"}, {Name: "S", From: "run", Secret: true, Sealed: "acme.x", Value: "never"}}})
	w.awaitProjected(s)
	w.check(map[string]string{
		"SELECT concat_ws(' ', agent, agent_ref, instance, environments) FROM sessions": "reviewer " + pinned.String() + ` team/prod ["base","platform/net"]`,
		"SELECT resolved FROM executions":                                               `{"agent":{"slug":"reviewer","version":"` + pinned.Version + `"},"variables":[{"name":"A","from":"agent","value":"1"},{"name":"S","from":"run","secret":true,"sealed":"acme.x"}]}`,
	})
	w.sameAsRebuilt()
}
