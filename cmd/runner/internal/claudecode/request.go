package claudecode

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

const (
	// hookID is the id of the hook that the handshake registers; see the comment of the package.
	hookID = "spool-ask"
	// hookTimeout is the time in seconds within which the hook has to answer: the greatest one that does not overflow a timer
	// of the CLI.
	hookTimeout = 2_147_483
)

// handleRequest handles a control request of the CLI.
func (s *session) handleRequest(l line, t *agent.Turn) error {
	q, err := decode[question](l.Request, "control_request")
	switch {
	case err != nil, q.Subtype == "can_use_tool":
		return s.permit(l.RequestID, q, err == nil, t)
	case q.Subtype == "hook_callback" && s.scope.checked:
		var a hookAnswer
		a.Output.Event, a.Output.Decision = "PreToolUse", events.PermissionAsk
		return s.respond(l.RequestID, a)
	case q.Subtype == "elicitation" && s.scope.checked:
		return s.elicit(l.RequestID, q, t)
	}
	logf(t, "warn", "the agent asked for %q, which is not offered", q.Subtype)
	return s.in.Send(controlResponse{Type: "control_response", Response: response{
		Subtype: "error", RequestID: l.RequestID, Error: fmt.Sprintf("%q is not offered", q.Subtype),
	}})
}

// respond answers a control request of the CLI.
func (s *session) respond(id string, value any) error {
	return s.in.Send(controlResponse{Type: "control_response", Response: response{Subtype: "success", RequestID: id, Response: value}})
}

// permit has the turn decide a permission request of the CLI.
func (s *session) permit(id string, q question, readable bool, t *agent.Turn) error {
	if !s.pending {
		// The turn that this belongs to has ended, or a turn runs that no query asked for.
		t.Emit(events.MainConversation, events.PermissionDecided{
			ToolName: q.ToolName, ToolUseID: q.ToolUseID, Decision: events.PermissionDeny, Rule: ruleNoQuery, Reason: noQuery,
		})
		return s.respond(id, verdict{Behavior: "deny", Message: noQuery})
	}
	c := checkedCall{Call: permission.Call{Tool: q.ToolName, Kind: permission.KindUnknown}}.deny(ruleUnreadable, "the request cannot be read")
	if readable {
		c = s.scope.check(q.ToolName, q.Input)
	}
	if c.denied == nil && s.scope.isPlanFile(c) {
		s.plan = c.Paths[0].Path
	}
	r := s.preview(c)
	r.Key, r.ToolUseID, r.Call, r.Decided = id, q.ToolUseID, c.Call, c.denied
	r.Reason = cmp.Or(r.Reason, q.Reason)
	var sent error
	t.Permit(s.conversationOf(q.ToolUseID, q.AgentID), r, func(a agent.PermissionAnswer) {
		sent = s.respond(id, s.verdict(c, r, a))
	})
	return sent
}

// noQuery is the message of a denial outside of a turn.
const noQuery = "No query is being answered."

// conversationOf returns the conversation of a call, by its id, or else by the id of the sub-agent that makes it.
func (s *session) conversationOf(toolUseID, agentID string) string {
	if c := s.turn.calls[toolUseID]; c != nil {
		return c.conv
	}
	if sub := s.turn.conversations[s.turn.agents[agentID]]; agentID != "" && sub != nil {
		return sub.id // the request came before the call's own line
	}
	return events.MainConversation
}

// verdict returns the CLI's form of the answer to a permission request.
func (s *session) verdict(c checkedCall, r agent.PermissionRequest, a agent.PermissionAnswer) verdict {
	deny := func(message string) verdict { return verdict{Behavior: "deny", Message: message} }
	switch {
	case r.Kind == events.ApprovalQuestion && a.Outcome == events.OutcomeAnswered:
		return verdict{Behavior: "allow", UpdatedInput: withAnswers(c.input, r.Questions, a.Answers)}
	case r.Kind == events.ApprovalQuestion && a.Allowed():
		return deny("The user was not asked. Go on without an answer.")
	case !a.Allowed():
		return deny(cmp.Or(a.Message, "The call was not approved."))
	}
	if a.Arguments != nil {
		if c = s.scope.check(c.Tool, a.Arguments); c.denied != nil {
			return deny("The user changed the arguments of this call, and they cannot be used: " + c.denied.Reason)
		}
	}
	v := verdict{Behavior: "allow", UpdatedInput: c.input}
	if c.Tool == exitPlanMode {
		v.UpdatedPermissions = []modeChange{{Type: "setMode", Mode: "default", Destination: "session"}}
	}
	return v
}

