package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

type agentsCommand struct {
	Apply applyCommand      `cmd:"" help:"Create versions from the definitions in a file."`
	Ls    agentsLsCommand   `cmd:"" help:"List agents, each in its latest version."`
	Show  agentsShowCommand `cmd:"" help:"Print an agent in the file format of apply."`
	Rm    agentsRmCommand   `cmd:"" help:"Remove agents: new sessions cannot use them, existing sessions continue."`
}

type instancesCommand struct {
	Apply applyCommand         `cmd:"" help:"Create versions from the definitions in a file."`
	Ls    instancesLsCommand   `cmd:"" help:"List agent instances, each in its latest version."`
	Show  instancesShowCommand `cmd:"" help:"Print an agent instance in the file format of apply."`
	Rm    instancesRmCommand   `cmd:"" help:"Remove agent instances: new sessions cannot use them, existing sessions continue."`
}

type envsCommand struct {
	Apply   applyCommand       `cmd:"" help:"Create versions from the definitions in a file."`
	Ls      envsLsCommand      `cmd:"" help:"List environments, each in its latest version."`
	Show    envsShowCommand    `cmd:"" help:"Print an environment in the file format of apply. The values of secrets are never shown; applying the file keeps them."`
	Rm      envsRmCommand      `cmd:"" help:"Remove environments: new executions cannot use them, running executions continue."`
	Explain envsExplainCommand `cmd:"" help:"Show where each variable and each allowed host would come from."`
}

type catalogueLsFlags struct {
	serverFlags
	Limit int `default:"50" help:"Maximum number of entries; 0 means all."`
}

type (
	agentsLsCommand    struct{ catalogueLsFlags }
	instancesLsCommand struct{ catalogueLsFlags }
	envsLsCommand      struct{ catalogueLsFlags }
)

// Run lists agents.
func (c *agentsLsCommand) Run(a *app) error {
	return printEntries(&c.catalogueLsFlags, a, definition.KindAgent, []any{"AGENT", "VERSION", "ARCHITECTURE", "MODEL", "TAGS", "CREATED"}, func(s events.AgentSpec) []any {
		return []any{s.Architecture, s.Model}
	})
}

// Run lists agent instances.
func (c *instancesLsCommand) Run(a *app) error {
	return printEntries(&c.catalogueLsFlags, a, definition.KindInstance, []any{"INSTANCE", "VERSION", "AGENT", "ENVIRONMENTS", "TAGS", "CREATED"}, func(s events.InstanceSpec) []any {
		var names []string
		for _, e := range s.Environments {
			names = append(names, e.String())
		}
		return []any{s.Agent, strings.Join(names, " ")}
	})
}

// Run lists environments.
func (c *envsLsCommand) Run(a *app) error {
	return printEntries(&c.catalogueLsFlags, a, definition.KindEnvironment, []any{"ENVIRONMENT", "VERSION", "VARIABLES", "SECRETS", "TAGS", "CREATED"}, func(s events.EnvironmentSpec) []any {
		secrets := 0
		for _, v := range s.Variables {
			if v.Secret {
				secrets++
			}
		}
		return []any{len(s.Variables), secrets}
	})
}

// printEntries prints the latest version of each catalogue entry of a kind as a table with the header head. row returns
// the columns for a spec. A spec from a newer server may have fields that this version of spool does not know.
func printEntries[S any](c *catalogueLsFlags, a *app, kind definition.Kind, head []any, row func(S) []any) error {
	if c.Limit < 0 {
		return usageError("limit: %d is negative; 0 means all", c.Limit)
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		var unread []error
		err := printList(a, c.JSON, c.Limit, cl.ListDefinitions(ctx, catalogueServiceOf(kind)), head, func(d *spoolv1.Definition) []any {
			ref := client.Reference(d.Ref)
			var spec S
			if err := json.Unmarshal([]byte(d.Spec.GetText()), &spec); err != nil {
				unread = append(unread, fmt.Errorf("%s: decode the spec: %w", ref, err))
			}
			out := append([]any{ref.WithoutVersion(), shortDigest(ref.Version)}, row(spec)...)
			return append(out, strings.Join(d.Tags, " "), formatTime(d.CreatedAt))
		})
		return errors.Join(append(unread, err)...)
	})
}

