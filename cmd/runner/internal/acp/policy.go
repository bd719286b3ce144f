package acp

import (
	"bytes"
	"cmp"
	"encoding/json"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// Rules by which the adapter itself denies a request.
const (
	ruleUnreadable  = "unreadable-request"
	ruleNoQuery     = "no-query"    // its events would not be recorded
	ruleNoOption    = "no-option"   // the agent offers no answer that allows this call alone
	ruleInterrupted = "interrupted" // the protocol demands that requests of an interrupted turn are cancelled
)

func denial(rule, reason string) *permission.Decision {
	return &permission.Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
}

// classify returns a Tool with the Kind for a tool kind of the protocol.
func classify(k sdk.ToolKind) Tool {
	switch k {
	case sdk.ToolKindRead:
		return Tool{Kind: permission.KindRead}
	case sdk.ToolKindEdit, sdk.ToolKindDelete, sdk.ToolKindMove:
		return Tool{Kind: permission.KindEdit}
	case sdk.ToolKindSearch:
		return Tool{Kind: permission.KindRead, Search: true}
	case sdk.ToolKindExecute:
		return Tool{Kind: permission.KindShell}
	case sdk.ToolKindThink:
		return Tool{Kind: permission.KindBookkeeping}
	case sdk.ToolKindFetch:
		return Tool{Kind: permission.KindNetwork}
	case sdk.ToolKindSwitchMode:
		return Tool{Kind: permission.KindQuestion}
	default:
		return Tool{Kind: permission.KindUnknown}
	}
}

// pathKeys are the arguments in which agents name files.
var pathKeys = []string{
	"path", "paths", "file", "files", "filePath", "filepath", "file_path", "absolute_path", "abs_path", "notebook_path",
	"dir", "directory", "dir_path", "parentDir", "source", "destination", "from", "to", "old_path", "new_path", "target_file",
}

// pathsOf returns the paths that a call names. It reports false if its input cannot be read.
func (s *session) pathsOf(c Call) ([]permission.Path, bool) {
	names := c.Paths
	if isSet(c.Input) {
		more, ok := inputPaths(c.Input)
		if !ok {
			return nil, false
		}
		names = append(slices.Clone(names), more...)
	}
	var paths []permission.Path
	for _, name := range names {
		paths = append(paths, s.resolve(name))
	}
	return paths, true
}

// resolve describes a path of a call.
func (s *session) resolve(name string) permission.Path {
	name = strings.TrimPrefix(name, "file://")
	p := permission.Path{Path: name, Outside: true}
	if !strings.HasPrefix(name, "~") { // an agent may take it for the home folder
		p = agent.ResolvePath(s.place.Workspace, name)
	}
	p.Skill = isInSkill(s.d.Skills, name)
	return p
}

// isInSkill reports whether a path is inside the folder of a skill, with symbolic links resolved.
func isInSkill(skills []string, path string) bool {
	real, err := filepath.EvalSymlinks(path)
	if err != nil || !filepath.IsAbs(path) {
		return false
	}
	return slices.ContainsFunc(skills, func(dir string) bool {
		dir, err := filepath.EvalSymlinks(dir)
		return err == nil && isWithin(dir, real)
	})
}

// inputPaths returns the paths among the arguments of a call. A glob pattern counts as a path if it could match files
// outside of its folder. The bool is false if the arguments cannot be decoded.
func inputPaths(input json.RawMessage) ([]string, bool) {
	var all map[string]json.RawMessage
	if json.Unmarshal(input, &all) != nil {
		return nil, false
	}
	var paths []string
	for _, key := range pathKeys {
		raw, ok := all[key]
		if !ok || string(raw) == "null" {
			continue
		}
		var one string
		var many []string
		switch {
		case json.Unmarshal(raw, &one) == nil:
			if one != "" {
				paths = append(paths, one)
			}
		case json.Unmarshal(raw, &many) == nil:
			paths = append(paths, many...)
		default:
			return nil, false
		}
	}
	for _, key := range []string{"pattern", "glob", "include"} {
		var p string
		if json.Unmarshal(all[key], &p) == nil && (strings.HasPrefix(p, "~") || slices.Contains(strings.Split(p, "/"), "..")) {
			paths = append(paths, p)
		}
	}
	return paths, true
}

// isWithin reports whether path is root itself or below it. Both are clean absolute paths.
func isWithin(root, path string) bool {
	rel, err := filepath.Rel(root, path)
	return err == nil && filepath.IsLocal(rel)
}

// input has the arguments of a call that a request shows, by the names that agents use.
type input struct {
	Command     string `json:"command"`
	Cmd         string `json:"cmd"`
	Cwd         string `json:"cwd"`
	Workdir     string `json:"workdir"`
	Description string `json:"description"`
	URL         string `json:"url"`
	Plan        string `json:"plan"`
}

// readInput returns the known arguments of a call. Those of an unexpected type are left out.
func readInput(raw json.RawMessage) input {
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return input{}
	}
	text := func(key string) (s string) {
		if json.Unmarshal(fields[key], &s) != nil {
			return ""
		}
		return s
	}
	return input{text("command"), text("cmd"), text("cwd"), text("workdir"), text("description"), text("url"), text("plan")}
}

