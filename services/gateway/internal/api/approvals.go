package api

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Limits of a decision, in bytes of JSON. The session service limits the comment.
const (
	maxArgumentsBytes = 128 << 10
	maxAnswersBytes   = 64 << 10
	maxContentBytes   = 64 << 10
)

// ListApprovals lists the approval requests of a tenant.
func (s *Server) ListApprovals(ctx context.Context, r *spoolv1.ListApprovalsRequest) (*spoolv1.ListApprovalsResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if id := r.GetSessionId(); id != "" {
		if _, err := s.checkSession(ctx, id, ""); err != nil {
			return nil, err
		}
		if _, err := s.Reads.Session(ctx, p.Tenant, id); err != nil {
			return nil, err
		}
	}
	if id := r.GetExecutionId(); id != "" {
		if err := reads.CheckExecutionID(id); err != nil {
			return nil, err
		}
		if _, err := s.Reads.CheckVisibleExecution(ctx, p.Tenant, id, p.Agents); err != nil {
			return nil, err
		}
	}
	f := reads.ApprovalFilter{Session: r.GetSessionId(), Execution: r.GetExecutionId(), Status: r.GetStatus(), Agents: p.Agents}
	list, next, err := s.Reads.Approvals(ctx, p.Tenant, f, r.GetPageToken(), r.GetPageSize())
	return &spoolv1.ListApprovalsResponse{Approvals: list, NextPageToken: next}, err
}

// GetApproval returns an approval request.
func (s *Server) GetApproval(ctx context.Context, r *spoolv1.GetApprovalRequest) (*spoolv1.Approval, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	return s.Reads.Approval(ctx, p.Tenant, r.GetApprovalId(), r.GetMinPosition(), p.Agents)
}

// DecideApproval stores the decision of a person on an approval request, and returns before the agent has received it. The session service
// refuses a decision that the request does not allow, and one on a request that is not open; here, what a person fills in is compared with
// the request.
func (s *Server) DecideApproval(ctx context.Context, r *spoolv1.DecideApprovalRequest) (*spoolv1.DecideApprovalResponse, error) {
	a, err := s.GetApproval(ctx, &spoolv1.GetApprovalRequest{ApprovalId: r.GetApprovalId()})
	if err != nil {
		return nil, err
	}
	return s.decideApproval(ctx, a, r)
}

// DecideInSession is DecideApproval for a decision that arrives on a WebSocket. It implements socket.Config.Decide.
func (s *Server) DecideInSession(ctx context.Context, p auth.Principal, session string, r *spoolv1.DecideApprovalRequest) (position string, err error) {
	if ctx, err = auth.With(ctx, p, false); err != nil {
		return "", err
	}
	if err := auth.CheckAllowed(ctx, spoolv1.Approvals_DecideApproval_FullMethodName); err != nil {
		return "", err
	}
	a, err := s.GetApproval(ctx, &spoolv1.GetApprovalRequest{ApprovalId: r.GetApprovalId()})
	if err != nil {
		return "", err
	}
	if session != "" && session != a.SessionId {
		return "", problem.New(problem.ApprovalNotFound, "", "the session has no such approval request")
	}
	answer, err := s.decideApproval(ctx, a, r)
	return answer.GetPosition(), err
}

// decideApproval implements DecideApproval and DecideInSession for the approval request a.
func (s *Server) decideApproval(ctx context.Context, a *spoolv1.Approval, r *spoolv1.DecideApprovalRequest) (*spoolv1.DecideApprovalResponse, error) {
	d := events.ApprovalDecided{
		ApprovalID: r.GetApprovalId(), Decision: r.GetDecision(), Comment: r.GetComment(), Arguments: rawJSON(r.GetArguments()), Content: rawJSON(r.GetContent()),
	}
	if d.Decision == "" {
		return nil, problem.Invalid("decision", "decision is empty; must be approve, approve_all, skip, reject or answer")
	}
	for _, f := range []struct {
		name  string
		value *spoolv1.Json
		most  int
	}{{"arguments", r.GetArguments(), maxArgumentsBytes}, {"answers", r.GetAnswers(), maxAnswersBytes}, {"content", r.GetContent(), maxContentBytes}} {
		if err := checkJSONValue(f.name, f.value, f.most); err != nil {
			return nil, err
		}
	}
	var asked events.ApprovalRequested
	if err := json.Unmarshal([]byte(a.GetRequest().GetText()), &asked); err != nil {
		return nil, problem.New(problem.Internal, "", "the request in the read models is not valid").WithCause(err)
	}
	secrets, err := s.checkDecision(&d, rawJSON(r.GetAnswers()), asked)
	if err != nil {
		return nil, err
	}
	answer, err := s.sendCreateCommand(ctx, s.withDecision(commands.Request{Type: command.TypeDecideApproval, SessionID: a.SessionId, ExecutionID: a.ExecutionId}, d, secrets))
	if err != nil {
		return nil, err
	}
	return &spoolv1.DecideApprovalResponse{Position: answer.Position}, nil
}

