package builtin

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/mcptool"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Rules that decide a call without the permission policy.
const (
	ruleInsideWorkspace  = "workspace.inside"    // allow: files inside the workspace
	ruleOutsideWorkspace = "workspace.outside"   // deny: the tools refuse these files whatever a policy allows
	ruleLeftToSandbox    = "workspace.sandboxed" // allow: the sandbox limits what a program can reach
	ruleMCPServer        = "mcp.server"          // allow: a tool of one of the agent's MCP servers
)

const (
	// maxRequestArguments is the maximum size in bytes of arguments that a permission request contains, so that the
	// request fits into a line. Larger arguments are left out.
	maxRequestArguments = 1 << 20
	// maxRequestText is the maximum size in bytes of each text of a permission request. It is larger than what a person is
	// shown, so that the turn refuses a command that is cut.
	maxRequestText = 256 << 10
)

// permissionRequest is the question of the agent's process to the runner whether a tool call may run. If the agent has
// no policy, no field after Outside is set.
type permissionRequest struct {
	ID        string `json:"id"` // unique in the process
	Tool      string `json:"tool"`
	ToolUseID string `json:"toolUseId,omitempty"`
	HasPaths  bool   `json:"hasPaths,omitempty"` // the call names files
	Outside   string `json:"outside,omitempty"`  // a path of the call that is outside the workspace, as the model wrote it

	Kind        permission.CallKind    `json:"kind,omitempty"`
	Paths       []string               `json:"paths,omitempty"` // relative to the workspace; see policyPaths
	Command     string                 `json:"command,omitempty"`
	Destructive bool                   `json:"destructive,omitempty"`
	Title       string                 `json:"title,omitempty"`
	Words       string                 `json:"words,omitempty"`
	Preview     events.ApprovalPreview `json:"preview,omitzero"`
	Arguments   json.RawMessage        `json:"arguments,omitempty"`
	Schema      json.RawMessage        `json:"schema,omitempty"`
}

// permissionReply is the runner's answer to a permissionRequest. If a person has to decide, a reply with Waiting comes
// first and another one follows. If the request ends without a decision, the call is not allowed.
type permissionReply struct {
	ID        string          `json:"id"`
	Waiting   bool            `json:"waiting,omitempty"`
	Allowed   bool            `json:"allowed,omitempty"`
	Message   string          `json:"message,omitempty"`   // why the call is not allowed, for the model
	Arguments json.RawMessage `json:"arguments,omitempty"` // replace those of the call; absent if they are not changed
}

// isWithoutPolicy reports whether the query is for an agent without permissions, and the execution has no rules either.
// Then only the paths of a call decide whether it may run.
func isWithoutPolicy(q runner.Query) bool {
	return reflect.ValueOf(q.Permissions).IsZero() && len(q.ExecutionPermissions.Rules) == 0
}

// decidePermission lets the turn decide a permission request of the process, and sends the reply: at once if the policy
// decides, otherwise when a person has decided.
func (s *session) decidePermission(r permissionRequest, t *agent.Turn) error {
	replied := false
	t.RequestPermission(events.MainConversation, r.turnRequest(s.plain), func(a agent.PermissionAnswer) {
		replied = true
		reply := permissionReply{ID: r.ID, Allowed: a.IsAllowed(), Message: a.Message, Arguments: a.Arguments}
		if err := s.in.Send(processOrder{Op: "permission", Permission: &reply}); err != nil {
			denial := permissionReply{ID: r.ID, Message: "the decision cannot be sent to the agent: " + err.Error()}
			_ = s.in.Send(processOrder{Op: "permission", Permission: &denial}) // two strings are always encoded
		}
	})
	if replied {
		return nil
	}
	return s.in.Send(processOrder{Op: "permission", Permission: &permissionReply{ID: r.ID, Waiting: true}})
}

// turnRequest converts the request to the form of package agent. plain means that the query has no policy.
func (r permissionRequest) turnRequest(plain bool) agent.PermissionRequest {
	call := permission.Call{Tool: r.Tool, Kind: r.Kind, Command: r.Command, Destructive: r.Destructive}
	for _, p := range r.Paths {
		call.Paths = append(call.Paths, permission.Path{Path: p})
	}
	return agent.PermissionRequest{
		Key: r.ID, ToolUseID: r.ToolUseID, Call: call, Decided: r.fixedDecision(plain),
		Title: strings.Join(strings.Fields(r.Title), " "), Reason: r.Words, Preview: r.Preview, Input: r.Arguments, Editable: true, Schema: r.Schema,
	}
}

// fixedDecision returns the decision on the request that no policy can change, or nil if the policy decides. plain
// means that the query has no policy.
func (r permissionRequest) fixedDecision(plain bool) *permission.Decision {
	d := permission.Decision{Action: events.PermissionAllow, Rule: ruleLeftToSandbox}
	switch {
	case r.Outside != "":
		return &permission.Decision{Action: events.PermissionDeny, Rule: ruleOutsideWorkspace, Reason: r.Outside + " is outside the workspace"}
	case !plain:
		return nil
	case r.HasPaths:
		d.Rule = ruleInsideWorkspace
	case strings.HasPrefix(r.Tool, mcptool.ToolNamePrefix):
		d.Rule = ruleMCPServer
	}
	return &d
}

