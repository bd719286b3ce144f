package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type approvalsCommand struct {
	Ls      approvalsLsCommand      `cmd:"" help:"List open approval requests, newest first."`
	Show    approvalsShowCommand    `cmd:"" help:"Show an approval request completely."`
	Approve approvalsApproveCommand `cmd:"" help:"Approve a call."`
	Reject  approvalsRejectCommand  `cmd:"" help:"Reject a call, and tell the agent why."`
	Skip    approvalsSkipCommand    `cmd:"" help:"Skip a call: the agent goes on without it."`
	Answer  approvalsAnswerCommand  `cmd:"" help:"Answer the questions of an agent or of an MCP server."`
}

type approvalsLsCommand struct {
	serverFlags
	Session string `placeholder:"SESSION" help:"Only requests of this session."`
	All     bool   `help:"Also list requests that have ended."`
	Limit   int    `default:"50" help:"Maximum number of entries; 0 means all."`
}

// Run lists approval requests.
func (c *approvalsLsCommand) Run(a *app) error {
	if c.Limit < 0 {
		return usageError("limit: %d is negative; 0 means all", c.Limit)
	}
	if c.Session != "" {
		if err := checkID("session", events.KindSession, c.Session); err != nil {
			return err
		}
	}
	request := &spoolv1.ListApprovalsRequest{SessionId: c.Session, Status: "open"}
	if c.All {
		request.Status = ""
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		return printList(a, c.JSON, c.Limit, client.List[*spoolv1.Approval](ctx, cl.Approvals.ListApprovals, request),
			[]any{"APPROVAL", "SESSION", "STATUS", "KIND", "TOOL", "TITLE", "REQUESTED"},
			func(x *spoolv1.Approval) []any {
				return []any{x.ApprovalId, x.SessionId, x.Status, x.Kind, x.GetToolName(), titleExcerpt(x.Title), formatTime(x.RequestedAt)}
			})
	})
}

type approvalsShowCommand struct {
	serverFlags
	Approval string `arg:"" help:"The approval request's id."`
}

// Run prints one approval request.
func (c *approvalsShowCommand) Run(a *app) error {
	if err := checkID("approval", events.KindApproval, c.Approval); err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.Approvals.GetApproval, &spoolv1.GetApprovalRequest{ApprovalId: c.Approval})
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		return printApproval(a, doc.Value)
	})
}

// printApproval prints an approval request with all of its fields.
func printApproval(a *app, x *spoolv1.Approval) error {
	request, err := decodeApprovalRequest(x)
	if err != nil {
		return err
	}
	by := x.GetDecidedBy().GetId()
	if user := x.GetDecidedBy().GetUser(); user != "" {
		by = user + " (" + by + ")"
	}
	var decided events.ApprovalDecided
	if x.Decided != nil {
		if err := json.Unmarshal([]byte(x.Decided.Text), &decided); err != nil {
			return fmt.Errorf("decode the decision: %w", err)
		}
	}
	status := x.Status
	if x.GetCause() != "" {
		status += " (" + x.GetCause() + ")"
	}
	err = printFields(a, []any{"approval", x.ApprovalId}, []any{"session", x.SessionId}, []any{"execution", x.ExecutionId}, []any{"conversation", x.ConversationId},
		[]any{"status", status}, []any{"requested", formatTime(x.RequestedAt)}, []any{"decision", x.GetDecision()}, []any{"decided by", by}, []any{"comment", decided.Comment},
		[]any{"decided", formatTime(x.DecidedAt)}, []any{"ended", formatTime(x.EndedAt)})
	if err != nil {
		return err
	}
	columns := 0
	if a.OutTTY {
		columns = a.Width() - 1
	}
	rows := terminal.ApprovalRows(request, columns)
	if len(request.Input) > 0 {
		rows = append(rows, terminal.FieldRows("arguments:", string(request.Input), columns)...)
	}
	for _, row := range slices.Concat(terminal.FieldRows("request:", terminal.ApprovalHeading(request), columns), rows) {
		if _, err := terminal.Fprintln(a.Out, terminal.Lines(row)); err != nil {
			return err
		}
	}
	return nil
}

// decodeApprovalRequest decodes the data of the event approval_requested in an approval request.
func decodeApprovalRequest(x *spoolv1.Approval) (request events.ApprovalRequested, err error) {
	if err := json.Unmarshal([]byte(x.GetRequest().GetText()), &request); err != nil {
		return request, fmt.Errorf("decode the approval request: %w", err)
	}
	return request, nil
}

// sendDecision sends the decision that request returns to the server. It prints the text done, or the response with
// --json.
func (s serverFlags) sendDecision(a *app, id, done string, request func(context.Context, *client.Client) (*spoolv1.DecideApprovalRequest, error)) error {
	if err := checkID("approval", events.KindApproval, id); err != nil {
		return err
	}
	return s.withClient(a, func(ctx context.Context, cl *client.Client) error {
		r, err := request(ctx, cl)
		if err != nil {
			return err
		}
		r.ApprovalId = id
		doc, err := client.Call(ctx, cl.Approvals.DecideApproval, r)
		switch {
		case err != nil:
			return err
		case s.JSON:
			return a.printJSON(doc)
		}
		_, err = terminal.Fprintln(a.Out, done, id)
		return err
	})
}

// fixedDecision returns a function for sendDecision that always returns r. It is used for decisions that do not
// depend on the approval request.
func fixedDecision(r *spoolv1.DecideApprovalRequest) func(context.Context, *client.Client) (*spoolv1.DecideApprovalRequest, error) {
	return func(context.Context, *client.Client) (*spoolv1.DecideApprovalRequest, error) { return r, nil }
}

type approvalsApproveCommand struct {
	serverFlags
	Approval  string `arg:"" help:"The approval request's id."`
	All       bool   `help:"Also approve all later requests of the same class in this execution; show ID names the class."`
	Arguments string `placeholder:"JSON|@FILE" help:"Run the call with these arguments instead; only if the request is editable."`
}

// Run approves the tool call of an approval request, or all calls of its class.
func (c *approvalsApproveCommand) Run(a *app) error {
	r := &spoolv1.DecideApprovalRequest{Decision: events.DecisionApprove}
	if c.All {
		r.Decision = events.DecisionApproveAll
	}
	var err error
	if r.Arguments, err = parseJSONFlag("arguments", c.Arguments); err != nil {
		return err
	}
	if c.All && r.Arguments != nil {
		return usageError("arguments: --arguments changes this call only; leave out --all")
	}
	return c.sendDecision(a, c.Approval, "approved", fixedDecision(r))
}

type approvalsRejectCommand struct {
	serverFlags
	Approval string `arg:"" help:"The approval request's id."`
	Comment  string `placeholder:"TEXT" help:"What the agent is told."`
}

// Run rejects the tool call of an approval request.
func (c *approvalsRejectCommand) Run(a *app) error {
	return c.sendDecision(a, c.Approval, "rejected", fixedDecision(&spoolv1.DecideApprovalRequest{Decision: events.DecisionReject, Comment: c.Comment}))
}

type approvalsSkipCommand struct {
	serverFlags
	Approval string `arg:"" help:"The approval request's id."`
}

// Run decides an approval request without an answer, so that the agent continues without the call.
func (c *approvalsSkipCommand) Run(a *app) error {
	return c.sendDecision(a, c.Approval, "skipped", fixedDecision(&spoolv1.DecideApprovalRequest{Decision: events.DecisionSkip}))
}

type approvalsAnswerCommand struct {
	serverFlags
	Approval   string   `arg:"" help:"The approval request's id."`
	Answer     []string `sep:"none" placeholder:"QUESTION=VALUE" help:"The answer to a question, which is named by its number or its id; the value is the number of an option, its label, or text. May be repeated, also for a question that takes several answers."`
	AnswerFile []string `sep:"none" placeholder:"QUESTION=FILE" help:"Like --answer, with the first line of a file, or of standard input for -, as the value: for secrets, because other processes can read arguments."`
	Content    string   `placeholder:"JSON|@FILE" help:"The answer to an MCP server: an object that matches the schema of the request."`
}

// Run answers the questions of an approval request.
func (c *approvalsAnswerCommand) Run(a *app) error {
	content, err := parseJSONFlag("content", c.Content)
	if err != nil {
		return err
	}
	given := c.Answer
	for _, s := range c.AnswerFile {
		question, file, ok := cutAtLastEquals(s)
		if !ok {
			return usageError("answer-file: %.100q is not QUESTION=FILE", s)
		}
		value, err := readFirstLine(a, file)
		if err != nil {
			return err
		}
		given = append(given, question+"="+value)
	}
	if (len(given) > 0) == (content != nil) {
		return usageError("answer: give --answer for each question, or --content for an MCP server")
	}
	return c.sendDecision(a, c.Approval, "answered", func(ctx context.Context, cl *client.Client) (*spoolv1.DecideApprovalRequest, error) {
		r := &spoolv1.DecideApprovalRequest{Decision: events.DecisionAnswer, Content: content}
		if content != nil {
			return r, nil
		}
		x, err := cl.Approvals.GetApproval(ctx, &spoolv1.GetApprovalRequest{ApprovalId: c.Approval})
		if err != nil {
			return nil, err
		}
		request, err := decodeApprovalRequest(x)
		if err != nil {
			return nil, err
		}
		answers, err := parseAnswers(request.Questions, given)
		if err == nil {
			r.Answers, err = encodeAnswers(answers)
		}
		return r, err
	})
}

