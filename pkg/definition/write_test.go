package definition_test

import (
	"bytes"
	"os"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
)

func mustWrite(t interface{ Fatal(...any) }, d definition.Document) string {
	var b bytes.Buffer
	if err := definition.WriteYAML(&b, d); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// same reports whether two documents define the same entry.
func same(a, b definition.Document) bool {
	return a.Kind == b.Kind && a.Ref == b.Ref && strings.Join(a.Tags, " ") == strings.Join(b.Tags, " ") &&
		reflect.DeepEqual(a.Agent, b.Agent) && reflect.DeepEqual(a.Instance, b.Instance) && reflect.DeepEqual(a.Environment, b.Environment)
}

// TestWrite_RoundTripsExamples tests that Parse reads a written document back unchanged: for each example, and for
// texts that YAML could read as another type.
func TestWrite_RoundTripsExamples(t *testing.T) {
	t.Parallel()
	for name, data := range examples(t) {
		docs, err := definition.Parse(name, data)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range docs {
			text := mustWrite(t, d)
			back, err := definition.Parse("", []byte(text))
			if err != nil || len(back) != 1 || !same(back[0], d) {
				t.Errorf("%s %s is written as\n%s\nand read as %+v, %v", d.Kind, d.Ref, text, back, err)
			}
		}
	}
	if err := definition.WriteYAML(&bytes.Buffer{}, definition.Document{Kind: definition.KindAgent}); err == nil {
		t.Error("a document without a spec was written")
	}
}

func TestWrite_MatchesTheGolden(t *testing.T) {
	t.Parallel()
	d := definition.Document{
		Kind: definition.KindAgent, Ref: events.Reference{Scope: events.ScopePlatform, Slug: "a"}, Tags: []string{"v1"},
		Agent: &events.AgentSpec{
			Architecture: "spool", Instructions: "One line.\nAnother: line.\n", MemoryFile: " leading\n", Model: "true", Description: "\x1b[2J é",
			Skills: []events.Reference{{Org: "o", Slug: "s", Version: "1.0"}}, Files: []events.FileSpec{{Path: "a", Mode: 0o755}},
			Environment: map[string]events.Declaration{"B": {}, "A": {Secret: true}}, Limits: events.Limits{BudgetUSD: 0.5},
		},
	}
	want, err := os.ReadFile("testdata/written.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if got := mustWrite(t, d); got != string(want) {
		t.Errorf("got\n%s", got)
	}
}

// TestStored_HidesSecretValues tests that a written environment shows which secrets exist, and not their values.
func TestStored_HidesSecretValues(t *testing.T) {
	t.Parallel()
	spec := definition.FromStored(events.EnvironmentSpec{Variables: map[string]events.Variable{
		"S": {Secret: true, Sealed: "key", Value: "hunter2", Description: "d"}, "V": {Value: "v"},
	}, Egress: []string{"GET a.com"}})
	text := mustWrite(t, definition.Document{Kind: definition.KindEnvironment, Ref: events.Reference{Slug: "e"}, Environment: &spec})
	want := "kind: environment\nslug: e\nspec:\n  variables:\n    S:\n      secret: true\n      description: d\n    V:\n      value: v\n  egress:\n    - GET a.com\n"
	if text != want {
		t.Errorf("got\n%s", text)
	}
	if _, err := definition.Parse("", []byte(text)); err != nil {
		t.Error(err)
	}
}

func TestWrite_RoundTripsAnyAgent(t *testing.T) {
	t.Parallel()
	odd := rapid.SampledFrom([]string{"true", "null", "~", "1", "0x1", "1e3", "2026-01-02", "- a", "a: b", "#c", "&a", "*a", "!!x", "%", "@", "`", "'", "\"", "|", ">", "{", "[", " x", "x ", "\tx", "x\n", "\nx", "a\n\nb\n", "a\n  b", "a \nb", "a\n\n", "\n\n", "\r\n", "\u0085", "\u2028a\nb", "\ufeffx", "<<", "=", "---", "...", "y", "é\nü", "\x7f\n", "\x1b[2J", "😀\nb"})
	text := rapid.OneOf(odd, rapid.StringN(0, 40, -1), rapid.Map(rapid.SliceOfN(odd, 1, 4), func(l []string) string { return strings.Join(l, "\n") }))
	rapid.Check(t, func(t *rapid.T) {
		noNUL := func(label string) string { return strings.ReplaceAll(text.Draw(t, label), "\x00", "0") }
		d := definition.Document{Kind: definition.KindAgent, Ref: events.Reference{Slug: "a"}, Agent: &events.AgentSpec{
			Architecture: "codex", Instructions: "0123456789" + noNUL("instructions"), MemoryFile: noNUL("memory"), Description: noNUL("description"),
			Environment: map[string]events.Declaration{"A": {Value: noNUL("value"), Required: rapid.Bool().Draw(t, "required")}},
			Files:       []events.FileSpec{{Path: "a", Content: noNUL("content"), Mode: rapid.Uint32Range(0, 0o777).Draw(t, "mode")}},
		}}
		out := mustWrite(t, d)
		back, err := definition.Parse("", []byte(out))
		if err != nil || len(back) != 1 || !same(back[0], d) {
			t.Fatalf("%+v is written as\n%s\nand read as %+v, %v", d.Agent, out, back, err)
		}
	})
}
