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

// applyDefinition carries out a command that adds a version of an agent, an instance or an environment to the
// catalogue.
func (h *Handler) applyDefinition(ctx context.Context, c command.Command) (command.Answer, error) {
	kind, ref, tags, spec, err := h.decodeDefinition(ctx, c)
	if err != nil {
		return command.Answer{}, err
	}
	if err := definitionRefusal("ref.", definition.CheckEntryNames(ref, tags)); err != nil {
		return command.Answer{}, err
	}
	if ref.Version, err = definition.Digest(spec); err != nil {
		return command.Answer{}, fmt.Errorf("digest of %s %s: %w", kind, ref, err)
	}
	apply := versions.ApplyVersion{Version: ref.Version, Tags: tags}
	switch s := spec.(type) {
	case events.AgentSpec:
		apply.Data = events.AgentApplied{Ref: ref, Tags: tags, Spec: s}
	case events.InstanceSpec:
		apply.Data = events.InstanceApplied{Ref: ref, Tags: tags, Spec: s}
	case events.EnvironmentSpec:
		apply.Data = events.EnvironmentApplied{Ref: ref, Tags: tags, Spec: s}
	}
	answer, err := h.decideEntry(ctx, c, ref.Subject(kind, c.Tenant), func(m events.CommandMeta) versions.Command {
		apply.CommandMeta = m
		return apply
	})
	answer.Ref = &ref
	return answer, err
}

// decodeDefinition decodes and checks the definition in a command that applies an agent, an instance or an environment.
// It returns a refusal if an entry to which the definition refers does not exist.
func (h *Handler) decodeDefinition(ctx context.Context, c command.Command) (kind events.Aspect, ref events.Reference, tags []string, spec any, err error) {
	switch c.Type {
	case command.TypeApplyAgent:
		var b command.ApplyAgent
		if err = decodeBody(c, &b); err == nil {
			err = definitionRefusal("spec.", definition.CheckAgent(b.Spec))
		}
		if err == nil {
			err = h.checkAppliedImages(b.Spec)
		}
		if err == nil && b.Ref.WithoutVersion() == (events.Reference{Slug: DefaultAgent}) {
			err = invalidFieldError("ref.slug", "the agent default is built in; choose another slug")
		}
		return events.Agent, b.Ref, b.Tags, b.Spec, err
	case command.TypeApplyInstance:
		var b command.ApplyInstance
		if err = decodeBody(c, &b); err == nil {
			err = definitionRefusal("spec.", definition.CheckInstance(b.Spec))
		}
		if err == nil {
			_, err = h.resolveDefinition(ctx, events.Agent, c.Tenant, "spec.agent", b.Spec.Agent)
		}
		for i, e := range b.Spec.Environments {
			if err == nil {
				_, err = h.resolveDefinition(ctx, events.Environment, c.Tenant, fmt.Sprintf("spec.environments[%d]", i), e)
			}
		}
		return events.Instance, b.Ref, b.Tags, b.Spec, err
	default:
		var b command.ApplyEnvironment
		if err = decodeBody(c, &b); err == nil {
			err = definitionRefusal("spec.", definition.CheckEnvironment(b.Spec))
		}
		return events.Environment, b.Ref, b.Tags, b.Spec, err
	}
}

// definitionRefusal returns the refusal of an invalid definition. The refusal names the first invalid field, and the
// number of the others.
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
	return invalidFieldError(field, detail)
}

