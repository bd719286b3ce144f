package command

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// apply adds a version of an agent, an instance or an environment.
func (h *Handler) apply(ctx context.Context, c command.Command) (command.Answer, error) {
	kind, ref, tags, spec, err := h.definition(ctx, c)
	if err != nil {
		return command.Answer{}, err
	}
	if err := definitionRefusal("ref.", definition.CheckEntryNames(ref, tags)); err != nil {
		return command.Answer{}, err
	}
	if ref.Version, err = definition.Digest(spec); err != nil {
		return command.Answer{}, fmt.Errorf("digest of %s %s: %w", kind, ref, err)
	}
	apply := versions.Apply{Version: ref.Version, Tags: tags}
	switch s := spec.(type) {
	case events.AgentSpec:
		apply.Data = events.AgentApplied{Ref: ref, Tags: tags, Spec: s}
	case events.InstanceSpec:
		apply.Data = events.InstanceApplied{Ref: ref, Tags: tags, Spec: s}
	case events.EnvironmentSpec:
		apply.Data = events.EnvironmentApplied{Ref: ref, Tags: tags, Spec: s}
	}
	answer, err := h.decideEntry(ctx, c, ref.Subject(kind, c.Tenant), func(m events.Meta) versions.Command {
		apply.Meta = m
		return apply
	})
	answer.Ref = &ref
	return answer, err
}

// definition decodes and checks an applied definition. Entries to which it refers must exist.
func (h *Handler) definition(ctx context.Context, c command.Command) (kind events.Aspect, ref events.Reference, tags []string, spec any, err error) {
	switch c.Type {
	case command.TypeApplyAgent:
		var b command.ApplyAgent
		if err = decode(c, &b); err == nil {
			err = definitionRefusal("spec.", definition.CheckAgent(b.Spec))
		}
		if err == nil {
			err = h.checkAppliedImages(b.Spec)
		}
		if err == nil && b.Ref.Bare() == (events.Reference{Slug: DefaultAgent}) {
			err = invalid("ref.slug", "the agent default is built in; choose another slug")
		}
		return events.Agent, b.Ref, b.Tags, b.Spec, err
	case command.TypeApplyInstance:
		var b command.ApplyInstance
		if err = decode(c, &b); err == nil {
			err = definitionRefusal("spec.", definition.CheckInstance(b.Spec))
		}
		if err == nil {
			_, err = h.resolve(ctx, events.Agent, c.Tenant, "spec.agent", b.Spec.Agent)
		}
		for i, e := range b.Spec.Environments {
			if err == nil {
				_, err = h.resolve(ctx, events.Environment, c.Tenant, fmt.Sprintf("spec.environments[%d]", i), e)
			}
		}
		return events.Instance, b.Ref, b.Tags, b.Spec, err
	default:
		var b command.ApplyEnvironment
		if err = decode(c, &b); err == nil {
			err = definitionRefusal("spec.", definition.CheckEnvironment(b.Spec))
		}
		return events.Environment, b.Ref, b.Tags, b.Spec, err
	}
}

// definitionRefusal returns the refusal of an invalid definition: the first invalid field, and the number of others.
func definitionRefusal(prefix string, wrong []definition.FieldError) error {
	if len(wrong) == 0 {
		return nil
	}
	detail := wrong[0].Detail
	if n := len(wrong) - 1; n > 0 {
		detail = fmt.Sprintf("%s (and %d more)", detail, n)
	}
	field := wrong[0].Field
	if !strings.HasPrefix(field, "tags") {
		field = prefix + field
	}
	return invalid(field, detail)
}

// remove hides an entry.
func (h *Handler) remove(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.RemoveEntry
	if err := decode(c, &b); err != nil {
		return command.Answer{}, err
	}
	if err := definitionRefusal("ref.", definition.CheckEntryNames(b.Ref, nil)); err != nil {
		return command.Answer{}, err
	}
	var kind events.Aspect
	var data events.Payload
	switch c.Type {
	case command.TypeRemoveAgent:
		kind, data = events.Agent, events.AgentRemoved{Ref: b.Ref}
	case command.TypeRemoveInstance:
		kind, data = events.Instance, events.InstanceRemoved{Ref: b.Ref}
	default:
		kind, data = events.Environment, events.EnvironmentRemoved{Ref: b.Ref}
	}
	answer, err := h.decideEntry(ctx, c, b.Ref.Subject(kind, c.Tenant), func(m events.Meta) versions.Command {
		return versions.Remove{Meta: m, Data: data}
	})
	answer.Ref = &b.Ref
	var refused *command.Error
	if errors.As(err, &refused) && refused.Code == versions.CodeNotFound {
		err = missingError(kind, "ref", b.Ref)
	}
	return answer, err
}

