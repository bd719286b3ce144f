package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// ApplyEnvironment creates a version of an environment. It returns when the read models contain the version, unless
// they are behind, so that the next version can keep the secrets of this one.
func (s *Server) ApplyEnvironment(ctx context.Context, r *spoolv1.ApplyEnvironmentRequest) (*spoolv1.ApplyResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	var spec events.EnvironmentSpec
	ref, err := decodeApplyRequest(p, r, &spec)
	if err != nil {
		return nil, err
	}
	if err := s.sealEnvironment(ctx, p.Tenant, ref, &spec); err != nil {
		return nil, err
	}
	a, err := s.sendChangeCommand(ctx, withEntrySubject(environmentKind(), p, ref, commands.Request{
		Type: command.TypeApplyEnvironment, Body: command.ApplyEnvironment{Ref: ref, Tags: r.GetTags(), Spec: spec},
	}))
	if err != nil {
		return nil, err
	}
	// The version is in the log. It is not an error if the read models do not contain it in time.
	_ = s.Reads.AwaitMinPosition(ctx, ref.Subject(events.Environment, p.Tenant).ID, a.Position)
	return applyResponse(ref, a), nil
}

// ListEnvironments lists the tenant's environments, and the platform's.
func (s *Server) ListEnvironments(ctx context.Context, r *spoolv1.ListEnvironmentsRequest) (*spoolv1.ListEnvironmentsResponse, error) {
	list, next, err := s.listDefinitions(ctx, environmentKind(), r)
	return &spoolv1.ListEnvironmentsResponse{Environments: list, NextPageToken: next}, err
}

// GetEnvironment returns a version of an environment.
func (s *Server) GetEnvironment(ctx context.Context, r *spoolv1.GetEnvironmentRequest) (*spoolv1.Definition, error) {
	return s.getDefinition(ctx, environmentKind(), r)
}

// RemoveEnvironment hides an environment, as RemoveAgent hides an agent.
func (s *Server) RemoveEnvironment(ctx context.Context, r *spoolv1.RemoveEnvironmentRequest) (*spoolv1.RemoveResponse, error) {
	ref, err := entryReference(r, "")
	if err != nil {
		return nil, err
	}
	return s.removeEntry(ctx, environmentKind(), commands.Request{Type: command.TypeRemoveEnvironment}, ref)
}

// builtInAgent is the name that a request uses for the built-in agent instead of a slug. The built-in agent is not a
// catalogue entry.
const builtInAgent = "default"

// ExplainEnvironment returns the variables and the allowlist that an execution with the requested agent and environments would have, with the
// source of each. It starts nothing.
func (s *Server) ExplainEnvironment(ctx context.Context, r *spoolv1.ExplainEnvironmentRequest) (*spoolv1.ExplainEnvironmentResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	agent, list, err := s.requestedDefinitions(ctx, p, r)
	if err != nil {
		return nil, err
	}
	merged, err := layers.MergeVariables(agent.Environment, list, nil)
	if err != nil {
		return nil, mergeError(err)
	}
	hosts, err := allowedHosts(agent, list)
	if err != nil {
		return nil, err
	}
	out := &spoolv1.ExplainEnvironmentResponse{}
	for _, h := range hosts {
		out.Egress = append(out.Egress, &spoolv1.ExplainedHost{Entry: h.Entry, From: h.From})
	}
	for _, v := range merged {
		one := &spoolv1.ExplainedVariable{Name: v.Name, From: v.From, Secret: v.Secret}
		if !v.Secret {
			one.Value = &v.Value
		}
		out.Variables = append(out.Variables, one)
	}
	return out, nil
}

// allowedHosts returns the hosts that the agent and the environments allow a sandbox to reach.
func allowedHosts(agent events.AgentSpec, list []layers.Environment) ([]egress.SourcedEntry, error) {
	from := []egress.SourceEntries{{From: layers.SourceAgent, Entries: agent.Egress}}
	for _, e := range list {
		from = append(from, egress.SourceEntries{From: e.Ref.String(), Entries: e.Spec.Egress})
	}
	hosts, err := egress.MergeEntries(command.MaxEgressEntries, from...)
	if err != nil {
		return nil, problem.New(problem.EgressInvalid, "", err.Error()).WithCause(err)
	}
	return hosts, nil
}

