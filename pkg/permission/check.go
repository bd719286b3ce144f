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
	MaxRules           = 200
	MaxRuleEntries     = 100  // of a list of a rule
	MaxRuleEntryLength = 1024 // bytes of an entry
	MaxToolNameLength  = 200  // bytes of the name of a tool
	MaxTools           = 200
	MaxTimeout         = 7 * 24 * time.Hour

	maxGlobBraces = 8 // of a glob; the alternatives multiply
)

// plainFieldName matches names that need no quotes in the path of a field.
var plainFieldName = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// FieldError is an error in one field of a permission policy.
type FieldError struct {
	Field  string // such as permissions.rules[2].command[0]
	Detail string
}

func (e FieldError) Error() string { return e.Field + ": " + e.Detail }

// Errors are all errors of a permission policy.
type Errors []FieldError

func (l Errors) Error() string {
	lines := make([]string, len(l))
	for i, e := range l {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// Actions returns the actions that rules of a policy can have: allow, ask and deny.
func Actions() []string {
	return []string{events.PermissionAllow, events.PermissionAsk, events.PermissionDeny}
}

// Presets returns the names of the presets that an agent's policy can have.
func Presets() []string {
	return []string{events.PresetWorkspace, events.PresetReadOnly, events.PresetAsk, events.PresetFull}
}

// policyChecker collects the errors of a permission policy.
type policyChecker struct{ errs Errors }

func (c *policyChecker) addError(field, format string, args ...any) {
	c.errs = append(c.errs, FieldError{field, fmt.Sprintf(format, args...)})
}

// Check returns the errors of an agent's permission policy. The fields of the errors begin with "permissions.".
func Check(p events.Permissions) Errors {
	var c policyChecker
	c.checkWord("permissions.preset", p.Preset, "preset", append(Presets(), ""))
	c.checkRules(p.Rules)
	if len(p.Tools) > MaxTools {
		c.addError("permissions.tools", "has %d entries; the limit is %d", len(p.Tools), MaxTools)
	}
	for _, name := range slices.Sorted(maps.Keys(p.Tools)) {
		field := "permissions.tools." + name
		if !plainFieldName.MatchString(name) {
			field = fmt.Sprintf("permissions.tools[%q]", name)
		}
		c.checkText(field, name, MaxToolNameLength)
		if strings.ContainsAny(name, "*?[") {
			c.addError(field, "must be the name of a tool; patterns are possible in rules")
		}
		c.checkWord(field, p.Tools[name], "action", Actions())
	}
	c.checkWord("permissions.default", p.Default, "action", append(Actions(), ""))
	c.checkWord("permissions.unattended", p.Unattended, "value", []string{events.UnattendedDeny, events.UnattendedSkip, ""})
	if most := MaxTimeout.Milliseconds(); int64(p.TimeoutMs) > most {
		c.addError("permissions.timeoutMs", "is %d; the limit is %d (seven days)", p.TimeoutMs, most)
	}
	return c.errs
}

// CheckExecution returns the errors of the permissions that a message sets for its execution. The fields of the errors
// begin with "permissions.".
func CheckExecution(p events.ExecutionPermissions) Errors {
	var c policyChecker
	c.checkRules(p.Rules)
	return c.errs
}

// checkWord adds an error unless a text is one of the values. The error does not list a value that is "".
func (c *policyChecker) checkWord(field, s, noun string, values []string) {
	switch shown := slices.DeleteFunc(slices.Clone(values), func(v string) bool { return v == "" }); {
	case slices.Contains(values, s):
	case s == "":
		c.addError(field, "is required; must be %s", joinWithOr(shown))
	default:
		c.addError(field, "%.64q is not known; the %s must be %s", s, noun, joinWithOr(shown))
	}
}

// joinWithOr returns a list as "a, b or c".
func joinWithOr(list []string) string {
	last := len(list) - 1
	return strings.Join(list[:last], ", ") + " or " + list[last]
}

// checkText adds an error if a text is empty, is too long, or has more than one line, and reports whether the text is
// valid.
func (c *policyChecker) checkText(field, s string, limit int) bool {
	switch {
	case s == "":
		c.addError(field, "is empty")
	case len(s) > limit:
		c.addError(field, "has %d bytes; the limit is %d", len(s), limit)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl):
		c.addError(field, "must not have control characters")
	default:
		return true
	}
	return false
}

func (c *policyChecker) checkRules(rules []events.PermissionRule) {
	if len(rules) > MaxRules {
		c.addError("permissions.rules", "has %d entries; the limit is %d", len(rules), MaxRules)
		return
	}
	valid := make([]bool, len(rules))
	for i, r := range rules {
		field := joinIndex("permissions.rules", i)
		before := len(c.errs)
		c.checkRule(field, r)
		valid[i] = len(c.errs) == before
		for j := range i {
			if valid[i] && valid[j] && coversRule(rules[j], r) {
				c.addError(field, "never matches: rules[%d] matches every call that it matches", j)
				break
			}
		}
	}
}

func (c *policyChecker) checkRule(field string, r events.PermissionRule) {
	c.checkWord(field+".then", r.Then, "action", Actions())
	if r.Tool != "" && c.checkText(field+".tool", r.Tool, MaxToolNameLength) {
		if _, err := path.Match(replaceSlashes(r.Tool), ""); err != nil {
			c.addError(field+".tool", "%.80q is not a valid pattern", r.Tool)
		}
	}
	c.checkList(field+".command", r.Command, checkCommand)
	c.checkList(field+".path", r.Path, checkGlob)
	c.checkList(field+".host", r.Host, checkHost)
	if len(r.Command) > 0 && len(r.Path) > 0 {
		c.addError(field+".path", "never matches together with command: the paths that a command uses are not known")
	}
}

// checkList adds an error for each invalid entry of a list. check returns what is wrong with an entry, or "".
func (c *policyChecker) checkList(field string, list []string, check func(string) string) {
	if len(list) > MaxRuleEntries {
		c.addError(field, "has %d entries; the limit is %d", len(list), MaxRuleEntries)
		return
	}
	for i, s := range list {
		if !c.checkText(joinIndex(field, i), s, MaxRuleEntryLength) {
			continue
		}
		if wrong := check(s); wrong != "" {
			c.addError(joinIndex(field, i), "%.80q %s", s, wrong)
		}
	}
}

// checkCommand returns what is wrong with a command pattern of a rule, or "".
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

// checkGlob returns what is wrong with a path glob of a rule, or "".
func checkGlob(s string) string {
	switch {
	case !doublestar.ValidatePattern(s):
		return "is not a valid pattern"
	case strings.Count(s, "{") > maxGlobBraces:
		return fmt.Sprintf("has too many alternatives in braces; the limit is %d", maxGlobBraces)
	case strings.HasPrefix(s, "~"):
		return "must be absolute or relative to the workspace; ~ is not expanded"
	case path.Clean(s) != s || s == ".." || strings.HasPrefix(s, "../"):
		return "never matches; must have no empty elements, no . and .. and no slash at the end (a folder's files are folder/**)"
	}
	return ""
}

// checkHost returns what is wrong with a host pattern of a rule, or "".
func checkHost(s string) string {
	host, below := strings.CutPrefix(s, "*.")
	if h, err := egress.ParseHost(host); err != nil || below && h.Name == "" {
		return "is not a host; must be host or *.host, without scheme, port and path"
	}
	return ""
}

// coversRule reports whether the rule earlier matches every call that the rule later matches, so that later has no
// effect. It does not find all such pairs.
func coversRule(earlier, later events.PermissionRule) bool {
	unconditional := len(earlier.Command) == 0 && len(earlier.Path) == 0 && len(earlier.Host) == 0
	// An allow rule needs all paths, hosts and commands of a call; other rules need only one.
	if !unconditional && earlier.Then == events.PermissionAllow && later.Then != events.PermissionAllow {
		return false
	}
	if earlier.Then == events.PermissionAllow && len(earlier.Host) > 0 && len(earlier.Command) == 0 && len(later.Command) > 0 {
		return false // hosts alone allow no shell command
	}
	return coversTool(earlier.Tool, later.Tool) && conditionIncludes(earlier.Command, later.Command) &&
		conditionIncludes(earlier.Path, later.Path) && conditionIncludes(earlier.Host, later.Host)
}

// coversTool reports whether the tool glob earlier matches every name that the glob later matches.
func coversTool(earlier, later string) bool {
	if earlier == "" || strings.Trim(earlier, "*") == "" || earlier == later {
		return true
	}
	return later != "" && !strings.ContainsAny(later, `*?[\`) && matchesTool(earlier, later)
}

// conditionIncludes reports whether the condition list is met whenever the condition other is met: list is empty, or it
// has all entries of other.
func conditionIncludes(list, other []string) bool {
	if len(list) == 0 {
		return true
	}
	return len(other) > 0 && !slices.ContainsFunc(other, func(s string) bool { return !slices.Contains(list, s) })
}

func joinIndex(list string, i int) string { return fmt.Sprintf("%s[%d]", list, i) }
