package claudecode

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// Rules of decisions that the adapter itself makes, as permission_decided names them.
const (
	ruleUnreadable = "unreadable-request" // deny
	ruleNoQuery    = "no-query"           // deny: its events would not be recorded
)

// Tools that ask the user. The CLI has them only if the agent's policy has a person decide.
const (
	askUserQuestion = "AskUserQuestion"
	enterPlanMode   = "EnterPlanMode"
	exitPlanMode    = "ExitPlanMode"
)

// paths names for each file tool the argument with the path. A search tool's argument is optional: without it the tool searches the workspace.
var paths = map[string]struct {
	argument string
	optional bool
}{
	"Read": {"file_path", false}, "Write": {"file_path", false}, "Edit": {"file_path", false}, "MultiEdit": {"file_path", false},
	"NotebookEdit": {"notebook_path", false}, "NotebookRead": {"notebook_path", false},
	"Glob": {"path", true}, "Grep": {"path", true}, "LS": {"path", true},
}

// toolsByKind are the CLI's own tools.
var toolsByKind = map[permission.CallKind][]string{
	permission.KindRead:  {"Read", "Glob", "Grep", "LS", "NotebookRead"},
	permission.KindEdit:  {"Write", "Edit", "MultiEdit", "NotebookEdit"},
	permission.KindShell: {"Bash", "BashOutput", "KillBash", "KillShell"},
	permission.KindAgent: {"Agent", "Task", "SendMessage"},
	permission.KindBookkeeping: {
		"TodoWrite", "TodoRead", "TaskCreate", "TaskGet", "TaskList", "TaskUpdate", "TaskOutput", "TaskStop",
		"Skill", "SlashCommand", "ToolSearch", "ReportFindings", "WaitForMcpServers", enterPlanMode,
	},
	permission.KindNetwork:  {"WebFetch", "WebSearch"},
	permission.KindQuestion: {askUserQuestion, exitPlanMode},
}

// kindOf returns the kind of a tool of the CLI itself.
func kindOf(tool string) permission.CallKind {
	for kind, tools := range toolsByKind {
		if slices.Contains(tools, tool) {
			return kind
		}
	}
	return permission.KindUnknown
}

// checkEachCall reports whether the CLI has to ask about every call of a tool: the policy may decide differently from the
// CLI, which reads files of the workspace and runs harmless commands without asking. It is false for the policy of an agent
// without permissions.
func checkEachCall(l agent.Launch) bool {
	return !reflect.ValueOf(l.Permissions).IsZero() || len(l.ExecutionPermissions.Rules) > 0
}

// unavailableQuestions returns the tools that ask the user and that the CLI must not have, because the agent's policy denies
// every call of them. The rules of an execution do not count, so that they need no other process.
func unavailableQuestions(l agent.Launch) []string {
	policy, err := permission.New(l.Permissions, events.ExecutionPermissions{})
	isAsked := func(tool string) bool {
		c := permission.Call{Tool: tool, Kind: permission.KindQuestion, Named: slices.Contains(l.Tools.Allow, tool)}
		return err == nil && checkEachCall(l) && policy.Decide(c).Action == events.PermissionAsk
	}
	var out []string
	if !isAsked(askUserQuestion) {
		out = append(out, askUserQuestion)
	}
	if !isAsked(exitPlanMode) { // without it the agent could not leave plan mode
		out = append(out, enterPlanMode, exitPlanMode)
	}
	return out
}

