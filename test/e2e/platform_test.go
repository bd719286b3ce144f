package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// keyHolder is a client with a key.
type keyHolder struct {
	t      *testing.T
	c      *harness.Cluster
	header map[string]string
}

func withKey(t *testing.T, c *harness.Cluster, key string) keyHolder {
	return keyHolder{t, c, map[string]string{"Authorization": "Bearer " + key}}
}

// tenant creates a key of a tenant with the root key, and waits until it is accepted.
func (k keyHolder) tenant(name string) keyHolder {
	k.t.Helper()
	var made struct{ Key string }
	k.gets(http.StatusCreated, "POST", "/api/keys", map[string]any{"name": "test", "tenant": name}, &made)
	other := withKey(k.t, k.c, made.Key)
	harness.Eventually(k.t, "the new key is accepted", func() bool {
		status, _ := other.asks("GET", "/api/sessions", nil)
		return status == http.StatusOK
	})
	return other
}

func (k keyHolder) asks(method, path string, body any) (int, []byte) {
	k.t.Helper()
	var raw []byte
	if body != nil {
		var err error
		if raw, err = json.Marshal(body); err != nil {
			k.t.Fatal(err)
		}
	}
	return request(k.t, method, k.c.URL(0)+path, k.header, raw)
}

// gets sends a request, checks the status and decodes the answer.
func (k keyHolder) gets(status int, method, path string, body, out any) string {
	k.t.Helper()
	got, raw := k.asks(method, path, body)
	if got != status {
		k.t.Fatalf("%s %s: answered %d %s, want %d", method, path, got, raw, status)
	}
	if out != nil {
		if err := json.Unmarshal(raw, out); err != nil {
			k.t.Fatalf("%s %s: answered %s: %v", method, path, raw, err)
		}
	}
	return string(raw)
}

// pushes pushes a skill's archive.
func (k keyHolder) pushes(zip []byte, query string) (int, []byte) {
	k.t.Helper()
	header := map[string]string{"Content-Type": "application/zip"}
	for name, value := range k.header {
		header[name] = value
	}
	return request(k.t, "POST", k.c.URL(0)+"/api/skills?"+query, header, zip)
}

// applies applies a definition and returns its version.
func (k keyHolder) applies(kind, scope, slug string, spec any) string {
	k.t.Helper()
	var applied struct{ Ref events.Reference }
	k.gets(http.StatusOK, "POST", "/api/"+kind, map[string]any{"ref": map[string]any{"scope": scope, "slug": slug}, "spec": spec}, &applied)
	return applied.Ref.Version
}

// runs posts a message in a new session, waits for its end, and deletes the session. It returns the result and all
// events of the session.
func (k keyHolder) runs(session map[string]any, message string) (result string, all []events.WireEvent) {
	k.t.Helper()
	var s struct{ SessionID string }
	k.gets(http.StatusCreated, "POST", "/api/sessions", session, &s)
	k.gets(http.StatusAccepted, "POST", "/api/sessions/"+s.SessionID+"/messages", map[string]any{"content": message}, nil)
	harness.Eventually(k.t, "the execution has ended", func() bool {
		var page struct{ Events []events.WireEvent }
		k.gets(http.StatusOK, "GET", "/api/sessions/"+s.SessionID+"/events?limit=1000", nil, &page)
		all = page.Events
		for _, e := range all {
			if events.IsTerminal(e.Type) {
				done, ok := events.DecodePayload(e.Type, e.Data).(events.ExecutionCompleted)
				if !ok {
					k.t.Fatalf("the execution ended with %s %s", e.Type, e.Data)
				}
				result = done.Result
				return true
			}
		}
		return false
	})
	status, raw := k.asks("DELETE", "/api/sessions/"+s.SessionID, nil)
	if status/100 != 2 {
		k.t.Errorf("delete: answered %d %s", status, raw)
	}
	harness.Eventually(k.t, "no process of the deleted session is left", func() bool { return len(harness.FindProcesses(k.c.WorkspaceFolder(s.SessionID))) == 0 })
	return result, all
}

