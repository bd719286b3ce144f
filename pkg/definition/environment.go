package definition

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/events"
)

// EnvironmentSpec is the spec of an environment in a file: with the values of secrets, or with the sources of these
// values.
type EnvironmentSpec struct {
	Description string              `json:"description,omitempty"`
	Variables   map[string]Variable `json:"variables"`        // by name: A-Z, a-z, 0-9 and _, not starting with a digit
	Egress      []string            `json:"egress,omitempty"` // hosts that sandboxes with this environment may reach, in addition to those of their agents
}

// Variable is an environment variable in a definition file.
type Variable struct {
	Value       string `json:"value,omitempty"`    // also of a secret; a secret without a value keeps the value that the server has
	ValueFrom   Source `json:"valueFrom,omitzero"` // instead of value
	Secret      bool   `json:"secret,omitempty"`   // the value is encrypted at once and never shown
	Description string `json:"description,omitempty"`
}

// Source is the source from which the command line reads the value of a variable. Exactly one field must be set.
type Source struct {
	Env  string `json:"env,omitempty"`  // name of an environment variable of the command line
	File string `json:"file,omitempty"` // path of a file, relative to the folder of the definition; one final line feed is removed
}

// CheckFile returns the errors in the spec of an environment in a file.
func (s EnvironmentSpec) CheckFile() []FieldError {
	var c specChecker
	for _, name := range slices.Sorted(maps.Keys(s.Variables)) {
		v, field := s.Variables[name], joinField("variables", name)
		from := joinField(field, "valueFrom")
		switch {
		case v.ValueFrom == Source{}:
		case v.Value != "":
			c.addError(from, "must not be set together with value")
		case v.ValueFrom.Env != "" && v.ValueFrom.File != "":
			c.addError(from, "must have env or file, not both")
		}
	}
	// The remaining rules are those of a draft. Rules of values are checked again when the values are known.
	return append(c.errs, CheckRequestedEnvironment(s.toRequest())...)
}

// toRequest returns the environment as a client sends it. Variables whose value comes from a source have no value.
func (s EnvironmentSpec) toRequest() events.EnvironmentSpec {
	out := events.EnvironmentSpec{Description: s.Description, Egress: s.Egress}
	if s.Variables != nil {
		out.Variables = make(map[string]events.Variable, len(s.Variables))
	}
	for name, v := range s.Variables {
		out.Variables[name] = events.Variable{Value: v.Value, Secret: v.Secret, Description: v.Description}
	}
	return out
}

// ReadValues reads the values of variables that have a source, with the functions env and file, and returns the
// environment that is sent to the server. The errors name fields of the document, such as
// spec.variables.TOKEN.valueFrom, and contain no values.
func (s EnvironmentSpec) ReadValues(env func(name string) (string, bool), file func(path string) ([]byte, error)) (events.EnvironmentSpec, []FieldError) {
	out := s.toRequest()
	var c specChecker
	for _, name := range slices.Sorted(maps.Keys(s.Variables)) {
		from := s.Variables[name].ValueFrom
		if from == (Source{}) {
			continue
		}
		field := joinField(joinField("spec.variables", name), "valueFrom")
		value, err := from.readValue(env, file)
		if err == nil {
			err = checkVariableValue(value)
		}
		if err == nil && value == "" && s.Variables[name].Secret {
			err = errEmpty // without a value the server would keep its own
		}
		if err != nil {
			c.addError(field, "%v", err)
			continue
		}
		v := out.Variables[name]
		v.Value = value
		out.Variables[name] = v
	}
	return out, c.errs
}

func (f Source) readValue(env func(string) (string, bool), file func(string) ([]byte, error)) (string, error) {
	if f.Env != "" {
		value, ok := env(f.Env)
		if !ok {
			return "", fmt.Errorf("variable %.64s is not set here", f.Env)
		}
		return value, nil
	}
	content, err := file(f.File)
	if err != nil {
		return "", err
	}
	value, _ := strings.CutSuffix(string(content), "\n")
	return strings.TrimSuffix(value, "\r"), nil
}

// MaxVariableSize is the maximum size in bytes of the value of a variable: the largest that Linux passes to a process.
const MaxVariableSize = 120 << 10

// checkVariableValue returns an error if the value of a variable is invalid. The error does not contain the value.
func checkVariableValue(s string) error {
	switch {
	case len(s) > MaxVariableSize:
		return fmt.Errorf("has %d bytes; the limit is %d", len(s), MaxVariableSize)
	case !utf8.ValidString(s):
		return errNotUTF8
	case strings.ContainsRune(s, 0):
		return errNUL
	}
	return nil
}
