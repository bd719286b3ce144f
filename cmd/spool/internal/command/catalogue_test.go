package command

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// catalogue is a fake gateway with agents, instances and environments.
type catalogue struct {
	*httptest.Server
	answer     func(what string) (status int, body string) // what is the method and the URI; status 0 means the default response
	mu         sync.Mutex
	requestLog []string
	bodies     []string
	keys       []string
}

func serveCatalogue(t *testing.T, answer func(string) (int, string)) *catalogue {
	t.Helper()
	c := &catalogue{answer: answer}
	c.Server = httptest.NewServer(c)
	t.Cleanup(c.Close)
	return c
}

var version = strings.Repeat("5e", 32)

const (
	agentDoc = `{"ref":{"org":"payments","slug":"reviewer","version":"%s"},"tags":["latest","stable"],"createdAt":"2026-01-02T03:04:05Z","extra":1,` +
		`"spec":{"architecture":"claude-code","instructions":"Review\nall of it.\n","model":"m\u001b[2J","skills":["o/s@v1"]}}`
	instanceDoc = `{"ref":{"slug":"i","version":"%s"},"tags":["latest"],"createdAt":"2026-01-02T03:04:05Z","spec":{"agent":{"org":"payments","slug":"reviewer"},"environments":[{"slug":"ci"}]}}`
	envDoc      = `{"ref":{"scope":"platform","slug":"ci","version":"%s"},"tags":["latest"],"createdAt":"2026-01-02T03:04:05Z",` +
		`"spec":{"variables":{"MODE":{"value":"strict"},"TOKEN":{"secret":true,"sealed":"k/1","value":"hunter2","description":"d"}}}}`
)

func (c *catalogue) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // the client reports an incomplete body
	what := r.Method + " " + r.URL.RequestURI()
	c.mu.Lock()
	c.requestLog, c.bodies, c.keys = append(c.requestLog, what), append(c.bodies, string(body)), append(c.keys, r.Header.Get("Idempotency-Key"))
	c.mu.Unlock()
	status, text := 0, ""
	if c.answer != nil {
		status, text = c.answer(what)
	}
	if status == 0 {
		status, text = usual(what, body)
	}
	w.Header().Set("Content-Type", "application/json")
	if status >= 300 {
		w.Header().Set("Content-Type", "application/problem+json")
	}
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

// usual returns the default response.
func usual(what string, body []byte) (int, string) {
	docs := map[string]string{"agents": agentDoc, "instances": instanceDoc, "environments": envDoc}
	method, path, _ := strings.Cut(what, " ")
	path, query, _ := strings.Cut(strings.TrimPrefix(path, "/api/"), "?")
	list, slug, _ := strings.Cut(path, "/")
	doc := fmt.Sprintf(docs[list], version)
	switch {
	case method == http.MethodPost && slug == "explain":
		return 200, `{"variables":[{"name":"MODE","from":"agent","secret":false,"value":"a\u001b[2J"},{"name":"TOKEN","from":"platform/ci@5e","secret":true,"value":"hunter2"}],"egress":[{"entry":"GET,HEAD api.example.com","from":"platform/ci@5e"}]}`
	case method == http.MethodPost:
		var in struct{ Ref map[string]any }
		if err := json.Unmarshal(body, &in); err != nil {
			return 500, err.Error()
		}
		in.Ref["version"] = version
		ref, _ := json.Marshal(in.Ref) // strings are always encoded
		return 200, fmt.Sprintf(`{"ref":%s,"position":"0-7","same":%v}`, ref, in.Ref["slug"] == "same")
	case method == http.MethodGet && slug == "" && query == "":
		return 200, fmt.Sprintf(`{%q:[%s],"nextPageToken":"more"}`, list, doc)
	case method == http.MethodGet && slug == "":
		return 200, fmt.Sprintf(`{%q:[%s],"nextPageToken":""}`, list, doc)
	case method == http.MethodGet && slug != "missing":
		return 200, doc
	case method == http.MethodDelete && slug != "missing":
		return 200, `{"position":"0-9"}`
	}
	return 404, `{"code":"NOT_FOUND","field":"slug","detail":"there is no such entry"}`
}

func (c *catalogue) requests() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.requestLog)
}

