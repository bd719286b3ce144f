// Package references resolves the references of an execution: its agent, instance, environments, skills, variables
// and secrets.
package references

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/secret"
)

// Skills makes the files of skills available to the sandboxes of an engine.
type Skills interface {
	// Provide copies a skill to the engine, unless the engine has it, and returns the folder in which sandboxes see
	// it. The error wraps ErrNoArchive if the object store does not have the skill's archive.
	Provide(ctx context.Context, digest string) (dir string, err error)
}

// ErrNoArchive is wrapped by the errors of Skills for a skill whose archive is missing.
var ErrNoArchive = errors.New("the skill's archive is not in the object store")

// Secrets opens sealed values. The session service removes the values of an execution once the log holds its end.
type Secrets interface {
	// Open returns the value of a secret of a tenant. After an error that wraps secret.ErrUnavailable the caller may try again.
	Open(ctx context.Context, tenant, key string) (string, error)
}

// An Error is returned for an invalid reference or variable. The execution fails before it starts.
type Error struct {
	Code string
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Failed returns the terminal event of the execution.
func (e *Error) Failed() events.ExecutionFailed {
	return events.ExecutionFailed{Code: e.Code, Message: strings.ReplaceAll(e.Error(), "\n", "; ")}
}

// Resolver resolves the references of executions. It is safe for concurrent use.
type Resolver struct {
	Log        eventlog.Log
	Provider   string  // name of the sandbox provider, for messages
	Containers bool    // the provider runs MCP servers in containers
	Skills     Skills  // nil: an execution with skills fails
	Secrets    Secrets // nil: an execution with secrets fails
	Logger     *slog.Logger
}

// An Execution holds the data of an execution that a Resolver needs.
type Execution struct {
	ID      string
	Session *eventlog.Loaded
	Message events.MessageAccepted
	// Report stores error events about skills that are not complete.
	Report func(ctx context.Context, e events.Error) error
}

// Resolve resolves the references of an execution: to the versions that the log has recorded for the execution, or
// otherwise to the present versions. An *Error means that the execution cannot start.
func (r *Resolver) Resolve(ctx context.Context, e Execution) (*Resolved, error) {
	out := &Resolved{values: map[string]string{}}
	for _, step := range []func(context.Context, Execution, *Resolved) error{r.resolveEntries, r.openVariables, r.provideSkills} {
		if err := step(ctx, e, out); err != nil {
			return nil, err
		}
	}
	if err := r.checkServers(out); err != nil {
		return nil, err
	}
	if err := out.expandServers(); err != nil {
		return nil, err
	}
	list, err := egress.ParseAllowlist(out.Allowlist())
	if err != nil {
		return nil, &Error{"EGRESS_INVALID", fmt.Errorf("what the execution may reach: %w", err)}
	}
	out.InspectsRequests = list.RestrictsMethods()
	return out, nil
}

// resolveEntries resolves the references to catalogue entries.
func (r *Resolver) resolveEntries(ctx context.Context, e Execution, out *Resolved) error {
	life, known := e.Session.Life, e.Session.Run.Resolved.Known
	out.Agent, out.Instance = life.AgentRef, life.Instance
	if known {
		recorded, err := r.recordedResolution(ctx, e)
		if err != nil {
			return err
		}
		out.ExecutionResolved = recorded
	}
	if out.Agent.Slug != "" {
		applied, err := entry[events.AgentApplied](ctx, r, e, events.Agent, out.Agent)
		if err != nil {
			return err
		}
		out.Definition = applied.Spec
	}
	if !known {
		if err := r.mergeEnvironments(ctx, e, out); err != nil {
			return err
		}
		for _, ref := range out.Definition.Skills {
			out.Skills = append(out.Skills, events.SkillUsed{Ref: ref})
		}
		for _, sub := range out.Definition.Subagents {
			for _, ref := range sub.Skills {
				out.Skills = append(out.Skills, events.SkillUsed{Ref: ref, Subagent: sub.Name})
			}
		}
		for _, m := range out.Definition.MCPServers {
			out.MCPServers = append(out.MCPServers, m.Name)
		}
	}
	for i := range out.Skills {
		pushed, err := r.skill(ctx, e, out, out.Skills[i].Ref)
		if err != nil {
			return err
		}
		out.Skills[i].Ref, out.Skills[i].Name = pushed.Ref, pushed.Name
		s := runner.Skill{Name: pushed.Name, Description: pushed.Description, Unlisted: out.Skills[i].Subagent != ""}
		out.skills, out.documents = append(out.skills, s), append(out.documents, pushed.Document)
	}
	return nil
}

// recordedResolution returns the execution_resolved event that the log has for the execution.
func (r *Resolver) recordedResolution(ctx context.Context, e Execution) (events.ExecutionResolved, error) {
	at := eventlog.Position{Shard: e.Session.RunHead.Subject.Partition() % r.Log.Shards(), Seq: e.Session.Run.Resolved.At}
	rec, err := r.Log.At(ctx, at)
	if err != nil {
		return events.ExecutionResolved{}, fmt.Errorf("read the resolved references of %s: %w", e.ID, err)
	}
	for _, x := range rec.Events {
		if d, ok := x.Data.(events.ExecutionResolved); ok && x.ExecutionID == e.ID {
			return d, nil
		}
	}
	return events.ExecutionResolved{}, fmt.Errorf("commit %s does not hold the resolved references of %s", at, e.ID)
}

// skill returns the version of a skill that a reference resolves to. A version that was removed is read by its digest: its
// SKILL.md is still in the log.
func (r *Resolver) skill(ctx context.Context, e Execution, out *Resolved, ref events.Reference) (events.SkillPushed, error) {
	pushed, err := entry[events.SkillPushed](ctx, r, e, events.Skill, ref)
	var unresolved *Error
	if !errors.As(err, &unresolved) || !events.IsDigest(ref.Version) {
		return pushed, err
	}
	p, rerr := eventlog.Entries{Log: r.Log}.Recall(ctx, events.Skill, e.Session.Tenant, ref)
	var none *eventlog.VersionError
	if errors.As(rerr, &none) {
		return pushed, err
	}
	if rerr != nil {
		return pushed, rerr
	}
	pushed, ok := p.(events.SkillPushed)
	if !ok {
		return pushed, fmt.Errorf("skill %s is a %T", ref, p)
	}
	out.removed = append(out.removed, pushed.Ref.Version)
	return pushed, nil
}

// mergeEnvironments merges the variables and the allowed hosts of all environments.
func (r *Resolver) mergeEnvironments(ctx context.Context, e Execution, out *Resolved) error {
	refs := e.Session.Life.Environments
	if out.Instance.Slug != "" {
		applied, err := entry[events.InstanceApplied](ctx, r, e, events.Instance, out.Instance)
		if err != nil {
			return err
		}
		refs = slices.Concat(applied.Spec.Environments, refs)
	}
	var list []layers.Environment
	for _, ref := range refs {
		applied, err := entry[events.EnvironmentApplied](ctx, r, e, events.Environment, ref)
		if err != nil {
			return err
		}
		list = append(list, layers.Environment{Ref: applied.Ref, Spec: applied.Spec})
		out.Environments = append(out.Environments, applied.Ref)
	}
	var err error
	if out.Variables, err = layers.Merge(out.Definition.Environment, list, e.Message.Environment); err != nil {
		return variableError(err)
	}
	out.Egress, err = allowedHosts(e.Session.Life.Options.Egress, out.Definition.Egress, list)
	return err
}

// variableError converts an error of package layers to an *Error. It returns any other error unchanged.
func variableError(err error) error {
	var conflict *layers.Error
	if errors.As(err, &conflict) {
		return &Error{conflict.Code, err}
	}
	return err
}

// fromSession is the source of allowed hosts that the session allows, but not its agent.
const fromSession = "session"

// allowedHosts returns the hosts that a sandbox may reach besides models: the hosts of the session and of each environment. The
// hosts of the agent became hosts of the session when it was created.
func allowedHosts(session, agent []string, list []layers.Environment) ([]events.AllowedHost, error) {
	var from []egress.SourceEntries
	for _, host := range session {
		l := egress.SourceEntries{From: fromSession, Entries: []string{host}}
		if slices.Contains(agent, host) {
			l.From = layers.FromAgent
		}
		from = append(from, l)
	}
	for _, e := range list {
		from = append(from, egress.SourceEntries{From: e.Ref.String(), Entries: e.Spec.Egress})
	}
	all, err := egress.MergeEntries(command.MaxEgressEntries, from...)
	if err != nil {
		return nil, &Error{"EGRESS_INVALID", err}
	}
	var out []events.AllowedHost
	for _, s := range all {
		out = append(out, events.AllowedHost(s))
	}
	return out, nil
}

// openVariables fills in the values of the variables, and opens secrets.
func (r *Resolver) openVariables(ctx context.Context, e Execution, out *Resolved) error {
	for _, v := range out.Variables {
		if !v.Secret {
			out.values[v.Name] = v.Value
			continue
		}
		if r.Secrets == nil {
			return &Error{"SECRETS_UNAVAILABLE", fmt.Errorf("variable %s is a secret, and this executor has no key to open it: set its secrets identity", v.Name)}
		}
		value, err := r.Secrets.Open(ctx, secretTenant(v, e.Session.Tenant), v.Sealed)
		if errors.Is(err, secret.ErrUnavailable) {
			return fmt.Errorf("variable %s: %w", v.Name, err) // the job is delivered again
		}
		if err != nil {
			return &Error{"SECRET_UNREADABLE", fmt.Errorf("variable %s: %w", v.Name, err)}
		}
		out.values[v.Name], out.Secrets = value, append(out.Secrets, value)
	}
	return nil
}

// secretTenant returns the tenant whose key opens a secret: that of the environment, which may be the platform's.
func secretTenant(v events.Provenance, tenant string) string {
	if v.From == layers.FromRun || v.From == layers.FromAgent {
		return tenant
	}
	ref, err := events.ParseReference(v.From)
	if err != nil {
		return tenant
	}
	return ref.Tenant(tenant)
}

// parallelSkills is the number of skills of one execution that are provided at a time.
const parallelSkills = 32

// provideSkills provides the skills on the engine, and reports those whose archive is missing.
func (r *Resolver) provideSkills(ctx context.Context, e Execution, out *Resolved) error {
	if len(out.skills) == 0 {
		return nil
	}
	if r.Skills == nil {
		return &Error{"SKILL_UNAVAILABLE", errors.New("this executor has no store of skills")}
	}
	errs := make([]error, len(out.skills))
	var group errgroup.Group
	group.SetLimit(parallelSkills)
	for i, used := range out.Skills {
		if slices.Contains(out.removed, used.Ref.Version) {
			continue
		}
		group.Go(func() error {
			out.skills[i].Dir, errs[i] = r.Skills.Provide(ctx, used.Ref.Version)
			return nil
		})
	}
	_ = group.Wait() // errs has the errors
	reported := map[string]bool{}
	for i, used := range out.Skills {
		if reported[used.Ref.Version] { // a sub-agent uses it too
			continue
		}
		reported[used.Ref.Version] = true
		if err := r.reportSkill(ctx, e, used, slices.Contains(out.removed, used.Ref.Version), errs[i]); err != nil {
			return err
		}
	}
	return nil
}

// reportSkill appends a warning event if the skill was removed or its archive is missing: the agent then gets only its
// SKILL.md. reportSkill returns err if the skill could not be provided for another reason.
func (r *Resolver) reportSkill(ctx context.Context, e Execution, used events.SkillUsed, removed bool, err error) error {
	switch {
	case removed:
		return e.Report(ctx, events.Error{Code: "SKILL_REMOVED", Message: fmt.Sprintf("skill %s was removed: the agent gets its SKILL.md alone", used.Ref)})
	case errors.Is(err, ErrNoArchive):
		r.Logger.Warn("the archive of a skill is missing; only its SKILL.md is used", "session", e.Session.ID, "execution", e.ID, "skill", used.Ref.String(), "error", err)
		return e.Report(ctx, events.Error{Code: "SKILL_ARCHIVE_MISSING", Message: fmt.Sprintf("the archive of skill %s is not in the object store: the agent gets its SKILL.md alone", used.Ref)})
	case err != nil:
		return fmt.Errorf("provide skill %s on the engine: %w", used.Ref, err)
	}
	return nil
}

// entry returns the version of a catalogue entry that a reference resolves to. The error is an *Error if there is none.
func entry[P events.Payload](ctx context.Context, r *Resolver, e Execution, kind events.Aspect, ref events.Reference) (P, error) {
	var out P
	p, err := eventlog.Entries{Log: r.Log}.Resolve(ctx, kind, e.Session.Tenant, ref)
	var none *eventlog.VersionError
	if errors.As(err, &none) {
		return out, &Error{strings.ToUpper(string(kind)) + "_NOT_FOUND", err}
	}
	if err != nil {
		return out, err
	}
	out, ok := p.(P)
	if !ok {
		return out, fmt.Errorf("%s %s is a %T", kind, ref, p)
	}
	return out, nil
}
