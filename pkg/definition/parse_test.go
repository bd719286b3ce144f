package definition_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
)

const minimal = "kind: agent\nslug: a\nspec:\n  architecture: spool\n  instructions: Say hello to all.\n"

// TestParse_AcceptsReferencesAsObjects tests that every field that holds references has a kind, and accepts the
// object form of a reference of that kind only.
func TestParse_AcceptsReferencesAsObjects(t *testing.T) {
	t.Parallel()
	file := `{"kind":"instance","slug":"a","spec":{"agent":{"scope":"organization","org":"o","kind":"agent","slug":"r","version":"stable"},
		"environments":[{"scope":"platform","kind":"environment","slug":"e"}]}}`
	list, err := definition.Parse("x.json", []byte(file))
	if err != nil || len(list) != 1 || list[0].Instance.Agent != (events.Reference{Org: "o", Slug: "r", Version: "stable"}) ||
		list[0].Instance.Environments[0] != (events.Reference{Scope: events.ScopePlatform, Slug: "e"}) {
		t.Errorf("got %+v, %v", list, err)
	}
	const wrong = "kind: instance\nslug: a\nspec:\n  agent:\n    kind: skill\n    slug: r\n"
	if _, err := definition.Parse("x.yaml", []byte(wrong)); err == nil || !strings.Contains(err.Error(), `x.yaml:5:11: spec.agent.kind: must be agent, not "skill"`) {
		t.Errorf("got %v", err)
	}
	var walk func(t reflect.Type, name string)
	walk = func(typ reflect.Type, name string) {
		switch {
		case typ == reflect.TypeFor[events.Reference]():
			if events.ReferenceKind(name) == "" {
				t.Errorf("field %s holds references of no kind", name)
			}
		case typ.Kind() == reflect.Slice, typ.Kind() == reflect.Map:
			walk(typ.Elem(), name)
		case typ.Kind() == reflect.Struct:
			for i := range typ.NumField() {
				name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
				walk(typ.Field(i).Type, name)
			}
		}
	}
	for _, spec := range []any{events.AgentSpec{}, events.InstanceSpec{}, events.EnvironmentSpec{}} {
		walk(reflect.TypeOf(spec), "")
	}
}

