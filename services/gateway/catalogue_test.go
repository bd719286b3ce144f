package gateway_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

const reviewer = `{"architecture":"spool","instructions":"Review <what> you are given."}`

func (s *served) apply(path, slug, spec string, rest ...string) answer {
	s.t.Helper()
	return s.do("POST", path, fmt.Sprintf(`{"ref":{"slug":%q},"spec":%s%s}`, slug, spec, strings.Join(rest, ""))).want(s.t, 200)
}

// TestAgents_LifeCycleOverREST tests the life cycle of an agent over REST.
func TestAgents_LifeCycleOverREST(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	first := g.do("POST", "/api/agents", `{"ref":{"scope":"organization","org":"team","slug":"reviewer"},"tags":["stable"],"spec":`+reviewer+`}`).want(t, 200)
	digest, err := definition.Digest(events.AgentSpec{Architecture: "spool", Instructions: "Review <what> you are given."})
	must(t, err)
	if got := string(first.body); got != `{"ref":{"scope":"organization","org":"team","slug":"reviewer","version":"`+digest+`"},"position":"`+first.text("position")+`","same":false}`+"\n" {
		t.Errorf("got %s", got)
	}
	again := g.do("POST", "/api/agents", `{"ref":{"org":"team","slug":"reviewer"},"spec":`+reviewer+`}`).want(t, 200)
	if again.field("same") != true || again.text("ref", "version") != digest {
		t.Errorf("got %s", again)
	}
	second := g.do("POST", "/api/agents", `{"ref":{"org":"team","slug":"reviewer"},"spec":{"architecture":"codex","instructions":"Review it twice, please.","skills":["platform/pdf@stable",{"slug":"csv"}]}}`).want(t, 200)

	at := "/api/agents/reviewer?org=team"
	one := g.get(at+"&minPosition="+second.text("position")).want(t, 200)
	if want := `{"ref":{"scope":"organization","org":"team","slug":"reviewer","version":"` + second.text("ref", "version") + `"},"tags":["latest"],` +
		`"spec":{"architecture":"codex","instructions":"Review it twice, please.","skills":[{"scope":"platform","slug":"pdf","version":"stable"},{"slug":"csv"}]},"createdAt":"2026-02-03T04:05:06Z"}` + "\n"; string(one.body) != want {
		t.Errorf("got  %s\nwant %s", one.body, want)
	}
	for _, version := range []string{"stable", digest} {
		if a := g.get(at+"&version="+version).want(t, 200); !strings.Contains(string(a.body), `"tags":["stable"],"spec":`+reviewer+`,`) {
			t.Errorf("%s is %s", version, a)
		}
	}
	if a := g.get("/api/agents").want(t, 200); a.names("agents") != "organization/team/reviewer [latest]" {
		t.Errorf("got %s", a)
	}
	if a := g.do("DELETE", at, "").want(t, 200); a.text("position") == "" {
		t.Errorf("got %s", a)
	}
	for _, version := range []string{"", "latest", "stable", "beta"} {
		g.get(at+"&version="+version).wantProblem(t, 404, "AGENT_NOT_FOUND", "slug")
	}
	g.get(at+"&version="+digest).want(t, 200) // sessions that pinned it continue
	if a := g.get("/api/agents").want(t, 200); string(a.body) != `{"agents":[],"nextPageToken":""}`+"\n" {
		t.Errorf("got %s", a)
	}
	g.do("DELETE", at, "").wantProblem(t, 404, "AGENT_NOT_FOUND", "slug")
	for _, c := range s.commands(t) {
		if c.Tenant != "default" || c.Actor.ID != "local" {
			t.Errorf("got %+v", c)
		}
	}
}