// permissionRequest returns the permission request for a call of the tool tl. The arguments must be valid, and paths
// are the paths that they name.
func (t *turn) permissionRequest(tl tool.Tool, arguments json.RawMessage, paths []string) permissionRequest {
	r := permissionRequest{Tool: tl.Name(), HasPaths: len(paths) > 0}
	for _, p := range paths {
		if _, err := t.Workspace.RelativePath(p); workspace.IsOutside(err) {
			r.Outside = p
			return r
		}
	}
	if isWithoutPolicy(t.query) {
		return r
	}
	for _, p := range paths {
		r.Paths = append(r.Paths, policyPaths(t.Workspace, p)...)
	}
	e := tl.Effect(arguments)
	r.Kind, r.Command, r.Destructive = e.Kind, e.Command, e.Destructive
	r.Title, r.Preview, r.Schema = truncate.Prefix(e.Title, maxRequestText), e.Preview, tl.Schema()
	r.Words, r.Preview.Command = truncate.Prefix(e.Words, maxRequestText), truncate.Prefix(e.Preview.Command, maxRequestText)
	for field, s := range map[string]*string{"diff": &r.Preview.Diff, "text": &r.Preview.Text} {
		if n := len(*s); n > maxRequestText {
			*s = truncate.Prefix(*s, maxRequestText)
			r.Preview.Cut = append(r.Preview.Cut, events.CutField{Field: field, Bytes: uint32(n)}) //nolint:gosec // of a call that a model wrote
		}
	}
	if len(arguments) <= maxRequestArguments {
		r.Arguments = arguments
	}
	return r
}

// policyPaths converts a path of the workspace to the form of permission.Path. A path whose last element is a symbolic
// link yields two paths: a tool may follow the link or replace it.
func policyPaths(w *workspace.Workspace, path string) []string {
	rel, err := w.RelativePath(path)
	if err != nil {
		return []string{filepath.ToSlash(filepath.Clean(path))} // the tool fails
	}
	root, err := filepath.EvalSymlinks(w.Root().Name())
	if err != nil {
		return []string{filepath.ToSlash(rel)}
	}
	whole := filepath.Join(root, rel)
	followed := resolveLinks(whole)
	replaced := followed
	if rel != "." {
		replaced = filepath.Join(resolveLinks(filepath.Dir(whole)), filepath.Base(whole))
	}
	paths := []string{relativeTo(root, replaced)}
	if followed != replaced {
		paths = append(paths, relativeTo(root, followed))
	}
	return paths
}

// resolveLinks resolves the symbolic links in the part of an absolute path that exists.
func resolveLinks(path string) string {
	for at := path; at != filepath.Dir(at); at = filepath.Dir(at) {
		if real, err := filepath.EvalSymlinks(at); err == nil {
			return filepath.Join(real, strings.TrimPrefix(path, at))
		}
	}
	return path
}

// relativeTo returns path relative to root, with slashes as separators.
func relativeTo(root, path string) string {
	rel, err := filepath.Rel(root, path)
	if err != nil {
		return filepath.ToSlash(path) // both are absolute, so this does not happen
	}
	return filepath.ToSlash(rel)
}

// permissionQueue sends the permission requests of a turn to the runner, and holds the replies until the turn takes
// them.
type permissionQueue struct {
	pipe  *reportWriter
	turn  int
	count int // requests so far

	mu      sync.Mutex
	replies []permissionReply
	added   chan struct{} // signalled after a reply was added
}

// newPermissionQueue returns the permissionQueue of a turn. turn is the number of the turn in the process and makes the
// ids of requests unique.
func newPermissionQueue(p *reportWriter, turn int) *permissionQueue {
	return &permissionQueue{pipe: p, turn: turn, added: make(chan struct{}, 1)}
}

// sendRequest sends a permission request and returns its id. Only the goroutine of the turn may call it.
func (p *permissionQueue) sendRequest(r permissionRequest) string {
	p.count++
	r.ID = "p" + strconv.Itoa(p.turn) + "." + strconv.Itoa(p.count)
	p.pipe.write(processReport{Op: "permission", Permission: &r})
	return r.ID
}

// addReply adds a reply of the runner to the queue. It does not block.
func (p *permissionQueue) addReply(r permissionReply) {
	p.mu.Lock()
	p.replies = append(p.replies, r)
	p.mu.Unlock()
	select {
	case p.added <- struct{}{}:
	default:
	}
}

// nextReply returns the next reply of the runner, in the order of arrival. It blocks until there is one, or returns
// false when ctx ends.
func (p *permissionQueue) nextReply(ctx context.Context) (permissionReply, bool) {
	for ctx.Err() == nil {
		p.mu.Lock()
		if len(p.replies) > 0 {
			r := p.replies[0]
			p.replies = p.replies[1:]
			p.mu.Unlock()
			return r, true
		}
		p.mu.Unlock()
		select {
		case <-p.added:
		case <-ctx.Done():
		}
	}
	return permissionReply{}, false
}

// argumentsChangedNote returns the note that precedes the result of a call whose arguments a person changed. The note
// shows the model the arguments that were used.
func argumentsChangedNote(arguments json.RawMessage) string {
	const limit = 2 << 10
	text := string(arguments)
	if len(text) > limit {
		text = truncate.Prefix(text, limit) + "…"
	}
	return fmt.Sprintf("[the user changed the arguments of this call to %s]\n", text)
}
