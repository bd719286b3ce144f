// Package definition defines the file format of agents, instances and environments, and the rules that apply to
// them both in files and in JSON over the API. It does no I/O.
//
// YAML is parsed by go.yaml.in/yaml/v3, the YAML organisation's continuation of the unmaintained gopkg.in/yaml.v3.
// Its nodes have line and column and keep aliases unexpanded, so that this package can limit their expansion.
package definition

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// Kind is the kind of a definition: agent, instance or environment.
type Kind string

// The kinds.
const (
	KindAgent       Kind = "agent"
	KindInstance    Kind = "instance"
	KindEnvironment Kind = "environment"
)

// Kinds returns all kinds of definitions in the order in which they are applied: a definition comes after those to
// which it refers.
func Kinds() []Kind { return []Kind{KindEnvironment, KindAgent, KindInstance} }

// Document is one definition in a file. The field that Kind names is set.
type Document struct {
	Kind        Kind
	Ref         events.Reference // without a version
	Tags        []string
	Agent       *events.AgentSpec // its architecture without an alias
	Instance    *events.InstanceSpec
	Environment *EnvironmentSpec

	file      string
	positions map[string]FilePosition
}

// FilePosition is a position in a definition file, counted from 1. A Column of 0 is unknown.
type FilePosition struct{ Line, Column int }

// FieldError is an error in one field of the spec of a definition.
type FieldError struct {
	Field  string // such as mcpServers[1].url
	Detail string
}

func (e FieldError) Error() string { return e.Field + ": " + e.Detail }

// Error is an error at one position of a definition file.
type Error struct {
	File string
	FilePosition
	Field  string // path of the field in the document, such as spec.mcpServers[1].url; "" if there is none
	Detail string
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	if e.Line > 0 && e.Column > 0 {
		fmt.Fprintf(&b, ":%d", e.Column)
	}
	b.WriteString(": ")
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Detail)
	return b.String()
}

// Errors are all errors of a definition file, sorted by line.
type Errors []*Error

func (l Errors) Error() string {
	lines := make([]string, len(l))
	for i, e := range l {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

func (l Errors) sort() {
	slices.SortStableFunc(l, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Field, b.Field))
	})
}

// ErrorAt returns an error about a field of the document, such as spec.model, with the field's position in the file. If
// the file does not contain the field, the position is that of the nearest enclosing field.
func (d Document) ErrorAt(field, detail string) *Error {
	return &Error{File: d.file, FilePosition: nearestPosition(d.positions, field), Field: field, Detail: detail}
}

// nearestPosition returns the position of a field in the file, or of the nearest field that encloses it; "" is the
// document itself.
func nearestPosition(positions map[string]FilePosition, field string) FilePosition {
	for {
		if p, ok := positions[field]; ok || field == "" {
			return p
		}
		field = parentField(field)
	}
}

// parentField returns the path of the field that encloses the given field, or "" for a top-level field.
func parentField(field string) string {
	return field[:max(strings.LastIndexAny(field, ".["), 0)]
}

// joinField returns the path of the field name inside the field path, with quotes if the name needs them.
func joinField(path, name string) string {
	switch {
	case strings.Trim(name, wordCharacters) != "" || name == "":
		return fmt.Sprintf("%s[%q]", path, name)
	case path == "":
		return name
	}
	return path + "." + name
}

// wordCharacters are the characters of field names that need no quotes in a path.
const wordCharacters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"

// joinIndex returns the path of the i-th element of the list at path.
func joinIndex(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }
