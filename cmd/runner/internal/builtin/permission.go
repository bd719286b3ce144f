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
	ruleInside    = "workspace.inside"    // allow: files inside the workspace
	ruleOutside   = "workspace.outside"   // deny: the tools refuse these files whatever a policy allows
	ruleSandboxed = "workspace.sandboxed" // allow: the sandbox limits what a program can reach
	ruleServer    = "mcp.server"          // allow: a tool of one of the agent's MCP servers
)

const (
	// maxRequestArguments is the size in bytes up to which a request contains the arguments, so that it fits into a line.
	maxRequestArguments = 1 << 20
	// maxRequestText is the maximum size of a text of a request in bytes. It is larger than what the turn records, so that
	// the turn notices that a text is cut.
	maxRequestText = 64 << 10
)

// permissionRequest asks whether a call of a tool may run. A request under no policy has no field after Outside.
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
	Preview     events.ApprovalPreview `json:"preview,omitzero"`
	Arguments   json.RawMessage        `json:"arguments,omitempty"`
	Schema      json.RawMessage        `json:"schema,omitempty"`
}

// permissionReply answers a permissionRequest. A reply with Waiting may come first: a person decides, and another reply
// follows. If the request ends without a decision, the call is not allowed.
type permissionReply struct {
	ID        string          `json:"id"`
	Waiting   bool            `json:"waiting,omitempty"`
	Allowed   bool            `json:"allowed,omitempty"`
	Message   string          `json:"message,omitempty"`   // why the call is not allowed, for the model
	Arguments json.RawMessage `json:"arguments,omitempty"` // replace those of the call; absent if they are not changed
}

// hasNoPolicy reports whether the query is of an agent without permissions, and nothing adapts them to the execution. Then
// the paths of a call decide alone.
func hasNoPolicy(q runner.Query) bool {
	return reflect.ValueOf(q.Permissions).IsZero() && len(q.ExecutionPermissions.Rules) == 0
}

// permit decides a request by the policy of the turn, and replies to it at once or when a person has decided.
func (s *session) permit(r permissionRequest, t *agent.Turn) error {
	replied := false
	t.Permit(events.MainConversation, r.forTurn(s.plain), func(a agent.PermissionAnswer) {
		replied = true
		reply := permissionReply{ID: r.ID, Allowed: a.Allowed(), Message: a.Message, Arguments: a.Arguments}
		if err := s.in.Send(order{Op: "permission", Permission: &reply}); err != nil {
			denial := permissionReply{ID: r.ID, Message: "the decision cannot be sent to the agent: " + err.Error()}
			_ = s.in.Send(order{Op: "permission", Permission: &denial}) // two strings are always encoded
		}
	})
	if replied {
		return nil
	}
	return s.in.Send(order{Op: "permission", Permission: &permissionReply{ID: r.ID, Waiting: true}})
}

// forTurn returns the request in the form of package agent. plain means that the query has no policy.
func (r permissionRequest) forTurn(plain bool) agent.PermissionRequest {
	call := permission.Call{Tool: r.Tool, Kind: r.Kind, Command: r.Command, Destructive: r.Destructive}
	for _, p := range r.Paths {
		call.Paths = append(call.Paths, permission.Path{Path: p})
	}
	return agent.PermissionRequest{
		Key: r.ID, ToolUseID: r.ToolUseID, Call: call, Decided: r.decided(plain),
		Title: strings.Join(strings.Fields(r.Title), " "), Preview: r.Preview, Input: r.Arguments, Editable: true, Schema: r.Schema,
	}
}

// decided returns the decision that no policy changes, or nil if the policy decides.
func (r permissionRequest) decided(plain bool) *permission.Decision {
	d := permission.Decision{Action: events.PermissionAllow, Rule: ruleSandboxed}
	switch {
	case r.Outside != "":
		return &permission.Decision{Action: events.PermissionDeny, Rule: ruleOutside, Reason: r.Outside + " is outside the workspace"}
	case !plain:
		return nil
	case r.HasPaths:
		d.Rule = ruleInside
	case strings.HasPrefix(r.Tool, mcptool.Prefix):
		d.Rule = ruleServer
	}
	return &d
}

// permissionRequest returns the request for a call with valid arguments, which names paths.
func (t *turn) permissionRequest(tl tool.Tool, arguments json.RawMessage, paths []string) permissionRequest {
	r := permissionRequest{Tool: tl.Name(), HasPaths: len(paths) > 0}
	for _, p := range paths {
		if _, err := t.Workspace.Rel(p); workspace.Outside(err) {
			r.Outside = p
			return r
		}
	}
	if hasNoPolicy(t.query) {
		return r
	}
	for _, p := range paths {
		r.Paths = append(r.Paths, policyPaths(t.Workspace, p)...)
	}
	e := tl.Effect(arguments)
	r.Kind, r.Command, r.Destructive = e.Kind, e.Command, e.Destructive
	r.Title, r.Preview, r.Schema = truncate.Prefix(e.Title, maxRequestText), e.Preview, tl.Schema()
	for _, s := range []*string{&r.Preview.Command, &r.Preview.Diff, &r.Preview.Text} {
		*s = truncate.Prefix(*s, maxRequestText)
	}
	if len(arguments) <= maxRequestArguments {
		r.Arguments = arguments
	}
	return r
}

// policyPaths returns a path of the workspace in the form of permission.Path. A path whose last element is a symbolic link
// has two: a tool may follow the link or replace it.
func policyPaths(w *workspace.Workspace, path string) []string {
	rel, err := w.Rel(path)
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

// relativeTo returns path relative to root, with slashes.
func relativeTo(root, path string) string {
	rel, err := filepath.Rel(root, path)
	if err != nil {
		return filepath.ToSlash(path) // both are absolute, so this does not happen
	}
	return filepath.ToSlash(rel)
}

// permits sends the permission requests of a turn and holds the replies until the turn takes them.
type permits struct {
	pipe  *pipe
	turn  int
	count int // requests so far

	mu      sync.Mutex
	replies []permissionReply
	added   chan struct{} // signalled after a reply was added
}

// newPermits returns the permits of the turn with that number in the process.
func newPermits(p *pipe, turn int) *permits {
	return &permits{pipe: p, turn: turn, added: make(chan struct{}, 1)}
}

// request sends a request and returns its id. Only the goroutine of the turn may call it.
func (p *permits) request(r permissionRequest) string {
	p.count++
	r.ID = "p" + strconv.Itoa(p.turn) + "." + strconv.Itoa(p.count)
	p.pipe.write(report{Op: "permission", Permission: &r})
	return r.ID
}

// add adds a reply. It does not block.
func (p *permits) add(r permissionReply) {
	p.mu.Lock()
	p.replies = append(p.replies, r)
	p.mu.Unlock()
	select {
	case p.added <- struct{}{}:
	default:
	}
}

// next returns the next reply, in the order of arrival. It blocks until there is one, or returns false when ctx ends.
func (p *permits) next(ctx context.Context) (permissionReply, bool) {
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

// changedNote returns the note that precedes the result of a call whose arguments a person changed.
func changedNote(arguments json.RawMessage) string {
	const limit = 2 << 10
	text := string(arguments)
	if len(text) > limit {
		text = truncate.Prefix(text, limit) + "…"
	}
	return fmt.Sprintf("[the user changed the arguments of this call to %s]\n", text)
}
