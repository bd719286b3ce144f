package definition

import (
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
)

//go:generate go run ./gen ../events ../../docs/agents.md ../../docs/schema/spool.schema.json

// WriteFieldTables writes tables, in Markdown, of all fields of definition files. notes has the comments of the fields,
// keyed by Type.Field.
func WriteFieldTables(w io.Writer, notes map[string]string) error {
	var b strings.Builder
	for _, s := range []struct {
		title, name string
		t           reflect.Type
	}{
		{"A document", "file", reflect.TypeFor[file[any]]()},
		{"`spec` of an agent", "AgentSpec", reflect.TypeFor[events.AgentSpec]()},
		{"`tools`", "ToolChoice", reflect.TypeFor[events.ToolChoice]()},
		{"`subagents[]`", "SubagentSpec", reflect.TypeFor[events.SubagentSpec]()},
		{"`commands[]`", "CommandSpec", reflect.TypeFor[events.CommandSpec]()},
		{"`mcpServers[]`", "MCPServer", reflect.TypeFor[events.MCPServer]()},
		{"`environment.NAME`", "Declaration", reflect.TypeFor[events.Declaration]()},
		{"`modelSettings`", "ModelSettings", reflect.TypeFor[events.ModelSettings]()},
		{"`dependencies`", "Dependencies", reflect.TypeFor[events.Dependencies]()},
		{"`files[]`", "FileSpec", reflect.TypeFor[events.FileSpec]()},
		{"`limits`", "Limits", reflect.TypeFor[events.Limits]()},
		{"`limits.session`", "Budget", reflect.TypeFor[events.Budget]()},
		{"`retries`", "Retries", reflect.TypeFor[events.Retries]()},
		{"`loops`", "Loops", reflect.TypeFor[events.Loops]()},
		{"`conversation`", "Conversation", reflect.TypeFor[events.Conversation]()},
		{"`permissions`", "Permissions", reflect.TypeFor[events.Permissions]()},
		{"`permissions.rules[]`", "PermissionRule", reflect.TypeFor[events.PermissionRule]()},
		{"`spec` of an instance", "InstanceSpec", reflect.TypeFor[events.InstanceSpec]()},
		{"`spec` of an environment", "EnvironmentSpec", reflect.TypeFor[EnvironmentSpec]()},
		{"`variables.NAME`", "Variable", reflect.TypeFor[Variable]()},
		{"`variables.NAME.valueFrom`", "Source", reflect.TypeFor[Source]()},
	} {
		fmt.Fprintf(&b, "\n### %s\n\n| field | type | |\n| --- | --- | --- |\n", s.title)
		for _, f := range structFields(s.t) {
			field := s.t.Field(f.index)
			kind := shortTypeName(field.Type)
			if f.required {
				kind += ", required"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.name, kind, notes[s.name+"."+field.Name])
		}
	}
	_, err := io.WriteString(w, strings.TrimPrefix(b.String(), "\n"))
	return err
}

// shortTypeName returns the name of a field's type for the documents, such as "list of text".
func shortTypeName(t reflect.Type) string {
	switch {
	case t == referenceType:
		return "reference"
	case t.Kind() == reflect.Interface || t.Kind() == reflect.Struct:
		return "mapping"
	case t.Kind() == reflect.Map:
		return "mapping to " + shortTypeName(t.Elem())
	case t.Kind() == reflect.Slice:
		return "list of " + shortTypeName(t.Elem())
	case t.Kind() == reflect.String:
		return "text"
	case t.Kind() == reflect.Bool:
		return "boolean"
	case t.Kind() == reflect.Uint32:
		return "whole number"
	}
	return "number"
}

// WriteSupportTable writes the table, in Markdown, of the agent fields that each architecture supports.
func WriteSupportTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "| field | %s |\n|%s\n", strings.Join(architecture.Names(), " | "), strings.Repeat(" --- |", len(architecture.Names())+1))
	table := SupportTable()
	for _, row := range supportTableRows() {
		fmt.Fprintf(&b, "| `%s` |", row)
		for _, a := range architecture.Names() {
			cell := table[row][a]
			if cell == "" {
				cell = "**no**"
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// supportTableRows returns the row names of SupportTable in the order of an agent's fields.
func supportTableRows() []string {
	order := fieldPaths(reflect.TypeFor[events.AgentSpec](), "")
	return slices.SortedFunc(maps.Keys(SupportTable()), func(a, b string) int {
		return slices.Index(order, a) - slices.Index(order, b)
	})
}

// fieldPaths returns the paths of the fields of a struct, of nested structs, and of structs in lists.
func fieldPaths(t reflect.Type, at string) []string {
	var out []string
	for _, f := range structFields(t) {
		path := joinField(at, f.name)
		out = append(out, path)
		inner := t.Field(f.index).Type
		if inner.Kind() == reflect.Slice {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && inner != referenceType {
			out = append(out, fieldPaths(inner, path)...)
		}
	}
	return out
}