// definitions is a file whose order differs from the order in which its definitions are applied.
const definitions = `kind: instance
slug: i
spec:
  agent: payments/reviewer@stable
  environments: [platform/ci]
---
kind: agent
slug: reviewer
org: payments
tags: [stable]
spec:
  architecture: claude-sdk
  instructions: Review all of it.
---
kind: environment
slug: ci
scope: platform
spec:
  variables:
    MODE: {value: strict}
    TOKEN: {secret: true, valueFrom: {env: CI_TOKEN}}
    KEY: {secret: true, valueFrom: {file: secrets/key}}
    KEPT: {secret: true}
`

// machine returns a machine, and a file of definitions with the files that they name.
func machine(t *testing.T, text string) (IO, string) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "all.yaml")
	if err := os.Mkdir(filepath.Join(dir, "secrets"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{file: text, filepath.Join(dir, "secrets", "key"): "k3y\r\n"} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w := testIO(t)
	w.LookupEnv = func(name string) (string, bool) { return "t0ken", name == "CI_TOKEN" }
	return w, file
}

func TestApply_SendsDefinitionsInOrder(t *testing.T) {
	t.Parallel()
	w, file := machine(t, definitions)
	c := serveCatalogue(t, nil)
	got := spool(t, w, "agents", "apply", "-f", file, "--url", c.URL)
	want := "applied environment platform/ci@" + version + "\napplied agent payments/reviewer@" + version + "\napplied instance i@" + version + "\n"
	if got != (result{ExitDone, want, ""}) {
		t.Errorf("%+v", got)
	}
	if requested := c.requests(); !slices.Equal(requested, []string{"POST /api/environments", "POST /api/agents", "POST /api/instances"}) {
		t.Errorf("requested %v", requested)
	}
	for i, want := range []string{
		`{"ref":{"scope":"platform","slug":"ci"},"spec":{"variables":{"KEPT":{"secret":true},"KEY":{"value":"k3y","secret":true},"MODE":{"value":"strict"},"TOKEN":{"value":"t0ken","secret":true}}}}`,
		`{"ref":{"org":"payments","slug":"reviewer"},"tags":["stable"],"spec":{"architecture":"claude-code","instructions":"Review all of it."}}`,
		`{"ref":{"slug":"i"},"spec":{"agent":{"org":"payments","slug":"reviewer","version":"stable"},"environments":[{"scope":"platform","slug":"ci"}]}}`,
	} {
		if c.bodies[i] != want || c.keys[i] == "" {
			t.Errorf("sent %s with key %q\nwant %s", c.bodies[i], c.keys[i], want)
		}
	}

	w.In = strings.NewReader(`{"kind":"instance","slug":"same","spec":{"agent":"a"}}`)
	if got := spool(t, w, "instances", "apply", "-f", "-", "--url", c.URL); got != (result{ExitDone, "unchanged instance same@" + version + "\n", ""}) {
		t.Errorf("%+v", got)
	}
	w.In = strings.NewReader(`{"kind":"instance","slug":"same","spec":{"agent":"a"}}`)
	if got := spool(t, w, "envs", "apply", "-f", "-", "--json", "--url", c.URL); got != (result{ExitDone, `{"kind":"instance","ref":{"slug":"same","version":"` + version + `"},"position":"0-7","same":true}` + "\n", ""}) {
		t.Errorf("%+v", got)
	}
}

// TestApply_ReportsErrorsOfTheFileBeforeARequest tests that all errors of a file are reported, without a request.
func TestApply_ReportsErrorsOfTheFileBeforeARequest(t *testing.T) {
	t.Parallel()
	c := serveCatalogue(t, nil)
	for name, x := range map[string]struct{ text, says string }{
		"rules": {"kind: agent\nslug: a\nspec:\n  architecture: moon\n  instructions: short\n",
			"stdin:4:17: spec.architecture: unknown architecture \"moon\"; must be one of claude-code (alias claude-sdk), codex, opencode, acp, spool\n" +
				"stdin:5:17: spec.instructions: has 5 characters; at least 10 are required\nspool: nothing was applied: the file has 2 errors\n"},
		"a good one before": {"kind: instance\nslug: a\nspec: {agent: a}\n---\nkind: \"x\\e[2J\"\n", ""},
		"nothing":           {"", "stdin:1:1: is empty: a definition has kind, slug and spec\nspool: nothing was applied: the file has an error\n"},
		"values": {"kind: environment\nslug: a\nspec:\n  variables:\n    A: {valueFrom: {env: NOPE}}\n    B:\n      valueFrom: {file: /nonsense/file}\n",
			"stdin:5:20: spec.variables.A.valueFrom: variable NOPE is not set here\nstdin:7:18: spec.variables.B.valueFrom: open /nonsense/file: no such file or directory\nspool: nothing was applied: the file has 2 errors\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := testIO(t)
			w.In = strings.NewReader(x.text)
			got := spool(t, w, "agents", "apply", "-f", "-", "--url", c.URL)
			if got.code != ExitUsage || got.out != "" || x.says != "" && got.err != x.says || !strings.Contains(got.err, "nothing was applied") || strings.Contains(got.err, "\x1b") {
				t.Errorf("%+v", got)
			}
		})
	}
	for _, args := range [][]string{{"apply"}, {"apply", "-f", "/nonsense"}, {"apply", "-f", t.TempDir()}} {
		if got := spool(t, testIO(t), append([]string{"agents"}, append(args, "--url", c.URL)...)...); got.code != ExitUsage || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	t.Cleanup(func() {
		if requested := c.requests(); len(requested) > 0 {
			t.Errorf("requests %v", requested)
		}
	})
}

// TestApply_StopsAtARefusedDefinition tests that a refused definition ends the command, with the position of the error
// in the file and with the definitions that were applied before.
func TestApply_StopsAtARefusedDefinition(t *testing.T) {
	t.Parallel()
	for name, x := range map[string]struct {
		status  int
		problem string
		code    int
		says    string
	}{
		"field":     {400, `{"code":"INVALID_REQUEST","field":"spec.instructions","detail":"they are not\nliked"}`, ExitUsage, "%s:13:17: spec.instructions: they are not\n  liked (INVALID_REQUEST)"},
		"no place":  {422, `{"code":"TOO_MANY_TAGS","field":"tags","detail":"too many"}`, ExitFailed, "%s:10:7: tags: too many (TOO_MANY_TAGS)"},
		"reference": {409, `{"code":"CONFLICT","field":"ref.org","detail":"not yours"}`, ExitFailed, "%s:9:6: org: not yours (CONFLICT)"},
		"whole":     {403, `{"code":"FORBIDDEN","field":"ref","detail":"no"}`, ExitFailed, "%s:8:7: slug: no (FORBIDDEN)"},
		"unplaced":  {401, `{"code":"UNAUTHENTICATED","detail":"no key"}`, ExitFailed, "%s:7:1: no key (UNAUTHENTICATED); pass a valid key with --key or SPOOL_API_KEY"},
		"elsewhere": {400, `{"code":"INVALID_REQUEST","field":"spec.mcpServers[3].url","detail":"x"}`, ExitUsage, "%s:12:3: spec.mcpServers[3].url: x (INVALID_REQUEST)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, file := machine(t, definitions)
			c := serveCatalogue(t, func(what string) (int, string) {
				if what == "POST /api/agents" {
					return x.status, x.problem
				}
				return 0, ""
			})
			got := spool(t, w, "envs", "apply", "-f", file, "--url", c.URL)
			says := "applied environment platform/ci; not agent payments/reviewer, and nothing after it (1 of 3)\nspool: " + fmt.Sprintf(x.says, file) + "\n"
			if got != (result{x.code, "applied environment platform/ci@" + version + "\n", says}) {
				t.Errorf("%+v\nwant %s", got, says)
			}
			if requested := c.requests(); len(requested) != 2 {
				t.Errorf("requested %v", requested)
			}
		})
	}
	w, file := machine(t, definitions)
	got := spool(t, w, "envs", "apply", "-f", file, "--url", nowhere)
	if got.code != ExitFailed || got.out != "" || !strings.Contains(got.err, "applied nothing; not environment platform/ci, and nothing after it (0 of 3)\nspool: cannot reach") {
		t.Errorf("%+v", got)
	}
}