// shortDigest returns the first characters of a digest, which are enough to distinguish versions. "show" prints the
// whole digest.
func shortDigest(digest string) string {
	const most = 12
	return digest[:min(len(digest), most)]
}

type catalogueShowFlags struct {
	serverFlags
	Ref     string `arg:"" help:"[platform/|identity_account/][org/]slug[@version]"`
	Version string `placeholder:"V" help:"A tag or a digest; by default the version in the reference, or the latest."`
}

type (
	agentsShowCommand    struct{ catalogueShowFlags }
	instancesShowCommand struct{ catalogueShowFlags }
	envsShowCommand      struct{ catalogueShowFlags }
)

// Run shows an agent.
func (c *agentsShowCommand) Run(a *app) error {
	return c.printDefinition(a, definition.KindAgent, func(d *definition.Document, spec []byte) error { return decodeStrict(spec, &d.Agent) })
}

// Run shows an instance.
func (c *instancesShowCommand) Run(a *app) error {
	return c.printDefinition(a, definition.KindInstance, func(d *definition.Document, spec []byte) error { return decodeStrict(spec, &d.Instance) })
}

// Run shows an environment.
func (c *envsShowCommand) Run(a *app) error {
	return c.printDefinition(a, definition.KindEnvironment, func(d *definition.Document, spec []byte) error {
		var s events.EnvironmentSpec
		if err := decodeStrict(spec, &s); err != nil {
			return err
		}
		stored := definition.FromStored(s)
		d.Environment = &stored
		return nil
	})
}

// decodeStrict decodes the spec of a definition, and returns an error for fields that this version of spool does not
// know.
func decodeStrict(spec []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(spec))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return fmt.Errorf("the server's response has fields that this version of spool does not know, use --json: %w", err)
	}
	return nil
}

// printDefinition prints a version of a definition as YAML that can be applied. fill decodes the spec into the
// document.
func (c *catalogueShowFlags) printDefinition(a *app, kind definition.Kind, fill func(*definition.Document, []byte) error) error {
	ref, err := parseReference("ref", c.Ref)
	if err != nil {
		return err
	}
	if c.Version != "" {
		if ref.Version != "" && ref.Version != c.Version {
			return usageError("version: the reference already names version %s", ref.Version)
		}
		ref.Version = c.Version
		if err := ref.Check(); err != nil {
			return usageError("%v", err)
		}
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := cl.GetDefinition(ctx, catalogueServiceOf(kind), ref)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		v, ref := doc.Value, client.Reference(doc.Value.Ref)
		d := definition.Document{Kind: kind, Ref: ref.WithoutVersion(), Tags: slices.DeleteFunc(v.Tags, func(t string) bool { return t == events.LatestTag })}
		if err := fill(&d, []byte(v.Spec.GetText())); err != nil {
			return err
		}
		if _, err := terminal.Fprintf(a.Out, "# %s, of %s\n", ref.String(), v.CreatedAt.AsTime().Format(time.RFC3339)); err != nil {
			return err
		}
		return definition.WriteYAML(a.Out, d)
	})
}

type catalogueRmFlags struct {
	serverFlags
	Refs []string `arg:"" name:"ref" help:"[platform/|identity_account/][org/]slug"`
}

type (
	agentsRmCommand    struct{ catalogueRmFlags }
	instancesRmCommand struct{ catalogueRmFlags }
	envsRmCommand      struct{ catalogueRmFlags }
)

// Run hides all versions of agents, so that new sessions cannot use them.
func (c *agentsRmCommand) Run(a *app) error { return c.removeEntries(a, definition.KindAgent) }

// Run hides all versions of agent instances.
func (c *instancesRmCommand) Run(a *app) error { return c.removeEntries(a, definition.KindInstance) }

