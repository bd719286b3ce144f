package api

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// StartExecution creates a session and posts its first message. With wait it returns when the execution has ended, or the
// time is up.
func (s *Server) StartExecution(ctx context.Context, r *spoolv1.StartExecutionRequest) (*spoolv1.StartExecutionResponse, error) {
	wait, err := s.beginWait(ctx, r.GetWait())
	if err != nil {
		return nil, err
	}
	defer wait.close()
	create, err := createSessionCommand(r)
	if err != nil {
		return nil, err
	}
	post, err := postMessageCommand(r)
	if err != nil {
		return nil, err
	}
	files, err := decodeWorkspaceFiles(r)
	if err != nil {
		return nil, err
	}
	vars, err := s.parseVariables(r)
	if err != nil {
		return nil, err
	}
	post.Files = files.refs
	request, stored := s.withStoredFiles(commands.Request{Type: command.TypeStartExecution}, files)
	request = vars.withSealedBody(s, request, func(all map[string]events.Variable) any {
		post.Environment = all
		return command.StartExecution{Create: create, Post: post}
	})
	request, done := s.withSessionLimit(s.withTranscript(request, r.GetTranscript(), &create.Transcript, func() any { return command.StartExecution{Create: create, Post: post} }))
	a, err := s.sendCreateCommand(ctx, request)
	done(err)
	stored(a, err)
	if err != nil {
		return nil, renameAgentField(r, err)
	}
	execution, cursor, err := wait.awaitEnd(ctx, a)
	if err != nil {
		return nil, err
	}
	return &spoolv1.StartExecutionResponse{SessionId: a.SessionID, ExecutionId: a.ExecutionID, Position: a.Position, Execution: execution, Cursor: cursor}, nil
}

// ListExecutions lists the tenant's executions.
func (s *Server) ListExecutions(ctx context.Context, r *spoolv1.ListExecutionsRequest) (*spoolv1.ListExecutionsResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	list, next, err := s.Reads.Executions(ctx, p.Tenant, listFilter(p, r.GetPhase(), r, r.MetadataValue), r.GetPageToken(), r.GetPageSize())
	return &spoolv1.ListExecutionsResponse{Executions: list, NextPageToken: next}, err
}

// ListSessionExecutions lists the executions of a session.
func (s *Server) ListSessionExecutions(ctx context.Context, r *spoolv1.ListSessionExecutionsRequest) (*spoolv1.ListExecutionsResponse, error) {
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	list, next, err := s.Reads.SessionExecutions(ctx, tenant, r.GetSessionId(), r.GetPageToken(), r.GetPageSize())
	return &spoolv1.ListExecutionsResponse{Executions: list, NextPageToken: next}, err
}

// GetExecution returns an execution that the caller may see, and why it waits, after the read models have reached the requested position.
func (s *Server) GetExecution(ctx context.Context, r *spoolv1.GetExecutionRequest) (*spoolv1.Execution, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if err := reads.CheckExecutionID(r.GetExecutionId()); err != nil {
		return nil, err
	}
	if len(p.Agents) > 0 {
		if _, err := s.Reads.CheckVisibleExecution(ctx, p.Tenant, r.GetExecutionId(), p.Agents); err != nil {
			return nil, err
		}
	}
	e, err := s.Reads.Execution(ctx, p.Tenant, r.GetExecutionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	e.Waiting, err = s.Waits.Find(ctx, p.Tenant, e)
	return e, err
}

// CancelExecution requests the end of an execution; its agent is interrupted.
func (s *Server) CancelExecution(ctx context.Context, r *spoolv1.CancelExecutionRequest) (*spoolv1.CancelExecutionResponse, error) {
	position, err := s.sendControl(ctx, command.TypeCancel, r.GetExecutionId())
	if err != nil {
		return nil, err
	}
	return &spoolv1.CancelExecutionResponse{Position: position}, nil
}

// PauseExecution requests that an execution pauses. It returns when the request is in the log, before the execution has paused.
func (s *Server) PauseExecution(ctx context.Context, r *spoolv1.PauseExecutionRequest) (*spoolv1.PauseExecutionResponse, error) {
	position, err := s.sendControl(ctx, command.TypePause, r.GetExecutionId())
	if err != nil {
		return nil, err
	}
	return &spoolv1.PauseExecutionResponse{Position: position}, nil
}

// ResumeExecution requests that a paused execution continues.
func (s *Server) ResumeExecution(ctx context.Context, r *spoolv1.ResumeExecutionRequest) (*spoolv1.ResumeExecutionResponse, error) {
	position, err := s.sendControl(ctx, command.TypeResume, r.GetExecutionId())
	if err != nil {
		return nil, err
	}
	return &spoolv1.ResumeExecutionResponse{Position: position}, nil
}

// TerminateExecution requests the end of an execution and of its session's sandbox.
func (s *Server) TerminateExecution(ctx context.Context, r *spoolv1.TerminateExecutionRequest) (*spoolv1.TerminateExecutionResponse, error) {
	position, err := s.sendControl(ctx, command.TypeTerminate, r.GetExecutionId())
	if err != nil {
		return nil, err
	}
	return &spoolv1.TerminateExecutionResponse{Position: position}, nil
}

// RecoverExecution stores the query of a failed execution again, as a new execution that continues the failed one, and returns before the new
// one has begun.
func (s *Server) RecoverExecution(ctx context.Context, r *spoolv1.RecoverExecutionRequest) (*spoolv1.RecoverExecutionResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if err := reads.CheckExecutionID(r.GetExecutionId()); err != nil {
		return nil, err
	}
	vars, err := s.parseVariables(r)
	if err != nil {
		return nil, err
	}
	session, err := s.Reads.CheckVisibleExecution(ctx, p.Tenant, r.GetExecutionId(), p.Agents)
	if err != nil {
		return nil, err
	}
	a, err := s.sendCreateCommand(ctx, vars.withSealedBody(s, commands.Request{Type: command.TypeRecoverExecution, SessionID: session}, func(all map[string]events.Variable) any {
		return command.RecoverExecution{ExecutionID: r.GetExecutionId(), Environment: all}
	}))
	if err != nil {
		return nil, err
	}
	return &spoolv1.RecoverExecutionResponse{SessionId: session, ExecutionId: a.ExecutionID, Position: a.Position}, nil
}

// sendControl sends a control command for an execution and returns the position of the control in the log. It looks up the execution's session in
// the read models, and then in the log.
func (s *Server) sendControl(ctx context.Context, typ command.Type, id string) (position string, err error) {
	p, err := auth.From(ctx)
	if err != nil {
		return "", err
	}
	if err := reads.CheckExecutionID(id); err != nil {
		return "", err
	}
	session, err := s.Reads.CheckVisibleExecution(ctx, p.Tenant, id, p.Agents)
	if err != nil {
		return "", err
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: typ, SessionID: session, ExecutionID: id})
	return a.Position, err
}
