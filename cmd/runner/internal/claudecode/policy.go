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
	ruleUnreadableRequest = "unreadable-request" // deny
	ruleOutsideTurn       = "no-query"           // deny: its events would not be recorded
)

// Tools that ask the user. The CLI has them only if the agent's policy has a person decide.
const (
	askUserQuestion = "AskUserQuestion"
	enterPlanMode   = "EnterPlanMode"
	exitPlanMode    = "ExitPlanMode"
)

// pathArguments maps each file tool of the CLI to the argument that holds the path. The argument of a search tool is optional: without it the tool
// searches the workspace.
var pathArguments = map[string]struct {
	argument string
	optional bool
}{
	"Read": {"file_path", false}, "Write": {"file_path", false}, "Edit": {"file_path", false}, "MultiEdit": {"file_path", false},
	"NotebookEdit": {"notebook_path", false}, "NotebookRead": {"notebook_path", false},
	"Glob": {"path", true}, "Grep": {"path", true}, "LS": {"path", true},
}

// toolsByKind lists the CLI's own tools by the permission kind of their calls.
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

// toolKind returns the permission kind of a tool of the CLI itself.
func toolKind(tool string) permission.CallKind {
	for kind, tools := range toolsByKind {
		if slices.Contains(tools, tool) {
			return kind
		}
	}
	return permission.KindUnknown
}

// asksAboutEachCall reports whether the CLI has to request a permission for every tool call. It must if the policy may decide differently from the
// CLI, which reads files of the workspace and runs harmless commands without a request. The result is false for the policy of an agent without
// permissions.
func asksAboutEachCall(l agent.Launch) bool {
	return !reflect.ValueOf(l.Permissions).IsZero() || len(l.ExecutionPermissions.Rules) > 0
}

