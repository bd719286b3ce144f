package definition

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// The schema is built by our own code from the same fields that the reader uses, so that both always agree on them. A
// generator would need most of this information as input: the document of each kind, that references may be texts, and
// the rules for texts and numbers, which pkg/events cannot express in tags of a library.

// object is a JSON object.
type object = map[string]any

// Patterns of texts that have a grammar.
const (
	patternSlug     = `^[a-z0-9]+([.-][a-z0-9]+)*$`
	patternTag      = `^[a-z0-9_][a-z0-9._-]{0,63}$`
	patternName     = `^[a-z0-9][a-z0-9-]{0,63}$`
	patternServer   = `^[a-z0-9][a-z0-9_-]{0,63}$`
	patternVariable = `^[A-Za-z_][A-Za-z0-9_]{0,127}$`
)

// rules returns the constraints of fields that are not expressed by their types, by Type.field.
func rules() map[string]object {
	slug := object{"pattern": patternSlug, "maxLength": maxName}
	entries := object{"items": object{"type": "string", "minLength": 1, "maxLength": permission.MaxEntry}, "maxItems": permission.MaxEntries}
	return map[string]object{
		"file.slug": slug, "file.org": slug, "Reference.slug": slug, "Reference.org": slug,
		"file.scope": {"enum": scopes()}, "Reference.scope": {"enum": scopes()},
		"Reference.kind":            {"enum": []events.Aspect{events.Agent, events.Instance, events.Environment, events.Skill}},
		"file.tags":                 {"items": object{"type": "string", "pattern": patternTag}, "uniqueItems": true},
		"AgentSpec.modelProvider":   {"enum": architecture.ModelProviders()},
		"AgentSpec.architecture":    {"enum": slices.Concat(architecture.Names(), slices.Sorted(maps.Keys(architecture.Aliases())))},
		"AgentSpec.instructions":    {"minLength": MinInstructions},
		"AgentSpec.command":         {"maxItems": command.MaxArguments},
		"AgentSpec.egress":          {"maxItems": command.MaxEgress},
		"EnvironmentSpec.egress":    {"maxItems": command.MaxEgress},
		"AgentSpec.environment":     {"propertyNames": object{"pattern": patternVariable}},
		"EnvironmentSpec.variables": {"propertyNames": object{"pattern": patternVariable}, "maxProperties": MaxEntries},
		"SubagentSpec.name":         {"pattern": patternName}, "CommandSpec.name": {"pattern": patternName}, "MCPServer.name": {"pattern": patternServer},
		"MCPServer.type":            {"enum": []string{events.MCPTypeStdio, events.MCPTypeHTTP, events.MCPTypeDocker}},
		"MCPServer.timeoutMs":       {"maximum": MaxTimeoutMs},
		"Retries.attempts":          {"maximum": MaxAttempts},
		"Retries.backoffMs":         {"maximum": events.MaxBackoff.Milliseconds()},
		"Loops.action":              {"enum": []string{events.LoopActionStop, events.LoopActionWarn, events.LoopActionNone}},
		"Loops.warn":                {"maximum": MaxLoopWindow},
		"Loops.stop":                {"maximum": MaxLoopWindow},
		"Loops.window":              {"maximum": MaxLoopWindow},
		"Limits.subagentDepth":      {"maximum": MaxSubagentDepth},
		"Permissions.preset":        {"enum": permission.Presets()},
		"Permissions.rules":         {"maxItems": permission.MaxRules},
		"Permissions.tools":         {"additionalProperties": object{"enum": permission.Actions()}, "maxProperties": permission.MaxTools},
		"Permissions.default":       {"enum": permission.Actions()},
		"Permissions.unattended":    {"enum": []string{events.UnattendedDeny, events.UnattendedSkip}},
		"Permissions.timeoutMs":     {"maximum": permission.MaxTimeout.Milliseconds()},
		"PermissionRule.tool":       {"maxLength": permission.MaxTool},
		"PermissionRule.command":    entries,
		"PermissionRule.path":       entries,
		"PermissionRule.host":       entries,
		"PermissionRule.then":       {"enum": permission.Actions()},
		"Dependencies.npm":          {"items": object{"type": "string", "pattern": dependency.PatternNPM}, "maxItems": dependency.Max, "uniqueItems": true},
		"Dependencies.pip":          {"items": object{"type": "string", "pattern": dependency.PatternPIP}, "maxItems": dependency.Max, "uniqueItems": true},
		"FileSpec.mode":             {"maximum": 0o777},
		"FileSpec.path":             {"minLength": 1},
		"InstanceSpec.environments": {"maxItems": MaxEnvironments},
		"Source.env":                {"minLength": 1}, "Source.file": {"minLength": 1},
	}
}