// removeEntry carries out a command that removes an agent, an instance or an environment from the catalogue.
func (h *Handler) removeEntry(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.RemoveEntry
	if err := decodeBody(c, &b); err != nil {
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
	answer, err := h.decideEntry(ctx, c, b.Ref.Subject(kind, c.Tenant), func(m events.CommandMeta) versions.Command {
		return versions.RemoveEntry{CommandMeta: m, Data: data}
	})
	answer.Ref = &b.Ref
	var refused *command.Error
	if errors.As(err, &refused) && refused.Code == versions.CodeNotFound {
		err = missingEntryError(kind, "ref", b.Ref)
	}
	return answer, err
}

// decideEntry decides on the command about a catalogue entry that build returns, appends the events of the decision,
// and returns the answer. Answer.Same is set if the entry already is as the command requests. The error is a
// *command.Error if the command is refused.
func (h *Handler) decideEntry(ctx context.Context, c command.Command, subject events.Subject, build func(events.CommandMeta) versions.Command) (command.Answer, error) {
	entries := eventlog.Catalogue{Log: h.cfg.Sessions.Log}
	var answer command.Answer
	err := eventlog.RetryOnConflict(func() error {
		e, err := entries.Load(ctx, subject, eventlog.LeaderOnly)
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
		list, err := versions.Decide(e.State, build(events.CommandMeta{CommandID: c.ID, Now: h.cfg.Now()}))
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
		if err := h.checkStoreSpace(ctx, c.Type); err != nil {
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

// resolveDefinition returns the definition of the catalogue entry that a reference names. If there is none, it returns
// a refusal that names the field.
func (h *Handler) resolveDefinition(ctx context.Context, kind events.Aspect, tenant, field string, ref events.Reference) (events.Payload, error) {
	if err := ref.Check(); err != nil {
		return nil, invalidFieldError(field, err.Error())
	}
	p, err := eventlog.Catalogue{Log: h.cfg.Sessions.Log}.Resolve(ctx, kind, tenant, ref)
	var none *eventlog.UnknownVersionError
	if errors.As(err, &none) {
		return nil, missingEntryError(kind, field, ref)
	}
	return p, err
}

// missingEntryError returns the refusal of a command whose field refers to a catalogue entry that does not exist.
func missingEntryError(kind events.Aspect, field string, ref events.Reference) error {
	err := &eventlog.UnknownVersionError{Kind: kind, Ref: ref}
	return &command.Error{Code: strings.ToUpper(string(kind)) + "_NOT_FOUND", Field: field, Detail: err.Error()}
}

// pinAgent resolves the agent or instance that a new session names to an exact version, and stores its references in
// out. It returns the definition of the agent, or nil for the built-in agent (DefaultAgent). It returns a refusal if an
// entry does not exist, or if the API key may not use it.
func (h *Handler) pinAgent(ctx context.Context, c command.Command, b command.CreateSession, out *events.SessionCreated) (*events.AgentSpec, error) {
	for i, s := range b.Environments {
		field := fmt.Sprintf("environments[%d]", i)
		ref, err := parseReference(field, s)
		if err != nil {
			return nil, err
		}
		// The execution resolves the reference again when it begins. This check refuses a missing entry at once.
		if _, err := h.resolveDefinition(ctx, events.Environment, c.Tenant, field, ref); err != nil {
			return nil, err
		}
		out.Environments = append(out.Environments, ref)
	}
	var agent events.Reference
	field := "agent"
	var err error
	switch {
	case b.Instance != "" && b.Agent != "":
		return nil, invalidFieldError("instance", "agent and instance exclude each other: an instance names its agent")
	case b.Instance != "":
		var ref events.Reference
		if ref, err = parseReference("instance", b.Instance); err != nil {
			return nil, err
		}
		p, err := h.resolveDefinition(ctx, events.Instance, c.Tenant, "instance", ref)
		if err != nil {
			return nil, err
		}
		instance, ok := p.(events.InstanceApplied)
		if !ok {
			return nil, fmt.Errorf("instance %s is a %T", ref, p)
		}
		if !events.AllowsAgent(c.Agents, instance.Spec.Agent.Slug) {
			return nil, missingEntryError(events.Instance, "instance", ref)
		}
		out.Instance, agent, field = instance.Ref, instance.Spec.Agent, "instance"
	case b.Agent == "" || b.Agent == DefaultAgent:
		if err := checkAgentAllowed(c, DefaultAgent); err != nil {
			return nil, err
		}
		out.Agent, out.AgentVersion = DefaultAgent, "1"
		return nil, nil
	default:
		if agent, err = parseReference("agent", b.Agent); err == nil {
			err = checkAgentAllowed(c, agent.Slug)
		}
		if err != nil {
			return nil, err
		}
	}
	p, err := h.resolveDefinition(ctx, events.Agent, c.Tenant, field, agent)
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

// checkAgentAllowed returns a refusal if the API key of a command may not use the agent. The refusal does not depend on
// whether the agent exists.
func checkAgentAllowed(c command.Command, slug string) error {
	if events.AllowsAgent(c.Agents, slug) {
		return nil
	}
	return &command.Error{Code: "FORBIDDEN", Field: "agent", Detail: "the API key is limited to the agents " + strings.Join(c.Agents, ", ")}
}

// parseReference parses a reference. The error is a refusal that names the field.
func parseReference(field, s string) (events.Reference, error) {
	ref, err := events.ParseReference(s)
	if err != nil {
		return ref, invalidFieldError(field, err.Error())
	}
	return ref, nil
}