// TestCatalogueLists_AreBoundedWithPlatformLast tests that lists are limited in rows and bytes, and that platform entries come last.
func TestCatalogueLists_AreBoundedWithPlatformLast(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	for _, ref := range []string{`"scope":"platform","slug":"a"`, `"slug":"b"`, `"slug":"a"`, `"org":"x","slug":"a"`, `"scope":"identity_account","org":"me","slug":"z"`, `"scope":"platform","org":"acme","slug":"a"`, `"slug":"c"`} {
		g.do("POST", "/api/instances", `{"ref":{`+ref+`},"spec":{"agent":"reviewer"}}`).want(t, 200)
	}
	g.apply("/api/instances", "gone", `{"agent":"reviewer"}`)
	g.do("DELETE", "/api/instances/gone", "").want(t, 200)
	g.apply("/api/agents", "other-kind", reviewer)
	const all = "identity_account/me/z;organization//a;organization//b;organization//c;organization/x/a;platform//a;platform/acme/a"
	for _, size := range []int{1, 3, 7} {
		var got []string
		for token, pages := "", 0; token != "" || pages == 0; pages++ {
			page := g.get(fmt.Sprintf("/api/instances?pageSize=%d&pageToken=%s", size, token)).want(t, 200)
			got = append(got, strings.Split(strings.ReplaceAll(page.names("instances"), " [latest]", ""), ";")...)
			if token = page.text("nextPageToken"); pages > 8 {
				t.Fatal("the pages do not end")
			}
		}
		if strings.Join(got, ";") != all {
			t.Errorf("in pages of %d: %s\nwant %s", size, got, all)
		}
	}
	for _, slug := range []string{"m", "n", "o"} {
		g.apply("/api/agents", slug, `{"architecture":"spool","instructions":"`+strings.Repeat("x", 1<<20)+`"}`)
	}
	page := g.get("/api/agents").want(t, 200)
	if page.names("agents") != "organization//m [latest];organization//n [latest]" || page.text("nextPageToken") == "" {
		t.Errorf("a page of large ones has %s", page.names("agents"))
	}
	if rest := g.get("/api/agents?pageToken="+page.text("nextPageToken")).want(t, 200); rest.names("agents") != "organization//o [latest];organization//other-kind [latest]" || rest.text("nextPageToken") != "" {
		t.Errorf("then comes %s", rest.names("agents"))
	}
}

