package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// createRequest is a request that creates a session: CreateSession or StartExecution.
type createRequest interface {
	GetArchitecture() string
	GetSandbox() string
	GetModel() string
	GetSessionOptions() *spoolv1.SessionOptions
	GetMetadata() *spoolv1.Json
	GetAgentProfileRef() string
	referencesRequest
}

// aliasedRequest is a createRequest whose agent may be in the field agentProfileRef, an alias of the field agent.
type aliasedRequest struct {
	createRequest
	agent string
}

// GetAgent returns the agent that the field agent, or its alias agentProfileRef, names.
func (a aliasedRequest) GetAgent() string { return a.agent }

// resolveAgentAlias returns the request with the agent of its field agent, or of that field's alias agentProfileRef.
// It returns a problem if the two fields name different agents.
func resolveAgentAlias(r createRequest) (aliasedRequest, error) {
	given, err := parseReference(fieldAgentProfile, r.GetAgentProfileRef())
	if err != nil || given == (events.Reference{}) {
		return aliasedRequest{r, r.GetAgent()}, err
	}
	agent, err := parseReference("agent", r.GetAgent())
	switch {
	case err != nil:
		return aliasedRequest{}, err
	case agent != (events.Reference{}) && agent != given:
		return aliasedRequest{}, problem.Invalid(fieldAgentProfile, "agent and agentProfileRef name two agents, %s and %s: give one of them", agent, given)
	case r.GetInstance() != "":
		return aliasedRequest{}, problem.Invalid(fieldAgentProfile, "agentProfileRef and instance exclude each other: an instance names its agent")
	}
	return aliasedRequest{r, given.String()}, nil
}

// fieldAgentProfile is the name of the request field that is an alias of the field agent.
const fieldAgentProfile = "agentProfileRef"

// renameAgentField replaces the field agent in a problem by the field agentProfileRef if the request used that alias.
func renameAgentField(r createRequest, err error) error {
	var p *problem.Error
	if errors.As(err, &p) && p.Field == "agent" && r.GetAgent() == "" && r.GetAgentProfileRef() != "" {
		p.Field = fieldAgentProfile
	}
	return err
}

// createSessionCommand validates a request that creates a session, and returns the command's body without the request's files.
func createSessionCommand(request createRequest) (command.CreateSession, error) {
	r, err := resolveAgentAlias(request)
	if err != nil {
		return command.CreateSession{}, err
	}
	o, err := sessionOptions(r.GetSessionOptions())
	if err != nil {
		return command.CreateSession{}, err
	}
	if m := r.GetModel(); m != "" {
		if o.Model != "" && o.Model != m {
			return command.CreateSession{}, problem.Invalid("model", "model and sessionOptions.model name two models; give one")
		}
		o.Model = m
	}
	if err := command.CheckOptions(o); err != nil {
		return command.CreateSession{}, commandProblem(err)
	}
	if err := checkMetadata("metadata", r.GetMetadata()); err != nil {
		return command.CreateSession{}, err
	}
	if _, _, _, err := parseRequestReferences(r); err != nil {
		return command.CreateSession{}, err
	}
	return command.CreateSession{
		Instance: r.GetInstance(), Environments: r.GetEnvironments(),
		Agent: r.GetAgent(), Architecture: r.GetArchitecture(), Provider: r.GetSandbox(), Options: o, Metadata: rawJSON(r.GetMetadata()),
		HostPathIdentity: r.GetSessionOptions().GetHostPathIdentity(),
	}, nil
}

// checkMetadata returns a problem unless the metadata of a request is valid JSON of an allowed size. Over gRPC,
// metadata arrives as unparsed text.
func checkMetadata(field string, m *spoolv1.Json) error {
	if m == nil {
		return nil
	}
	if err := checkMetadataSize(m); err != nil {
		return err
	}
	if !json.Valid([]byte(m.GetText())) {
		return problem.Invalid(field, "the text is not valid JSON")
	}
	return nil
}

// CreateSession creates a session.
func (s *Server) CreateSession(ctx context.Context, r *spoolv1.CreateSessionRequest) (*spoolv1.CreateSessionResponse, error) {
	body, err := createSessionCommand(r)
	if err != nil {
		return nil, err
	}
	files, err := decodeWorkspaceFiles(r)
	if err != nil {
		return nil, err
	}
	body.Files = files.refs
	request, stored := s.withStoredFiles(commands.Request{Type: command.TypeCreateSession, Body: body}, files)
	request, done := s.withSessionLimit(s.withTranscript(request, r.GetTranscript(), &body.Transcript, func() any { return body }))
	a, err := s.sendCreateCommand(ctx, request)
	done(err)
	stored(a, err)
	if err != nil {
		return nil, renameAgentField(r, err)
	}
	return &spoolv1.CreateSessionResponse{SessionId: a.SessionID, Position: a.Position}, nil
}

// forkTimeout bounds how long a fork may take. It includes reading the parent's log and possibly waiting for a
// snapshot.
const forkTimeout = 45 * time.Second

// ForkSession creates a session that continues after an event of another session, or with preview only answers where it
// would begin.
func (s *Server) ForkSession(ctx context.Context, r *spoolv1.ForkSessionRequest) (*spoolv1.ForkSessionResponse, error) {
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	if r.At != nil && r.GetAt() == 0 {
		return nil, problem.Invalid("at", "events are numbered from 1; leave it out for the last event")
	}
	agent, err := parseReference("agent", r.GetAgent())
	if err == nil {
		err = checkMetadata("metadata", r.GetMetadata())
	}
	if err != nil {
		return nil, err
	}
	body := command.ForkSession{Parent: r.GetSessionId(), At: r.At, Metadata: rawJSON(r.GetMetadata()), AllowConversationLoss: r.GetAllowConversationLoss(), Preview: r.GetPreview()}
	if agent != (events.Reference{}) {
		body.Agent = agent.String()
	}
	request, done := commands.Request{Type: command.TypeForkSession, Body: body, Timeout: forkTimeout}, func(error) {}
	if !r.GetPreview() {
		request, done = s.withSessionLimit(request)
	}
	a, err := s.sendCreateCommand(ctx, request)
	done(err)
	if err != nil {
		return nil, err
	}
	if r.GetPreview() {
		return &spoolv1.ForkSessionResponse{Parent: reads.ParentMessage(a.Forked)}, nil
	}
	return &spoolv1.ForkSessionResponse{SessionId: a.SessionID, Position: a.Position, Parent: reads.ParentMessage(a.Forked)}, nil
}

// ListSessions lists the tenant's sessions.
func (s *Server) ListSessions(ctx context.Context, r *spoolv1.ListSessionsRequest) (*spoolv1.ListSessionsResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	filter := listFilter(p, r.GetStatus(), r, r.MetadataValue)
	filter.Parent, filter.HasOpenApprovals = r.GetParent(), r.HasOpenApprovals
	filter.Phases = slices.Compact(slices.Sorted(slices.Values(r.GetPhase())))
	list, next, err := s.Reads.Sessions(ctx, p.Tenant, filter, r.GetPageToken(), r.GetPageSize())
	return &spoolv1.ListSessionsResponse{Sessions: list, NextPageToken: next}, err
}

// filterRequest is a request with the filters of ListSessions and ListExecutions.
type filterRequest interface {
	GetAgent() string
	GetArchitecture() string
	GetMetadataKey() string
	GetCreatedAfter() string
	GetCreatedBefore() string
	GetUpdatedAfter() string
	GetUpdatedBefore() string
	GetText() string
	GetSort() string
	GetOrder() string
}

// listFilter returns the filter of a list request for what the principal may see.
func listFilter(p auth.Principal, state string, r filterRequest, metadataValue *string) reads.Filter {
	return reads.Filter{
		State: state, Agent: r.GetAgent(), Architecture: r.GetArchitecture(), MetadataKey: r.GetMetadataKey(), MetadataValue: metadataValue,
		CreatedAfter: r.GetCreatedAfter(), CreatedBefore: r.GetCreatedBefore(), UpdatedAfter: r.GetUpdatedAfter(), UpdatedBefore: r.GetUpdatedBefore(),
		Text: r.GetText(), Sort: r.GetSort(), Order: r.GetOrder(), Agents: p.Agents,
	}
}

// GetSession returns a session.
func (s *Server) GetSession(ctx context.Context, r *spoolv1.GetSessionRequest) (*spoolv1.Session, error) {
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	return s.Reads.Session(ctx, tenant, r.GetSessionId())
}

// UpdateSession changes the options of a session, its metadata, or both.
func (s *Server) UpdateSession(ctx context.Context, r *spoolv1.UpdateSessionRequest) (*spoolv1.UpdateSessionResponse, error) {
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	if r.SessionOptions == nil && r.Metadata == nil && len(r.Clear) == 0 {
		return nil, problem.Invalid("sessionOptions", "the request changes nothing: give sessionOptions, clear or metadata")
	}
	if err := checkMetadata("metadata", r.GetMetadata()); err != nil {
		return nil, err
	}
	body := command.UpdateSession{Metadata: rawJSON(r.GetMetadata()), Clear: r.GetClear()}
	if r.SessionOptions != nil {
		o, err := sessionOptions(r.SessionOptions)
		if err != nil {
			return nil, err
		}
		body.Options = &o
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: command.TypeUpdateSession, SessionID: r.GetSessionId(), Body: body})
	if err != nil {
		return nil, err
	}
	return &spoolv1.UpdateSessionResponse{SessionId: r.GetSessionId(), Position: a.Position}, nil
}

// DeleteSession deletes a session permanently.
func (s *Server) DeleteSession(ctx context.Context, r *spoolv1.DeleteSessionRequest) (*spoolv1.DeleteSessionResponse, error) {
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: command.TypeDeleteSession, SessionID: r.GetSessionId()})
	if err != nil {
		return nil, err
	}
	return &spoolv1.DeleteSessionResponse{SessionId: r.GetSessionId(), Position: a.Position}, nil
}

// messageRequest is a request with a message: PostMessage or StartExecution.
type messageRequest interface {
	GetContent() string
	GetParts() []*spoolv1.Part
	GetMetadata() *spoolv1.Json
	GetPermissions() *spoolv1.ExecutionPermissions
}

// postMessageCommand validates the message of a request, and returns the command's body without the request's files and variables.
func postMessageCommand(r messageRequest) (command.PostMessage, error) {
	m := command.PostMessage{Content: r.GetContent(), Metadata: rawJSON(r.GetMetadata())}
	size := len(m.Content)
	for _, p := range r.GetParts() {
		size += len(p.GetText()) + len(p.GetData())
		m.Parts = append(m.Parts, events.Part{Type: p.GetType(), Text: p.GetText(), MediaType: p.GetMediaType(), Data: p.GetData()})
	}
	switch {
	case size > MaxMessageBytes:
		return m, problem.New(problem.PayloadTooLarge, "content", tooLargeDetail("the message", size, MaxMessageBytes))
	case m.Content != "" && len(m.Parts) > 0:
		return m, problem.Invalid("parts", "content and parts exclude each other; give the text as a part of type text")
	case strings.TrimSpace(m.Content) == "" && len(m.Parts) == 0:
		return m, problem.Invalid("content", "the message is empty")
	}
	if err := checkMetadata("metadata", r.GetMetadata()); err != nil {
		return m, err
	}
	var err error
	m.Permissions, err = executionPermissions(r.GetPermissions())
	return m, err
}

// PostMessage stores a query for a session, as a new execution, and returns before the execution has begun. With wait it
// returns when the execution has ended, or the time is up.
func (s *Server) PostMessage(ctx context.Context, r *spoolv1.PostMessageRequest) (*spoolv1.PostMessageResponse, error) {
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	wait, err := s.beginWait(ctx, r.GetWait())
	if err != nil {
		return nil, err
	}
	defer wait.close()
	body, err := postMessageCommand(r)
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
	if len(files.refs)+len(vars.secrets) > 0 {
		// Store nothing for a session that does not exist.
		if _, _, err := s.requireSession(ctx, r.GetSessionId()); err != nil {
			return nil, err
		}
	}
	body.Files = files.refs
	request, stored := s.withStoredFiles(commands.Request{Type: command.TypePostMessage, SessionID: r.GetSessionId()}, files)
	a, err := s.sendCreateCommand(ctx, vars.withSealedBody(s, request,
		func(all map[string]events.Variable) any {
			body.Environment = all
			return body
		}))
	stored(a, err)
	if err != nil {
		return nil, err
	}
	execution, cursor, err := wait.awaitEnd(ctx, a)
	if err != nil {
		return nil, err
	}
	return &spoolv1.PostMessageResponse{SessionId: r.GetSessionId(), ExecutionId: a.ExecutionID, Position: a.Position, Execution: execution, Cursor: cursor}, nil
}

// InterruptSession requests that the running turn of a session stops.
func (s *Server) InterruptSession(ctx context.Context, r *spoolv1.InterruptSessionRequest) (*spoolv1.InterruptSessionResponse, error) {
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: command.TypeInterrupt, SessionID: r.GetSessionId()})
	if err != nil {
		return nil, err
	}
	return &spoolv1.InterruptSessionResponse{Position: a.Position}, nil
}

// SyncSession requests a snapshot of the session's workspace, and returns before it is taken.
func (s *Server) SyncSession(ctx context.Context, r *spoolv1.SyncSessionRequest) (*spoolv1.SyncSessionResponse, error) {
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: command.TypeSyncWorkspace, SessionID: r.GetSessionId()})
	if err != nil {
		return nil, err
	}
	return &spoolv1.SyncSessionResponse{Position: a.Position}, nil
}

// TerminateEnvironment requests the end of the session's sandbox.
func (s *Server) TerminateEnvironment(ctx context.Context, r *spoolv1.TerminateEnvironmentRequest) (*spoolv1.TerminateEnvironmentResponse, error) {
	if err := reads.CheckSessionID(r.GetSessionId()); err != nil {
		return nil, err
	}
	a, err := s.sendChangeCommand(ctx, commands.Request{Type: command.TypeTerminate, SessionID: r.GetSessionId()})
	if err != nil {
		return nil, err
	}
	return &spoolv1.TerminateEnvironmentResponse{Position: a.Position}, nil
}

// ListConversations lists the conversations of a session.
func (s *Server) ListConversations(ctx context.Context, r *spoolv1.ListConversationsRequest) (*spoolv1.ListConversationsResponse, error) {
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	list, err := s.Reads.Conversations(ctx, tenant, r.GetSessionId())
	return &spoolv1.ListConversationsResponse{Conversations: list}, err
}

// tooLargeDetail returns the detail of a problem about something that has more bytes than its limit.
func tooLargeDetail(what string, size, limit int) string {
	return fmt.Sprintf("%s has %d bytes; the limit is %d", what, size, limit)
}
