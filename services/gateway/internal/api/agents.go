package api

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
)

// ApplyAgent creates a version of an agent.
func (s *Server) ApplyAgent(ctx context.Context, r *spoolv1.ApplyAgentRequest) (*spoolv1.ApplyResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	var spec events.AgentSpec
	ref, err := decodeApplyRequest(p, r, &spec)
	if err != nil {
		return nil, err
	}
	a, err := s.sendChangeCommand(ctx, withEntrySubject(agentKind(), p, ref, commands.Request{
		Type: command.TypeApplyAgent, Body: command.ApplyAgent{Ref: ref, Tags: r.GetTags(), Spec: spec},
	}))
	if err != nil {
		return nil, err
	}
	return applyResponse(ref, a), nil
}

// ListAgents lists the tenant's agents and the platform's.
func (s *Server) ListAgents(ctx context.Context, r *spoolv1.ListAgentsRequest) (*spoolv1.ListAgentsResponse, error) {
	list, next, err := s.listDefinitions(ctx, agentKind(), r)
	return &spoolv1.ListAgentsResponse{Agents: list, NextPageToken: next}, err
}

// GetAgent returns a version of an agent.
func (s *Server) GetAgent(ctx context.Context, r *spoolv1.GetAgentRequest) (*spoolv1.Definition, error) {
	return s.getDefinition(ctx, agentKind(), r)
}

// RemoveAgent hides an agent: new sessions cannot use it, and sessions that have pinned a version continue.
func (s *Server) RemoveAgent(ctx context.Context, r *spoolv1.RemoveAgentRequest) (*spoolv1.RemoveResponse, error) {
	ref, err := entryReference(r, "")
	if err != nil {
		return nil, err
	}
	return s.removeEntry(ctx, agentKind(), commands.Request{Type: command.TypeRemoveAgent}, ref)
}

// ApplyInstance creates a version of an agent instance.
func (s *Server) ApplyInstance(ctx context.Context, r *spoolv1.ApplyInstanceRequest) (*spoolv1.ApplyResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	var spec events.InstanceSpec
	ref, err := decodeApplyRequest(p, r, &spec)
	if err != nil {
		return nil, err
	}
	a, err := s.sendChangeCommand(ctx, withEntrySubject(instanceKind(), p, ref, commands.Request{
		Type: command.TypeApplyInstance, Body: command.ApplyInstance{Ref: ref, Tags: r.GetTags(), Spec: spec},
	}))
	if err != nil {
		return nil, err
	}
	return applyResponse(ref, a), nil
}

// ListInstances lists the tenant's agent instances and the platform's.
func (s *Server) ListInstances(ctx context.Context, r *spoolv1.ListInstancesRequest) (*spoolv1.ListInstancesResponse, error) {
	list, next, err := s.listDefinitions(ctx, instanceKind(), r)
	return &spoolv1.ListInstancesResponse{Instances: list, NextPageToken: next}, err
}

// GetInstance returns a version of an agent instance.
func (s *Server) GetInstance(ctx context.Context, r *spoolv1.GetInstanceRequest) (*spoolv1.Definition, error) {
	return s.getDefinition(ctx, instanceKind(), r)
}

// RemoveInstance hides an agent instance, as RemoveAgent hides an agent.
func (s *Server) RemoveInstance(ctx context.Context, r *spoolv1.RemoveInstanceRequest) (*spoolv1.RemoveResponse, error) {
	ref, err := entryReference(r, "")
	if err != nil {
		return nil, err
	}
	return s.removeEntry(ctx, instanceKind(), commands.Request{Type: command.TypeRemoveInstance}, ref)
}