func TestCatalogueLs_PrintsTables(t *testing.T) {
	t.Parallel()
	c := serveCatalogue(t, nil)
	for noun, want := range map[string]string{
		"agents":    "payments/reviewer  5e5e5e5e5e5e  claude-code   m",
		"instances": "i         5e5e5e5e5e5e  payments/reviewer  ci            latest",
		"envs":      "platform/ci  5e5e5e5e5e5e  2          1        latest",
	} {
		got := spool(t, testIO(t), noun, "ls", "--url", c.URL)
		lines := strings.Split(got.out, "\n")
		if got.code != ExitDone || len(lines) != 4 || !strings.HasPrefix(lines[1], want) || lines[1] != lines[2] || strings.Contains(got.out, "\x1b") || strings.Contains(got.out, "hunter2") {
			t.Errorf("%s: %+v", noun, got)
		}
		if got := spool(t, testIO(t), noun, "ls", "--limit", "1", "--json", "--url", c.URL); got.code != ExitDone || strings.Count(got.out, "\n") != 1 || !json.Valid([]byte(got.out)) {
			t.Errorf("%s: %+v", noun, got)
		}
		if got := spool(t, testIO(t), noun, "ls", "--limit=-1", "--url", c.URL); got.code != ExitUsage {
			t.Errorf("%s: %+v", noun, got)
		}
	}
	if requested := c.requests(); !slices.Contains(requested, "GET /api/environments?pageToken=more") {
		t.Errorf("requested %v", requested)
	}
	bad := serveCatalogue(t, func(string) (int, string) {
		return 200, `{"agents":[{"ref":{"slug":"a"},"spec":{"model":7}}]}`
	})
	if got := spool(t, testIO(t), "agents", "ls", "--url", bad.URL); got.code != ExitFailed || !strings.Contains(got.err, "a: decode the spec") {
		t.Errorf("%+v", got)
	}
}

