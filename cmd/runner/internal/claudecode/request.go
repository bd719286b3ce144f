package claudecode

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

const (
	// callHookID is the id of the hook that the handshake registers to be called before each tool call; see the comment
	// of the package.
	callHookID = "spool-ask"
	// callHookTimeout is the time in seconds within which the hook has to answer: the largest value that does not
	// overflow a timer of the CLI.
	callHookTimeout = 2_147_483
)

// handleControlRequest handles a control_request of the CLI, such as a permission request.
func (s *session) handleControlRequest(l outputLine, t *agent.Turn) error {
	q, err := decode[cliRequest](l.Request, "control_request")
	switch {
	case err != nil, q.Subtype == "can_use_tool":
		return s.requestPermission(l.RequestID, q, err == nil, t)
	case q.Subtype == "hook_callback":
		return s.handleCallHook(l.RequestID, q.Input)
	case q.Subtype == "elicitation" && s.scope.checked:
		return s.handleElicitation(l.RequestID, q, t)
	}
	journalLogf(t, "warn", "the agent asked for %q, which is not offered", q.Subtype)
	return s.in.Send(controlResponse{Type: "control_response", Response: responseBody{
		Subtype: "error", RequestID: l.RequestID, Error: fmt.Sprintf("%q is not offered", q.Subtype),
	}})
}

// sendControlResponse sends the answer to the control_request id of the CLI.
func (s *session) sendControlResponse(id string, value any) error {
	return s.in.Send(controlResponse{Type: "control_response", Response: responseBody{Subtype: "success", RequestID: id, Response: value}})
}

// requestPermission lets the turn decide a permission request of the CLI, and sends the answer. readable is false if
// the request could not be decoded, which denies the call.
func (s *session) requestPermission(id string, q cliRequest, readable bool, t *agent.Turn) error {
	if !s.pending {
		// The turn that this belongs to has ended, or a turn runs that no query asked for.
		t.Emit(events.MainConversation, events.PermissionDecided{
			ToolName: q.ToolName, ToolUseID: q.ToolUseID, Decision: events.PermissionDeny, Rule: ruleOutsideTurn, Reason: outsideTurnMessage,
		})
		return s.sendControlResponse(id, permissionResult{Behavior: "deny", Message: outsideTurnMessage})
	}
	c := callToDecide{Call: permission.Call{Tool: q.ToolName, Kind: permission.KindUnknown}}.withDenial(ruleUnreadableRequest, "the request cannot be read")
	if readable {
		c = s.scope.checkCall(q.ToolName, q.Input)
	}
	if c.denied == nil && s.scope.isPlanCall(c) {
		s.plan = c.Paths[0].Path
	}
	r := s.callPreview(c)
	r.Key, r.ToolUseID, r.Call, r.Decided = id, q.ToolUseID, c.Call, c.denied
	r.Reason = cmp.Or(r.Reason, q.Reason)
	var sent error
	t.RequestPermission(s.conversationOf(q.ToolUseID, q.AgentID), r, func(a agent.PermissionAnswer) {
		sent = s.sendControlResponse(id, s.newPermissionResult(c, r, a))
	})
	return sent
}

// outsideTurnMessage is the message of a denial when no turn runs.
const outsideTurnMessage = "No query is being answered."

// conversationOf returns the id of the conversation in which a call was made: that of the sub-agent with the id agentID,
// or else the one that has a call with the id.
func (s *session) conversationOf(toolUseID, agentID string) string {
	if _, known := s.subagents[agentID]; known {
		return s.conversationName(agentID)
	}
	conversation, _ := s.findCall(toolUseID)
	return conversation
}