// cutAtLastEquals cuts s at its last "=", because the id of a question may also contain one.
func cutAtLastEquals(s string) (before, after string, found bool) {
	i := strings.LastIndexByte(s, '=')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// readFirstLine returns the first line of a file, or of standard input if file is "-".
func readFirstLine(a *app, file string) (string, error) {
	in := a.In
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return "", usageError("answer-file: %v", err)
		}
		defer f.Close() //nolint:errcheck // only read
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, 64<<10))
	if err != nil {
		return "", fmt.Errorf("answer-file: %w", err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSuffix(line, "\r"), nil
}

// parseAnswers converts arguments of the form QUESTION=VALUE to answers by the id of their question.
func parseAnswers(questions []events.Question, given []string) (map[string][]string, error) {
	if len(questions) == 0 {
		return nil, usageError("answer: the request asks no questions; approve, reject or skip it, or answer an MCP server with --content")
	}
	out := map[string][]string{}
	for _, s := range given {
		q, value := findQuestion(questions, s)
		if q == nil {
			return nil, usageError("answer: %.100q does not begin with the number or the id of a question, and =", strings.SplitN(s, "=", 2)[0])
		}
		answer, err := parseAnswer(*q, value)
		if err != nil {
			return nil, usageError("answer: %v", err)
		}
		out[q.ID] = append(out[q.ID], answer...)
	}
	return out, nil
}

// findQuestion returns the question that an argument of the form QUESTION=VALUE names, and the value. It returns nil if
// there is no such question.
func findQuestion(questions []events.Question, s string) (q *events.Question, value string) {
	for i := range questions {
		for _, name := range []string{questions[i].ID, strconv.Itoa(i + 1)} {
			if value, ok := strings.CutPrefix(s, name+"="); ok {
				return &questions[i], value
			}
		}
	}
	return nil, ""
}

// errUnknownOption is returned for an answer that is none of the options of a question that allows no other answer.
var errUnknownOption = errors.New("is not one of the options, and the question takes no other answer")

// parseAnswer returns the answers to a question in a text: the label or the number of an option, several numbers with
// commas between them, or free text. Its error does not contain the text, which may be secret.
func parseAnswer(q events.Question, text string) ([]string, error) {
	if slices.ContainsFunc(q.Options, func(o events.QuestionOption) bool { return o.Label == text }) {
		return []string{text}, nil
	}
	var labels []string
	for _, part := range strings.Split(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil || n < 1 || n > len(q.Options) {
			labels = nil
			break
		}
		labels = append(labels, q.Options[n-1].Label)
	}
	switch {
	case len(labels) > 1 && !q.Multiple:
		return nil, errors.New("the question takes one answer")
	case len(labels) > 0:
		return labels, nil
	case len(q.Options) > 0 && !q.Other:
		return nil, errUnknownOption
	case text == "":
		return nil, errors.New("the answer is empty")
	}
	return []string{text}, nil
}

// encodeAnswers encodes the answers to the questions of an approval request as JSON.
func encodeAnswers(answers map[string][]string) (*spoolv1.Json, error) {
	b, err := json.Marshal(answers)
	if err != nil {
		return nil, fmt.Errorf("encode the answers: %w", err)
	}
	return &spoolv1.Json{Text: string(b)}, nil
}

// parseJSONFlag returns the JSON that is the value of a flag, or that is in the file after "@". It returns nil for "".
func parseJSONFlag(flag, s string) (*spoolv1.Json, error) {
	if file, ok := strings.CutPrefix(s, "@"); ok {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, usageError("%s: %v", flag, err)
		}
		s = string(b)
	}
	if s = strings.TrimSpace(s); s == "" {
		return nil, nil
	}
	if !json.Valid([]byte(s)) {
		return nil, usageError("%s: the text is not valid JSON", flag)
	}
	return &spoolv1.Json{Text: s}, nil
}