// TestCatalogueShow_PrintsAFileForApply tests that apply accepts the output of show.
func TestCatalogueShow_PrintsAFileForApply(t *testing.T) {
	t.Parallel()
	c := serveCatalogue(t, nil)
	for _, x := range []struct {
		args      []string
		requested string
		want      string
	}{
		{[]string{"agents", "show", "payments/reviewer"}, "GET /api/agents/reviewer?org=payments", "# payments/reviewer@" + version + `, of 2026-01-02T03:04:05Z
kind: agent
slug: reviewer
org: payments
tags:
  - stable
spec:
  architecture: claude-code
  model: "m\e[2J"
  instructions: |
    Review
    all of it.
  skills:
    - o/s@v1
`},
		{[]string{"instances", "show", "i", "--version", "latest"}, "GET /api/instances/i?version=latest", "# i@" + version + `, of 2026-01-02T03:04:05Z
kind: instance
slug: i
spec:
  agent: payments/reviewer
  environments:
    - ci
`},
		{[]string{"envs", "show", "platform/ci@" + version}, "GET /api/environments/ci?scope=platform&version=" + version, "# platform/ci@" + version + `, of 2026-01-02T03:04:05Z
kind: environment
slug: ci
scope: platform
spec:
  variables:
    MODE:
      value: strict
    TOKEN:
      secret: true
      description: d
`},
	} {
		got := spool(t, testIO(t), append(x.args, "--url", c.URL)...)
		if requested := c.requests(); got != (result{ExitDone, x.want, ""}) || requested[len(requested)-1] != x.requested {
			t.Errorf("requested %v: %d %s\n%s", requested, got.code, got.err, got.out)
		}
		w := testIO(t)
		w.In = strings.NewReader(strings.ReplaceAll(got.out, `"m\e[2J"`, "m"))
		if got := spool(t, w, x.args[0], "apply", "-f", "-", "--url", c.URL); got.code != ExitDone {
			t.Errorf("%v is not applied again: %+v", x.args, got)
		}
	}
	if got := spool(t, testIO(t), "agents", "show", "payments/reviewer", "--json", "--url", c.URL); got.code != ExitDone || got.out != fmt.Sprintf(agentDoc, version)+"\n" {
		t.Errorf("%+v", got)
	}
	if got := spool(t, testIO(t), "agents", "show", "missing", "--url", c.URL); got != (result{ExitFailed, "", "spool: slug: there is no such entry (NOT_FOUND)\n"}) {
		t.Errorf("%+v", got)
	}
	newer := serveCatalogue(t, func(string) (int, string) {
		return 200, `{"ref":{"slug":"a"},"spec":{"architecture":"spool","instructions":"x","mood":"new"}}`
	})
	if got := spool(t, testIO(t), "agents", "show", "a", "--url", newer.URL); got.code != ExitFailed || !strings.Contains(got.err, `unknown field "mood"`) || got.out != "" {
		t.Errorf("%+v", got)
	}
}

func TestCatalogueRm_ContinuesAfterAFailure(t *testing.T) {
	t.Parallel()
	c := serveCatalogue(t, nil)
	got := spool(t, testIO(t), "agents", "rm", "payments/a", "missing", "platform/b", "--url", c.URL)
	if got != (result{ExitFailed, "removed agent payments/a\nremoved agent platform/b\n", "spool: missing: slug: there is no such entry (NOT_FOUND)\n"}) {
		t.Errorf("%+v", got)
	}
	if requested := c.requests(); !slices.Equal(requested, []string{"DELETE /api/agents/a?org=payments", "DELETE /api/agents/missing", "DELETE /api/agents/b?scope=platform"}) {
		t.Errorf("requested %v", requested)
	}
	for noun, requested := range map[string]string{"instances": "DELETE /api/instances/x", "envs": "DELETE /api/environments/x"} {
		if got := spool(t, testIO(t), noun, "rm", "x", "--json", "--url", c.URL); got != (result{ExitDone, `{"position":"0-9"}` + "\n", ""}) || !slices.Contains(c.requests(), requested) {
			t.Errorf("%+v", got)
		}
	}
}

func TestExplain_NeverPrintsSecrets(t *testing.T) {
	t.Parallel()
	c := serveCatalogue(t, nil)
	got := spool(t, testIO(t), "envs", "explain", "--agent", "payments/reviewer@stable", "--env", "ci", "--env", "platform/ci", "--url", c.URL)
	if want := "NAME   FROM            SECRET  VALUE\nMODE   agent           -       a\\u{1b}[2J\nTOKEN  platform/ci@5e  secret  -\n\nEGRESS                    FROM\nGET,HEAD api.example.com  platform/ci@5e\n"; got != (result{ExitDone, want, ""}) {
		t.Errorf("%+v", got)
	}
	if c.bodies[0] != `{"agent":"payments/reviewer@stable","environments":["ci","platform/ci"]}` || c.requests()[0] != "POST /api/environments/explain" {
		t.Errorf("requested %v %s", c.requests(), c.bodies)
	}
	got = spool(t, testIO(t), "envs", "explain", "--instance", "i", "--json", "--url", c.URL)
	if got.code != ExitDone || strings.Count(got.out, "\n") != 3 || strings.Contains(got.out, "hunter2") || !strings.Contains(got.out, `{"name":"TOKEN","from":"platform/ci@5e","secret":true}`+"\n"+`{"entry":"GET,HEAD api.example.com","from":"platform/ci@5e"}`) {
		t.Errorf("%+v", got)
	}
}

func TestCatalogue_RefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		args []string
		says string
	}{
		{[]string{"agents"}, "see `spool agents --help`"},
		{[]string{"agents", "show"}, "ref"},
		{[]string{"agents", "show", "A"}, "ref: slug: "},
		{[]string{"agents", "show", "a@v1", "--version", "v2"}, "version: the reference already names version v1"},
		{[]string{"agents", "show", "a", "--version", "V"}, "version: "},
		{[]string{"instances", "rm"}, "ref"},
		{[]string{"instances", "rm", "ok", "a@v1"}, "ref: a@v1 names a version"},
		{[]string{"envs", "rm", "a/b/c"}, "ref: "},
		{[]string{"envs", "explain"}, "agent: name an agent"},
		{[]string{"envs", "explain", "--agent", "a", "--instance", "b"}, "--agent"},
		{[]string{"envs", "explain", "--env", ""}, "env: slug: "},
		{[]string{"envs", "explain", "--instance", "*"}, "instance: slug: "},
		{[]string{"envs", "explain", "--env", "ok", "--env", "a,b"}, "env: slug: "},
	} {
		got := spool(t, testIO(t), append(x.args, "--url", nowhere)...)
		if got.code != ExitUsage || !strings.Contains(got.err, x.says) || strings.Count(got.err, "\n") != 1 || got.out != "" {
			t.Errorf("%v: %+v, want %q", x.args, got, x.says)
		}
	}
}