// requestedDefinitions returns the definition of the agent to which a request refers, and the environments in the
// order in which they are merged.
func (s *Server) requestedDefinitions(ctx context.Context, p auth.Principal, r *spoolv1.ExplainEnvironmentRequest) (agent events.AgentSpec, list []layers.Environment, err error) {
	ref, refs, err := s.selectReferences(ctx, p, r)
	if err != nil {
		return agent, nil, err
	}
	if ref.Slug != "" && ref != (events.Reference{Slug: builtInAgent}) {
		v, found, err := s.Reads.Definition(ctx, events.Agent, p.Tenant, ref)
		if err == nil && !found {
			err = agentKind().notFound("agent")
		}
		if err == nil {
			err = decodeSpec(v.Spec, &agent)
		}
		if err != nil {
			return agent, nil, err
		}
	}
	for _, e := range refs {
		v, found, err := s.Reads.Definition(ctx, events.Environment, p.Tenant, e.ref)
		if err == nil && !found {
			err = environmentKind().notFound(e.field)
		}
		one := layers.Environment{Ref: withShortScope(v.Ref)}
		if err == nil {
			err = decodeSpec(v.Spec, &one.Spec)
		}
		if err != nil {
			return agent, nil, err
		}
		list = append(list, one)
	}
	return agent, list, nil
}

// fieldReference is a reference to a catalogue entry, together with the name of the request field that contains the
// reference.
type fieldReference struct {
	ref   events.Reference
	field string
}

// selectReferences returns the references of the agent and the environments that a request refers to, directly or by its instance. The
// environments of the instance come first.
func (s *Server) selectReferences(ctx context.Context, p auth.Principal, r *spoolv1.ExplainEnvironmentRequest) (agent events.Reference, out []fieldReference, err error) {
	agent, instance, list, err := parseRequestReferences(r)
	if err != nil {
		return agent, nil, err
	}
	if instance.Slug != "" {
		v, found, err := s.Reads.Definition(ctx, events.Instance, p.Tenant, instance)
		if err == nil && found {
			found, err = mayUseVersion(p, events.Instance, v)
		}
		if err == nil && !found {
			err = instanceKind().notFound("instance")
		}
		var spec events.InstanceSpec
		if err == nil {
			err = decodeSpec(v.Spec, &spec)
		}
		if err != nil {
			return agent, nil, err
		}
		agent = spec.Agent
		for _, e := range spec.Environments {
			out = append(out, fieldReference{withShortScope(e), "instance"})
		}
	}
	if agent.Slug != "" && !events.AllowsAgent(p.Agents, agent.Slug) {
		return agent, nil, agentKind().notFound("agent")
	}
	for i, e := range list {
		out = append(out, fieldReference{e, fmt.Sprintf("environments[%d]", i)})
	}
	return agent, out, nil
}

// referencesRequest is a request that refers to an agent or an instance, and to environments.
type referencesRequest interface {
	GetAgent() string
	GetInstance() string
	GetEnvironments() []string
}

// parseRequestReferences parses the references of a request to an agent, an instance and environments. A reference
// that the request does not have is zero.
func parseRequestReferences(r referencesRequest) (agent, instance events.Reference, list []events.Reference, err error) {
	if r.GetAgent() != "" && r.GetInstance() != "" {
		return agent, instance, nil, problem.Invalid("instance", "agent and instance exclude each other: an instance names its agent")
	}
	if agent, err = parseReference("agent", r.GetAgent()); err != nil {
		return agent, instance, nil, err
	}
	if instance, err = parseReference("instance", r.GetInstance()); err != nil {
		return agent, instance, nil, err
	}
	list, err = parseReferences("environments", r.GetEnvironments())
	return agent, instance, list, err
}

// mergeError combines all conflicts between variables of environments into one problem, with the code of the first
// conflict.
func mergeError(err error) error {
	var first *layers.VariableError
	if !errors.As(err, &first) {
		return problem.From(err)
	}
	return problem.New(problem.Code(first.Code), "", strings.ReplaceAll(err.Error(), "\n", "; ")).WithCause(err)
}

// decodeSpec decodes the JSON of a definition, as the read models store it, into a value.
func decodeSpec(text string, into any) error {
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return problem.New(problem.Internal, "", "a definition in the read models is not valid").WithCause(err)
	}
	return nil
}
