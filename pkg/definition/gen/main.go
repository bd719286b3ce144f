// Command gen writes docs/agents.md and the JSON Schema of definitions.
package main

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"text/template"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events/gen/notes"
)

//go:embed agents.md.tmpl
var pageTemplate string

const (
	exampleFile    = "testdata/examples/reviewer.yaml"
	acpExampleFile = "testdata/examples/porter.yaml"
)

func main() {
	if err := generate(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

// generate writes the page and the JSON Schema that args name. It must run in the folder of package definition.
func generate(args []string) error {
	if len(args) != 3 {
		return errors.New("usage: gen EVENTS_DIR DOCUMENT SCHEMA")
	}
	comments, err := notes.ReadFieldComments(args[0])
	if err != nil {
		return err
	}
	own, err := notes.ReadFieldComments(".")
	if err != nil {
		return err
	}
	maps.Copy(comments, own) // a file's variables are not those of the log
	text, err := generatePage(comments)
	if err != nil {
		return err
	}
	schema, err := definition.GenerateSchema(comments)
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(args[1], text, 0o644), os.WriteFile(args[2], append(schema, '\n'), 0o644))
}

func generatePage(comments map[string]string) ([]byte, error) {
	sample, err := os.ReadFile(exampleFile)
	if err != nil {
		return nil, err
	}
	porter, err := os.ReadFile(acpExampleFile)
	if err != nil {
		return nil, err
	}
	var fields, honours bytes.Buffer
	if err := errors.Join(definition.WriteFieldTables(&fields, comments), definition.WriteSupportTable(&honours)); err != nil {
		return nil, err
	}
	t, err := template.New("agents.md").Parse(pageTemplate)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = t.Execute(&out, map[string]string{"Example": string(sample), "ACP": string(porter), "Fields": fields.String(), "Honours": honours.String(), "Presets": presetRows()})
	return out.Bytes(), err
}

// presetRows returns the rows of the page's table of ACP presets.
func presetRows() string {
	var b strings.Builder
	for _, p := range architecture.Presets() {
		var names []string
		for _, name := range slices.Sorted(maps.Keys(p.Env)) {
			names = append(names, "`"+name+"`")
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", p.Name, p.Agent, strings.Join(p.Providers, ", "), strings.Join(names, ", "))
	}
	return b.String()
}