// TestPlatform_EntriesAreSharedAndReadOnly tests that every tenant may use and read the entries of tenant platform by
// their references, and that no tenant may write them. The platform's secret works and is never shown. A tenant's
// entry with the same name is a different one.
func TestPlatform_EntriesAreSharedAndReadOnly(t *testing.T) {
	t.Parallel()
	const rootKey, token, mine = "a-root-key-of-more-than-32-characters", "kestrel-7731-of-the-platform", "magpie-9915-of-the-tenant"
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml"), Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKey}, KeepLogs: true})
	root := withKey(t, c, rootKey)
	platform := root.tenant(events.PlatformTenant)
	if status, raw := platform.pushes(greet(t), "slug=greet&scope=platform&tag=stable"); status != http.StatusCreated {
		t.Fatalf("pushed: %d %s", status, raw)
	}
	environment := func(whom, secret string) map[string]any {
		return map[string]any{"variables": map[string]any{"WHOM": map[string]any{"value": whom}, "DOOR_TOKEN": map[string]any{"value": secret, "secret": true}}}
	}
	agent := func(instructions string, skills ...string) map[string]any {
		return map[string]any{"architecture": "spool", "model": "known-model", "instructions": instructions, "skills": skills}
	}
	platform.applies("environments", "platform", "street", environment("Ada", token))
	version := platform.applies("agents", "platform", "porter", agent("You are the platform's porter.", "platform/greet@stable"))
	ours, theirs := root.tenant("ours"), root.tenant("theirs")
	harness.Eventually(t, "the agent is read", func() bool {
		status, _ := ours.asks("GET", "/api/agents/porter?scope=platform", nil)
		return status == http.StatusOK
	})

	// A tenant uses all of these by reference: the agent, its skill, the environment and its secret.
	session := map[string]any{"agent": "platform/porter", "environments": []string{"platform/street"}}
	dir := func() string {
		for _, r := range c.Model.Requests() {
			if m := regexp.MustCompile(`LOCATION: ([^ \\"]+)/`).FindSubmatch(r.Body); m != nil {
				return string(m[1])
			}
		}
		t.Fatal("no model request contains the location of the skill")
		return ""
	}
	_, first := ours.runs(session, "hello")
	const hash = `run the command printf %s "$DOOR_TOKEN" | sha256sum; `
	sum := func(secret string) string {
		digest := sha256.Sum256([]byte(secret))
		return hex.EncodeToString(digest[:])
	}
	result, second := ours.runs(session, hash+dir()+"/scripts/greet.sh")
	if !strings.Contains(result, sum(token)) || !strings.Contains(result, "greetings to Ada from") {
		t.Errorf("the agent said %q", result)
	}
	if told := resolutionOf(t, first); told.Agent.Version != version || told.Agent.Scope != events.ScopePlatform || len(told.Skills) != 1 || told.Skills[0].Ref.Scope != events.ScopePlatform {
		t.Errorf("resolved %+v", told)
	}

	platformIsReadOnly(t, ours, platform, greet(t), agent("You are anybody's porter."), environment("Eve", "x"))

	// The tenant's own entries have the same names.
	ours.applies("environments", "", "street", environment("Grace", mine))
	own := ours.applies("agents", "", "porter", agent("You are our porter."))
	result, third := ours.runs(map[string]any{"agent": "porter", "environments": []string{"street"}}, hash+"echo \"$WHOM\"")
	if !strings.Contains(result, sum(mine)) || !strings.Contains(result, "Grace") || resolutionOf(t, third).Agent.Version != own {
		t.Errorf("the tenant's own agent answered %q, resolved %+v", result, resolutionOf(t, third))
	}
	if result, _ := ours.runs(session, hash+"echo \"$WHOM\""); !strings.Contains(result, sum(token)) || !strings.Contains(result, "Ada") {
		t.Errorf("after that the platform's agent answered %q", result)
	}
	if result, _ := theirs.runs(session, hash+"echo \"$WHOM\""); !strings.Contains(result, sum(token)) || !strings.Contains(result, "Ada") {
		t.Errorf("for another tenant the platform's agent answered %q", result)
	}
	status, raw := theirs.asks("POST", "/api/sessions", map[string]any{"agent": "porter"})
	refused(t, "another tenant's agent", http.StatusNotFound, "AGENT_NOT_FOUND", "agent", status, raw)

	// Sessions that named only an agent have its default instance. Each tenant has its own.
	for whose, want := range map[*keyHolder]string{&ours: "organization/platform/porter.default porter.default", &theirs: "organization/platform/porter.default"} {
		var list struct {
			Instances []struct{ Ref events.Reference }
		}
		whose.gets(http.StatusOK, "GET", "/api/instances", nil, &list)
		var got []string
		for _, one := range list.Instances {
			got = append(got, one.Ref.WithoutVersion().String())
		}
		if slices.Sort(got); strings.Join(got, " ") != want {
			t.Errorf("a tenant has the instances %s, want %s", got, want)
		}
	}
	if told := resolutionOf(t, third); told.Instance.WithoutVersion() != (events.Reference{Slug: "porter.default"}) {
		t.Errorf("the execution resolved the instance %s", told.Instance)
	}

	// The secret is in no answer, in no event, and in no written data.
	for _, list := range [][]events.WireEvent{first, second, third} {
		for _, e := range list {
			if strings.Contains(string(e.Data), token) || strings.Contains(string(e.Data), mine) {
				t.Errorf("event %s shows a secret: %s", e.Type, e.Data)
			}
		}
	}
	for where, content := range c.WrittenData() {
		if strings.Contains(string(content), token) {
			t.Errorf("%s shows the secret", where)
		}
	}
}

