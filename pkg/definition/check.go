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
	MinInstructionsLength = 10       // characters
	MaxTextSize           = 1 << 20  // bytes of instructions, of a memory file, of a prompt
	MaxDescriptionSize    = 16 << 10 // bytes
	MaxFilesSize          = 8 << 20  // bytes of all files of an agent
	MaxTimeoutMs          = 300_000
	MaxSubagentDepth      = 100  // levels of sub-agents below an agent
	MaxAttempts           = 20   // starts of an agent in one execution
	MaxLoopWindow         = 100  // calls of a conversation that are compared for loops
	MaxListEntries        = 1000 // of a list or a map
	MaxEnvironments       = 32   // of an instance
	MaxMCPContainers      = 8    // MCP servers of type docker, each in a container of its own

	maxNameLength  = 64  // characters of the name of a sub-agent, a command or a server
	maxLabelLength = 200 // characters of an agent's name and of a model
)

var (
	errNotUTF8 = errors.New("is not valid UTF-8")
	errNUL     = errors.New("has a NUL byte")
	errEmpty   = errors.New("is empty")
)

// specChecker collects the errors that its methods find in the spec of a definition.
type specChecker struct{ errs []FieldError }

// addError records an error in a field of the spec.
func (c *specChecker) addError(field, format string, args ...any) {
	c.errs = append(c.errs, FieldError{field, fmt.Sprintf(format, args...)})
}

// checkText adds an error if a text is larger than limit bytes.
func (c *specChecker) checkText(field, s string, limit int) {
	if len(s) > limit {
		c.addError(field, "has %d bytes; the limit is %d", len(s), limit)
	}
}

// checkNotEmpty adds an error if a text is empty, and reports whether it has content.
func (c *specChecker) checkNotEmpty(field, s string) bool {
	if strings.TrimSpace(s) == "" {
		c.addError(field, "is required")
		return false
	}
	return true
}

// checkLine adds an error if a short text is too long or has more than one line.
func (c *specChecker) checkLine(field, s string) {
	if utf8.RuneCountInString(s) > maxLabelLength || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		c.addError(field, "must be one line of at most %d characters", maxLabelLength)
	}
}

// checkCount adds an error if a list or a map has more than limit entries.
func (c *specChecker) checkCount(field string, n, limit int) {
	if n > limit {
		c.addError(field, "has %d entries; the limit is %d", n, limit)
	}
}

// checkList adds an error for each empty and each repeated element of a list.
func (c *specChecker) checkList(field string, list []string) {
	c.checkCount(field, len(list), MaxListEntries)
	seen := map[string]int{}
	for i, s := range list {
		c.checkLine(joinIndex(field, i), s)
		if c.checkNotEmpty(joinIndex(field, i), s) {
			c.checkUnique(seen, field, "", s, i)
		}
	}
}

// checkUnique adds an error if another element of the list has the same name.
func (c *specChecker) checkUnique(seen map[string]int, list, field, name string, i int) {
	if before, ok := seen[name]; ok {
		at := joinIndex(list, i)
		if field != "" {
			at = joinField(at, field)
		}
		c.addError(at, "%.80q is already in %s", name, joinIndex(list, before))
		return
	}
	seen[name] = i
}

// addOptionError adds the error that a check of session options returned, under the name of the agent's field.
// optionField is the name of the field in session options.
func (c *specChecker) addOptionError(err error, optionField, field string) {
	var wrong *command.Error
	switch {
	case err == nil:
	case errors.As(err, &wrong):
		c.addError(field+strings.TrimPrefix(wrong.Field, optionField), "%s", wrong.Detail)
	default:
		c.addError(field, "%v", err)
	}
}

// checkReference adds an error if a reference is invalid, and reports whether it is valid.
func (c *specChecker) checkReference(field string, r events.Reference) bool {
	var wrong *events.ReferenceError
	switch err := r.Check(); {
	case err == nil:
		return true
	case errors.As(err, &wrong) && wrong.Field != "":
		c.addError(joinField(field, wrong.Field), "%s", wrong.Detail)
	default:
		c.addError(field, "%v", err)
	}
	return false
}

func (c *specChecker) checkReferences(field string, list []events.Reference, limit int) {
	c.checkCount(field, len(list), limit)
	seen := map[string]int{}
	for i, r := range list {
		if c.checkReference(joinIndex(field, i), r) {
			c.checkUnique(seen, field, "", r.WithoutVersion().String(), i)
		}
	}
}

// checkVariable adds an error if the name of an environment variable is invalid, and reports whether it is valid.
func (c *specChecker) checkVariable(field, name string) bool {
	if err := layers.CheckVariableName(name); err != nil {
		c.addError(field, "%v", err)
		return false
	}
	return true
}