// describe returns the permission request for a call. known is the call before the request, with the input that the agent
// reported for the call itself; made is its content.
func (s *session) describe(c, known Call, made []toolContent) agent.PermissionRequest {
	tool := s.tool(c)
	own, in := readInput(known.Input), readInput(c.Input)
	command := cmp.Or(in.Command, in.Cmd, own.Command, own.Cmd)
	r := agent.PermissionRequest{
		Call: permission.Call{
			Tool: cmp.Or(tool.Name, c.Name), Kind: tool.Kind, Named: tool.Named, LeftOut: tool.LeftOut,
		},
		ToolUseID: c.ID,
		Title:     firstLine(cmp.Or(c.Asks, c.Title, c.Name)),
		Reason:    cmp.Or(in.Description, own.Description),
		Input:     c.Input,
		Preview:   events.ApprovalPreview{Paths: slices.DeleteFunc(slices.Clone(c.Paths), func(p string) bool { return p == s.place.Workspace })},
	}
	if isSet(known.Input) {
		r.Input = known.Input
	}
	for _, part := range made {
		switch part.Type {
		case "diff":
			r.Preview.Diff += diff(part)
		case "content":
			r.Preview.Text += part.Content.String()
		}
	}
	switch tool.Kind {
	case permission.KindRead, permission.KindEdit:
		paths, ok := s.pathsOf(c)
		switch r.Call.Paths = paths; {
		case tool.LeftOut, tool.Named:
		case !ok:
			r.Decided = denial(ruleUnreadable, "the request's input cannot be read")
		case len(paths) == 0 && !tool.Search:
			r.Decided = denial(ruleUnreadable, "the request names no file")
		}
	case permission.KindShell:
		r.Call.Command, r.Preview.Command = command, command
		if c.Asks == "" && command != "" {
			r.Title = firstLine(command)
		}
		if command == "" { // a rule about commands must not take an unknown one for a harmless one
			r.Call.Command = "$UNKNOWN_COMMAND # " + r.Title
		}
		if cwd := cmp.Or(in.Cwd, in.Workdir, own.Cwd, own.Workdir); cwd != s.place.Workspace {
			r.Preview.Cwd = cwd
		}
	case permission.KindNetwork:
		if r.Preview.URL = cmp.Or(in.URL, own.URL); r.Preview.URL != "" {
			if u, err := url.Parse(r.Preview.URL); err == nil {
				r.Call.Hosts = []string{u.Hostname()}
			}
		}
	case permission.KindQuestion:
		r.Kind = events.ApprovalPlan
		r.Preview.Text = cmp.Or(in.Plan, own.Plan, r.Preview.Text)
	}
	if p := r.Preview; p.Command+p.Diff+p.URL+p.Text == "" && isSet(c.Input) {
		r.Preview.Text = indented(c.Input)
	}
	return r
}