// resolutionOf returns the resolution of a session's first execution.
func resolutionOf(t *testing.T, all []events.WireEvent) events.ExecutionResolved {
	t.Helper()
	for _, e := range all {
		if d, ok := events.DecodePayload(e.Type, e.Data).(events.ExecutionResolved); ok {
			return d
		}
	}
	t.Fatal("the session has no execution_resolved")
	return events.ExecutionResolved{}
}

// platformIsReadOnly checks that a tenant reads the platform's entries, without the secret, and that every way to
// write them is refused.
func platformIsReadOnly(t *testing.T, tenant, owner keyHolder, zip []byte, agent, environment map[string]any) {
	t.Helper()
	ref := func(slug string) map[string]any { return map[string]any{"scope": "platform", "slug": slug} }
	for name, c := range map[string]struct {
		method, path string
		body         any
		field        string
	}{
		"an agent":           {"POST", "/api/agents", map[string]any{"ref": ref("porter"), "spec": agent}, "ref.scope"},
		"a new agent":        {"POST", "/api/agents", map[string]any{"ref": ref("brand-new"), "spec": agent}, "ref.scope"},
		"an environment":     {"POST", "/api/environments", map[string]any{"ref": ref("street"), "spec": environment}, "ref.scope"},
		"an instance":        {"POST", "/api/instances", map[string]any{"ref": ref("porter"), "spec": map[string]any{"agent": "platform/porter"}}, "ref.scope"},
		"no agent":           {"DELETE", "/api/agents/porter?scope=platform", nil, "scope"},
		"no environment":     {"DELETE", "/api/environments/street?scope=platform", nil, "scope"},
		"no skill":           {"DELETE", "/api/skills/greet?scope=platform", nil, "scope"},
		"the tag of a skill": {"POST", "/api/skills/greet/tags", map[string]any{"scope": "platform", "version": "stable", "tag": "newest"}, "scope"},
	} {
		status, raw := tenant.asks(c.method, c.path, c.body)
		refused(t, name, http.StatusForbidden, "FORBIDDEN", c.field, status, raw)
	}
	status, raw := tenant.pushes(zip, "slug=greet&scope=platform")
	refused(t, "a skill", http.StatusForbidden, "FORBIDDEN", "scope", status, raw)
	for _, k := range []keyHolder{tenant, owner} {
		shown := k.gets(http.StatusOK, "GET", "/api/environments/street?scope=platform", nil, nil)
		if !strings.Contains(shown, "DOOR_TOKEN") || !strings.Contains(shown, "Ada") || strings.Contains(shown, "kestrel") {
			t.Errorf("the environment is shown as %s", shown)
		}
	}
	var list struct {
		Agents []struct{ Ref events.Reference }
	}
	tenant.gets(http.StatusOK, "GET", "/api/agents", nil, &list)
	if len(list.Agents) != 1 || list.Agents[0].Ref.Scope != events.ScopePlatform {
		t.Errorf("agents %+v", list.Agents)
	}
}
