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
var page string

const (
	example = "testdata/examples/reviewer.yaml"
	acp     = "testdata/examples/porter.yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

// run is started in the folder of package definition.
func run(args []string) error {
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
	text, err := document(comments)
	if err != nil {
		return err
	}
	schema, err := definition.Schema(comments)
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(args[1], text, 0o644), os.WriteFile(args[2], append(schema, '\n'), 0o644))
}

func document(comments map[string]string) ([]byte, error) {
	sample, err := os.ReadFile(example)
	if err != nil {
		return nil, err
	}
	porter, err := os.ReadFile(acp)
	if err != nil {
		return nil, err
	}
	var fields, honours bytes.Buffer
	if err := errors.Join(definition.WriteFields(&fields, comments), definition.WriteSupportTable(&honours)); err != nil {
		return nil, err
	}
	t, err := template.New("agents.md").Parse(page)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = t.Execute(&out, map[string]string{"Example": string(sample), "ACP": string(porter), "Fields": fields.String(), "Honours": honours.String(), "Presets": presets()})
	return out.Bytes(), err
}

// presets returns the rows of the table of presets.
func presets() string {
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
