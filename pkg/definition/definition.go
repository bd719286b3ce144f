// Package definition is what agents, instances and environments look like as
// files, and the rules that hold for them however they come: as a file, or as
// JSON over the API. It does no I/O.
//
// YAML is read by go.yaml.in/yaml/v3: the YAML organisation's continuation of
// gopkg.in/yaml.v3, which has no maintainer any more. Its nodes know line and
// column and keep aliases unexpanded, so that their expansion can be bounded here.
package definition

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// Kind says what a document defines.
type Kind string

// The kinds.
const (
	KindAgent       Kind = "agent"
	KindInstance    Kind = "instance"
	KindEnvironment Kind = "environment"
)

// Kinds are all kinds in the order in which they are applied: what is referred to comes first.
func Kinds() []Kind { return []Kind{KindEnvironment, KindAgent, KindInstance} }

// Document is one definition of a file. The field that Kind names is set.
type Document struct {
	Kind        Kind
	Ref         events.Reference // without a version
	Tags        []string
	Agent       *events.AgentSpec // its architecture without an alias
	Instance    *events.InstanceSpec
	Environment *EnvironmentSpec

	file   string
	places map[string]Place
}

// Place is where something stands in a file, from 1. Column 0 is not known.
type Place struct{ Line, Column int }

// FieldError is what is wrong with one field of a spec.
type FieldError struct {
	Field  string // such as mcpServers[1].url
	Detail string
}

func (e FieldError) Error() string { return e.Field + ": " + e.Detail }

// Error is what is wrong at one place of a file.
type Error struct {
	File string
	Place
	Field  string // of the document, such as spec.mcpServers[1].url; "" where none can be named
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

// Errors is all that is wrong with a file, by line.
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

// At makes an error about a field of the document, such as spec.model, at its
// place in the file. A field that the file does not have stands where the nearest one around it does.
func (d Document) At(field, detail string) *Error {
	return &Error{File: d.file, Place: nearest(d.places, field), Field: field, Detail: detail}
}

// nearest is the place of a field, or of what it would be in; "" is the document itself.
func nearest(places map[string]Place, field string) Place {
	for {
		if p, ok := places[field]; ok || field == "" {
			return p
		}
		field = parent(field)
	}
}

// parent of a field's path: "" in the end.
func parent(field string) string {
	return field[:max(strings.LastIndexAny(field, ".["), 0)]
}

// within is the path of a named field.
func within(path, name string) string {
	switch {
	case strings.Trim(name, wordCharacters) != "" || name == "":
		return fmt.Sprintf("%s[%q]", path, name)
	case path == "":
		return name
	}
	return path + "." + name
}

// wordCharacters are those of names that stand in a path without quotes.
const wordCharacters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"

// element is the path of a list's element.
func element(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }
