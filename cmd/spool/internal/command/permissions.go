package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

type permissionsCommand struct {
	Explain permissionsExplainCommand `cmd:"" help:"Show what an agent's permissions decide about a call of a tool, and which rule decides."`
}

type permissionsExplainCommand struct {
	serverFlags
	Call                 string `arg:"" help:"A tool, or a tool with its argument in parentheses: a command, a path or a URL, as in 'Bash(rm -rf x)'."`
	Agent                string `placeholder:"REF" help:"The agent; with --file the agent in the file, which is only needed if the file has several."`
	File                 string `short:"f" placeholder:"FILE" help:"Definitions in YAML or JSON that are not applied yet; - for standard input."`
	ExecutionPermissions string `placeholder:"FILE" help:"Permissions of a message in YAML or JSON, with rules that come before the agent's."`
}

// maxPermissionsBytes is the maximum size of the file that --execution-permissions names.
const maxPermissionsBytes = 1 << 20

// Run prints what the permissions of an agent decide about a tool call, and which rule decides. It evaluates the
// permissions on this machine.
func (c *permissionsExplainCommand) Run(a *app) error {
	if c.Agent == "" && c.File == "" {
		return usageError("agent: name an agent with --agent, or a file with --file")
	}
	var ref events.Reference
	if c.Agent != "" {
		var err error
		if ref, err = parseReference("agent", c.Agent); err != nil {
			return err
		}
	}
	execution, err := c.readExecutionPermissions()
	if err != nil {
		return err
	}
	if c.File != "" {
		spec, err := c.readAgentFile(a, ref)
		if err != nil {
			return a.printFileErrors(err, "nothing was decided")
		}
		return c.printDecision(a, spec, execution)
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := cl.GetDefinition(ctx, catalogueServiceOf(definition.KindAgent), ref)
		if err != nil {
			return err
		}
		spec, err := decodeAgentSpec([]byte(doc.Value.Spec.GetText()))
		if err != nil {
			return fmt.Errorf("agent %s: %w", ref, err)
		}
		return c.printDecision(a, spec, execution)
	})
}

// readExecutionPermissions returns the permissions of the message, from the flags.
func (c *permissionsExplainCommand) readExecutionPermissions() (p events.ExecutionPermissions, err error) {
	if c.ExecutionPermissions == "" {
		return p, nil
	}
	f, err := os.Open(c.ExecutionPermissions)
	if err != nil {
		return p, usageError("execution-permissions: %v", err)
	}
	defer f.Close() //nolint:errcheck // the file is only read
	data, err := io.ReadAll(io.LimitReader(f, maxPermissionsBytes+1))
	switch {
	case err != nil:
		return p, usageError("execution-permissions: %v", err)
	case len(data) > maxPermissionsBytes:
		return p, usageError("execution-permissions: the file has more than %d bytes", maxPermissionsBytes)
	}
	var tree any
	if err := yaml.Unmarshal(data, &tree); err != nil { // JSON is YAML
		return p, usageError("execution-permissions: %v", err)
	}
	data, err = json.Marshal(tree)
	if err == nil {
		err = decodeKnownFields(data, &p)
	}
	if err != nil {
		return p, usageError("execution-permissions: %v", err)
	}
	if wrong := permission.CheckExecution(p); len(wrong) > 0 {
		return p, usageError("execution-permissions: %v", wrong)
	}
	return p, nil
}

// decodeKnownFields decodes JSON and returns an error for fields that into does not have.
func decodeKnownFields(data []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	return dec.Decode(into)
}

// readAgentFile returns the spec of an agent in the command's file. If the file defines several agents, ref selects
// one; the version of ref is ignored.
func (c *permissionsExplainCommand) readAgentFile(a *app, ref events.Reference) (events.AgentSpec, error) {
	docs, err := (&applyCommand{File: c.File}).readDefinitions(a)
	if err != nil {
		return events.AgentSpec{}, err
	}
	docs = slices.DeleteFunc(docs, func(d definition.Document) bool {
		return d.Agent == nil || c.Agent != "" && d.Ref.WithoutVersion() != ref.WithoutVersion()
	})
	switch {
	case len(docs) == 1:
		return *docs[0].Agent, nil
	case len(docs) > 1:
		return events.AgentSpec{}, usageError("agent: the file has %d agents; name one of them with --agent", len(docs))
	case c.Agent != "":
		return events.AgentSpec{}, usageError("agent: the file has no agent %s", ref.WithoutVersion())
	}
	return events.AgentSpec{}, usageError("file: the file has no agent")
}

// decodeAgentSpec decodes the spec of an agent. It returns an error if the permissions have fields that this version of
// spool does not know, because they could change the decision.
func decodeAgentSpec(data []byte) (events.AgentSpec, error) {
	var spec events.AgentSpec
	var parts struct{ Permissions json.RawMessage }
	if err := errors.Join(json.Unmarshal(data, &spec), json.Unmarshal(data, &parts)); err != nil {
		return spec, fmt.Errorf("decode the spec: %w", err)
	}
	if parts.Permissions == nil {
		return spec, nil
	}
	if err := decodeKnownFields(parts.Permissions, &spec.Permissions); err != nil {
		return spec, fmt.Errorf("this version of spool does not know all of its permissions: %w", err)
	}
	return spec, nil
}

// printDecision evaluates the permissions for the tool call and prints the decision.
func (c *permissionsExplainCommand) printDecision(a *app, spec events.AgentSpec, execution events.ExecutionPermissions) error {
	call, err := permission.ParseCall(c.Call, spec)
	if err != nil {
		return usageError("call: %v", err)
	}
	policy, err := permission.New(spec.Permissions, execution)
	if err != nil {
		return err
	}
	e, err := policy.Explain(call)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.printJSON(struct {
			Call string `json:"call"`
			permission.Explanation
		}{c.Call, e})
	}
	table := newTable(a)
	rule := e.Rule
	if e.Text != "" {
		rule += " " + e.Text
	}
	for _, row := range [][]any{
		{"ACTION", e.Action}, {"RULE", rule}, {"LAYER", e.Layer}, {"REASON", e.Reason}, {"CLASS", e.Class}, {"UNATTENDED", e.Unattended},
	} {
		if row[1] != "" {
			writeTableRow(table, row)
		}
	}
	return table.Flush()
}
