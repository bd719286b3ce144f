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
	ruleUnreadableRequest = "unreadable-request"
	ruleOutsideTurn       = "no-query"    // its events would not be recorded
	ruleNoUsableOption    = "no-option"   // the agent offers no answer that allows this call alone
	ruleTurnInterrupted   = "interrupted" // the protocol demands that requests of an interrupted turn are cancelled
)

// newDenial returns a decision that denies a call by a rule of the adapter, for the given reason.
func newDenial(rule, reason string) *permission.Decision {
	return &permission.Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
}

// toolInfoForKind returns a ToolInfo whose Kind is the permission kind for a tool kind of the protocol.
func toolInfoForKind(k sdk.ToolKind) ToolInfo {
	switch k {
	case sdk.ToolKindRead:
		return ToolInfo{Kind: permission.KindRead}
	case sdk.ToolKindEdit, sdk.ToolKindDelete, sdk.ToolKindMove:
		return ToolInfo{Kind: permission.KindEdit}
	case sdk.ToolKindSearch:
		return ToolInfo{Kind: permission.KindRead, Search: true}
	case sdk.ToolKindExecute:
		return ToolInfo{Kind: permission.KindShell}
	case sdk.ToolKindThink:
		return ToolInfo{Kind: permission.KindBookkeeping}
	case sdk.ToolKindFetch:
		return ToolInfo{Kind: permission.KindNetwork}
	case sdk.ToolKindSwitchMode:
		return ToolInfo{Kind: permission.KindQuestion}
	default:
		return ToolInfo{Kind: permission.KindUnknown}
	}
}

// pathArguments are the names of arguments of tool calls in which agents pass paths of files.
var pathArguments = []string{
	"path", "paths", "file", "files", "filePath", "filepath", "file_path", "absolute_path", "abs_path", "notebook_path",
	"dir", "directory", "dir_path", "parentDir", "source", "destination", "from", "to", "old_path", "new_path", "target_file",
}

// callPaths returns the paths that a tool call names. It returns false if the input of the call cannot be decoded.
func (s *session) callPaths(c ToolCall) ([]permission.Path, bool) {
	names := c.Paths
	if hasValue(c.Input) {
		more, ok := pathsInArguments(c.Input)
		if !ok {
			return nil, false
		}
		names = append(slices.Clone(names), more...)
	}
	var paths []permission.Path
	for _, name := range names {
		paths = append(paths, s.resolvePath(name))
	}
	return paths, true
}