// Run hides all versions of environments.
func (c *envsRmCommand) Run(a *app) error { return c.removeEntries(a, definition.KindEnvironment) }

// removeEntries hides the catalogue entries that c.Refs names. It checks all references before the first removal. After
// a failure it continues, and returns the joined errors at the end.
func (c *catalogueRmFlags) removeEntries(a *app, kind definition.Kind) error {
	refs := make([]events.Reference, len(c.Refs))
	for i, s := range c.Refs {
		var err error
		if refs[i], err = parseReference("ref", s); err != nil {
			return err
		}
		if refs[i].Version != "" {
			return usageError("ref: %s names a version, but all versions of the %s are removed: leave the version out", truncate.Text(s, 64), kind)
		}
	}
	return forEachName(c.serverFlags, a, refs, "removed "+string(kind), func(ctx context.Context, cl *client.Client, ref events.Reference) (any, error) {
		return cl.RemoveDefinition(ctx, catalogueServiceOf(kind), ref)
	})
}

type envsExplainCommand struct {
	serverFlags
	Agent    string   `xor:"of" placeholder:"REF" help:"Explain this agent."`
	Instance string   `xor:"of" placeholder:"REF" help:"Explain this agent instance: its agent, then its environments."`
	Env      []string `placeholder:"REF" sep:"none" help:"An environment above these; a later one overrides an earlier one."`
}

// Run prints the variables and the allowed hosts that an execution would have, and which part of the agent or
// environments each comes from.
func (c *envsExplainCommand) Run(a *app) error {
	if c.Agent == "" && c.Instance == "" && len(c.Env) == 0 {
		return usageError("agent: name an agent, an instance, or environments with --env")
	}
	for _, r := range slices.Concat([][2]string{{"agent", c.Agent}, {"instance", c.Instance}}, pairWithName("env", c.Env)) {
		if _, err := parseReference(r[0], r[1]); err != nil && (r[1] != "" || r[0] == "env") {
			return err
		}
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		request := &spoolv1.ExplainEnvironmentRequest{Agent: c.Agent, Instance: c.Instance, Environments: c.Env}
		doc, err := client.Call(ctx, cl.Environments.ExplainEnvironment, request)
		if err != nil {
			return err
		}
		var lines []proto.Message
		for _, v := range doc.Value.Variables {
			if v.Secret || v.GetValue() == "" { // a server never sends the value of a secret; if it did, it is not printed
				v.Value = nil
			}
			lines = append(lines, v)
		}
		if !c.JSON {
			return printEnvironmentExplanation(a, doc.Value)
		}
		for _, h := range doc.Value.Egress {
			lines = append(lines, h)
		}
		for _, m := range lines {
			if err := a.printJSON(json.RawMessage(wirejson.Marshal(m))); err != nil {
				return err
			}
		}
		return nil
	})
}

// printEnvironmentExplanation prints a table of an execution's variables, and a table of its allowed hosts.
func printEnvironmentExplanation(a *app, e *spoolv1.ExplainEnvironmentResponse) error {
	table := newTable(a)
	for i, v := range e.Variables {
		if i == 0 {
			writeTableRow(table, []any{"NAME", "FROM", "SECRET", "VALUE"})
		}
		secret := ""
		if v.Secret {
			secret = "secret"
		}
		writeTableRow(table, []any{v.Name, v.From, secret, v.GetValue()})
	}
	if err := table.Flush(); err != nil || len(e.Egress) == 0 {
		return err
	}
	if len(e.Variables) > 0 {
		if _, err := terminal.Fprintln(a.Out); err != nil {
			return err
		}
	}
	writeTableRow(table, []any{"EGRESS", "FROM"})
	for _, h := range e.Egress {
		writeTableRow(table, []any{h.Entry, h.From})
	}
	return table.Flush()
}

// pairWithName returns a pair of name and value for each value.
func pairWithName(name string, values []string) [][2]string {
	out := make([][2]string, len(values))
	for i, v := range values {
		out[i] = [2]string{name, v}
	}
	return out
}
