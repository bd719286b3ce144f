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

// Skills stores the files of skills on an engine, so that its sandboxes can read them.
type Skills interface {
	// Provide copies a skill to the engine, unless the engine has it, and returns the folder in which sandboxes see
	// it. The error wraps ErrNoArchive if the object store does not have the skill's archive.
	Provide(ctx context.Context, digest string) (dir string, err error)
}

// ErrNoArchive is wrapped by the errors of Skills for a skill whose archive is missing.
var ErrNoArchive = errors.New("the skill's archive is not in the object store")

// Secrets decrypts the values of secrets. The session service removes the secrets of an execution when the log has the
// execution's end.
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

// FailedEvent returns the event that ends the execution with this error.
func (e *Error) FailedEvent() events.ExecutionFailed {
	return events.ExecutionFailed{Code: e.Code, Message: strings.ReplaceAll(e.Error(), "\n", "; ")}
}

// A Resolver resolves the references of executions to agents, skills and environments. It is safe for concurrent use.
type Resolver struct {
	Log        eventlog.Log
	Provider   string  // name of the sandbox provider, for messages
	Containers bool    // the provider runs MCP servers in containers
	Skills     Skills  // nil: an execution with skills fails
	Secrets    Secrets // nil: an execution with secrets fails
	Logger     *slog.Logger
}

// An Execution has the data of an execution that a Resolver needs.
type Execution struct {
	ID      string
	Session *eventlog.SessionState
	Message events.MessageAccepted
	// Report stores error events about skills that are not complete.
	Report func(ctx context.Context, e events.Error) error
}

// Resolve resolves the references of an execution. If the log has recorded versions for the execution, it uses those, and
// otherwise the present versions. An *Error means that the execution cannot start.
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

// resolveEntries reads the catalogue entries that the execution refers to into out.
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
		applied, err := resolveEntry[events.AgentApplied](ctx, r, e, events.Agent, out.Agent)
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
		pushed, err := r.resolveSkill(ctx, e, out, out.Skills[i].Ref)
		if err != nil {
			return err
		}
		out.Skills[i].Ref, out.Skills[i].Name = pushed.Ref, pushed.Name
		s := runner.Skill{Name: pushed.Name, Description: pushed.Description, Version: pushed.Ref.Version, Unlisted: out.Skills[i].Subagent != ""}
		out.skills, out.documents = append(out.skills, s), append(out.documents, pushed.Document)
	}
	return nil
}

// recordedResolution returns the execution_resolved event that the log has for the execution.
func (r *Resolver) recordedResolution(ctx context.Context, e Execution) (events.ExecutionResolved, error) {
	at := eventlog.Position{Shard: e.Session.RunHead.Subject.Partition() % r.Log.Shards(), Seq: e.Session.Run.Resolved.At}
	rec, err := r.Log.CommitAt(ctx, at)
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

// resolveSkill returns the version of a skill that a reference names. If that version was removed, it reads the version by its
// digest, because its SKILL.md is still in the log.
func (r *Resolver) resolveSkill(ctx context.Context, e Execution, out *Resolved, ref events.Reference) (events.SkillPushed, error) {
	pushed, err := resolveEntry[events.SkillPushed](ctx, r, e, events.Skill, ref)
	var unresolved *Error
	if !errors.As(err, &unresolved) || !events.IsDigest(ref.Version) {
		return pushed, err
	}
	p, rerr := eventlog.Catalogue{Log: r.Log}.ResolveRemoved(ctx, events.Skill, e.Session.Tenant, ref)
	var none *eventlog.UnknownVersionError
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

// mergeEnvironments merges the variables and the allowed hosts of all environments of the execution into out.
func (r *Resolver) mergeEnvironments(ctx context.Context, e Execution, out *Resolved) error {
	refs := e.Session.Life.Environments
	if out.Instance.Slug != "" {
		applied, err := resolveEntry[events.InstanceApplied](ctx, r, e, events.Instance, out.Instance)
		if err != nil {
			return err
		}
		refs = slices.Concat(applied.Spec.Environments, refs)
	}
	var list []layers.Environment
	for _, ref := range refs {
		applied, err := resolveEntry[events.EnvironmentApplied](ctx, r, e, events.Environment, ref)
		if err != nil {
			return err
		}
		list = append(list, layers.Environment{Ref: applied.Ref, Spec: applied.Spec})
		out.Environments = append(out.Environments, applied.Ref)
	}
	var err error
	if out.Variables, err = layers.MergeVariables(out.Definition.Environment, list, e.Message.Environment); err != nil {
		return variableError(err)
	}
	out.Egress, err = allowedHosts(e.Session.Life.Options.Egress, out.Definition.Egress, list)
	return err
}

// variableError converts an error of package layers to an *Error. It returns any other error unchanged.
func variableError(err error) error {
	var conflict *layers.VariableError
	if errors.As(err, &conflict) {
		return &Error{conflict.Code, err}
	}
	return err
}

// hostFromSession is the recorded source of an allowed host that the session allows and its agent does not.
const hostFromSession = "session"

// allowedHosts returns the hosts, besides those of model providers, that a sandbox may reach: those of the session and of each
// environment. The hosts of the agent were added to the session when it was created.
func allowedHosts(session, agent []string, list []layers.Environment) ([]events.AllowedHost, error) {
	var from []egress.SourceEntries
	for _, host := range session {
		l := egress.SourceEntries{From: hostFromSession, Entries: []string{host}}
		if slices.Contains(agent, host) {
			l.From = layers.SourceAgent
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

// openVariables sets the values of the execution's variables in out, for which it decrypts secrets.
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

// secretTenant returns the tenant whose key decrypts the secret of a variable: that of the environment that defines the variable,
// which may be the platform's.
func secretTenant(v events.Provenance, tenant string) string {
	if v.From == layers.SourceRun || v.From == layers.SourceAgent {
		return tenant
	}
	ref, err := events.ParseReference(v.From)
	if err != nil {
		return tenant
	}
	return ref.OwnerTenant(tenant)
}

// parallelSkills is the number of skills of one execution that are stored on the engine at the same time.
const parallelSkills = 32

// provideSkills stores the execution's skills on the engine, and records a warning in the log for each skill whose archive is
// missing.
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

// reportSkill records a warning in the log if a skill was removed or its archive is missing, so that the agent gets only its
// SKILL.md. err is the error of storing the skill on the engine; any other error is returned.
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

// resolveEntry returns the version of a catalogue entry that a reference names, or an *Error if there is none.
func resolveEntry[P events.Payload](ctx context.Context, r *Resolver, e Execution, kind events.Aspect, ref events.Reference) (P, error) {
	var out P
	p, err := eventlog.Catalogue{Log: r.Log}.Resolve(ctx, kind, e.Session.Tenant, ref)
	var none *eventlog.UnknownVersionError
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