// decideEntry decides on the command that build returns for a catalogue entry, appends the events, and returns the answer. Answer.Same is set
// if the entry already is as the command requests. The error is a *command.Error if the command is refused.
func (h *Handler) decideEntry(ctx context.Context, c command.Command, subject events.Subject, build func(events.Meta) versions.Command) (command.Answer, error) {
	entries := eventlog.Entries{Log: h.cfg.Sessions.Log}
	var answer command.Answer
	err := eventlog.Decide(func() error {
		e, err := entries.Load(ctx, subject, eventlog.Leader)
		if err != nil {
			return err
		}
		done, err := entries.HasCommand(ctx, e, c.ID)
		if err != nil {
			return err
		}
		if done {
			answer = command.Answer{Position: entries.Position(e).String()}
			return nil
		}
		list, err := versions.Decide(e.State, build(events.Meta{CommandID: c.ID, Now: h.cfg.Now()}))
		var refused *versions.Error
		if errors.As(err, &refused) {
			return &command.Error{Code: refused.Code, Field: refused.Field, Detail: refused.Detail}
		}
		if err != nil {
			return err
		}
		if len(list) == 0 {
			answer = command.Answer{Position: entries.Position(e).String(), Same: true}
			return nil
		}
		if err := h.checkRoom(ctx, c.Type); err != nil {
			return err
		}
		err = entries.Append(ctx, &e, c.Actor, c.ID, list)
		answer = command.Answer{Position: entries.Position(e).String()}
		return err
	})
	if err != nil {
		return command.Answer{}, fmt.Errorf("append to %s: %w", subject, err)
	}
	return answer, nil
}

// resolve returns the definition that a reference names. If there is none, it returns a refusal of the request.
func (h *Handler) resolve(ctx context.Context, kind events.Aspect, tenant, field string, ref events.Reference) (events.Payload, error) {
	if err := ref.Check(); err != nil {
		return nil, invalid(field, err.Error())
	}
	p, err := eventlog.Entries{Log: h.cfg.Sessions.Log}.Resolve(ctx, kind, tenant, ref)
	var none *eventlog.VersionError
	if errors.As(err, &none) {
		return nil, missingError(kind, field, ref)
	}
	return p, err
}

// missingError returns the refusal of a reference to an entry that does not exist.
func missingError(kind events.Aspect, field string, ref events.Reference) error {
	err := &eventlog.VersionError{Kind: kind, Ref: ref}
	return &command.Error{Code: strings.ToUpper(string(kind)) + "_NOT_FOUND", Field: field, Detail: err.Error()}
}

// pin resolves the agent or instance that a new session names to an exact version, and stores its references in out. It returns the
// definition of the agent, or nil for the built-in agent (DefaultAgent). An entry that does not exist, or that the API key may not use,
// is a refusal.
func (h *Handler) pin(ctx context.Context, c command.Command, b command.CreateSession, out *events.SessionCreated) (*events.AgentSpec, error) {
	for i, s := range b.Environments {
		field := fmt.Sprintf("environments[%d]", i)
		ref, err := parseReference(field, s)
		if err != nil {
			return nil, err
		}
		// The execution resolves the reference again when it begins. This check refuses a missing entry at once.
		if _, err := h.resolve(ctx, events.Environment, c.Tenant, field, ref); err != nil {
			return nil, err
		}
		out.Environments = append(out.Environments, ref)
	}
	var agent events.Reference
	field := "agent"
	var err error
	switch {
	case b.Instance != "" && b.Agent != "":
		return nil, invalid("instance", "an instance names its agent: give one of agent and instance")
	case b.Instance != "":
		var ref events.Reference
		if ref, err = parseReference("instance", b.Instance); err != nil {
			return nil, err
		}
		p, err := h.resolve(ctx, events.Instance, c.Tenant, "instance", ref)
		if err != nil {
			return nil, err
		}
		instance, ok := p.(events.InstanceApplied)
		if !ok {
			return nil, fmt.Errorf("instance %s is a %T", ref, p)
		}
		if !events.AllowsAgent(c.Agents, instance.Spec.Agent.Slug) {
			return nil, missingError(events.Instance, "instance", ref)
		}
		out.Instance, agent, field = instance.Ref, instance.Spec.Agent, "instance"
	case b.Agent == "" || b.Agent == DefaultAgent:
		if err := checkAgent(c, DefaultAgent); err != nil {
			return nil, err
		}
		out.Agent, out.AgentVersion = DefaultAgent, "1"
		return nil, nil
	default:
		if agent, err = parseReference("agent", b.Agent); err == nil {
			err = checkAgent(c, agent.Slug)
		}
		if err != nil {
			return nil, err
		}
	}
	p, err := h.resolve(ctx, events.Agent, c.Tenant, field, agent)
	if err != nil {
		return nil, err
	}
	applied, ok := p.(events.AgentApplied)
	if !ok {
		return nil, fmt.Errorf("agent %s is a %T", agent, p)
	}
	out.Agent, out.AgentVersion, out.AgentRef = applied.Ref.Slug, applied.Ref.Version, applied.Ref
	return &applied.Spec, nil
}

// checkAgent refuses an agent that the actor's key may not use. The refusal does not depend on whether the agent exists.
func checkAgent(c command.Command, slug string) error {
	if events.AllowsAgent(c.Agents, slug) {
		return nil
	}
	return &command.Error{Code: "FORBIDDEN", Field: "agent", Detail: "the API key is limited to the agents " + strings.Join(c.Agents, ", ")}
}

// parseReference parses a reference. The error is a refusal that names the field.
func parseReference(field, s string) (events.Reference, error) {
	ref, err := events.ParseReference(s)
	if err != nil {
		return ref, invalid(field, err.Error())
	}
	return ref, nil
}
