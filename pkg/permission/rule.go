package permission

import (
	"path"
	"slices"
	"strings"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
)

// workspaceRoot is the folder of the workspace in every sandbox, to which absolute globs refer.
const workspaceRoot = "/workspace"

// compiledRule is a rule of a policy with parsed conditions, ready to be matched with calls.
type compiledRule struct {
	events.PermissionRule
	name     string
	commands [][]string
	hosts    []hostRule
}

// hostRule is a rule's condition that matches one host, or all hosts below it.
type hostRule struct {
	host  string
	below bool
}

// compileRules compiles valid rules. prefix is the beginning of the names of the compiled rules.
func compileRules(rules []events.PermissionRule, prefix string) []compiledRule {
	out := make([]compiledRule, len(rules))
	for i, r := range rules {
		out[i] = compiledRule{PermissionRule: r, name: joinIndex(prefix+"rules", i)}
		for _, c := range r.Command {
			out[i].commands = append(out[i].commands, strings.Fields(c))
		}
		for _, h := range r.Host {
			host, below := strings.CutPrefix(h, "*.")
			out[i].hosts = append(out[i].hosts, hostRule{canonicalHost(host), below})
		}
	}
	return out
}

// canonicalHost returns the canonical form of a host, in which rules compare hosts.
func canonicalHost(s string) string {
	if h, err := egress.ParseHost(s); err == nil {
		return h.String()
	}
	return strings.ToLower(strings.Trim(strings.TrimSuffix(s, "."), "[]"))
}

// analyzedCall is a tool call with its canonical paths and hosts and the analysis of its command, which rules are
// matched with.
type analyzedCall struct {
	Call
	paths  []string     // of canonicalPath
	hosts  []string     // canonical
	parsed *shellScript // nil before a rule needs it
}

func newAnalyzedCall(c Call) *analyzedCall {
	s := &analyzedCall{Call: c}
	for _, p := range c.Paths {
		s.paths = append(s.paths, canonicalPath(p))
	}
	for _, h := range c.Hosts {
		s.hosts = append(s.hosts, canonicalHost(h))
	}
	return s
}

// canonicalPath returns a clean path: relative inside of the workspace, absolute outside, and "" for a path outside
// whose folder is unknown, such as ~/x.
func canonicalPath(p Path) string {
	clean := path.Clean(p.Path)
	if !p.Outside && path.IsAbs(clean) || !p.Outside && clean != ".." && !strings.HasPrefix(clean, "../") {
		return clean
	}
	if !path.IsAbs(clean) {
		clean = path.Join(workspaceRoot, clean)
	}
	if clean == workspaceRoot || strings.HasPrefix(clean, workspaceRoot+"/") {
		return ""
	}
	return clean
}

// script returns the analysis of the call's shell command.
func (s *analyzedCall) script() *shellScript {
	if s.parsed == nil {
		s.parsed = analyzeScript(s.Command)
	}
	return s.parsed
}

// matches reports whether a rule decides a call. An allow rule matches only if the whole call meets its conditions, and
// a deny or ask rule if a part of the call does.
func (r *compiledRule) matches(s *analyzedCall) bool {
	allow := r.Then == events.PermissionAllow
	return matchesTool(r.Tool, s.Tool) &&
		(len(r.commands) == 0 || s.Command != "" && matchesCommand(r.commands, s.script(), allow)) &&
		(len(r.Path) == 0 || s.Kind != KindShell && someOrAll(s.paths, allow, r.matchesPath)) &&
		(len(r.hosts) == 0 || (s.Kind != KindShell || !allow || len(r.commands) > 0) && someOrAll(s.hosts, allow, r.matchesHost))
}

// someOrAll reports whether an element of a list meets a condition. If all is set, it reports whether the list has
// elements and all of them meet the condition.
func someOrAll[E any](list []E, all bool, meets func(E) bool) bool {
	if !all {
		return slices.ContainsFunc(list, meets)
	}
	return len(list) > 0 && !slices.ContainsFunc(list, func(e E) bool { return !meets(e) })
}

// matchesTool reports whether a valid glob matches the name of a tool. A slash in the name is not special.
func matchesTool(glob, name string) bool {
	if glob == "" || glob == "*" || glob == name {
		return true
	}
	ok, err := path.Match(replaceSlashes(glob), replaceSlashes(name))
	return err == nil && ok
}

// replaceSlashes replaces slashes by NUL, so that path.Match does not treat them as separators.
func replaceSlashes(s string) string { return strings.ReplaceAll(s, "/", "\x00") }

func (r *compiledRule) matchesPath(p string) bool {
	if p == "" {
		return r.Then != events.PermissionAllow
	}
	return slices.ContainsFunc(r.Path, func(glob string) bool {
		name := p
		switch {
		case path.IsAbs(p) && !path.IsAbs(glob):
			return false
		case path.IsAbs(glob) && !path.IsAbs(p):
			name = path.Join(workspaceRoot, p)
		}
		ok, err := doublestar.Match(glob, name)
		return err == nil && ok
	})
}

func (r *compiledRule) matchesHost(host string) bool {
	return slices.ContainsFunc(r.hosts, func(h hostRule) bool {
		if h.below {
			return strings.HasSuffix(host, "."+h.host)
		}
		return host == h.host
	})
}

// matchesCommand reports whether the command condition of a rule matches a script. allow is set for an allow rule.
func matchesCommand(commands [][]string, s *shellScript, allow bool) bool {
	if allow {
		return someOrAll(s.commands, true, func(call []commandWord) bool {
			return slices.ContainsFunc(commands, func(c []string) bool { return beginsWithWords(call, c) })
		})
	}
	return s.opaque || slices.ContainsFunc(s.calls, func(call []commandWord) bool {
		return slices.ContainsFunc(commands, func(c []string) bool { return mayRun(call, c) })
	})
}

// beginsWithWords reports whether a command begins with the given words.
func beginsWithWords(call []commandWord, words []string) bool {
	if len(call) < len(words) {
		return false
	}
	for i, w := range words {
		if c := call[i]; !c.literal || c.tilde || c.text != w {
			return false
		}
	}
	return true
}

// mayRun reports whether a command may run the program words[0] with the other words as its first arguments. The
// command may name the program by its path, and may have options with values before an argument. An argument that is
// not literal may have any value.
func mayRun(call []commandWord, words []string) bool {
	if path.Base(call[0].text) != path.Base(words[0]) {
		return false
	}
	call, words = call[1:], words[1:]
	isValue := false // the word may be the value of an option
	for _, c := range call {
		switch {
		case len(words) == 0:
			return true
		case !c.literal || c.text == words[0]:
			words, isValue = words[1:], false
		case strings.HasPrefix(c.text, "-"):
			isValue = true
		case isValue:
			isValue = false
		default:
			return false
		}
	}
	return len(words) == 0
}
