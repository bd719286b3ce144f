package api

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// StartExecution makes a session and posts its first message.
func (s *Server) StartExecution(ctx context.Context, r *spoolv1.StartExecutionRequest) (*spoolv1.StartExecutionResponse, error) {
	create, err := creation(r)
	if err != nil {
		return nil, err
	}
	post, err := message(r)
	if err != nil {
		return nil, err
	}
	a, err := s.make(ctx, commands.Request{Type: command.TypeStartExecution, Body: command.StartExecution{Create: create, Post: post}})
	if err != nil {
		return nil, err
	}
	return &spoolv1.StartExecutionResponse{SessionId: a.SessionID, ExecutionId: a.ExecutionID, Position: a.Position}, nil
}

// ListExecutions lists the tenant's executions.
func (s *Server) ListExecutions(ctx context.Context, r *spoolv1.ListExecutionsRequest) (*spoolv1.ListExecutionsResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	list, next, err := s.Reads.Executions(ctx, p.Tenant, r.GetPhase(), r.GetPageToken(), r.GetPageSize())
	return &spoolv1.ListExecutionsResponse{Executions: list, NextPageToken: next}, err
}

// ListSessionExecutions lists the executions of a session.
func (s *Server) ListSessionExecutions(ctx context.Context, r *spoolv1.ListSessionExecutionsRequest) (*spoolv1.ListExecutionsResponse, error) {
	tenant, err := s.session(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	list, next, err := s.Reads.SessionExecutions(ctx, tenant, r.GetSessionId(), r.GetPageToken(), r.GetPageSize())
	return &spoolv1.ListExecutionsResponse{Executions: list, NextPageToken: next}, err
}

// GetExecution reads an execution.
func (s *Server) GetExecution(ctx context.Context, r *spoolv1.GetExecutionRequest) (*spoolv1.Execution, error) {
	return s.execution(ctx, r.GetExecutionId(), r.GetMinPosition())
}

func (s *Server) execution(ctx context.Context, id, minPosition string) (*spoolv1.Execution, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if err := reads.CheckExecution(id); err != nil {
		return nil, err
	}
	return s.Reads.Execution(ctx, p.Tenant, id, minPosition)
}

// CancelExecution ends an execution. Its session comes from the read models, which an execution that
// was posted a moment ago is waited for in.
func (s *Server) CancelExecution(ctx context.Context, r *spoolv1.CancelExecutionRequest) (*spoolv1.CancelExecutionResponse, error) {
	e, err := s.execution(ctx, r.GetExecutionId(), "")
	if err != nil {
		return nil, err
	}
	a, err := s.change(ctx, commands.Request{Type: command.TypeCancel, SessionID: e.SessionId, ExecutionID: e.ExecutionId})
	if err != nil {
		return nil, err
	}
	return &spoolv1.CancelExecutionResponse{Position: a.Position}, nil
}