func scopes() []events.ReferenceScope {
	return []events.ReferenceScope{events.ScopePlatform, events.ScopeOrganization, events.ScopeAccount}
}

// Schema returns the JSON Schema (draft 2020-12) of one document of a file. notes are the comments of fields, by
// Type.Field. Parse refuses every document that the schema refuses, and checks further rules.
func Schema(notes map[string]string) ([]byte, error) {
	g := schema{notes: notes, rules: rules(), used: map[string]bool{}, defs: object{}}
	var choose []any
	for _, k := range Kinds() {
		t := map[Kind]reflect.Type{
			KindAgent: reflect.TypeFor[file[events.AgentSpec]](), KindInstance: reflect.TypeFor[file[events.InstanceSpec]](), KindEnvironment: reflect.TypeFor[file[EnvironmentSpec]](),
		}[k]
		document := g.object(t, "file")
		document["properties"].(object)["kind"] = object{"const": k}
		g.defs[string(k)] = document
		choose = append(choose, object{
			"if":   object{"properties": object{"kind": object{"const": k}}, "required": []string{"kind"}},
			"then": object{"$ref": "#/$defs/" + string(k)},
		})
	}
	for _, rule := range slices.Sorted(maps.Keys(g.rules)) {
		if !g.used[rule] {
			return nil, fmt.Errorf("schema: there is no field %s", rule)
		}
	}
	return json.MarshalIndent(object{
		"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A definition of Spool: an agent, an instance or an environment",
		"$comment": "Generated from pkg/definition by `make generate`; do not edit.",
		"type":     "object", "required": []string{"kind"}, "properties": object{"kind": object{"enum": Kinds()}}, "allOf": choose, "$defs": g.defs,
	}, "", "  ")
}

type schema struct {
	notes map[string]string
	rules map[string]object
	used  map[string]bool // rules
	defs  object
}

// object describes a struct; name is the type's in notes and rules.
func (g schema) object(t reflect.Type, name string) object {
	properties, required := object{}, []string{}
	for _, f := range fieldsOf(t) {
		p := g.value(t.Field(f.index).Type)
		if note := g.notes[name+"."+t.Field(f.index).Name]; note != "" {
			p["description"] = note
		}
		key := name + "." + f.name
		maps.Copy(p, g.rules[key])
		g.used[key] = true
		properties[f.name] = p
		if f.required {
			required = append(required, f.name)
		}
	}
	return object{"type": "object", "properties": properties, "required": required, "additionalProperties": false}
}

// value describes a type; structs are described once, under their names.
func (g schema) value(t reflect.Type) object {
	switch {
	case t == typeReference:
		g.describeReference()
		return object{"anyOf": []any{object{"type": "string", "minLength": 1, "maxLength": 512}, object{"$ref": "#/$defs/Reference"}}}
	case t.Kind() == reflect.Struct:
		g.define(t)
		return object{"$ref": "#/$defs/" + t.Name()}
	case t.Kind() == reflect.Slice:
		return object{"type": "array", "items": g.value(t.Elem())}
	case t.Kind() == reflect.Map:
		return object{"type": "object", "additionalProperties": g.value(t.Elem())}
	case t.Kind() == reflect.Bool:
		return object{"type": "boolean"}
	case t.Kind() == reflect.Uint32:
		return object{"type": "integer", "minimum": 0, "maximum": uint32(math.MaxUint32)}
	case t.Kind() == reflect.Float64:
		return object{"type": "number", "minimum": 0}
	}
	return object{"type": "string"}
}

// describeReference describes the object form under the name of events.Reference.
func (g schema) describeReference() {
	if _, ok := g.defs["Reference"]; !ok {
		g.defs["Reference"] = g.object(reflect.TypeFor[events.ReferenceObject](), "Reference")
	}
}

func (g schema) define(t reflect.Type) {
	if _, ok := g.defs[t.Name()]; !ok {
		g.defs[t.Name()] = object{} // ends the recursion for a type that contains itself
		g.defs[t.Name()] = g.object(t, t.Name())
	}
}
