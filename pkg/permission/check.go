package permission

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
)

// Limits of a policy.
const (
	MaxRules   = 200
	MaxEntries = 100  // of a list of a rule
	MaxEntry   = 1024 // bytes of an entry
	MaxTool    = 200  // bytes of the name of a tool
	MaxTools   = 200
	MaxTimeout = 7 * 24 * time.Hour

	maxBraces = 8 // of a glob; the alternatives multiply
)

// wordOnly matches the names that need no quotes in the path of a field.
var wordOnly = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// FieldError is an error in one field of a policy.
type FieldError struct {
	Field  string // such as permissions.rules[2].command[0]
	Detail string
}

func (e FieldError) Error() string { return e.Field + ": " + e.Detail }

// Errors are all errors of a policy.
type Errors []FieldError

func (l Errors) Error() string {
	lines := make([]string, len(l))
	for i, e := range l {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// Actions returns the actions of rules.
func Actions() []string {
	return []string{events.PermissionAllow, events.PermissionAsk, events.PermissionDeny}
}

// Presets returns the names of the presets.
func Presets() []string {
	return []string{events.PresetWorkspace, events.PresetReadOnly, events.PresetAsk, events.PresetFull}
}

type checker struct{ errs Errors }

func (c *checker) fail(field, format string, args ...any) {
	c.errs = append(c.errs, FieldError{field, fmt.Sprintf(format, args...)})
}

// Check returns the errors of an agent's policy. The fields begin with "permissions.".
func Check(p events.Permissions) Errors {
	var c checker
	c.checkWord("permissions.preset", p.Preset, "preset", append(Presets(), ""))
	c.checkRules(p.Rules)
	if len(p.Tools) > MaxTools {
		c.fail("permissions.tools", "has %d entries; the limit is %d", len(p.Tools), MaxTools)
	}
	for _, name := range slices.Sorted(maps.Keys(p.Tools)) {
		field := "permissions.tools." + name
		if !wordOnly.MatchString(name) {
			field = fmt.Sprintf("permissions.tools[%q]", name)
		}
		c.checkText(field, name, MaxTool)
		if strings.ContainsAny(name, "*?[") {
			c.fail(field, "must be the name of a tool; patterns are possible in rules")
		}
		c.checkWord(field, p.Tools[name], "action", Actions())
	}
	c.checkWord("permissions.default", p.Default, "action", append(Actions(), ""))
	c.checkWord("permissions.unattended", p.Unattended, "value", []string{events.UnattendedDeny, events.UnattendedSkip, ""})
	if most := MaxTimeout.Milliseconds(); int64(p.TimeoutMs) > most {
		c.fail("permissions.timeoutMs", "is %d; the limit is %d (seven days)", p.TimeoutMs, most)
	}
	return c.errs
}

// CheckExecution returns the errors of the permissions of a message. The fields begin with "permissions.".
func CheckExecution(p events.ExecutionPermissions) Errors {
	var c checker
	c.checkRules(p.Rules)
	return c.errs
}

// checkWord checks a text that must be one of the values. "" is a value that is not shown.
func (c *checker) checkWord(field, s, noun string, values []string) {
	switch shown := slices.DeleteFunc(slices.Clone(values), func(v string) bool { return v == "" }); {
	case slices.Contains(values, s):
	case s == "":
		c.fail(field, "is required; must be %s", oneOf(shown))
	default:
		c.fail(field, "%.64q is not known; the %s must be %s", s, noun, oneOf(shown))
	}
}

// oneOf returns a list as "a, b or c".
func oneOf(list []string) string {
	last := len(list) - 1
	return strings.Join(list[:last], ", ") + " or " + list[last]
}

// checkText reports whether a text is not empty, not too long, and on one line.
func (c *checker) checkText(field, s string, limit int) bool {
	switch {
	case s == "":
		c.fail(field, "is empty")
	case len(s) > limit:
		c.fail(field, "has %d bytes; the limit is %d", len(s), limit)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl):
		c.fail(field, "must not have control characters")
	default:
		return true
	}
	return false
}

func (c *checker) checkRules(rules []events.PermissionRule) {
	if len(rules) > MaxRules {
		c.fail("permissions.rules", "has %d entries; the limit is %d", len(rules), MaxRules)
		return
	}
	valid := make([]bool, len(rules))
	for i, r := range rules {
		field := element("permissions.rules", i)
		before := len(c.errs)
		c.checkRule(field, r)
		valid[i] = len(c.errs) == before
		for j := range i {
			if valid[i] && valid[j] && covers(rules[j], r) {
				c.fail(field, "never matches: rules[%d] matches every call that it matches", j)
				break
			}
		}
	}
}

func (c *checker) checkRule(field string, r events.PermissionRule) {
	c.checkWord(field+".then", r.Then, "action", Actions())
	if r.Tool != "" && c.checkText(field+".tool", r.Tool, MaxTool) {
		if _, err := path.Match(withoutSlashes(r.Tool), ""); err != nil {
			c.fail(field+".tool", "%.80q is not a valid pattern", r.Tool)
		}
	}
	c.checkList(field+".command", r.Command, checkCommand)
	c.checkList(field+".path", r.Path, checkGlob)
	c.checkList(field+".host", r.Host, checkHost)
	if len(r.Command) > 0 && len(r.Path) > 0 {
		c.fail(field+".path", "never matches together with command: the paths that a command uses are not known")
	}
}

// checkList checks the entries of a list. check returns what is wrong with one, or "".
func (c *checker) checkList(field string, list []string, check func(string) string) {
	if len(list) > MaxEntries {
		c.fail(field, "has %d entries; the limit is %d", len(list), MaxEntries)
		return
	}
	for i, s := range list {
		if !c.checkText(element(field, i), s, MaxEntry) {
			continue
		}
		if wrong := check(s); wrong != "" {
			c.fail(element(field, i), "%.80q %s", s, wrong)
		}
	}
}

func checkCommand(s string) string {
	switch {
	case len(strings.Fields(s)) == 0:
		return "is empty"
	case strings.ContainsAny(s, "*?"):
		return "must not have wildcards; it matches every command that begins with its words"
	case strings.ContainsAny(s, ";&|<>()$`'\"\\{}"):
		return "must be the first words of one command, without quotes and shell syntax"
	}
	return ""
}

func checkGlob(s string) string {
	switch {
	case !doublestar.ValidatePattern(s):
		return "is not a valid pattern"
	case strings.Count(s, "{") > maxBraces:
		return fmt.Sprintf("has too many alternatives in braces; the limit is %d", maxBraces)
	case strings.HasPrefix(s, "~"):
		return "must be absolute or relative to the workspace; ~ is not expanded"
	case path.Clean(s) != s || s == ".." || strings.HasPrefix(s, "../"):
		return "never matches; must have no empty elements, no . and .. and no slash at the end (a folder's files are folder/**)"
	}
	return ""
}

func checkHost(s string) string {
	host, below := strings.CutPrefix(s, "*.")
	if h, err := egress.ParseHost(host); err != nil || below && h.Name == "" {
		return "is not a host; must be host or *.host, without scheme, port and path"
	}
	return ""
}

// covers reports whether a rule matches every call that a later rule matches. It does not find all such pairs.
func covers(earlier, later events.PermissionRule) bool {
	unconditional := len(earlier.Command) == 0 && len(earlier.Path) == 0 && len(earlier.Host) == 0
	// An allow rule needs all paths, hosts and commands of a call; other rules need only one.
	if !unconditional && earlier.Then == events.PermissionAllow && later.Then != events.PermissionAllow {
		return false
	}
	if earlier.Then == events.PermissionAllow && len(earlier.Host) > 0 && len(earlier.Command) == 0 && len(later.Command) > 0 {
		return false // hosts alone allow no shell command
	}
	return coversTool(earlier.Tool, later.Tool) && includes(earlier.Command, later.Command) &&
		includes(earlier.Path, later.Path) && includes(earlier.Host, later.Host)
}

// coversTool reports whether a glob matches every name that another glob matches.
func coversTool(earlier, later string) bool {
	if earlier == "" || strings.Trim(earlier, "*") == "" || earlier == later {
		return true
	}
	return later != "" && !strings.ContainsAny(later, `*?[\`) && matchesTool(earlier, later)
}

// includes reports whether a list of conditions is met whenever another is: it is empty, or has all its entries.
func includes(list, other []string) bool {
	if len(list) == 0 {
		return true
	}
	return len(other) > 0 && !slices.ContainsFunc(other, func(s string) bool { return !slices.Contains(list, s) })
}

func element(list string, i int) string { return fmt.Sprintf("%s[%d]", list, i) }
