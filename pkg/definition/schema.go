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

// jsonObject is a JSON object.
type jsonObject = map[string]any

// Patterns of texts that have a grammar.
const (
	slugPattern       = `^[a-z0-9]+([.-][a-z0-9]+)*$`
	tagPattern        = `^[a-z0-9_][a-z0-9._-]{0,63}$`
	namePattern       = `^[a-z0-9][a-z0-9-]{0,63}$`
	serverNamePattern = `^[a-z0-9][a-z0-9_-]{0,63}$`
	variablePattern   = `^[A-Za-z_][A-Za-z0-9_]{0,127}$`
)

// fieldConstraints returns the JSON Schema constraints of fields that do not follow from their Go types, by Type.field.
func fieldConstraints() map[string]jsonObject {
	slug := jsonObject{"pattern": slugPattern, "maxLength": maxNameLength}
	entries := jsonObject{"items": jsonObject{"type": "string", "minLength": 1, "maxLength": permission.MaxRuleEntryLength}, "maxItems": permission.MaxRuleEntries}
	return map[string]jsonObject{
		"file.slug": slug, "file.org": slug, "Reference.slug": slug, "Reference.org": slug,
		"file.scope": {"enum": allScopes()}, "Reference.scope": {"enum": allScopes()},
		"Reference.kind":            {"enum": []events.Aspect{events.Agent, events.Instance, events.Environment, events.Skill}},
		"file.tags":                 {"items": jsonObject{"type": "string", "pattern": tagPattern}, "uniqueItems": true},
		"AgentSpec.modelProvider":   {"enum": architecture.ModelProviders()},
		"AgentSpec.architecture":    {"enum": slices.Concat(architecture.Names(), slices.Sorted(maps.Keys(architecture.Aliases())))},
		"AgentSpec.instructions":    {"minLength": MinInstructionsLength},
		"AgentSpec.command":         {"maxItems": command.MaxCommandArguments},
		"AgentSpec.egress":          {"maxItems": command.MaxEgressEntries},
		"EnvironmentSpec.egress":    {"maxItems": command.MaxEgressEntries},
		"AgentSpec.environment":     {"propertyNames": jsonObject{"pattern": variablePattern}},
		"EnvironmentSpec.variables": {"propertyNames": jsonObject{"pattern": variablePattern}, "maxProperties": MaxListEntries},
		"SubagentSpec.name":         {"pattern": namePattern}, "CommandSpec.name": {"pattern": namePattern}, "MCPServer.name": {"pattern": serverNamePattern},
		"MCPServer.type":            {"enum": []string{events.MCPTypeStdio, events.MCPTypeHTTP, events.MCPTypeDocker}},
		"MCPServer.timeoutMs":       {"maximum": MaxTimeoutMs},
		"Retries.attempts":          {"maximum": MaxAttempts},
		"Retries.backoffMs":         {"maximum": events.MaxBackoff.Milliseconds()},
		"Conversation.onLoss":       {"enum": []string{events.OnLossFail, events.OnLossContinue}},
		"Loops.action":              {"enum": []string{events.LoopActionStop, events.LoopActionWarn, events.LoopActionNone}},
		"Loops.warn":                {"maximum": MaxLoopWindow},
		"Loops.stop":                {"maximum": MaxLoopWindow},
		"Loops.window":              {"maximum": MaxLoopWindow},
		"Limits.subagentDepth":      {"maximum": MaxSubagentDepth},
		"Permissions.preset":        {"enum": permission.Presets()},
		"Permissions.rules":         {"maxItems": permission.MaxRules},
		"Permissions.tools":         {"additionalProperties": jsonObject{"enum": permission.Actions()}, "maxProperties": permission.MaxTools},
		"Permissions.default":       {"enum": permission.Actions()},
		"Permissions.unattended":    {"enum": []string{events.UnattendedDeny, events.UnattendedSkip}},
		"Permissions.timeoutMs":     {"maximum": permission.MaxTimeout.Milliseconds()},
		"PermissionRule.tool":       {"maxLength": permission.MaxToolNameLength},
		"PermissionRule.command":    entries,
		"PermissionRule.path":       entries,
		"PermissionRule.host":       entries,
		"PermissionRule.then":       {"enum": permission.Actions()},
		"Dependencies.npm":          {"items": jsonObject{"type": "string", "pattern": dependency.PatternNPM}, "maxItems": dependency.MaxPackages, "uniqueItems": true},
		"Dependencies.pip":          {"items": jsonObject{"type": "string", "pattern": dependency.PatternPIP}, "maxItems": dependency.MaxPackages, "uniqueItems": true},
		"FileSpec.mode":             {"maximum": 0o777},
		"FileSpec.path":             {"minLength": 1},
		"InstanceSpec.environments": {"maxItems": MaxEnvironments},
		"Source.env":                {"minLength": 1}, "Source.file": {"minLength": 1},
	}
}

func allScopes() []events.ReferenceScope {
	return []events.ReferenceScope{events.ScopePlatform, events.ScopeOrganization, events.ScopeAccount}
}

// GenerateSchema returns the JSON Schema (draft 2020-12) of one document of a definition file. notes are the comments
// of fields, by Type.Field. Parse refuses every document that the schema refuses, and checks further rules.
func GenerateSchema(notes map[string]string) ([]byte, error) {
	g := schemaGenerator{notes: notes, rules: fieldConstraints(), used: map[string]bool{}, defs: jsonObject{}}
	var choose []any
	for _, k := range Kinds() {
		t := map[Kind]reflect.Type{
			KindAgent: reflect.TypeFor[file[events.AgentSpec]](), KindInstance: reflect.TypeFor[file[events.InstanceSpec]](), KindEnvironment: reflect.TypeFor[file[EnvironmentSpec]](),
		}[k]
		document := g.structSchema(t, "file")
		document["properties"].(jsonObject)["kind"] = jsonObject{"const": k}
		g.defs[string(k)] = document
		choose = append(choose, jsonObject{
			"if":   jsonObject{"properties": jsonObject{"kind": jsonObject{"const": k}}, "required": []string{"kind"}},
			"then": jsonObject{"$ref": "#/$defs/" + string(k)},
		})
	}
	for _, rule := range slices.Sorted(maps.Keys(g.rules)) {
		if !g.used[rule] {
			return nil, fmt.Errorf("schema: there is no field %s", rule)
		}
	}
	return json.MarshalIndent(jsonObject{
		"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A definition of Spool: an agent, an instance or an environment",
		"$comment": "Generated from pkg/definition by `make generate`; do not edit.",
		"type":     "object", "required": []string{"kind"}, "properties": jsonObject{"kind": jsonObject{"enum": Kinds()}}, "allOf": choose, "$defs": g.defs,
	}, "", "  ")
}

type schemaGenerator struct {
	notes map[string]string
	rules map[string]jsonObject
	used  map[string]bool // rules
	defs  jsonObject
}

// structSchema returns the schema of a struct; name is the name of the type in notes and rules.
func (g schemaGenerator) structSchema(t reflect.Type, name string) jsonObject {
	properties, required := jsonObject{}, []string{}
	for _, f := range structFields(t) {
		p := g.typeSchema(t.Field(f.index).Type)
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
	return jsonObject{"type": "object", "properties": properties, "required": required, "additionalProperties": false}
}

// typeSchema returns the schema of a Go type. The schema of a struct is added to the definitions once and referred to
// by name.
func (g schemaGenerator) typeSchema(t reflect.Type) jsonObject {
	switch {
	case t == referenceType:
		g.addReferenceSchema()
		return jsonObject{"anyOf": []any{jsonObject{"type": "string", "minLength": 1, "maxLength": 512}, jsonObject{"$ref": "#/$defs/Reference"}}}
	case t.Kind() == reflect.Struct:
		g.addStructSchema(t)
		return jsonObject{"$ref": "#/$defs/" + t.Name()}
	case t.Kind() == reflect.Slice:
		return jsonObject{"type": "array", "items": g.typeSchema(t.Elem())}
	case t.Kind() == reflect.Map:
		return jsonObject{"type": "object", "additionalProperties": g.typeSchema(t.Elem())}
	case t.Kind() == reflect.Bool:
		return jsonObject{"type": "boolean"}
	case t.Kind() == reflect.Uint32:
		return jsonObject{"type": "integer", "minimum": 0, "maximum": uint32(math.MaxUint32)}
	case t.Kind() == reflect.Float64:
		return jsonObject{"type": "number", "minimum": 0}
	}
	return jsonObject{"type": "string"}
}

// addReferenceSchema adds the schema of a reference that is an object, under the name Reference.
func (g schemaGenerator) addReferenceSchema() {
	if _, ok := g.defs["Reference"]; !ok {
		g.defs["Reference"] = g.structSchema(reflect.TypeFor[events.ReferenceObject](), "Reference")
	}
}

func (g schemaGenerator) addStructSchema(t reflect.Type) {
	if _, ok := g.defs[t.Name()]; !ok {
		g.defs[t.Name()] = jsonObject{} // ends the recursion for a type that contains itself
		g.defs[t.Name()] = g.structSchema(t, t.Name())
	}
}