// checkStoredTexts adds errors for texts that the log or a table cannot store: invalid UTF-8 and NUL bytes.
func (c *specChecker) checkStoredTexts(v reflect.Value, path string) {
	switch v.Kind() {
	case reflect.String:
		switch s := v.String(); {
		case !utf8.ValidString(s):
			c.addError(path, "%v", errNotUTF8)
		case strings.ContainsRune(s, 0):
			c.addError(path, "%v", errNUL)
		}
	case reflect.Slice:
		for i := range v.Len() {
			c.checkStoredTexts(v.Index(i), joinIndex(path, i))
		}
	case reflect.Map:
		for _, k := range slices.SortedFunc(maps.Keys(mapKeys(v)), strings.Compare) {
			c.checkStoredTexts(reflect.ValueOf(k), path)
			c.checkStoredTexts(v.MapIndex(reflect.ValueOf(k)), joinField(path, k))
		}
	case reflect.Struct:
		for _, f := range structFields(v.Type()) {
			c.checkStoredTexts(v.Field(f.index), joinField(path, f.name))
		}
	}
}

// mapKeys returns the set of the keys of a map, as strings.
func mapKeys(v reflect.Value) map[string]bool {
	out := make(map[string]bool, v.Len())
	for _, k := range v.MapKeys() {
		out[k.String()] = true
	}
	return out
}

// CheckEntryNames returns the errors in the reference and the tags of a catalogue entry. The fields in errors are
// scope, org, slug, version and tags[i]. The reference must have no version.
func CheckEntryNames(ref events.Reference, tags []string) []FieldError {
	var c specChecker
	var wrong *events.ReferenceError
	if err := ref.Check(); errors.As(err, &wrong) {
		c.addError(wrong.Field, "%s", wrong.Detail)
	}
	if ref.Version != "" {
		c.addError("version", "must not be set: the version of an entry follows from its content")
	}
	c.checkCount("tags", len(tags), versions.MaxTags)
	seen := map[string]int{}
	for i, t := range tags {
		if !events.IsTag(t) {
			c.addError(joinIndex("tags", i), "%.64q is not a tag; must have 1 to 64 characters of a-z, 0-9, dots, hyphens and underscores, and not begin with a dot or a hyphen", t)
			continue
		}
		c.checkUnique(seen, "tags", "", t, i)
	}
	return c.errs
}

// CheckInstance returns the errors in the spec of an agent instance.
func CheckInstance(s events.InstanceSpec) []FieldError {
	var c specChecker
	c.checkStoredTexts(reflect.ValueOf(s), "")
	c.checkText("description", s.Description, MaxDescriptionSize)
	c.checkReference("agent", s.Agent)
	c.checkReferences("environments", s.Environments, MaxEnvironments)
	return c.errs
}

// CheckEnvironment returns the errors in the spec of an environment as the log stores it: a secret has the key of its
// encrypted value, and never the value.
func CheckEnvironment(s events.EnvironmentSpec) []FieldError {
	return checkEnvironment(s, func(c *specChecker, field string, v events.Variable) {
		switch {
		case v.Secret && v.Value != "":
			c.addError(joinField(field, "value"), "must not be set: the value of a secret is encrypted before it is stored")
		case v.Secret && v.Sealed == "":
			c.addError(joinField(field, "sealed"), "is required: the key of the secret's encrypted value")
		}
	})
}

// CheckRequestedEnvironment returns the errors in the spec of an environment as a client sends it: with the values of
// secrets. A secret may come without a value; only the server knows whether it has one.
func CheckRequestedEnvironment(s events.EnvironmentSpec) []FieldError {
	return checkEnvironment(s, func(c *specChecker, field string, v events.Variable) {
		if v.Sealed != "" {
			c.addError(joinField(field, "sealed"), "must not be set by clients; set value")
		}
	})
}

// checkEnvironment checks the parts of an environment that the log and clients have in common, and calls each for every
// variable.
func checkEnvironment(s events.EnvironmentSpec, each func(c *specChecker, field string, v events.Variable)) []FieldError {
	var c specChecker
	c.checkStoredTexts(reflect.ValueOf(s), "")
	c.checkText("description", s.Description, MaxDescriptionSize)
	if s.Variables == nil {
		c.addError("variables", "is required")
	}
	c.checkCount("variables", len(s.Variables), MaxListEntries)
	for _, name := range slices.Sorted(maps.Keys(s.Variables)) {
		v, field := s.Variables[name], joinField("variables", name)
		c.checkVariable(field, name)
		c.checkText(joinField(field, "value"), v.Value, MaxVariableSize)
		c.checkText(joinField(field, "description"), v.Description, MaxDescriptionSize)
		if v.Sealed != "" && !v.Secret {
			c.addError(joinField(field, "sealed"), "must not be set: only secrets have an encrypted value")
		}
		each(&c, field, v)
	}
	c.checkEgress(s.Egress)
	return c.errs
}