func examples(t testing.TB) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", "examples", "*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d examples, %v", len(files), err)
	}
	out := map[string][]byte{}
	for _, f := range files {
		if out[f], err = os.ReadFile(f); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func TestParse_AcceptsTheExamples(t *testing.T) {
	t.Parallel()
	all := map[definition.Kind]int{}
	for name, data := range examples(t) {
		docs, err := definition.Parse(name, data)
		if err != nil {
			t.Errorf("%v", err)
		}
		for _, d := range docs {
			all[d.Kind]++
		}
	}
	for _, k := range definition.Kinds() {
		if all[k] == 0 {
			t.Errorf("no example has an %s", k)
		}
	}
}

func TestParse_ReadsAllKinds(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("testdata/examples/reviewer.yaml")
	if err != nil {
		t.Fatal(err)
	}
	docs, err := definition.Parse("x.yaml", data)
	if err != nil || len(docs) != 3 {
		t.Fatalf("%d documents, %v", len(docs), err)
	}
	env, agent, instance := docs[0], docs[1], docs[2]
	if v := env.Environment.Variables["GITHUB_TOKEN"]; !v.Secret || v.ValueFrom.Env != "GITHUB_TOKEN" || env.Environment.Variables["BUILD_MODE"].Value != "strict" {
		t.Errorf("environment %+v", env.Environment)
	}
	if agent.Ref != (events.Reference{Org: "payments", Slug: "reviewer"}) || len(agent.Tags) != 1 || agent.Agent.Files[1].Mode != 0o755 ||
		agent.Agent.Skills[1] != (events.Reference{Scope: events.ScopePlatform, Slug: "release-notes"}) || !strings.HasSuffix(agent.Agent.Instructions, "yourself.\n") {
		t.Errorf("agent %s %+v", agent.Ref, agent.Agent)
	}
	if instance.Instance.Agent != (events.Reference{Org: "payments", Slug: "reviewer", Version: "stable"}) {
		t.Errorf("instance %+v", instance.Instance)
	}
	for field, want := range map[string]definition.FilePosition{
		"spec.skills[1].slug": {Line: 28, Column: 31}, "spec.skills[0].slug": {Line: 27, Column: 7}, "spec.files[1].mode": {Line: 39, Column: 13},
		"spec.nonsense": {Line: 20, Column: 3}, "org": {Line: 17, Column: 6}, "nonsense": {Line: 15, Column: 1},
	} {
		if e := agent.ErrorAt(field, "d"); e.FilePosition != want || e.File != "x.yaml" {
			t.Errorf("%s has the position %+v, want %+v", field, e.FilePosition, want)
		}
	}
	if docs, err := definition.Parse("", []byte(strings.ReplaceAll(minimal, "spool", "claude-sdk"))); err != nil || docs[0].Agent.Architecture != definition.ClaudeCode {
		t.Errorf("an alias is read as %+v, %v", docs, err)
	}
}

// TestParse_ReadsJSON tests inputs that only JSON has: surrogate pairs, control characters, and values one after
// another.
func TestParse_ReadsJSON(t *testing.T) {
	t.Parallel()
	one := `{"kind":"agent","slug":"a","spec":{"architecture":"spool","instructions":"\ud83d\ude00 and so on` + "\x7f" + `","limits":{"timeMs":0.0}}}`
	docs, err := definition.Parse("-", []byte(one+"\n"+strings.Replace(one, `"a"`, `"b"`, 1)))
	if err != nil || len(docs) != 2 || docs[1].Agent.Instructions != "😀 and so on\x7f" || docs[1].Ref.Slug != "b" {
		t.Errorf("%+v, %v", docs, err)
	}
	for in, want := range map[string]string{
		`{"kind":"agent","slug":"a",` + "\n" + ` "x\n": [[[]]], "spec":{"instructions": 7}}`: `x.json:2:2: ["x\n"]: unknown field`,
		`{"kind":"agent",`:             "x.json:1:17: is not JSON: unexpected EOF",
		`{"kind":"agent",}`:            "x.json:1:17: is not JSON: invalid character",
		"{}\n  nonsense":               "x.json:2:3: is not JSON: invalid character",
		"":                             "x.json:1:1: is empty",
		strings.Repeat(`[`, 1_000_000): "x.json:1:34: lists and mappings are nested more than 32 deep",
	} {
		if _, err := definition.Parse("x.json", []byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v\nwant %s", in, err, want)
		}
	}
}

// TestParse_ReportsAllErrors tests that one call reports all errors, sorted by line, each with its position and its
// field.
func TestParse_ReportsAllErrors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ in, want string }{
		"everything": {`kind: agent
slug: Bad_Slug
org: 7
tags: [ok, "-no", ok]
extra: 1
spec:
  architecture: codex
  instructions: short
  model: [a]
  skills: [a, a@v1, "x//y", {slug: B, nonsense: 1}]
  environment:
    PATH: {value: x}
    PIN: {value: 1234, secret: maybe}
    TOKEN: {value: hunter2, secret: true}
  files:
  - {path: /etc/passwd}
  - {path: a, mode: -1}
  - {path: a/b, content: x, contentBase64: eA==}
  command: [my-agent]
  limits: {turns: 1.5}
  egress: [ok.example.com, "https://x", "*"]
`, `f:2:7: slug: "Bad_Slug" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens
f:3:6: org: must be a text: put it in quotes
f:4:12: tags[1]: "-no" is not a tag; must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores, and not begin with a dot or a hyphen
f:4:19: tags[2]: "ok" is already in tags[0]
f:5:1: extra: unknown field; must be one of kind, slug, scope, org, tags, spec
f:8:17: spec.instructions: has 5 characters; at least 10 are required
f:9:10: spec.model: must be a text
f:10:15: spec.skills[1]: "a" is already in skills[0]
f:10:21: spec.skills[2]: "x//y" is not [scope/][org/]slug[@version]
f:10:36: spec.skills[3].slug: "B" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens
f:10:39: spec.skills[3].nonsense: unknown field; must be one of scope, org, kind, slug, version
f:12:11: spec.environment.PATH: variable PATH is set by Spool itself
f:13:18: spec.environment.PIN.value: must be a text: put it in quotes
f:13:32: spec.environment.PIN.secret: must be true or false
f:14:20: spec.environment.TOKEN.value: must not be set: agents hold no secrets; set the value in an environment, or in the request
f:16:12: spec.files[0].path: must not begin with a slash: the path is relative to the workspace
f:17:21: spec.files[1].mode: must be a whole number from 0 to 4294967295
f:18:12: spec.files[2].path: folder a is also a file: files[1]
f:18:44: spec.files[2].contentBase64: must not be set together with content
f:19:12: spec.command: architecture codex does not support this field
f:20:19: spec.limits.turns: must be a whole number from 0 to 4294967295
f:21:28: spec.egress[1]: must be a host, not a URL or a network; an entry is host, host:port or *.host, optionally after methods and a space: GET,HEAD api.example.com
f:21:41: spec.egress[2]: a star is allowed only at the beginning, before a dot; an entry is host, host:port or *.host, optionally after methods and a space: GET,HEAD api.example.com`},
		"missing":        {"kind: agent\n", "f:1:1: slug: is required\nf:1:1: spec: is required"},
		"no kind":        {"slug: a\nspec: {}\n", "f:1:1: kind: is required"},
		"unknown kind":   {"slug: a\nkind: robot\nspec: {x: [1]}\n", `f:2:7: kind: "robot" is not a kind; must be agent, instance or environment`},
		"list of kinds":  {"slug: a\nkind: [agent]\nspec: {}\n", "f:2:7: kind: must be a text"},
		"no mapping":     {"- a\n", "f:1:1: must be a mapping"},
		"empty":          {"# nothing\n---\n", "f:1:1: is empty: a definition has kind, slug and spec"},
		"null":           {"kind: instance\nslug: a\nspec:\n  agent:\n", "f:4:9: spec.agent: is empty: leave it out, or set it to a reference: a text such as org/slug@version, or a mapping"},
		"no YAML":        {minimal + "---\nkind: [\n", "f:7: did not find expected node content"},
		"both":           {"kind: instance\nslug: B\nspec: {agent: a}\n---\nkind: [\n", `f:2:7: slug: "B" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens` + "\nf:5: did not find expected node content"},
		"given twice":    {minimal + "slug: b\n", "f:6:1: slug: is set twice"},
		"defined twice":  {minimal + "---\n" + minimal, "f:8:7: slug: agent a is already defined in line 1"},
		"merge":          {"kind: environment\nslug: a\nspec:\n  variables: {A: &x {value: v}, B: {<<: *x}}\n", "f:4:37: spec.variables.B: merge keys (<<) are not supported: write the fields out"},
		"keys":           {"kind: environment\nslug: a\nspec:\n  variables: {1: {}, [a]: {}}\n", "f:4:15: spec.variables: has a name that is not a text: put the name in quotes\nf:4:22: spec.variables: has a name that is not a text: put the name in quotes"},
		"names":          {"kind: environment\nslug: a\nspec:\n  variables: {a.b: {}, A: {}}\n", `f:4:20: spec.variables["a.b"]: "a.b" is not a variable's name: 1 to 128 characters of A-Z, a-z, 0-9 and _, not starting with a digit`},
		"secrets":        {"kind: environment\nslug: a\nspec:\n  variables:\n    A: {secret: true}\n    B: {value: x, valueFrom: {env: B}}\n    C: {valueFrom: {env: C, file: c}}\n    D: {sealed: x}\n    E: {valueFrom: {}}\n", "f:6:30: spec.variables.B.valueFrom: must not be set together with value\nf:7:20: spec.variables.C.valueFrom: must have env or file, not both\nf:8:9: spec.variables.D.sealed: unknown field; must be one of value, valueFrom, secret, description"},
		"account":        {"kind: instance\nslug: a\nscope: identity_account\nspec: {agent: x/y/z/a}\n", "f:1:1: org: is empty: the scope identity_account requires the name of the account\n" + `f:4:15: spec.agent: "x/y/z/a" is not [scope/][org/]slug[@version]`},
		"not UTF-8":      {"kind: agent\nslug: \xff", "f:2:7: is not valid UTF-8"},
		"control":        {"kind: agent\nslug: a\x01", `f:2:8: control characters are not allowed; in double quotes write \x and two digits`},
		"tagged":         {"kind: instance\nslug: a\nspec: {agent: !!binary YQ==, description: !mine x}\n", "f:3:15: spec.agent: must be a reference: a text such as org/slug@version, or a mapping; put a text that looks like something else in quotes\nf:3:43: spec.description: must be a text: put it in quotes"},
		"long field":     {"kind: agent\nslug: a\n" + strings.Repeat("é", 60) + ": 1\nspec: {architecture: spool, instructions: 0123456789}", "f:3:1: [\"" + strings.Repeat("é", 32) + "…\"]: unknown field; must be one of kind, slug, scope, org, tags, spec\nf:4:43: spec.instructions: must be a text: put it in quotes"},
		"unknown alias":  {"kind: *x\n", "f: unknown anchor 'x' referenced"},
		"deep":           {minimal + "  x: " + strings.Repeat("[", 40) + strings.Repeat("]", 40), "f:6:37: lists and mappings are nested more than 32 deep"},
		"no text at all": {"", "f:1:1: is empty: a definition has kind, slug and spec"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			docs, err := definition.Parse("f", []byte(c.in))
			if err == nil || err.Error() != c.want || docs != nil {
				t.Errorf("%d documents and\n%v\nwant\n%s", len(docs), err, c.want)
			}
			if list := definition.Errors(nil); err != nil && !errors.As(err, &list) {
				t.Errorf("the error is a %T", err)
			}
			if err != nil && (strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "1234:")) {
				t.Errorf("the error contains a secret value: %v", err)
			}
		})
	}
}