// TestCatalogue_BadInputNamesTheField tests that an error in a definition names the path of the field, over REST and gRPC.
func TestCatalogue_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	spec := func(s string) string { return `{"ref":{"slug":"a"},"spec":` + s + `}` }
	ref := func(s string) string { return `{"ref":{` + s + `},"spec":` + reviewer + `}` }
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code, field              string
	}{
		{"no reference", "POST", "/api/agents", `{"spec":` + reviewer + `}`, 400, "INVALID_REQUEST", "ref"},
		{"no slug", "POST", "/api/agents", ref(``), 400, "INVALID_REQUEST", "ref.slug"},
		{"slug", "POST", "/api/agents", ref(`"slug":"A.>"`), 400, "INVALID_REQUEST", "ref.slug"},
		{"scope", "POST", "/api/agents", ref(`"slug":"a","scope":"mine"`), 400, "INVALID_REQUEST", "ref.scope"},
		{"org", "POST", "/api/agents", ref(`"slug":"a","org":"*"`), 400, "INVALID_REQUEST", "ref.org"},
		{"no account", "POST", "/api/agents", ref(`"slug":"a","scope":"identity_account"`), 400, "INVALID_REQUEST", "ref.org"},
		{"version", "POST", "/api/agents", ref(`"slug":"a","version":"1"`), 400, "INVALID_REQUEST", "ref.version"},
		{"tag", "POST", "/api/agents", `{"ref":{"slug":"a"},"tags":["ok","Not ok"],"spec":` + reviewer + `}`, 400, "INVALID_REQUEST", "tags[1]"},
		{"no spec", "POST", "/api/agents", `{"ref":{"slug":"a"}}`, 400, "INVALID_REQUEST", "spec"},
		{"spec of no object", "POST", "/api/agents", spec(`[]`), 400, "INVALID_REQUEST", "spec"},
		{"unknown field", "POST", "/api/agents", spec(`{"mcpServers":[{"name":"a"},{"ulr":"x"}]}`), 400, "INVALID_REQUEST", "spec.mcpServers[1].ulr"},
		{"wrong type", "POST", "/api/agents", spec(`{"limits":{"turns":"5"}}`), 400, "INVALID_REQUEST", "spec.limits.turns"},
		{"reference in a list", "POST", "/api/agents", spec(`{"skills":["ok","not ok"]}`), 400, "INVALID_REQUEST", "spec.skills[1]"},
		{"reference as an object", "POST", "/api/instances", spec(`{"agent":{"slug":"a","version":"!"}}`), 400, "INVALID_REQUEST", "spec.agent.version"},
		{"too large", "POST", "/api/agents", spec(`{"instructions":"` + strings.Repeat("x", 4<<20) + `"}`), 413, "PAYLOAD_TOO_LARGE", "spec"},
		{"deep", "POST", "/api/agents", spec(`{"name":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + `}`), 400, "INVALID_REQUEST", "spec"},
		{"unknown parameter", "GET", "/api/agents/a?tag=x", "", 400, "INVALID_REQUEST", "tag"},
		{"slug in the path", "GET", "/api/agents/A", "", 400, "INVALID_REQUEST", "slug"},
		{"slug of a subject", "DELETE", "/api/environments/%3E", "", 400, "INVALID_REQUEST", "slug"},
		{"scope of a GET", "GET", "/api/instances/a?scope=x", "", 400, "INVALID_REQUEST", "scope"},
		{"version of a GET", "GET", "/api/environments/a?version=%00", "", 400, "INVALID_REQUEST", "version"},
		{"position", "GET", "/api/agents/a?minPosition=x", "", 400, "INVALID_REQUEST", "minPosition"},
		{"page size", "GET", "/api/agents?pageSize=201", "", 400, "INVALID_REQUEST", "pageSize"},
		{"page token", "GET", "/api/agents?pageToken=YWJj", "", 400, "INVALID_REQUEST", "pageToken"},
		{"page token of base64", "GET", "/api/skills?pageToken=YS8vQQ", "", 400, "INVALID_REQUEST", "pageToken"},
		{"none", "GET", "/api/agents/none", "", 404, "AGENT_NOT_FOUND", "slug"},
		{"none", "GET", "/api/instances/none", "", 404, "INSTANCE_NOT_FOUND", "slug"},
		{"none", "GET", "/api/environments/none", "", 404, "ENVIRONMENT_NOT_FOUND", "slug"},
		{"none", "GET", "/api/skills/none", "", 404, "SKILL_NOT_FOUND", "slug"},
		{"none to remove", "DELETE", "/api/instances/none", "", 404, "INSTANCE_NOT_FOUND", "slug"},
		{"method", "PUT", "/api/agents", "", 405, "METHOD_NOT_ALLOWED", ""},
		{"agent and instance", "POST", "/api/sessions", `{"agent":"a","instance":"b"}`, 400, "INVALID_REQUEST", "instance"},
		{"agent of a session", "POST", "/api/sessions", `{"agent":"a b"}`, 400, "INVALID_REQUEST", "agent"},
		{"instance of an execution", "POST", "/api/executions", `{"content":"x","instance":"a/b/c/d"}`, 400, "INVALID_REQUEST", "instance"},
		{"environment of a session", "POST", "/api/sessions", `{"environments":["a",""]}`, 400, "INVALID_REQUEST", "environments[1]"},
		{"environments of a session", "POST", "/api/sessions", `{"environments":["a"` + strings.Repeat(`,"a"`, 32) + `]}`, 400, "INVALID_REQUEST", "environments"},
		{"explained", "POST", "/api/environments/explain", `{"environments":["a@"]}`, 400, "INVALID_REQUEST", "environments[0]"},
		{"explained agent", "POST", "/api/environments/explain", `{"agent":"none"}`, 404, "AGENT_NOT_FOUND", "agent"},
		{"explained instance", "POST", "/api/environments/explain", `{"instance":"none"}`, 404, "INSTANCE_NOT_FOUND", "instance"},
		{"explained environment", "POST", "/api/environments/explain", `{"environments":["none"]}`, 404, "ENVIRONMENT_NOT_FOUND", "environments[0]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := g.do(c.method, c.path, c.body).wantProblem(t, c.status, c.code, c.field)
			if d := a.text("detail"); len(d) > 300 || strings.Contains(d, "\n") {
				t.Errorf("not one sentence: %q", d)
			}
		})
	}
	conn := g.conn()
	_, err := spoolv1.NewAgentsClient(conn).ApplyAgent(t.Context(), &spoolv1.ApplyAgentRequest{Ref: &spoolv1.Reference{Slug: "a"}, Spec: &spoolv1.Json{Text: `{"tools":{"alow":[]}}`}})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "spec.tools.alow")
	_, err = spoolv1.NewAgentsClient(conn).ApplyAgent(t.Context(), &spoolv1.ApplyAgentRequest{Ref: &spoolv1.Reference{Slug: "a"}, Spec: &spoolv1.Json{Text: `{`}})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "spec")
	_, err = spoolv1.NewInstancesClient(conn).GetInstance(t.Context(), &spoolv1.GetInstanceRequest{Slug: "none"})
	wantCode(t, err, codes.NotFound, "INSTANCE_NOT_FOUND", "slug")
	if n := len(s.commands(t)); n != 1 {
		t.Errorf("%d commands were sent, want only the one that removes a missing entry", n)
	}
	// Errors of the session service are passed on.
	s.mu.Lock()
	s.refuse = func(command.Command) *command.Error {
		return &command.Error{Code: "TOO_MANY_TAGS", Field: "tags", Detail: "an entry has at most 64 tags"}
	}
	s.mu.Unlock()
	g.do("POST", "/api/agents", ref(`"slug":"a"`)).wantProblem(t, 409, "TOO_MANY_TAGS", "tags")
}

// TestCatalogue_TenantsCannotSeeEachOther tests, over REST and gRPC, that for a client another tenant's entry does not
// exist.
func TestCatalogue_TenantsCannotSeeEachOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	key := func(tenant string) *served {
		return g.withKey(g.withKey(root).do("POST", "/api/keys", fmt.Sprintf(`{"name":"x","tenant":%q}`, tenant)).want(t, 201).text("key"))
	}
	a, b, platform := key("a"), key("b"), key("platform")
	conn := g.conn()
	agents := spoolv1.NewAgentsClient(conn)
	made, err := agents.ApplyAgent(a.context(t.Context()), &spoolv1.ApplyAgentRequest{Ref: &spoolv1.Reference{Slug: "mine"}, Spec: &spoolv1.Json{Text: reviewer}})
	must(t, err)
	got, err := agents.GetAgent(a.context(t.Context()), &spoolv1.GetAgentRequest{Slug: "mine", Version: made.GetRef().GetVersion(), MinPosition: made.GetPosition()})
	if err != nil || got.GetSpec().GetText() != reviewer || got.GetRef().GetScope() != "organization" {
		t.Errorf("got %v, %v", got, err)
	}
	for _, path := range []string{"?version=" + made.GetRef().GetVersion(), "?scope=organization", "?scope=platform"} {
		theirs, none := b.get("/api/agents/mine"+path).wantProblem(t, 404, "AGENT_NOT_FOUND", "slug"), b.get("/api/agents/none"+path)
		if string(theirs.body) != string(none.body) {
			t.Errorf("another tenant's can be distinguished from a missing one: %s, %s", theirs, none)
		}
	}
	_, err = agents.GetAgent(b.context(t.Context()), &spoolv1.GetAgentRequest{Slug: "mine"})
	wantCode(t, err, codes.NotFound, "AGENT_NOT_FOUND", "slug")
	b.do("DELETE", "/api/agents/mine", "").wantProblem(t, 404, "AGENT_NOT_FOUND", "slug")
	b.do("POST", "/api/environments/explain", `{"agent":"mine"}`).wantProblem(t, 404, "AGENT_NOT_FOUND", "agent")

	// Platform entries are written with a key of tenant platform and can be read by every tenant.
	body := `{"ref":{"scope":"platform","slug":"shared"},"spec":` + reviewer + `}`
	if p := a.do("POST", "/api/agents", body).wantProblem(t, 403, "FORBIDDEN", "ref.scope"); !strings.Contains(p.text("detail"), "key of tenant platform") {
		t.Errorf("got %s", p)
	}
	a.do("DELETE", "/api/agents/shared?scope=platform", "").wantProblem(t, 403, "FORBIDDEN", "scope")
	g.withKey(root).do("POST", "/api/agents", body).wantProblem(t, 403, "FORBIDDEN", "Authorization")
	platform.apply("/api/agents", "internal", reviewer)
	platform.do("POST", "/api/keys", `{"name":"x"}`).wantProblem(t, 403, "FORBIDDEN", "tenant")
	a.do("POST", "/api/keys", `{"name":"x","tenant":"platform"}`).wantProblem(t, 403, "FORBIDDEN", "tenant")
	platform.do("POST", "/api/agents", body).want(t, 200)
	b.get("/api/agents/shared").wantProblem(t, 404, "AGENT_NOT_FOUND", "slug")
	if got := b.get("/api/agents/shared?scope=platform").want(t, 200); got.text("ref", "scope") != "platform" {
		t.Errorf("got %s", got)
	}
	for who, want := range map[*served]string{a: "organization//mine [latest];platform//shared [latest]", b: "platform//shared [latest]", platform: "organization//internal [latest];platform//shared [latest]"} {
		if got := who.get("/api/agents").want(t, 200).names("agents"); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	list, err := agents.ListAgents(b.context(t.Context()), &spoolv1.ListAgentsRequest{})
	if err != nil || len(list.GetAgents()) != 1 {
		t.Errorf("got %v, %v", list, err)
	}
}

// TestCatalogue_NothingIsMissingWhileFolding tests that nothing is reported as missing while the read models are being folded.
func TestCatalogue_NothingIsMissingWhileFolding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	w.exec("UPDATE checkpoints SET caught_up = false")
	g.get("/api/agents/a").wantProblem(t, 503, "UNAVAILABLE", "")
}

// TestSessions_AcceptReferencesInEveryForm tests that a session names its agent with a string or an object, in agent or
// agentProfileRef, and that these are the same request.
func TestSessions_AcceptReferencesInEveryForm(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	const object = `{"scope":"organization","org":"acme","kind":"agent","slug":"reviewer","version":"stable"}`
	for _, agent := range []string{
		`"agent":"acme/reviewer@stable"`, `"agent":` + object, `"agentProfileRef":"organization/acme/reviewer@stable"`, `"agentProfileRef":` + object,
		`"agent":"acme/reviewer@stable","agentProfileRef":` + object,
	} {
		body := `{` + agent + `,"environments":["staging",{"scope":"platform","slug":"proxies"}]`
		g.do("POST", "/api/sessions", body+`}`, header("Idempotency-Key", "one")).want(t, 201)
		g.do("POST", "/api/executions", body+`,"content":"q"}`).want(t, 202)
		s.mu.Lock()
		var create command.CreateSession
		var start command.StartExecution
		must(t, json.Unmarshal(s.all[0].Body, &create))
		must(t, json.Unmarshal(s.all[len(s.all)-1].Body, &start))
		s.mu.Unlock()
		for _, got := range []command.CreateSession{create, start.Create} {
			if ref, err := events.ParseReference(got.Agent); err != nil || ref.String() != "acme/reviewer@stable" || !slices.Equal(got.Environments, []string{"staging", "platform/proxies"}) {
				t.Errorf("%s: the session is asked for with %+v", agent, got)
			}
		}
	}
	for body, field := range map[string]string{
		`"agent":"a","agentProfileRef":"b"`:             "agentProfileRef",
		`"agent":"a","agentProfileRef":"a@v1"`:          "agentProfileRef",
		`"instance":"a","agentProfileRef":"b"`:          "agentProfileRef",
		`"agentProfileRef":"Not A Slug"`:                "agentProfileRef",
		`"agentProfileRef":{"slug":"a","colour":"red"}`: "agentProfileRef.colour",
		`"agentProfileRef":{"slug":"a","kind":"skill"}`: "agentProfileRef.kind",
		`"agent":{"slug":"a","scope":"mine"}`:           "agent.scope",
		`"environments":[{"slug":"a"},{"name":"b"}]`:    "environments[1].name",
		`"instance":{"slug":"a","version":"` + `V"}`:    "instance.version",
		`"agent":["a"]`: "agent",
	} {
		g.do("POST", "/api/sessions", `{`+body+`}`).wantProblem(t, 400, "INVALID_REQUEST", field)
		g.do("POST", "/api/executions", `{"content":"q",`+body+`}`).wantProblem(t, 400, "INVALID_REQUEST", field)
	}
	g.do("POST", "/api/environments/explain", `{"agent":{"slug":"a","colour":1}}`).wantProblem(t, 400, "INVALID_REQUEST", "agent.colour")
	s.mu.Lock()
	s.refuse = func(command.Command) *command.Error {
		return &command.Error{Code: "AGENT_NOT_FOUND", Field: "agent", Detail: "there is no agent reviewer"}
	}
	s.mu.Unlock()
	g.do("POST", "/api/sessions", `{"agentProfileRef":"reviewer"}`).wantProblem(t, 404, "AGENT_NOT_FOUND", "agentProfileRef")
	g.do("POST", "/api/sessions", `{"agent":"reviewer"}`).wantProblem(t, 404, "AGENT_NOT_FOUND", "agent")
}