// newPermissionResult converts the answer to a permission request to the format of the CLI.
func (s *session) newPermissionResult(c callToDecide, r agent.PermissionRequest, a agent.PermissionAnswer) permissionResult {
	deny := func(message string) permissionResult { return permissionResult{Behavior: "deny", Message: message} }
	switch {
	case r.Kind == events.ApprovalQuestion && a.Outcome == events.OutcomeAnswered:
		return permissionResult{Behavior: "allow", UpdatedInput: addAnswers(c.input, r.Questions, a.Answers)}
	case r.Kind == events.ApprovalQuestion && a.IsAllowed():
		return deny("The user was not asked. Go on without an answer.")
	case !a.IsAllowed():
		return deny(cmp.Or(a.Message, "The call was not approved."))
	}
	if a.Arguments != nil {
		if c = s.scope.checkCall(c.Tool, a.Arguments); c.denied != nil {
			return deny("The user changed the arguments of this call, and they cannot be used: " + c.denied.Reason)
		}
	}
	v := permissionResult{Behavior: "allow", UpdatedInput: c.input}
	if c.Tool == exitPlanMode {
		v.UpdatedPermissions = []permissionModeChange{{Type: "setMode", Mode: "default", Destination: "session"}}
	}
	return v
}

// parseQuestions returns the questions to the user in the input of a call of AskUserQuestion. It reads members by their exact names, as
// the CLI does: otherwise the user could answer another question than the one that the CLI asks.
func parseQuestions(input json.RawMessage) []events.Question {
	var asked []json.RawMessage
	if json.Unmarshal(transcript.ParseMembers(input)["questions"], &asked) != nil {
		return nil
	}
	var out []events.Question
	for i, raw := range asked {
		q := transcript.ParseMembers(raw)
		var options []json.RawMessage
		var multiple bool
		if q == nil || parseOptional(q["options"], &options) != nil || parseOptional(q["multiSelect"], &multiple) != nil {
			return nil
		}
		question := events.Question{
			ID: fmt.Sprintf("q%d", i+1), Header: transcript.ParseString(q["header"]), Question: transcript.ParseString(q["question"]), Multiple: multiple, Other: true,
		}
		for _, raw := range options {
			o := transcript.ParseMembers(raw)
			question.Options = append(question.Options, events.QuestionOption{Label: transcript.ParseString(o["label"]), Description: transcript.ParseString(o["description"])})
		}
		out = append(out, question)
	}
	return out
}

// parseOptional decodes a member into v, and leaves v as it is if the object has no such member.
func parseOptional(raw json.RawMessage, v any) error {
	if raw == nil {
		return nil
	}
	return json.Unmarshal(raw, v)
}

// addAnswers returns the input of AskUserQuestion with the user's answers, by the text of the question. Several answers
// to a question are joined by a comma, as the CLI does it.
func addAnswers(input json.RawMessage, questions []events.Question, answers map[string][]string) json.RawMessage {
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

// handleElicitation lets the turn decide the request of an MCP server for data of the user. A policy sees it as a
// question by a tool with the name mcp__SERVER.
func (s *session) handleElicitation(id string, q cliRequest, t *agent.Turn) error {
	if !s.pending {
		return s.sendControlResponse(id, elicitationResult{Action: "cancel"})
	}
	r := agent.PermissionRequest{
		Key: id, Call: permission.Call{Tool: mcpToolPrefix + q.Server, Kind: permission.KindQuestion}, Kind: events.ApprovalElicitation,
		Title: q.Server + ": " + agent.FirstLine(q.Message), Preview: events.ApprovalPreview{Text: q.Message, URL: q.URL}, Schema: bytes.Clone(q.Schema),
	}
	var sent error
	t.RequestPermission(events.MainConversation, r, func(a agent.PermissionAnswer) {
		e := elicitationResult{Action: "decline"}
		switch a.Outcome {
		case events.OutcomeAnswered:
			e = elicitationResult{Action: "accept", Content: a.Content}
		case "":
			e.Action = "cancel"
		}
		sent = s.sendControlResponse(id, e)
	})
	return sent
}

// requestAnnotations sends the control request for the annotations of the tools of MCP servers, which a policy needs.
func (s *session) requestAnnotations() error {
	if !s.scope.checked || len(s.scope.servers) == 0 {
		return nil
	}
	_, err := s.sendControlRequest(map[string]any{"subtype": "mcp_status"})
	return err
}

// storeAnnotations stores which tools of MCP servers destroy data, if the answer to a control request lists the
// servers.
func (s *session) storeAnnotations(a cliResponse) {
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
				s.scope.destructive[mcpToolPrefix+server.Name+"__"+replacedNameCharacters.ReplaceAllString(tool.Name, "_")] = true
			}
		}
	}
}