// TestParse_RefusesLargeInputsFast tests that inputs that are too large, or that expand to something too large, are
// refused without a long computation.
func TestParse_RefusesLargeInputsFast(t *testing.T) {
	t.Parallel()
	var laughs strings.Builder
	laughs.WriteString("kind: agent\nslug: a\nspec:\n  architecture: spool\n  instructions: Say hello to all.\n  model: &l0 " + strings.Repeat("x", 1000) + "\n")
	laughs.WriteString("  skills: &l1 [" + strings.Repeat("*l0, ", 999) + "*l0]\n  commands: &l2 [" + strings.Repeat("*l1, ", 999) + "*l1]\n  subagents: [" + strings.Repeat("*l2,", 9_999) + "*l2]\n")
	var lists strings.Builder
	lists.WriteString(minimal + "  tools: &t {allow: &l [" + strings.Repeat("a, ", 3000) + "a]}\n  subagents:\n  - &s {name: a, description: b, instructions: c, tools: *l}\n" + strings.Repeat("  - *s\n", 3000))
	for name, in := range map[string]string{
		"size":       strings.Repeat("#", definition.MaxFileSize+1),
		"laughs":     laughs.String(),
		"lists":      lists.String(),
		"texts":      minimal + "  description: &d " + strings.Repeat("x", 1<<20) + "\n  egress: [" + strings.Repeat("*d, ", 999) + "*d]\n",
		"cycle":      minimal + "  commands: &c [*c, *c]\n",
		"flow":       minimal + "  x: " + strings.Repeat("[", 1<<20),
		"mappings":   minimal + "  x: " + strings.Repeat("{a: ", 1<<20),
		"indents":    minimal + strings.Repeat("- ", 1<<20),
		"elements":   minimal + "  egress: [" + strings.Repeat("a,", 1<<17) + "]\n",
		"fields":     minimal + strings.Repeat("  é: 1\n", 1<<15),
		"documents":  strings.Repeat("--- a\n", 1<<15),
		"deep JSON":  strings.Repeat(`{"a":`, 800_000),
		"wide JSON":  `{"kind":"agent","tags":[` + strings.Repeat("1,", 1<<17) + `1]}`,
		"long lines": "kind: agent\nslug: " + strings.Repeat("a ", 1<<20),
		"anchors":    minimal + "  egress: [" + strings.Repeat("&a a,", 1<<17) + "]\n",
		"tags":       minimal + "  name: !<" + strings.Repeat("!", 1<<20) + "> x\n",
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := definition.Parse("f", []byte(in))
			if err == nil {
				t.Error("the input was accepted")
			}
			took := time.Since(start)
			t.Logf("%v: %.200v", took, err)
			if took > time.Minute { // a quadratic computation over a megabyte would take hours
				t.Errorf("Parse took %v", took)
			}
		})
	}
}
