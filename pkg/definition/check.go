package definition

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// Limits of definitions.
const (
	MinInstructions  = 10       // characters
	MaxText          = 1 << 20  // bytes of instructions, of a memory file, of a prompt
	MaxDescription   = 16 << 10 // bytes
	MaxFiles         = 8 << 20  // bytes of all files of an agent
	MaxTimeoutMs     = 300_000
	MaxSubagentDepth = 100  // levels of sub-agents below an agent
	MaxAttempts      = 20   // starts of an agent in one execution
	MaxLoopWindow    = 100  // calls of a conversation that are compared for loops
	MaxEntries       = 1000 // of a list or a map
	MaxEnvironments  = 32   // of an instance
	MaxContainers    = 8    // MCP servers of type docker, each in a container of its own

	maxName  = 64  // characters of the name of a sub-agent, a command or a server
	maxLabel = 200 // characters of an agent's name and of a model
)

var (
	errNotUTF8 = errors.New("is not valid UTF-8")
	errNUL     = errors.New("has a NUL byte")
	errEmpty   = errors.New("is empty")
)

// checker collects errors.
type checker struct{ errs []FieldError }

func (c *checker) fail(field, format string, args ...any) {
	c.errs = append(c.errs, FieldError{field, fmt.Sprintf(format, args...)})
}

// checkText checks the size of a text in bytes.
func (c *checker) checkText(field, s string, limit int) {
	if len(s) > limit {
		c.fail(field, "has %d bytes; the limit is %d", len(s), limit)
	}
}

// must adds an error if a text is empty.
func (c *checker) must(field, s string) bool {
	if strings.TrimSpace(s) == "" {
		c.fail(field, "is required")
		return false
	}
	return true
}

// checkLabel checks a short text on one line.
func (c *checker) checkLabel(field, s string) {
	if utf8.RuneCountInString(s) > maxLabel || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		c.fail(field, "must be one line of at most %d characters", maxLabel)
	}
}

// count checks the size of a list or a map.
func (c *checker) count(field string, n, limit int) {
	if n > limit {
		c.fail(field, "has %d entries; the limit is %d", n, limit)
	}
}

// checkList adds errors for empty and repeated elements.
func (c *checker) checkList(field string, list []string) {
	c.count(field, len(list), MaxEntries)
	seen := map[string]int{}
	for i, s := range list {
		c.checkLabel(element(field, i), s)
		if c.must(element(field, i), s) {
			c.checkUnique(seen, field, "", s, i)
		}
	}
}

// checkUnique adds an error if another element has the same name.
func (c *checker) checkUnique(seen map[string]int, list, field, name string, i int) {
	if before, ok := seen[name]; ok {
		at := element(list, i)
		if field != "" {
			at = within(at, field)
		}
		c.fail(at, "%.80q is already in %s", name, element(list, before))
		return
	}
	seen[name] = i
}

// addOptionError adds the error of a check of session options under the name of the agent's field. optionField is the name in
// the options.
func (c *checker) addOptionError(err error, optionField, field string) {
	var wrong *command.Error
	switch {
	case err == nil:
	case errors.As(err, &wrong):
		c.fail(field+strings.TrimPrefix(wrong.Field, optionField), "%s", wrong.Detail)
	default:
		c.fail(field, "%v", err)
	}
}

// reference checks a reference.
func (c *checker) reference(field string, r events.Reference) bool {
	var wrong *events.ReferenceError
	switch err := r.Check(); {
	case err == nil:
		return true
	case errors.As(err, &wrong) && wrong.Field != "":
		c.fail(within(field, wrong.Field), "%s", wrong.Detail)
	default:
		c.fail(field, "%v", err)
	}
	return false
}

func (c *checker) checkReferences(field string, list []events.Reference, limit int) {
	c.count(field, len(list), limit)
	seen := map[string]int{}
	for i, r := range list {
		if c.reference(element(field, i), r) {
			c.checkUnique(seen, field, "", r.WithoutVersion().String(), i)
		}
	}
}

// checkVariable checks the name of a variable.
func (c *checker) checkVariable(field, name string) bool {
	if err := layers.CheckVariableName(name); err != nil {
		c.fail(field, "%v", err)
		return false
	}
	return true
}