// questionsOf returns the questions of a call of AskUserQuestion.
func questionsOf(input json.RawMessage) []events.Question {
	var asked struct {
		Questions []struct {
			Question string                  `json:"question"`
			Header   string                  `json:"header"`
			Options  []events.QuestionOption `json:"options"`
			Multiple bool                    `json:"multiSelect"`
		} `json:"questions"`
	}
	if json.Unmarshal(input, &asked) != nil {
		return nil
	}
	var out []events.Question
	for i, q := range asked.Questions {
		out = append(out, events.Question{
			ID: fmt.Sprintf("q%d", i+1), Header: q.Header, Question: q.Question, Options: q.Options, Multiple: q.Multiple, Other: true,
		})
	}
	return out
}

// withAnswers returns the input of AskUserQuestion with the answers of the user, by the text of the question. Several
// answers to a question are joined by a comma, as the CLI does it.
func withAnswers(input json.RawMessage, questions []events.Question, answers map[string][]string) json.RawMessage {
	byText := map[string]string{}
	for _, q := range questions {
		if a := answers[q.ID]; len(a) > 0 {
			byText[q.Question] = strings.Join(a, ", ")
		}
	}
	var args map[string]json.RawMessage
	if err := json.Unmarshal(input, &args); err != nil || args == nil {
		return input // the questions were read from it
	}
	var err error
	if args["answers"], err = json.Marshal(byText); err != nil {
		return input // strings always marshal
	}
	if raw, err := json.Marshal(args); err == nil {
		return raw
	}
	return input // values that were decoded always marshal
}

// elicit has the turn decide the request of an MCP server for data of the user. A policy sees it as a question by a tool with
// the name mcp__SERVER.
func (s *session) elicit(id string, q question, t *agent.Turn) error {
	if !s.pending {
		return s.respond(id, elicited{Action: "cancel"})
	}
	r := agent.PermissionRequest{
		Key: id, Call: permission.Call{Tool: mcpPrefix + q.Server, Kind: permission.KindQuestion}, Kind: events.ApprovalElicitation,
		Title: q.Server + ": " + firstLine(q.Message), Preview: events.ApprovalPreview{Text: q.Message, URL: q.URL}, Schema: bytes.Clone(q.Schema),
	}
	var sent error
	t.Permit(events.MainConversation, r, func(a agent.PermissionAnswer) {
		e := elicited{Action: "decline"}
		switch a.Outcome {
		case events.OutcomeAnswered:
			e = elicited{Action: "accept", Content: a.Content}
		case "":
			e.Action = "cancel"
		}
		sent = s.respond(id, e)
	})
	return sent
}

// requestAnnotations asks the CLI for the annotations of the tools of MCP servers, which a policy needs.
func (s *session) requestAnnotations() error {
	if !s.scope.checked || len(s.scope.servers) == 0 {
		return nil
	}
	_, err := s.control(map[string]any{"subtype": "mcp_status"})
	return err
}

// readAnnotations remembers which tools of MCP servers destroy data, if the answer to a control request says so.
func (s *session) readAnnotations(a answer) {
	var status mcpStatus
	if !s.scope.checked || len(a.Response) == 0 || json.Unmarshal(a.Response, &status) != nil {
		return
	}
	for _, server := range status.Servers {
		for _, tool := range server.Tools {
			if tool.Annotations.Destructive {
				if s.scope.destructive == nil {
					s.scope.destructive = map[string]bool{}
				}
				s.scope.destructive[mcpPrefix+server.Name+"__"+notInNames.ReplaceAllString(tool.Name, "_")] = true
			}
		}
	}
}