// deniedQuestionTools returns the tools that ask the user and that are taken away from the CLI, because the agent's policy denies every call of
// them. The rules of an execution are ignored, so that a change of them needs no other process.
func deniedQuestionTools(l agent.Launch) []string {
	policy, err := permission.New(l.Permissions, events.ExecutionPermissions{})
	isAsked := func(tool string) bool {
		c := permission.Call{Tool: tool, Kind: permission.KindQuestion, Named: slices.Contains(l.Tools.Allow, tool)}
		return err == nil && asksAboutEachCall(l) && policy.Decide(c).Action == events.PermissionAsk
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

// toolsWithAskRule are the tools for which the CLI's settings get a rule of the kind "ask". The CLI complains about names of tools that it does not
// know.
var toolsWithAskRule = []string{"Agent", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Skill", "WebFetch", "WebSearch", "Write"}

// cliSettings returns the settings with which the CLI requests permissions where the hook of the handshake does not run, as in the CLI's simple
// mode.
func cliSettings(l agent.Launch) string {
	ask := slices.Clone(toolsWithAskRule)
	for _, s := range l.MCPServers {
		ask = append(ask, mcpToolPrefix+s.Name)
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

// callToDecide is a tool call in the form of the permission policy, with the input that the tool gets if the call is allowed. The paths in that
// input are those that were checked, because the CLI expands and trims paths by rules of its own.
type callToDecide struct {
	permission.Call
	input  json.RawMessage
	denied *permission.Decision // the adapter's own decision, for a call that it cannot read
}

// checkCall describes a tool call for the permission policy.
func (s policyScope) checkCall(tool string, input json.RawMessage) callToDecide {
	c := callToDecide{Call: permission.Call{Tool: tool, Kind: toolKind(tool), Named: slices.Contains(s.allow, tool)}, input: slices.Clone(input)}
	var args map[string]json.RawMessage
	if json.Unmarshal(input, &args) != nil || args == nil {
		return c.withDenial(ruleUnreadableRequest, "the request has no readable input")
	}
	served, has := s.serverToolStatus(tool)
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
		return s.addPath(c, args)
	case permission.KindShell:
		if c.Command = textArgument(args, "command"); c.Command == "" && tool == "Bash" && s.checked {
			return c.withDenial(ruleUnreadableRequest, "command is missing")
		}
	case permission.KindNetwork:
		return s.addHost(c, args)
	case permission.KindQuestion:
		if tool == askUserQuestion && s.checked && len(parseQuestions(input)) == 0 {
			return c.withDenial(ruleUnreadableRequest, "the request has no readable question")
		}
	}
	return c
}

// withDenial returns the call with a denial by a rule of the adapter.
func (c callToDecide) withDenial(rule, reason string) callToDecide {
	c.denied = &permission.Decision{Action: events.PermissionDeny, Rule: rule, Reason: reason}
	return c
}

// withArgument returns the call with another value of the argument name.
func (c callToDecide) withArgument(args map[string]json.RawMessage, name, value string) callToDecide {
	raw, err := json.Marshal(value)
	if err != nil {
		return c.withDenial(ruleUnreadableRequest, name+" cannot be written as JSON")
	}
	args = maps.Clone(args)
	args[name] = raw
	if c.input, err = json.Marshal(args); err != nil {
		return c.withDenial(ruleUnreadableRequest, "the input cannot be written as JSON")
	}
	return c
}

// addPath adds the path that a call of a file tool names to the description of the call.
func (s policyScope) addPath(c callToDecide, args map[string]json.RawMessage) callToDecide {
	where := pathArguments[c.Tool]
	var path string
	if raw, ok := args[where.argument]; ok && json.Unmarshal(raw, &path) != nil {
		return c.withDenial(ruleUnreadableRequest, where.argument+" is not a text")
	}
	if pattern, ok := args["pattern"]; ok && c.Tool == "Glob" {
		// A pattern can contain a path.
		var p string
		if json.Unmarshal(pattern, &p) != nil || filepath.IsAbs(p) || strings.HasPrefix(p, "~") || slices.Contains(strings.Split(p, "/"), "..") {
			return c.withDenial(permission.RuleOutsideWorkspace, fmt.Sprintf("The pattern %s leads out of the folder that is searched. Pass another folder as path.", pattern))
		}
	}
	path = strings.TrimFunc(path, isJavaScriptSpace)
	if path == "" {
		if !where.optional {
			return c.withDenial(ruleUnreadableRequest, where.argument+" is missing")
		}
		c.Paths = []permission.Path{{Path: "."}}
		return c
	}
	if rel, ok := pathInside(s.root, path); ok {
		return s.addInsidePath(c, args, where.argument, rel)
	}
	if real, ok := s.resolveSkillFile(path); ok && c.Kind == permission.KindRead {
		c.Paths = []permission.Path{{Path: real, Outside: true, Skill: true}}
		return c.withArgument(args, where.argument, real)
	}
	if !s.checked { // denied whatever it is
		return c.withDenial(permission.RuleOutsideWorkspace, fmt.Sprintf("%s is outside of the workspace %s, and the workspace policy allows files inside it only.", path, s.root))
	}
	real, err := s.resolveOutsidePath(path)
	if err != nil {
		return c.withDenial(permission.RuleOutsideWorkspace, fmt.Sprintf("%q is outside of the workspace %s, or cannot be resolved: %v.", path, s.root, err))
	}
	c.Paths = []permission.Path{{Path: real, Outside: true}}
	if s.isPlanPath(real) {
		c.Kind = permission.KindBookkeeping
	}
	return c.withArgument(args, where.argument, real)
}

// addInsidePath adds the path rel, which is inside the workspace, to the call. A policy with rules checks the path with its symbolic links
// resolved, and the tool then gets that path.
func (s policyScope) addInsidePath(c callToDecide, args map[string]json.RawMessage, argument, rel string) callToDecide {
	given := filepath.Join(s.root, rel)
	if s.checked {
		root, err := filepath.EvalSymlinks(s.root)
		if err != nil {
			return c.withDenial(ruleUnreadableRequest, argument+" cannot be resolved")
		}
		real, err := resolveLinks(given)
		if err != nil || !isWithin(root, real) {
			return c.withDenial(permission.RuleOutsideWorkspace, fmt.Sprintf("%s is outside of the workspace %s.", given, s.root))
		}
		if rel, err = filepath.Rel(root, real); err != nil {
			return c.withDenial(ruleUnreadableRequest, argument+" cannot be resolved")
		}
		given = filepath.Join(s.root, rel)
	}
	c.Paths = []permission.Path{{Path: filepath.ToSlash(rel)}}
	return c.withArgument(args, argument, given)
}

// textArgument returns the argument name of a tool call, or "" if it is not a string. Names of arguments are case-sensitive, as for the CLI.
func textArgument(args map[string]json.RawMessage, name string) string {
	var s string
	if raw, ok := args[name]; !ok || json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// addHost adds the host that a call of a network tool connects to.
func (s policyScope) addHost(c callToDecide, args map[string]json.RawMessage) callToDecide {
	raw, ok := args["url"]
	if !ok || !s.checked {
		return c
	}
	var text string
	if json.Unmarshal(raw, &text) != nil {
		return c.withDenial(ruleUnreadableRequest, "url is not a text")
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || strings.ContainsAny(text, `\`) {
		return c.withDenial(ruleUnreadableRequest, "url has no readable host")
	}
	c.Hosts = []string{u.Hostname()}
	return c.withArgument(args, "url", u.String()) // the CLI would read some URLs differently
}

// isPlanPath reports whether a path is a plan file of plan mode. The CLI keeps plans in its configuration folder and writes them without a
// permission request.
func (s policyScope) isPlanPath(real string) bool {
	if s.plans == "" {
		return false
	}
	dir, err := resolveLinks(s.plans)
	return err == nil && filepath.Dir(real) == dir && filepath.Ext(real) == ".md"
}

// resolveOutsidePath returns the absolute path, with symbolic links resolved, for a path outside of the workspace, as the CLI interprets it.
func (s policyScope) resolveOutsidePath(path string) (string, error) {
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
	return resolveLinks(filepath.Clean(path))
}

// resolveLinks returns a clean absolute path with its symbolic links resolved. The last elements of the path need not exist.
func resolveLinks(path string) (string, error) {
	for range 40 { // as many links as Linux follows
		real, err := filepath.EvalSymlinks(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return real, err
		}
		dir, err := resolveLinks(filepath.Dir(path))
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

// pathInside returns a path relative to root, the workspace. The bool is false if the path, with its symbolic links resolved, is outside of root.
func pathInside(root, path string) (string, bool) {
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
	rel, err := workspace.RelativePath(root, path)
	return rel, err == nil
}

// isWithin reports whether path is root itself or below it. Both are clean absolute paths.
func isWithin(root, path string) bool {
	rel, err := filepath.Rel(root, path)
	return err == nil && filepath.IsLocal(rel)
}

// isJavaScriptSpace reports whether the trim function of JavaScript removes the character r.
func isJavaScriptSpace(r rune) bool {
	return r == '\uFEFF' || strings.ContainsRune(" \t\n\v\f\r\u00a0\u1680\u2028\u2029\u202f\u205f\u3000", r) || r >= '\u2000' && r <= '\u200a'
}