// resolvePath converts a path that a call names to the form of the permission policy, with symbolic links resolved.
func (s *session) resolvePath(name string) permission.Path {
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

// parseArguments returns the arguments of a call by their names in the form of foldName, because agents in some languages ignore case
// in the names of members. The bool is false if the input is not an object, or if two of its names differ only in case: the agent may
// read another one than the policy.
func parseArguments(input json.RawMessage) (map[string]json.RawMessage, bool) {
	var all map[string]json.RawMessage
	if json.Unmarshal(input, &all) != nil {
		return nil, false
	}
	folded := map[string]json.RawMessage{}
	for name, value := range all {
		folded[foldName(name)] = value
	}
	return folded, len(folded) == len(all)
}

// foldName returns the name of an argument without case, as encoding/json compares names.
func foldName(name string) string { return strings.ToLower(strings.ToUpper(name)) }

// pathsInArguments returns the paths among the arguments of a call. A glob pattern counts as a path if it could match files outside of its folder.
// The bool is false if the arguments cannot be decoded.
func pathsInArguments(input json.RawMessage) ([]string, bool) {
	all, ok := parseArguments(input)
	if !ok {
		return nil, false
	}
	var paths []string
	for _, key := range pathArguments {
		raw, ok := all[foldName(key)]
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

// callArguments holds the arguments of a call that a permission request shows, by the names that agents use.
type callArguments struct {
	Command     string `json:"command"`
	Cmd         string `json:"cmd"`
	Cwd         string `json:"cwd"`
	Workdir     string `json:"workdir"`
	Description string `json:"description"`
	URL         string `json:"url"`
	Plan        string `json:"plan"`
}

// parseCallArguments decodes the arguments of a call that a permission request shows. It leaves out arguments of an unexpected type. The bool
// is false if two arguments have the same name in different cases, or name different commands or folders: the agent may use either.
func parseCallArguments(raw json.RawMessage) (callArguments, bool) {
	fields, ok := parseArguments(raw)
	if !ok {
		return callArguments{}, fields == nil
	}
	for _, same := range [][2]string{{"command", "cmd"}, {"cwd", "workdir"}} {
		if a, b := fields[same[0]], fields[same[1]]; hasValue(a) && hasValue(b) && !bytes.Equal(a, b) {
			return callArguments{}, false
		}
	}
	text := func(key string) (s string) {
		if json.Unmarshal(fields[key], &s) != nil {
			return ""
		}
		return s
	}
	return callArguments{text("command"), text("cmd"), text("cwd"), text("workdir"), text("description"), text("url"), text("plan")}, true
}

// newPermissionRequest returns the permission request for the call c. known is the same call before the request, with the input that the agent
// reported for the call itself; made is the content of the call.
func (s *session) newPermissionRequest(c, known ToolCall, made []callContent) agent.PermissionRequest {
	tool := s.callInfo(c)
	own, ownOK := parseCallArguments(known.Input)
	in, inOK := parseCallArguments(c.Input)
	command := cmp.Or(in.Command, in.Cmd, own.Command, own.Cmd)
	r := agent.PermissionRequest{
		Call: permission.Call{
			Tool: cmp.Or(tool.Name, c.Name), Kind: tool.Kind, Named: tool.Named, LeftOut: tool.LeftOut,
		},
		ToolUseID: c.ID,
		Input:     c.Input,
		Preview:   events.ApprovalPreview{Paths: slices.DeleteFunc(slices.Clone(c.Paths), func(p string) bool { return p == s.place.Workspace })},
	}
	said := []string{cmp.Or(in.Description, own.Description), c.Asks, c.Title}
	if hasValue(known.Input) {
		r.Input = known.Input
	}
	for _, part := range made {
		switch part.Type {
		case "diff":
			r.Preview.Diff += diffText(part)
		case "content":
			r.Preview.Text += part.Content.String()
		}
	}
	switch tool.Kind {
	case permission.KindRead, permission.KindEdit:
		paths, ok := s.callPaths(c)
		if names, _ := pathsInArguments(c.Input); len(names) > 0 {
			r.Preview.Paths = append(r.Preview.Paths, slices.DeleteFunc(names, func(p string) bool { return slices.Contains(r.Preview.Paths, p) })...)
		}
		switch r.Call.Paths = paths; {
		case tool.LeftOut, tool.Named:
		case !ok:
			r.Decided = newDenial(ruleUnreadableRequest, "the request's input cannot be read")
		case len(paths) == 0 && !tool.Search:
			r.Decided = newDenial(ruleUnreadableRequest, "the request names no file")
		}
	case permission.KindShell:
		r.Call.Command, r.Preview.Command = command, command
		if command == "" { // a rule about commands must not take an unknown one for a harmless one
			r.Call.Command = "$UNKNOWN_COMMAND # " + agent.FirstLine(cmp.Or(c.Asks, c.Title, c.Name))
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
	interpreted := []permission.CallKind{permission.KindRead, permission.KindEdit, permission.KindShell, permission.KindNetwork}
	if (!ownOK || !inOK) && slices.Contains(interpreted, tool.Kind) {
		r.Decided = newDenial(ruleUnreadableRequest, "the request has two arguments that mean the same")
	}
	if p := &r.Preview; p.Command+p.URL != "" { // the content describes the call
		said, p.Text = append(said, p.Text), ""
	}
	if p := r.Preview; p.Command+p.Diff+p.URL+p.Text == "" && hasValue(c.Input) {
		r.Preview.Text = indentJSON(c.Input)
	}
	r.Title = callTitle(r)
	r.Reason = agentWords(said, append(r.Preview.Paths, r.Call.Tool, r.Preview.Command, r.Title)...)
	return r
}

// callTitle returns a title for a permission request, made from what the call does.
func callTitle(r agent.PermissionRequest) string {
	switch p := r.Preview; {
	case p.Command != "":
		return agent.FirstLine(p.Command)
	case p.URL != "" || len(p.Paths) > 0:
		return r.Call.Tool + ": " + cmp.Or(p.URL, strings.Join(p.Paths, ", "))
	}
	return r.Call.Tool
}

// agentWords returns what an agent says about a call, one text a line, without repetitions and the texts in known.
func agentWords(said []string, known ...string) string {
	var words []string
	for _, s := range said {
		if s = strings.TrimSpace(s); s != "" && !slices.Contains(known, s) && !slices.Contains(words, s) {
			words = append(words, s)
		}
	}
	return strings.Join(words, "\n")
}

// handlePermission answers a permission request of the agent: at once if the policy decides, otherwise when a person has
// decided.
func (s *session) handlePermission(m rpcMessage, t *agent.Turn) error {
	q, err := decode[permissionRequest](m.Params, "session/request_permission")
	r, key := agent.PermissionRequest{}, callKey{events.MainConversation, q.ToolCall.ID}
	flow := s.conversationOf(q.SessionID)
	if flow != nil {
		key.conversation = flow.conv
	}
	interrupted := s.addOpenRequest(m.ID, key)
	switch {
	case err != nil: // the id is known, so that the agent gets an answer
		r.Decided = newDenial(ruleUnreadableRequest, "the request cannot be read")
	default:
		known := ToolCall{ID: q.ToolCall.ID}
		made := q.ToolCall.Content
		if running := s.calls[key]; running != nil {
			known = running.ToolCall
			if made == nil {
				made = running.content
			}
		}
		c := known.mergeUpdate(q.ToolCall)
		if q.ToolCall.Title != nil {
			c.Asks = *q.ToolCall.Title
		}
		r = s.newPermissionRequest(c, known, made)
	}
	switch {
	case err != nil:
	case !s.pending || flow == nil:
		r.Decided = newDenial(ruleOutsideTurn, "No query is being answered.")
	case interrupted:
		r.Refused = newDenial(ruleTurnInterrupted, "The turn was interrupted.")
	case !hasOption(q.Options, sdk.PermissionOptionKindAllowOnce):
		r.Refused = newDenial(ruleNoUsableOption, "The agent offers no answer that allows this once.")
	}
	r.Key = string(m.ID)
	byPolicy := true // until RequestPermission returns
	t.RequestPermission(key.conversation, r, func(a agent.PermissionAnswer) {
		outcome, ok := chooseOption(q.Options, a.IsAllowed(), byPolicy)
		refused := r.Refused != nil && a.Message == r.Refused.Reason
		if a.Outcome == "" || refused || s.isInterrupted() { // the protocol demands it of an interrupted turn
			outcome = sdk.NewRequestPermissionOutcomeCancelled()
		}
		if a.Comment != "" {
			s.comments = append(s.comments, "Your call of "+r.Call.Tool+" ("+r.Title+") was rejected by the user: "+a.Comment)
		}
		if !ok && a.Outcome != "" && !byPolicy && !s.isInterrupted() {
			s.stopAfterRejection()
		}
		s.answerOpenRequest(r.Key, outcome)
	})
	byPolicy = false
	return err
}

// handleSubagentRequest answers a permission request of a sub-agent, or withdraws it if the sub-agent no longer waits. The agent may repeat a
// request.
func (s *session) handleSubagentRequest(q SubagentRequest, conversation string, t *agent.Turn) {
	key := "subagent/" + q.ID
	if q.Over {
		t.WithdrawRequest(key)
		return
	}
	if s.heard[q.ID] {
		return
	}
	s.heard[q.ID] = true
	known := q.Call
	known.Input = q.Input
	r := s.newPermissionRequest(q.Call, known, nil)
	r.Key = key
	switch {
	case !s.pending:
		r.Decided = newDenial(ruleOutsideTurn, "No query is being answered.")
	case s.isInterrupted():
		r.Refused = newDenial(ruleTurnInterrupted, "The turn was interrupted.")
	}
	t.RequestPermission(conversation, r, func(a agent.PermissionAnswer) {
		params := map[string]string{"id": q.ID, "reply": "once"}
		if !a.IsAllowed() {
			params["reply"], params["message"] = "reject", a.Message
		}
		_ = s.in.Send(rpcRequest{JSONRPC: "2.0", Method: "_spool/answer", Params: params}) //nolint:errcheck // see stopAfterRejection
	})
}

// stopAfterRejection stops the turn after a person denied a call, for an agent that offers no answer that denies one call.
func (s *session) stopAfterRejection() {
	s.mu.Lock()
	s.interrupted = true
	id := s.id
	s.mu.Unlock()
	_ = s.requestStop(id, maxStopRequests) //nolint:errcheck // Send fails only if a value cannot be encoded, and these can
	s.cancelOpenRequests()
}

// addOpenRequest records that a permission request for a call is not answered yet. It reports whether the turn is interrupted.
func (s *session) addOpenRequest(id json.RawMessage, call callKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked[string(id)] = call
	return s.interrupted
}

// answerOpenRequest answers a permission request with an outcome. It does nothing if the request is answered already, for example by an interrupt.
// Any goroutine may call it.
func (s *session) answerOpenRequest(id string, o sdk.RequestPermissionOutcome) {
	s.mu.Lock()
	_, open := s.asked[id]
	delete(s.asked, id)
	s.mu.Unlock()
	if open {
		_ = s.in.Send(rpcReply{JSONRPC: "2.0", ID: json.RawMessage(id), Result: sdk.RequestPermissionResponse{Outcome: o}}) //nolint:errcheck // see stopAfterRejection
	}
}

// cancelOpenRequests answers all permission requests that are not answered. The protocol demands that after session/cancel.
func (s *session) cancelOpenRequests() {
	for _, id := range s.openRequestIDs(func(callKey) bool { return true }) {
		s.answerOpenRequest(id, sdk.NewRequestPermissionOutcomeCancelled())
	}
}

// openRequestIDs returns the ids of the permission requests that are not answered and for whose call the function of returns true.
func (s *session) openRequestIDs(of func(callKey) bool) []string {
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

// withdrawRequests withdraws the permission requests for a call that has ended, because the agent no longer waits for their answers.
func (s *session) withdrawRequests(call callKey, t *agent.Turn) {
	for _, id := range s.openRequestIDs(func(c callKey) bool { return c == call }) {
		t.WithdrawRequest(id)
		s.answerOpenRequest(id, sdk.NewRequestPermissionOutcomeCancelled())
	}
}

// withdrawRequest handles the agent's notification that it no longer waits for the answer to a permission request.
func (s *session) withdrawRequest(m rpcMessage, t *agent.Turn) error {
	r, err := decode[struct {
		ID json.RawMessage `json:"requestId"`
	}](m.Params, m.Method)
	if err != nil {
		return err
	}
	t.WithdrawRequest(string(r.ID))
	s.answerOpenRequest(string(r.ID), sdk.NewRequestPermissionOutcomeCancelled())
	return nil
}

// chooseOption returns the answer to a permission request, and reports whether the agent offers such an answer. It allows a call only by an option
// for this call alone, because the agent would not ask again after "always". For the same reason a person's rejection is not turned into "reject
// always".
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

// hasOption reports whether the options include one of the given kind.
func hasOption(options []sdk.PermissionOption, kind sdk.PermissionOptionKind) bool {
	return slices.ContainsFunc(options, func(o sdk.PermissionOption) bool { return o.Kind == kind })
}

// indentJSON returns a JSON value with indentation, for people to read.
func indentJSON(raw json.RawMessage) string {
	var out bytes.Buffer
	if json.Indent(&out, raw, "", "  ") != nil {
		return string(raw)
	}
	return out.String()
}
