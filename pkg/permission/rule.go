package permission

import (
	"path"
	"slices"
	"strings"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
)

// workspaceRoot is the folder of the workspace for absolute globs, in every sandbox.
const workspaceRoot = "/workspace"

// rule is a rule of a policy that is ready to be matched.
type rule struct {
	events.PermissionRule
	name     string
	commands [][]string
	hosts    []hostRule
}

// hostRule matches one host, or all hosts below it.
type hostRule struct {
	host  string
	below bool
}

// compile returns valid rules. prefix is the beginning of their names.
func compile(rules []events.PermissionRule, prefix string) []rule {
	out := make([]rule, len(rules))
	for i, r := range rules {
		out[i] = rule{PermissionRule: r, name: element(prefix+"rules", i)}
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

// canonicalHost returns a host in the form in which hosts are compared.
func canonicalHost(s string) string {
	if h, err := egress.ParseHost(s); err == nil {
		return h.String()
	}
	return strings.ToLower(strings.Trim(strings.TrimSuffix(s, "."), "[]"))
}

// subject is a call with what rules need of it.
type subject struct {
	Call
	paths  []string // of canonicalPath
	hosts  []string // canonical
	parsed *script  // nil before a rule needs it
}

func newSubject(c Call) *subject {
	s := &subject{Call: c}
	for _, p := range c.Paths {
		s.paths = append(s.paths, canonicalPath(p))
	}
	for _, h := range c.Hosts {
		s.hosts = append(s.hosts, canonicalHost(h))
	}
	return s
}

// canonicalPath returns a clean path: relative inside of the workspace, absolute outside, and "" if a path outside does not say
// where it is, such as ~/x.
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

// script returns the analysis of the command.
func (s *subject) script() *script {
	if s.parsed == nil {
		s.parsed = analyze(s.Command)
	}
	return s.parsed
}

// matches reports whether a rule decides a call. An allow rule matches only if all of the call meets its conditions, and a
// deny or ask rule if some of it does.
func (r *rule) matches(s *subject) bool {
	allow := r.Then == events.PermissionAllow
	return matchesTool(r.Tool, s.Tool) &&
		(len(r.commands) == 0 || s.Command != "" && matchesCommand(r.commands, s.script(), allow)) &&
		(len(r.Path) == 0 || s.Kind != Shell && some(s.paths, allow, r.matchesPath)) &&
		(len(r.hosts) == 0 || (s.Kind != Shell || !allow || len(r.commands) > 0) && some(s.hosts, allow, r.matchesHost))
}

// some reports whether one element of a list meets a condition, or with all whether it has elements and all of them do.
func some[E any](list []E, all bool, meets func(E) bool) bool {
	if !all {
		return slices.ContainsFunc(list, meets)
	}
	return len(list) > 0 && !slices.ContainsFunc(list, func(e E) bool { return !meets(e) })
}

// matchesTool reports whether a valid glob matches the name of a tool. A slash in the name is a character like any other.
func matchesTool(glob, name string) bool {
	if glob == "" || glob == "*" || glob == name {
		return true
	}
	ok, err := path.Match(withoutSlashes(glob), withoutSlashes(name))
	return err == nil && ok
}

func withoutSlashes(s string) string { return strings.ReplaceAll(s, "/", "\x00") }

func (r *rule) matchesPath(p string) bool {
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

func (r *rule) matchesHost(host string) bool {
	return slices.ContainsFunc(r.hosts, func(h hostRule) bool {
		if h.below {
			return strings.HasSuffix(host, "."+h.host)
		}
		return host == h.host
	})
}

// matchesCommand reports whether commands of a rule match a script.
func matchesCommand(commands [][]string, s *script, allow bool) bool {
	if allow {
		return some(s.commands, true, func(call []word) bool {
			return slices.ContainsFunc(commands, func(c []string) bool { return beginsWith(call, c) })
		})
	}
	return s.opaque || slices.ContainsFunc(s.calls, func(call []word) bool {
		return slices.ContainsFunc(commands, func(c []string) bool { return mayBe(call, c) })
	})
}

// beginsWith reports whether a command begins with words.
func beginsWith(call []word, words []string) bool {
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

// mayBe reports whether a command runs the program of words with the other words as its first arguments. The program may be
// named by its path, and options with their values may come before an argument. An argument that is not literal may be any.
func mayBe(call []word, words []string) bool {
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
