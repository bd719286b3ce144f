package command

import (
	"cmp"
	"context"
	"errors"
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

// applyCommand is the command "apply" of agents, instances and envs, which stores the definitions in a file on the
// server.
type applyCommand struct {
	serverFlags
	File string `short:"f" required:"" placeholder:"FILE" help:"Definitions in YAML or JSON, of any kind (docs/agents.md); - for standard input. Environments are applied first, then agents, then instances."`
}

// Run stores the definitions of a file on the server. It sends no request unless the whole file is valid.
func (c *applyCommand) Run(a *app) error {
	docs, err := c.readDefinitions(a)
	if err != nil {
		return a.printFileErrors(err, "nothing was applied")
	}
	specs, err := c.buildSpecs(a, docs)
	if err != nil {
		return a.printFileErrors(err, "nothing was applied")
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		for i, d := range docs {
			if err := c.applyDefinition(ctx, a, cl, d, specs[i]); err != nil {
				return printApplied(a, docs, i, addFilePosition(ctx, d, err))
			}
		}
		return nil
	})
}

// readDefinitions reads the definitions from the command's file, and returns them in the order in which they must be
// applied.
func (c *applyCommand) readDefinitions(a *app) ([]definition.Document, error) {
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

// buildSpecs returns the specs of the definitions in the form in which they are sent. It reads the files that they
// name, and the variables that environments take from this machine.
func (c *applyCommand) buildSpecs(a *app, docs []definition.Document) ([]any, error) {
	out := make([]any, len(docs))
	var wrong definition.Errors
	for i, d := range docs {
		switch {
		case d.Agent != nil:
			out[i] = d.Agent
		case d.Instance != nil:
			out[i] = d.Instance
		default:
			spec, faults := d.Environment.ReadValues(a.lookupEnv, c.readReferencedFile)
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

// readReferencedFile reads a file that a definition names. A relative path starts at the folder of the definition's
// file.
func (c *applyCommand) readReferencedFile(path string) ([]byte, error) {
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

// applyDefinition sends one definition to the server and prints the result.
func (c *applyCommand) applyDefinition(ctx context.Context, a *app, cl *client.Client, d definition.Document, spec any) error {
	applied, err := cl.ApplyDefinition(ctx, catalogueServiceOf(d.Kind), d.Ref, d.Tags, spec)
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
	_, err = terminal.Fprintln(a.Out, done, d.Kind, ref.String())
	return err
}

// addFilePosition adds the line and column of the invalid field in the definition's file to an error of the server.
func addFilePosition(ctx context.Context, d definition.Document, err error) error {
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

// printApplied prints which definitions were applied before definition i failed with err, and returns err.
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
	terminal.Fprintf(a.Err, "applied %s; not %s %s, and nothing after it (%d of %d)\n", strings.Join(before, ", "), docs[i].Kind, docs[i].Ref, i, len(docs))
	return err
}

// printFileErrors prints all errors of a definition file, one per line. It returns an error that begins with outcome.
func (a *app) printFileErrors(err error, outcome string) error {
	var list definition.Errors
	if !errors.As(err, &list) {
		return err
	}
	for _, e := range list {
		terminal.Fprintln(a.Err, e.Error())
	}
	if len(list) == 1 {
		return usageError("%s: the file has an error", outcome)
	}
	return usageError("%s: the file has %d errors", outcome, len(list))
}

// lookupEnv returns a variable from the environment of the program spool.
func (a *app) lookupEnv(name string) (string, bool) {
	if a.LookupEnv == nil {
		return "", false
	}
	return a.LookupEnv(name)
}

// catalogueServiceOf returns the API service that manages definitions of a kind.
func catalogueServiceOf(k definition.Kind) client.CatalogueService {
	switch k {
	case definition.KindAgent:
		return client.Agents
	case definition.KindInstance:
		return client.Instances
	}
	return client.Environments
}

// parseReference parses a reference that the user entered. name is the argument or flag, for the error message.
func parseReference(name, s string) (events.Reference, error) {
	ref, err := events.ParseReference(s)
	if err != nil {
		return ref, usageError("%s: %v", name, err)
	}
	return ref, nil
}