// checkJSONValue returns a problem if a JSON value of a request has more than maxBytes bytes, is nested too deep, or
// is not valid. Over gRPC such a value arrives as unparsed text.
func checkJSONValue(field string, m *spoolv1.Json, maxBytes int) error {
	text := []byte(m.GetText())
	switch {
	case m == nil:
		return nil
	case len(text) > maxBytes:
		return problem.New(problem.PayloadTooLarge, field, tooLargeDetail("the value", len(text), maxBytes))
	case wirejson.CheckDepth(text) != nil:
		return problem.Invalid(field, "the value is nested deeper than %d levels", wirejson.MaxDepth)
	case !json.Valid(text):
		return problem.Invalid(field, "the text is not valid JSON")
	}
	return nil
}

// checkDecision compares a person's decision d, and the answers and arguments that the person filled in, with the
// approval request. It sets the answers of d, except those to secret questions. It returns these: JSON lists of texts
// by the id of the question.
func (s *Server) checkDecision(d *events.ApprovalDecided, answers json.RawMessage, request events.ApprovalRequested) (secrets map[string][]byte, err error) {
	switch {
	case len(answers) > 0 && d.Decision != events.DecisionAnswer:
		return nil, problem.Invalid("answers", "answers are given with the decision answer")
	case len(d.Content) > 0 && d.Decision != events.DecisionAnswer:
		return nil, problem.Invalid("content", "content is given with the decision answer")
	case len(answers) > 0 && request.Kind != events.ApprovalQuestion:
		return nil, problem.Invalid("answers", "the request asks no questions")
	case len(answers) > 0:
		return s.checkAnswers(d, answers, request.Questions)
	case len(request.Schema) == 0:
		return nil, nil
	case len(d.Content) > 0 && request.Kind == events.ApprovalElicitation:
		return nil, checkSchema("content", request.Schema, d.Content)
	case len(d.Arguments) > 0 && request.Kind == events.ApprovalTool && request.Editable:
		return nil, checkSchema("arguments", request.Schema, d.Arguments)
	}
	return nil, nil
}

// checkAnswers implements checkDecision for a request with questions: it compares the answers of a person with the
// questions.
func (s *Server) checkAnswers(d *events.ApprovalDecided, answers json.RawMessage, questions []events.Question) (secrets map[string][]byte, err error) {
	var given map[string][]string
	if err := json.Unmarshal(answers, &given); err != nil {
		return nil, problem.Invalid("answers", "answers must be an object with a list of texts for the id of each question")
	}
	d.Answers = map[string][]string{}
	for _, q := range questions {
		field, list := "answers."+truncate.Text(q.ID, 100), given[q.ID]
		delete(given, q.ID)
		if err := checkAnswer(field, list, q); err != nil {
			return nil, err
		}
		if !q.Secret {
			d.Answers[q.ID] = list
			continue
		}
		text, err := json.Marshal(list)
		if err == nil && len(text) > secret.MaxValueSize {
			err = problem.New(problem.PayloadTooLarge, field, tooLargeDetail("the answer", len(text), secret.MaxValueSize))
		}
		if err == nil {
			err = s.requireSealer(field)
		}
		if err != nil {
			return nil, err
		}
		if secrets == nil {
			secrets = map[string][]byte{}
		}
		secrets[q.ID] = text
	}
	for _, id := range slices.Sorted(maps.Keys(given)) {
		return nil, problem.Invalid("answers."+truncate.Text(id, 100), "the request has no question with this id")
	}
	return secrets, nil
}

// checkAnswer returns INVALID_REQUEST unless the question q allows the answer, a list of texts. Its error does not
// contain the answer.
func checkAnswer(field string, list []string, q events.Question) error {
	switch {
	case len(list) == 0:
		return problem.Invalid(field, "the question has no answer; answer all questions of the request, or skip or reject it")
	case len(list) > 1 && !q.Multiple:
		return problem.Invalid(field, "the question takes one answer, not %d", len(list))
	case len(q.Options) == 0 || q.Other:
		return nil
	}
	var labels []string
	for _, o := range q.Options {
		labels = append(labels, fmt.Sprintf("%+q", truncate.Text(o.Label, 64)))
	}
	for _, text := range list {
		if !slices.ContainsFunc(q.Options, func(o events.QuestionOption) bool { return o.Label == text }) {
			return problem.Invalid(field, "the answer is not one of the options %s", truncate.Text(strings.Join(labels, ", "), 400))
		}
	}
	return nil
}

// withDecision returns the command request r with the decision d as its body. If there are answers to secret
// questions, they are encrypted and stored when the command is sent; the body then has the keys under which they are
// stored.
func (s *Server) withDecision(r commands.Request, d events.ApprovalDecided, secrets map[string][]byte) commands.Request {
	r.Body = command.DecideApproval{ApprovalDecided: d}
	if len(secrets) == 0 {
		return r
	}
	ids := slices.Sorted(maps.Keys(secrets))
	for _, id := range ids {
		r.Secrets = append(r.Secrets, []byte(id), secrets[id])
	}
	r.Seal = func(ctx context.Context, tenant, execution string) (any, error) {
		sealed := d
		sealed.Sealed = map[string]string{}
		for _, id := range ids {
			key, err := s.sealSecret(ctx, tenant, execution, "answers."+truncate.Text(id, 100), string(secrets[id]))
			if err != nil {
				return nil, err
			}
			sealed.Sealed[id] = key
		}
		return command.DecideApproval{ApprovalDecided: sealed}, nil
	}
	return r
}
