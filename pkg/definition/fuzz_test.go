package definition_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
)

// FuzzParse tests that Parse either refuses a file with errors that name lines of that file, or returns documents
// that are well formed, that can be written and read back unchanged, and that have a digest.
func FuzzParse(f *testing.F) {
	for _, data := range examples(f) {
		f.Add(data)
	}
	for _, s := range []string{
		"", minimal, "a: &a [*a]", "{", `{"kind":"agent"`, "kind: [\n", "- - - -\n", "? a\n: b\n", "!!binary x", "%YAML 1.1\n---\n", "kind: &x agent\nslug: *x\nspec: *x\n",
		"kind: environment\nslug: a\nspec: {variables: {<<: {A: {}}}}\n", "\ufeffkind: agent\n", "kind: \"\\ud83d\"\n", "kind: instance\nslug: a\nspec: {agent: {slug: a, version: '1'}}\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		docs, err := definition.Parse("f", data)
		if err != nil {
			var list definition.Errors
			if !errors.As(err, &list) || len(list) == 0 || docs != nil {
				t.Fatalf("%d documents, and the error is %#v", len(docs), err)
			}
			if !slices.IsSortedFunc(list[:len(list)-1], func(a, b *definition.Error) int { return a.Line - b.Line }) {
				t.Fatalf("not by line: %v", err)
			}
			return
		}
		for _, d := range docs {
			var spec any
			var wrong []definition.FieldError
			switch {
			case d.Agent != nil:
				spec, wrong = d.Agent, definition.CheckAgent(*d.Agent)
			case d.Instance != nil:
				spec, wrong = d.Instance, definition.CheckInstance(*d.Instance)
			default:
				var e events.EnvironmentSpec
				e, _ = d.Environment.ReadValues(func(string) (string, bool) { return "v", true }, func(string) ([]byte, error) { return []byte("v"), nil })
				spec, wrong = e, definition.CheckRequestedEnvironment(e)
			}
			if wrong = append(wrong, definition.CheckEntryNames(d.Ref, d.Tags)...); len(wrong) > 0 {
				t.Fatalf("%s %s was accepted: %v", d.Kind, d.Ref, wrong)
			}
			if digest, err := definition.Digest(spec); err != nil || !events.IsDigest(digest) {
				t.Fatalf("its digest is %s, %v", digest, err)
			}
			text := mustWrite(t, d)
			back, err := definition.Parse("g", []byte(text))
			if err != nil || len(back) != 1 || !same(back[0], d) {
				t.Fatalf("%s %s is written as\n%s\nand read as %+v, %v", d.Kind, d.Ref, text, back, err)
			}
		}
	})
}
