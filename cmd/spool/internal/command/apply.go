package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
)

// applyCommand is the command "apply" of agents, instances and envs.
type applyCommand struct {
	server
	File string `short:"f" required:"" placeholder:"FILE" help:"Definitions in YAML or JSON, of any kind (docs/agents.md); - for standard input. Environments are applied first, then agents, then instances."`
}

// Run applies the definitions of a file. It sends nothing unless the whole file is valid.
func (c *applyCommand) Run(a *app) error {
	docs, err := c.read(a)
	if err != nil {
		return a.printErrors(err, "nothing was applied")
	}
	specs, err := c.specs(a, docs)
	if err != nil {
		return a.printErrors(err, "nothing was applied")
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		for i, d := range docs {
			if err := c.apply(ctx, a, cl, d, specs[i]); err != nil {
				return printApplied(a, docs, i, withPosition(ctx, d, err))
			}
		}
		return nil
	})
}

// read returns the definitions in the order in which they are applied.
func (c *applyCommand) read(a *app) ([]definition.Document, error) {
	name, in := "stdin", a.In
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return nil, usageError("file: %v", err)
		}
		defer f.Close() //nolint:errcheck // the file is only read
		name, in = c.File, f
	}
	data, err := io.ReadAll(io.LimitReader(in, definition.MaxFileSize+1))
	if err != nil {
		return nil, usageError("file: %v", err)
	}
	docs, err := definition.Parse(name, data)
	slices.SortStableFunc(docs, func(a, b definition.Document) int {
		return cmp.Compare(slices.Index(definition.Kinds(), a.Kind), slices.Index(definition.Kinds(), b.Kind))
	})
	return docs, err
}

// specs returns the specs to send, with the values that environments take from this machine.
func (c *applyCommand) specs(a *app, docs []definition.Document) ([]any, error) {
	out := make([]any, len(docs))
	var wrong definition.Errors
	for i, d := range docs {
		switch {
		case d.Agent != nil:
			out[i] = d.Agent
		case d.Instance != nil:
			out[i] = d.Instance
		default:
			spec, faults := d.Environment.ReadValues(a.lookupEnv, c.readFile)
			for _, f := range faults {
				wrong = append(wrong, d.ErrorAt(f.Field, f.Detail))
			}
			out[i] = spec
		}
	}
	if len(wrong) > 0 {
		return nil, wrong
	}
	return out, nil
}

// readFile reads a file that a definition names. Relative paths start at the definition's folder.
func (c *applyCommand) readFile(path string) ([]byte, error) {
	if !filepath.IsAbs(path) && c.File != "-" {
		path = filepath.Join(filepath.Dir(c.File), path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, definition.MaxVariableSize+2)) // the value with a line feed, and one byte to detect more
	return b, errors.Join(err, f.Close())
}

// apply sends one definition and prints the result.
func (c *applyCommand) apply(ctx context.Context, a *app, cl *client.Client, d definition.Document, spec any) error {
	applied, err := cl.Apply(ctx, listOf(d.Kind), d.Ref, d.Tags, spec)
	if err != nil {
		return err
	}
	ref := client.Reference(applied.Ref)
	if c.JSON {
		return a.printJSON(struct {
			Kind     definition.Kind  `json:"kind"`
			Ref      events.Reference `json:"ref"`
			Position string           `json:"position"`
			Same     bool             `json:"same"`
		}{d.Kind, ref, applied.Position, applied.Same})
	}
	done := "applied"
	if applied.Same {
		done = "unchanged"
	}
	_, err = fmt.Fprintln(a.Out, done, d.Kind, terminal.Line(ref.String()))
	return err
}

// withPosition adds the position of the invalid field in the file to a server's error.
func withPosition(ctx context.Context, d definition.Document, err error) error {
	var problem *client.Error
	switch cause := context.Cause(ctx); {
	case cause != nil:
		return cause
	case !errors.As(err, &problem):
		return err
	}
	field := strings.TrimPrefix(problem.Field, "ref.")
	if field == "ref" {
		field = "slug"
	}
	withoutField := *problem
	withoutField.Field = ""
	code := ExitFailed
	if client.IsCode(err, "INVALID_REQUEST", "PAYLOAD_TOO_LARGE") {
		code = ExitUsage
	}
	return &exitError{code, d.ErrorAt(field, withoutField.Error())}
}

// printApplied prints which definitions were applied before definition i failed.
func printApplied(a *app, docs []definition.Document, i int, err error) error {
	if len(docs) == 1 {
		return err
	}
	var before []string
	for _, d := range docs[:i] {
		before = append(before, string(d.Kind)+" "+d.Ref.String())
	}
	if i == 0 {
		before = []string{"nothing"}
	}
	fmt.Fprintf(a.Err, "applied %s; not %s %s, and nothing after it (%d of %d)\n", strings.Join(before, ", "), docs[i].Kind, docs[i].Ref, i, len(docs))
	return err
}

// printErrors prints all errors of a file, one per line, and returns an error that begins with the outcome.
func (a *app) printErrors(err error, outcome string) error {
	var list definition.Errors
	if !errors.As(err, &list) {
		return err
	}
	for _, e := range list {
		fmt.Fprintln(a.Err, terminal.Line(e.Error()))
	}
	if len(list) == 1 {
		return usageError("%s: the file has an error", outcome)
	}
	return usageError("%s: the file has %d errors", outcome, len(list))
}

// lookupEnv returns a variable of spool's own environment.
func (a *app) lookupEnv(name string) (string, bool) {
	if a.LookupEnv == nil {
		return "", false
	}
	return a.LookupEnv(name)
}

// listOf returns the catalogue list of a kind of definition.
func listOf(k definition.Kind) client.Catalogue {
	switch k {
	case definition.KindAgent:
		return client.Agents
	case definition.KindInstance:
		return client.Instances
	}
	return client.Environments
}

// reference parses a reference that the user entered.
func reference(name, s string) (events.Reference, error) {
	ref, err := events.ParseReference(s)
	if err != nil {
		return ref, usageError("%s: %v", name, err)
	}
	return ref, nil
}
