package definition_test

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/spoolhq/spool/pkg/definition"
)

const schemaFile = "../../docs/schema/spool.schema.json"

func compileSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	s, err := jsonschema.NewCompiler().Compile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// instances returns the documents of a file in the form that the validator expects.
func instances(t *testing.T, data string) []any {
	t.Helper()
	var out []any
	for dec := yaml.NewDecoder(strings.NewReader(data)); ; {
		var v any
		if dec.Decode(&v) != nil { // the end of the file, or text that is not YAML, which a schema does not check
			return out
		}
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		i, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, i)
	}
}

func TestSchema_AcceptsTheExamples(t *testing.T) {
	t.Parallel()
	s := compileSchema(t)
	for name, data := range examples(t) {
		text := string(data)
		if strings.HasSuffix(name, ".json") {
			text = strings.ReplaceAll(text, `\ud83d\ude00`, "😀") // the YAML reader of this test does not support surrogate pairs
		}
		list := instances(t, text)
		if len(list) == 0 {
			t.Errorf("%s has no documents", name)
		}
		for _, i := range list {
			if err := s.Validate(i); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// The documents below have a place for fields of the document itself and, at the end, a place for fields of the spec.
const (
	anAgent          = "kind: agent\nslug: a\n%s\nspec:\n  architecture: spool\n  instructions: Say hello to all.\n"
	anInstance       = "kind: instance\nslug: a\n%s\nspec:\n  agent: b\n"
	anEnvironment    = "kind: environment\nslug: a\n%s\nspec:\n  variables: {A: {value: x}}\n"
	emptyEnvironment = "kind: environment\nslug: a\n%s\nspec:\n"
)

func document(kind, own, spec string) string {
	out := strings.Replace(kind, "%s", own, 1)
	if spec != "" {
		out += "  " + spec + "\n"
	}
	return out
}

// TestSchema_RefusesWhatParseRefuses tests that the schema refuses unknown fields and wrong types that Parse refuses,
// for every type and at every depth.
func TestSchema_RefusesWhatParseRefuses(t *testing.T) {
	t.Parallel()
	s := compileSchema(t)
	for name, text := range map[string]string{
		"unknown field":               document(anAgent, "extra: 1", ""),
		"unknown field of an agent":   document(anAgent, "", "extra: 1"),
		"unknown field of tools":      document(anAgent, "", "tools: {extra: []}"),
		"unknown field of a skill":    document(anAgent, "", "skills: [{slug: a, name: pdf}]"),
		"unknown field of a variable": document(anAgent, "", "environment: {A: {valueFrom: {env: A}}}"),
		"unknown field of a file":     document(anAgent, "", "files: [{path: a, extra: 1}]"),
		"unknown field of limits":     document(anAgent, "", "limits: {turn: 1}"),
		"unknown field of a server":   document(anAgent, "", "mcpServers: [{name: a, type: http, url: 'https://a', env_: {}}]"),
		"unknown field of a command":  document(anAgent, "", "commands: [{name: a, prompt: b, extra: 1}]"),
		"unknown field of a subagent": document(anAgent, "", "subagents: [{name: a, description: b, instructions: c, mcp: []}]"),
		"unknown field of instance":   document(anInstance, "", "extra: 1"),
		"unknown field of env":        document(anEnvironment, "", "extra: 1"),
		"unknown field of its var":    document(emptyEnvironment, "", "variables: {A: {sealed: x}}"),
		"unknown source":              document(emptyEnvironment, "", "variables: {A: {valueFrom: {vault: x}}}"),
		"agent's field of instance":   document(anInstance, "", "architecture: spool"),
		"version":                     document(anAgent, "version: v1", ""),
		"number for a text":           document(anAgent, "", "model: 7"),
		"boolean for a text":          document(anAgent, "org: true", ""),
		"list for a text":             document(anAgent, "", "name: [a]"),
		"text for a list":             document(anAgent, "", "egress: example.com"),
		"mapping for a list":          document(anAgent, "", "skills: {a: b}"),
		"list for a mapping":          document(anAgent, "", "environment: [A]"),
		"text for a mapping":          document(anAgent, "", "limits: 7"),
		"text for a boolean":          document(emptyEnvironment, "", "variables: {A: {secret: 'yes'}}"),
		"number for a boolean":        document(anAgent, "", "environment: {A: {required: 1}}"),
		"text for a number":           document(anAgent, "", "limits: {budgetUsd: '1'}"),
		"fraction":                    document(anAgent, "", "files: [{path: a, mode: 1.5}]"),
		"negative":                    document(anAgent, "", "limits: {tokens: -1}"),
		"too large":                   document(anAgent, "", "limits: {tokens: 4294967296}"),
		"number for a reference":      document(anAgent, "", "skills: [7]"),
		"list for a reference":        strings.Replace(document(anInstance, "", ""), "agent: b", "agent: [b]", 1),
		"number in a list of texts":   document(anAgent, "", "egress: [7]"),
		"number in a map of texts":    document(anAgent, "", "mcpServers: [{name: a, type: http, url: 'https://a', headers: {A: 1}}]"),
		"null":                        document(anAgent, "", "model:"),
		"null in a list":              document(anAgent, "", "egress: [~]"),
		"null variable":               document(emptyEnvironment, "", "variables: {A: }"),
		"null document":               "kind: agent\nslug: a\nspec:\n",
		"missing spec":                "kind: agent\nslug: a\n",
		"missing slug":                strings.Replace(document(anAgent, "", ""), "slug: a", "", 1),
		"missing kind":                "slug: a\nspec: {}\n",
		"missing instructions":        strings.Replace(document(anAgent, "", ""), "instructions", "name", 1),
		"missing agent":               strings.Replace(document(anInstance, "", ""), "agent: b", "description: b", 1),
		"missing variables":           document(emptyEnvironment, "", "description: d"),
		"missing path":                document(anAgent, "", "files: [{content: a}]"),
		"missing slug of a reference": document(anAgent, "", "skills: [{org: a}]"),
		"unknown kind":                "kind: robot\nslug: a\nspec: {}\n",
		"no mapping":                  "[a]\n",
		"tags as a text":              document(anAgent, "tags: a", ""),
		"wrong architecture":          strings.Replace(document(anAgent, "", ""), "spool", "moon", 1),
		"short instructions":          strings.Replace(document(anAgent, "", ""), "Say hello to all.", "Short", 1),
		"wrong scope":                 document(anAgent, "scope: world", ""),
		"wrong slug":                  strings.Replace(document(anAgent, "", ""), "slug: a", "slug: A", 1),
		"wrong tag":                   document(anAgent, "tags: [A]", ""),
		"wrong mode":                  document(anAgent, "", "files: [{path: a, mode: 0o1000}]"),
		"wrong name of a variable":    document(emptyEnvironment, "", "variables: {A-B: {}}"),
		"wrong type of a server":      document(anAgent, "", "mcpServers: [{name: a, type: podman, url: 'https://a'}]"),
		"wrong timeout":               document(anAgent, "", "mcpServers: [{name: a, type: http, url: 'https://a', timeoutMs: 300001}]"),
		"wrong preset":                document(anAgent, "", "permissions: {preset: yolo}"),
		"wrong action of a rule":      document(anAgent, "", "permissions: {rules: [{then: no-way}]}"),
		"rule without an action":      document(anAgent, "", "permissions: {rules: [{tool: Bash}]}"),
		"wrong action of a tool":      document(anAgent, "", "permissions: {tools: {Bash: never}}"),
		"empty command of a rule":     document(anAgent, "", "permissions: {rules: [{command: [''], then: deny}]}"),
		"long wait for a decision":    document(anAgent, "", "permissions: {timeoutMs: 604800001}"),
		"negative budget":             document(anAgent, "", "limits: {budgetUsd: -0.5}"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if docs, err := definition.Parse("f", []byte(text)); err == nil {
				t.Errorf("Parse accepts it: %+v\n%s", docs, text)
			}
			list := instances(t, text)
			if len(list) != 1 || s.Validate(list[0]) == nil {
				t.Errorf("the schema accepts it:\n%s", text)
			}
		})
	}
	for name, text := range map[string]string{"agent": document(anAgent, "tags: [a]", "skills: [a, {slug: b}]\n  permissions: {preset: ask, rules: [{tool: Bash, command: [ls], then: allow}], tools: {Read: deny}, timeoutMs: 604800000}"), "instance": document(anInstance, "", ""), "environment": document(anEnvironment, "", "")} {
		if _, err := definition.Parse("f", []byte(text)); err != nil || s.Validate(instances(t, text)[0]) != nil {
			t.Errorf("%s: the document from which the refused ones were derived is refused itself: %v, %v", name, err, s.Validate(instances(t, text)[0]))
		}
	}
}

// TestDocs_ExampleIsTested tests that the example in the documentation is one of the tested examples, and that the
// page lists every row of the table.
func TestDocs_ExampleIsTested(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/agents.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```yaml\n")
	example, _, ok := strings.Cut(rest, "```\n")
	docs, err := definition.Parse("docs/agents.md", []byte(example))
	if !ok || err != nil || len(docs) != len(definition.Kinds()) {
		t.Errorf("%d documents, %v", len(docs), err)
	}
	s := compileSchema(t)
	for _, i := range instances(t, example) {
		if err := s.Validate(i); err != nil {
			t.Error(err)
		}
	}
	for field, cells := range definition.SupportTable() {
		_, row, ok := strings.Cut(string(page), "| `"+field+"` |")
		row, _, _ = strings.Cut(row, "\n")
		for _, how := range cells {
			ok = ok && strings.Contains(row, how)
		}
		if !ok {
			t.Errorf("the page has no row for %s: run go generate", field)
		}
	}
}
