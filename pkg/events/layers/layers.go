// Package layers merges variables from three sources: the agent, its environments in their order, and one
// execution. It is pure.
package layers

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// The names of the lowest and the highest layer.
const (
	SourceAgent = "agent"
	SourceRun   = "run"
)

// Environment is a resolved environment: its reference with the digest, and its spec.
type Environment struct {
	Ref  events.Reference
	Spec events.EnvironmentSpec
}

// VariableError is returned for a variable or placeholder that is invalid, missing, or in conflict with another one.
type VariableError struct {
	Code   string // CodeConflict, CodeMissing or CodeReserved
	Name   string // of the variable or the environment
	Detail string
}

func (e *VariableError) Error() string { return e.Detail }

// The codes of VariableError.
const (
	CodeConflict = "ENVIRONMENT_CONFLICT"
	CodeMissing  = "ENVIRONMENT_MISSING"
	CodeReserved = "ENVIRONMENT_RESERVED"
)

// MergeVariables merges the variables of an agent, of environments and of a run. It returns every variable once, sorted
// by name, with the source of its value. A later layer overrides an earlier one, and decides whether the variable is a
// secret. The error joins one *Error for each problem.
func MergeVariables(agent map[string]events.Declaration, environments []Environment, run map[string]events.Variable) ([]events.Provenance, error) {
	merged := map[string]events.Provenance{}
	var wrong []error
	put := func(from, name string, v events.Variable) {
		if err := CheckVariableName(name); err != nil {
			wrong = append(wrong, err)
			return
		}
		merged[name] = events.Provenance{Name: name, From: from, Secret: v.Secret, Sealed: v.Sealed, Value: v.Value}
	}
	for _, name := range slices.Sorted(maps.Keys(agent)) {
		if d := agent[name]; !d.Required && !d.Secret || d.Value != "" {
			put(SourceAgent, name, events.Variable{Value: d.Value, Secret: d.Secret})
		}
	}
	seen := map[events.Reference]string{}
	for _, e := range environments {
		if before, ok := seen[e.Ref.WithoutVersion()]; ok && before != e.Ref.Version {
			wrong = append(wrong, &VariableError{CodeConflict, e.Ref.WithoutVersion().String(), fmt.Sprintf("environment %s is referred to in two versions, %s and %s", e.Ref.WithoutVersion(), before, e.Ref.Version)})
		}
		seen[e.Ref.WithoutVersion()] = e.Ref.Version
		for _, name := range slices.Sorted(maps.Keys(e.Spec.Variables)) {
			put(e.Ref.String(), name, e.Spec.Variables[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(run)) {
		put(SourceRun, name, run[name])
	}
	for _, name := range slices.Sorted(maps.Keys(agent)) {
		if _, ok := merged[name]; !ok && agent[name].Required {
			wrong = append(wrong, &VariableError{CodeMissing, name, fmt.Sprintf("variable %s is required by the agent, and no environment sets it", name)})
		}
	}
	out := make([]events.Provenance, 0, len(merged))
	for _, name := range slices.Sorted(maps.Keys(merged)) {
		out = append(out, merged[name])
	}
	return out, errors.Join(wrong...)
}

// reservedVariables lists variables that define how a sandbox reaches models and where agents keep their files. Only Spool
// sets them.
var reservedVariables = []string{
	"PATH", "HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
	"ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "LD_PRELOAD", "LD_LIBRARY_PATH",
}

// maxVariableNameLength is the maximum length of a variable's name in characters.
const maxVariableNameLength = 128

// CheckVariableName returns an *Error if name is not allowed for a variable.
func CheckVariableName(name string) error {
	ok := name != "" && len(name) <= maxVariableNameLength && (name[0] < '0' || name[0] > '9')
	for i := 0; ok && i < len(name); i++ {
		c := name[i]
		ok = c == '_' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
	}
	if !ok {
		return &VariableError{CodeConflict, name, fmt.Sprintf("%.64q is not a variable's name: 1 to %d characters of A-Z, a-z, 0-9 and _, not starting with a digit", name, maxVariableNameLength)}
	}
	if slices.Contains(reservedVariables, name) || strings.HasPrefix(name, "SPOOL_") {
		return &VariableError{CodeReserved, name, fmt.Sprintf("variable %s is set by Spool itself", name)}
	}
	return nil
}

// PlaceholderNames returns the names of all ${NAME} in s, in order. $$ is a dollar sign.
func PlaceholderNames(s string) []string {
	var names []string
	_, _ = ExpandPlaceholders(s, func(name string) (string, bool) {
		names = append(names, name)
		return "", true
	})
	return names
}

// ExpandPlaceholders replaces each ${NAME} in s by its value. The error joins one *Error for each name without a value. A
// dollar sign that is followed by neither a brace nor another dollar sign is literal.
func ExpandPlaceholders(s string, value func(name string) (string, bool)) (string, error) {
	var b strings.Builder
	var wrong []error
	splitPlaceholders(s, func(text string) { b.WriteString(text) }, func(name string) {
		v, found := value(name)
		if !found {
			wrong = append(wrong, &VariableError{CodeMissing, name, fmt.Sprintf("${%.64s} has no value: no environment sets it", name)})
		}
		b.WriteString(v)
	})
	return b.String(), errors.Join(wrong...)
}

// CheckPlaceholders returns an error if a ${ in s is not closed or names an invalid variable. The error joins all
// problems.
func CheckPlaceholders(s string) error {
	var wrong []error
	open := splitPlaceholders(s, func(string) {}, func(name string) {
		if err := CheckVariableName(name); err != nil {
			wrong = append(wrong, err)
		}
	})
	if open {
		wrong = append(wrong, errors.New("a ${ is not closed by }; $$ stands for a dollar sign"))
	}
	return errors.Join(wrong...)
}

// splitPlaceholders splits s into literal text and the names of ${NAME}, and calls text or placeholder for each part.
// open reports whether a ${ was taken as text because no brace closes it.
func splitPlaceholders(s string, text, placeholder func(string)) (open bool) {
	for {
		before, rest, ok := strings.Cut(s, "$")
		text(before)
		if !ok {
			return open
		}
		name, after, closed := strings.Cut(strings.TrimPrefix(rest, "{"), "}")
		braced := strings.HasPrefix(rest, "{")
		switch {
		case strings.HasPrefix(rest, "$"):
			text("$")
			s = rest[1:]
		case braced && closed:
			placeholder(name)
			s = after
		default:
			open = open || braced
			text("$")
			s = rest
		}
	}
}