// askRules are the tools for which a rule of the settings has the CLI ask. The CLI complains about names that it does not know.
var askRules = []string{"Agent", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Skill", "WebFetch", "WebSearch", "Write"}

// settings returns the CLI's settings with which it asks about calls where the hook of the handshake does not run, as in
// its simple mode.
func settings(l agent.Launch) string {
	ask := slices.Clone(askRules)
	for _, s := range l.MCPServers {
		ask = append(ask, mcpPrefix+s.Name)
	}
	raw, err := json.Marshal(map[string]any{
		"permissions": map[string]any{"ask": ask},
		"sandbox":     map[string]any{"autoAllowBashIfSandboxed": false},
	})
	if err != nil {
		return "{}" // strings always marshal
	}
	return string(raw)
}

// checkedCall is a call of a tool with the input that an allowed call is run with. Its paths are those that were checked,
// because the CLI expands and trims paths by rules of its own.
type checkedCall struct {
	permission.Call
	input  json.RawMessage
	denied *permission.Decision // the adapter's own decision, for a call that it cannot read
}

// check describes a call for the permission policy.
func (s scope) check(tool string, input json.RawMessage) checkedCall {
	c := checkedCall{Call: permission.Call{Tool: tool, Kind: kindOf(tool), Named: slices.Contains(s.allow, tool)}, input: slices.Clone(input)}
	var args map[string]json.RawMessage
	if json.Unmarshal(input, &args) != nil || args == nil {
		return c.deny(ruleUnreadable, "the request has no readable input")
	}
	served, has := s.belongsToServer(tool)
	if slices.Contains(s.deny, tool) || served && !has {
		c.LeftOut = true
		return c
	}
	if served {
		c.Kind, c.Destructive = permission.KindMCPTool, s.destructive[tool]
		return c
	}
	switch c.Kind {
	case permission.KindRead, permission.KindEdit:
		return s.checkPath(c, args)
	case permission.KindShell:
		if c.Command = text(args, "command"); c.Command == "" && tool == "Bash" && s.checked {
			return c.deny(ruleUnreadable, "command is missing")
		}
	case permission.KindNetwork:
		return s.checkURL(c, args)
	}
	return c
}

// deny returns the call with a denial of the adapter.
func (c checkedCall) deny(rule, reason string) checkedCall {
	c.denied = &permission.Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
	return c
}

// withArgument returns the call with another value of an argument.
func (c checkedCall) withArgument(args map[string]json.RawMessage, name, value string) checkedCall {
	raw, err := json.Marshal(value)
	if err != nil {
		return c.deny(ruleUnreadable, name+" cannot be written as JSON")
	}
	args = maps.Clone(args)
	args[name] = raw
	if c.input, err = json.Marshal(args); err != nil {
		return c.deny(ruleUnreadable, "the input cannot be written as JSON")
	}
	return c
}

// checkPath adds the path of a file tool to the call.
func (s scope) checkPath(c checkedCall, args map[string]json.RawMessage) checkedCall {
	where := paths[c.Tool]
	var path string
	if raw, ok := args[where.argument]; ok && json.Unmarshal(raw, &path) != nil {
		return c.deny(ruleUnreadable, where.argument+" is not a text")
	}
	if pattern, ok := args["pattern"]; ok && c.Tool == "Glob" {
		// A pattern can contain a path.
		var p string
		if json.Unmarshal(pattern, &p) != nil || filepath.IsAbs(p) || strings.HasPrefix(p, "~") || slices.Contains(strings.Split(p, "/"), "..") {
			return c.deny(permission.RuleOutsideWorkspace, fmt.Sprintf("The pattern %s leads out of the folder that is searched. Pass another folder as path.", pattern))
		}
	}
	path = strings.TrimFunc(path, isSpace)
	if path == "" {
		if !where.optional {
			return c.deny(ruleUnreadable, where.argument+" is missing")
		}
		c.Paths = []permission.Path{{Path: "."}}
		return c
	}
	if rel, ok := inside(s.root, path); ok {
		return s.insidePath(c, args, where.argument, rel)
	}
	if real, ok := s.skillFile(path); ok && c.Kind == permission.KindRead {
		c.Paths = []permission.Path{{Path: real, Outside: true, Skill: true}}
		return c.withArgument(args, where.argument, real)
	}
	if !s.checked { // denied whatever it is
		return c.deny(permission.RuleOutsideWorkspace, fmt.Sprintf("%s is outside of the workspace %s, and the workspace policy allows files inside it only.", path, s.root))
	}
	real, err := s.resolveOutside(path)
	if err != nil {
		return c.deny(permission.RuleOutsideWorkspace, fmt.Sprintf("%q is outside of the workspace %s, or cannot be resolved: %v.", path, s.root, err))
	}
	c.Paths = []permission.Path{{Path: real, Outside: true}}
	if s.isPlan(real) {
		c.Kind = permission.KindBookkeeping
	}
	return c.withArgument(args, where.argument, real)
}

// insidePath adds a path inside the workspace to the call. A policy with rules sees the path with its symbolic links
// resolved, and the tool then gets that path.
func (s scope) insidePath(c checkedCall, args map[string]json.RawMessage, argument, rel string) checkedCall {
	given := filepath.Join(s.root, rel)
	if s.checked {
		root, err := filepath.EvalSymlinks(s.root)
		if err != nil {
			return c.deny(ruleUnreadable, argument+" cannot be resolved")
		}
		real, err := resolve(given)
		if err != nil || !isWithin(root, real) {
			return c.deny(permission.RuleOutsideWorkspace, fmt.Sprintf("%s is outside of the workspace %s.", given, s.root))
		}
		if rel, err = filepath.Rel(root, real); err != nil {
			return c.deny(ruleUnreadable, argument+" cannot be resolved")
		}
		given = filepath.Join(s.root, rel)
	}
	c.Paths = []permission.Path{{Path: filepath.ToSlash(rel)}}
	return c.withArgument(args, argument, given)
}

// text returns an argument that is a text, or "". Names of arguments are case-sensitive, as for the CLI.
func text(args map[string]json.RawMessage, name string) string {
	var s string
	if raw, ok := args[name]; !ok || json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// checkURL adds the host that a tool reaches to the call.
func (s scope) checkURL(c checkedCall, args map[string]json.RawMessage) checkedCall {
	raw, ok := args["url"]
	if !ok || !s.checked {
		return c
	}
	var text string
	if json.Unmarshal(raw, &text) != nil {
		return c.deny(ruleUnreadable, "url is not a text")
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || strings.ContainsAny(text, `\`) {
		return c.deny(ruleUnreadable, "url has no readable host")
	}
	c.Hosts = []string{u.Hostname()}
	return c.withArgument(args, "url", u.String()) // the CLI would read some URLs differently
}

// isPlan reports whether a path is a plan of plan mode, which the CLI keeps in its configuration folder and writes without
// asking.
func (s scope) isPlan(real string) bool {
	if s.plans == "" {
		return false
	}
	dir, err := resolve(s.plans)
	return err == nil && filepath.Dir(real) == dir && filepath.Ext(real) == ".md"
}

// resolveOutside returns an absolute path for a path that is not inside the workspace, as the CLI reads it, with its symbolic
// links resolved.
func (s scope) resolveOutside(path string) (string, error) {
	switch {
	case strings.ContainsRune(path, 0):
		return "", errors.New("it has a NUL")
	case path == "~" || strings.HasPrefix(path, "~/"):
		if !filepath.IsAbs(s.home) {
			return "", errors.New("HOME is not set")
		}
		path = s.home + path[1:]
	case strings.HasPrefix(path, "~"):
		return "", errors.New("it names the home folder of a user")
	case !filepath.IsAbs(path):
		path = filepath.Join(s.root, path)
	}
	return resolve(filepath.Clean(path))
}

// resolve returns a clean absolute path with its symbolic links resolved. The end of the path need not exist.
func resolve(path string) (string, error) {
	for range 40 { // as many links as Linux follows
		real, err := filepath.EvalSymlinks(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return real, err
		}
		dir, err := resolve(filepath.Dir(path))
		if err != nil {
			return "", err
		}
		path = filepath.Join(dir, filepath.Base(path))
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil //nolint:nilerr // not a link: it does not exist
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(dir, target)
		}
		path = filepath.Clean(target)
	}
	return "", errors.New("it has too many symbolic links")
}

// inside returns a path relative to the root of the workspace. The bool is false if the path, with its symbolic links resolved, is outside the
// workspace.
func inside(root, path string) (string, bool) {
	if strings.HasPrefix(path, "~") {
		return "", false // the CLI takes it for the home folder
	}
	if filepath.IsAbs(path) {
		// Aliases of the workspace, such as /mnt/workspace, would be other folders for the CLI.
		real, err := filepath.EvalSymlinks(root)
		if err != nil || !isWithin(root, path) && !isWithin(real, path) {
			return "", false
		}
	}
	rel, err := workspace.Inside(root, path)
	return rel, err == nil
}

func isWithin(root, path string) bool {
	rel, err := filepath.Rel(root, path)
	return err == nil && filepath.IsLocal(rel)
}

// isSpace reports whether the trim function of JavaScript removes r.
func isSpace(r rune) bool {
	return r == '\uFEFF' || strings.ContainsRune(" \t\n\v\f\r\u00a0\u1680\u2028\u2029\u202f\u205f\u3000", r) || r >= '\u2000' && r <= '\u200a'
}