// handlePermission answers a permission request of the agent: at once if the policy decides, otherwise when a person has
// decided.
func (s *session) handlePermission(m message, t *agent.Turn) error {
	q, err := decode[permissionRequest](m.Params, "session/request_permission")
	interrupted := s.addRequest(m.ID, q.ToolCall.ID)
	r, conversation := agent.PermissionRequest{}, events.MainConversation
	flow := s.flow(q.SessionID)
	switch {
	case err != nil: // the id is known, so that the agent gets an answer
		r.Decided = denial(ruleUnreadable, "the request cannot be read")
	default:
		known := Call{ID: q.ToolCall.ID}
		made := q.ToolCall.Content
		if running := s.calls[q.ToolCall.ID]; running != nil {
			known = running.Call
			if made == nil {
				made = running.content
			}
		}
		c := known.with(q.ToolCall)
		if q.ToolCall.Title != nil {
			c.Asks = *q.ToolCall.Title
		}
		r = s.describe(c, known, made)
	}
	if flow != nil {
		conversation = flow.conv
	}
	switch {
	case err != nil:
	case !s.pending || flow == nil:
		r.Decided = denial(ruleNoQuery, "No query is being answered.")
	case interrupted:
		r.Refused = denial(ruleInterrupted, "The turn was interrupted.")
	case !offers(q.Options, sdk.PermissionOptionKindAllowOnce):
		r.Refused = denial(ruleNoOption, "The agent offers no answer that allows this once.")
	}
	r.Key = string(m.ID)
	byPolicy := true // until Permit returns
	t.Permit(conversation, r, func(a agent.PermissionAnswer) {
		outcome, ok := chooseOption(q.Options, a.Allowed(), byPolicy)
		refused := r.Refused != nil && a.Message == r.Refused.Reason
		if a.Outcome == "" || refused || s.isInterrupted() { // the protocol demands it of an interrupted turn
			outcome = sdk.NewRequestPermissionOutcomeCancelled()
		}
		if a.Comment != "" {
			s.comments = append(s.comments, "Your call of "+r.Call.Tool+" ("+r.Title+") was rejected by the user: "+a.Comment)
		}
		if !ok && a.Outcome != "" && !byPolicy && !s.isInterrupted() {
			s.stopRejected()
		}
		s.answerRequest(r.Key, outcome)
	})
	byPolicy = false
	return err
}

// handleSubagentRequest answers a permission request of a sub-agent, or withdraws it. The agent may repeat a request.
func (s *session) handleSubagentRequest(q Request, t *agent.Turn) {
	key := "subagent/" + q.ID
	if q.Over {
		t.Withdraw(key)
		return
	}
	if s.heard[q.ID] {
		return
	}
	s.heard[q.ID] = true
	known := q.Call
	known.Input = q.Input
	r := s.describe(q.Call, known, nil)
	r.Key = key
	switch {
	case !s.pending:
		r.Decided = denial(ruleNoQuery, "No query is being answered.")
	case s.isInterrupted():
		r.Refused = denial(ruleInterrupted, "The turn was interrupted.")
	}
	t.Permit(cmp.Or(q.Conversation, events.MainConversation), r, func(a agent.PermissionAnswer) {
		params := map[string]string{"id": q.ID, "reply": "once"}
		if !a.Allowed() {
			params["reply"], params["message"] = "reject", a.Message
		}
		_ = s.in.Send(request{JSONRPC: "2.0", Method: "_spool/answer", Params: params}) //nolint:errcheck // see stopRejected
	})
}