// checkStrings adds errors for texts that the log or a table cannot store: invalid UTF-8 and NUL bytes.
func (c *checker) checkStrings(v reflect.Value, path string) {
	switch v.Kind() {
	case reflect.String:
		switch s := v.String(); {
		case !utf8.ValidString(s):
			c.fail(path, "%v", errNotUTF8)
		case strings.ContainsRune(s, 0):
			c.fail(path, "%v", errNUL)
		}
	case reflect.Slice:
		for i := range v.Len() {
			c.checkStrings(v.Index(i), element(path, i))
		}
	case reflect.Map:
		for _, k := range slices.SortedFunc(maps.Keys(keys(v)), strings.Compare) {
			c.checkStrings(reflect.ValueOf(k), path)
			c.checkStrings(v.MapIndex(reflect.ValueOf(k)), within(path, k))
		}
	case reflect.Struct:
		for _, f := range fieldsOf(v.Type()) {
			c.checkStrings(v.Field(f.index), within(path, f.name))
		}
	}
}

// keys returns the keys of a map as texts.
func keys(v reflect.Value) map[string]bool {
	out := make(map[string]bool, v.Len())
	for _, k := range v.MapKeys() {
		out[k.String()] = true
	}
	return out
}

// CheckEntry returns the errors in the name and the tags of an entry. The fields are scope, org, slug and tags[i].
// The reference must have no version.
func CheckEntry(ref events.Reference, tags []string) []FieldError {
	var c checker
	var wrong *events.ReferenceError
	if err := ref.Check(); errors.As(err, &wrong) {
		c.fail(wrong.Field, "%s", wrong.Detail)
	}
	if ref.Version != "" {
		c.fail("version", "must not be set: the version of an entry follows from its content")
	}
	c.count("tags", len(tags), versions.MaxTags)
	seen := map[string]int{}
	for i, t := range tags {
		if !events.IsTag(t) {
			c.fail(element("tags", i), "%.64q is not a tag; must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores, and not begin with a dot or a hyphen", t)
			continue
		}
		c.checkUnique(seen, "tags", "", t, i)
	}
	return c.errs
}

// CheckInstance returns the errors of an agent instance.
func CheckInstance(s events.InstanceSpec) []FieldError {
	var c checker
	c.checkStrings(reflect.ValueOf(s), "")
	c.checkText("description", s.Description, MaxDescription)
	c.reference("agent", s.Agent)
	c.checkReferences("environments", s.Environments, MaxEnvironments)
	return c.errs
}

// CheckEnvironment returns the errors of an environment in the form of the log: a secret has the key of its
// encrypted value, and never the value.
func CheckEnvironment(s events.EnvironmentSpec) []FieldError {
	return checkEnvironment(s, func(c *checker, field string, v events.Variable) {
		switch {
		case v.Secret && v.Value != "":
			c.fail(within(field, "value"), "must not be set: the value of a secret is encrypted before it is stored")
		case v.Secret && v.Sealed == "":
			c.fail(within(field, "sealed"), "is required: the key of the secret's encrypted value")
		}
	})
}

// CheckDraft returns the errors of an environment in the form of a client's request: with the values of its
// secrets. Only the server knows whether a secret may come without a value.
func CheckDraft(s events.EnvironmentSpec) []FieldError {
	return checkEnvironment(s, func(c *checker, field string, v events.Variable) {
		if v.Sealed != "" {
			c.fail(within(field, "sealed"), "must not be set by clients; set value")
		}
	})
}

func checkEnvironment(s events.EnvironmentSpec, each func(c *checker, field string, v events.Variable)) []FieldError {
	var c checker
	c.checkStrings(reflect.ValueOf(s), "")
	c.checkText("description", s.Description, MaxDescription)
	if s.Variables == nil {
		c.fail("variables", "is required")
	}
	c.count("variables", len(s.Variables), MaxEntries)
	for _, name := range slices.Sorted(maps.Keys(s.Variables)) {
		v, field := s.Variables[name], within("variables", name)
		c.checkVariable(field, name)
		c.checkText(within(field, "value"), v.Value, MaxValue)
		c.checkText(within(field, "description"), v.Description, MaxDescription)
		if v.Sealed != "" && !v.Secret {
			c.fail(within(field, "sealed"), "must not be set: only secrets have an encrypted value")
		}
		each(&c, field, v)
	}
	c.checkEgress(s.Egress)
	return c.errs
}