// stopRejected stops the turn after a person denied a call of an agent that offers no answer for that.
func (s *session) stopRejected() {
	s.mu.Lock()
	s.interrupted = true
	id := s.id
	s.mu.Unlock()
	_ = s.requestStop(id, maxStopRequests) //nolint:errcheck // Send fails only if a value cannot be encoded, and these can
	s.cancelRequests()
}

// addRequest adds a permission request for a call to those that are not answered. It reports whether the turn is
// interrupted.
func (s *session) addRequest(id json.RawMessage, call string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked[string(id)] = call
	return s.interrupted
}

// answerRequest answers a permission request with an outcome. It does nothing if the request was answered, which an interrupt
// does. It may be called by any goroutine.
func (s *session) answerRequest(id string, o sdk.RequestPermissionOutcome) {
	s.mu.Lock()
	_, open := s.asked[id]
	delete(s.asked, id)
	s.mu.Unlock()
	if open {
		_ = s.in.Send(reply{JSONRPC: "2.0", ID: json.RawMessage(id), Result: sdk.RequestPermissionResponse{Outcome: o}}) //nolint:errcheck // see stopRejected
	}
}

// cancelRequests answers all permission requests that are not answered. The protocol demands that after session/cancel.
func (s *session) cancelRequests() {
	for _, id := range s.unanswered(func(string) bool { return true }) {
		s.answerRequest(id, sdk.NewRequestPermissionOutcomeCancelled())
	}
}

// unanswered returns the ids of the permission requests that are not answered, of those calls for which of returns true.
func (s *session) unanswered(of func(call string) bool) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for id, call := range s.asked {
		if of(call) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// withdrawRequests ends the permission requests of a call that has ended: the agent does not wait for an answer any more.
func (s *session) withdrawRequests(call string, t *agent.Turn) {
	for _, id := range s.unanswered(func(c string) bool { return c == call }) {
		t.Withdraw(id)
		s.answerRequest(id, sdk.NewRequestPermissionOutcomeCancelled())
	}
}

// withdrawRequest handles the agent's notification that it does not wait for the answer to a permission request any more.
func (s *session) withdrawRequest(m message, t *agent.Turn) error {
	r, err := decode[struct {
		ID json.RawMessage `json:"requestId"`
	}](m.Params, m.Method)
	if err != nil {
		return err
	}
	t.Withdraw(string(r.ID))
	s.answerRequest(string(r.ID), sdk.NewRequestPermissionOutcomeCancelled())
	return nil
}

// chooseOption returns the answer to a permission request, and reports whether the agent offers it. It allows a call only by
// an option for this call alone, because after "always" the agent would not ask again. For the same reason it does not
// reject always what a person rejected once.
func chooseOption(options []sdk.PermissionOption, allow, byPolicy bool) (sdk.RequestPermissionOutcome, bool) {
	wanted := []sdk.PermissionOptionKind{sdk.PermissionOptionKindRejectOnce}
	switch {
	case allow:
		wanted = []sdk.PermissionOptionKind{sdk.PermissionOptionKindAllowOnce}
	case byPolicy:
		wanted = append(wanted, sdk.PermissionOptionKindRejectAlways)
	}
	for _, kind := range wanted {
		for _, o := range options {
			if o.Kind == kind {
				return sdk.NewRequestPermissionOutcomeSelected(o.OptionId), true
			}
		}
	}
	return sdk.NewRequestPermissionOutcomeCancelled(), false
}

// offers reports whether an option of a kind is offered.
func offers(options []sdk.PermissionOption, kind sdk.PermissionOptionKind) bool {
	return slices.ContainsFunc(options, func(o sdk.PermissionOption) bool { return o.Kind == kind })
}

// indented returns JSON for people.
func indented(raw json.RawMessage) string {
	var out bytes.Buffer
	if json.Indent(&out, raw, "", "  ") != nil {
		return string(raw)
	}
	return out.String()
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}
