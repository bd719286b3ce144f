package wirejson

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

func TestUnmarshalValue_NamesTheInvalidField(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"mcpServers":[{"name":"a"},{"ulr":"x"}]}`: "spec.mcpServers[1].ulr: unknown field; must be one of name, type, image, command, env, url, headers, timeoutMs, tools",
		`{"mcpServers":[{"headers":{"A":1}}]}`:      "spec.mcpServers[0].headers.A: must be a string, not a number",
		`{"limits":{"turns":-1}}`:                   "spec.limits.turns: must be a whole number from 0 to 4294967295, not -1",
		`{"limits":{"budgetUsd":1e999}}`:            "spec.limits.budgetUsd: must be a number, not 1e999",
		`{"limits":{"budgetUsd":"1"}}`:              "spec.limits.budgetUsd: must be a number, not a string",
		`{"skills":["a/b/c/d"]}`:                    `spec.skills[0]: "a/b/c/d" is not [scope/][org/]slug[@version]`,
		`{"skills":["A"]}`:                          `spec.skills[0]: slug: "A" is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens`,
		`{"skills":[{"slug":"a","scope":"mine"}]}`:  `spec.skills[0].scope: "mine" is not one of platform, organization and identity_account`,
		`{"skills":[{"slug":"a","vers":"1"}]}`:      "spec.skills[0].vers: unknown field; must be one of scope, org, kind, slug, version",
		`{"skills":[{"slug":"a","kind":"agent"}]}`:  `spec.skills[0].kind: must be skill, not "agent"`,
		`{"skills":[null]}`:                         "spec.skills[0]: must not be null",
		`{"skills":[7]}`:                            "spec.skills[0]: must be an object, not 7",
		`{"skills":"a"}`:                            "spec.skills: must be a list, not a string",
		`{"environment":{"A":{"secret":"yes"}}}`:    "spec.environment.A.secret: must be true or false, not a string",
		`{"environment":{"A":{},"A":{}}}`:           "spec.environment.A: is set twice",
		`{"name":"a","name":"b"}`:                   "spec.name: is set twice",
		`["x"]`:                                     "spec: must be an object, not a list",
		`{"name":"a"`:                               "spec: not valid JSON",
		``:                                          "spec: not valid JSON",
		"{\"name\":\"\xff\"}":                       "spec: the text is not valid UTF-8",
		`{"name":"\ud800"}`:                         `spec.name: the text holds half of a surrogate pair (\ud800 to \udfff)`,
		`{"tools":` + strings.Repeat("[", 600) + "1" + strings.Repeat("]", 600) + "}": "spec.tools: nested deeper than 512 levels",
	} {
		err := UnmarshalValue([]byte(body), "spec", &events.AgentSpec{})
		if err == nil || err.Error() != want {
			t.Errorf("%s: got %v\nwant %s", body, err, want)
		}
	}
}

// TestUnmarshalValue_AcceptsEveryField tests that every field of a definition survives a round trip, with references in
// both forms.
func TestUnmarshalValue_AcceptsEveryField(t *testing.T) {
	t.Parallel()
	for _, zero := range []any{events.AgentSpec{}, events.InstanceSpec{}, events.EnvironmentSpec{}} {
		want := reflect.New(reflect.TypeOf(zero))
		fillGo(want.Elem())
		b, err := json.Marshal(want.Interface())
		if err != nil {
			t.Fatal(err)
		}
		got := reflect.New(reflect.TypeOf(zero))
		if err := UnmarshalValue(b, "spec", got.Interface()); err != nil || !reflect.DeepEqual(got.Interface(), want.Interface()) {
			t.Errorf("%T: got %+v, %v\nwant %+v", zero, got.Elem(), err, want.Elem())
		}
	}
	var s events.InstanceSpec
	if err := UnmarshalValue([]byte(` {"description":null,"agent":{"scope":"organization","org":"team","kind":"agent","slug":"a","version":"stable"},"environments":["platform/e",{"slug":"f"}]} `), "spec", &s); err != nil {
		t.Fatal(err)
	}
	if want := (events.InstanceSpec{Agent: events.Reference{Org: "team", Slug: "a", Version: "stable"},
		Environments: []events.Reference{{Scope: events.ScopePlatform, Slug: "e"}, {Slug: "f"}}}); !reflect.DeepEqual(s, want) {
		t.Errorf("got %+v", s)
	}
}

// fillGo sets every field of a definition.
func fillGo(v reflect.Value) {
	if v.Type() == reflect.TypeFor[events.Reference]() {
		v.Set(reflect.ValueOf(events.Reference{Scope: events.ScopeAccount, Org: "o", Slug: "s", Version: "v"}))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fillGo(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillGo(v.Index(0))
	case reflect.Map:
		elem := reflect.New(v.Type().Elem()).Elem()
		fillGo(elem)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("K"), elem)
	case reflect.String:
		v.SetString("text <&> é")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint32:
		v.SetUint(7)
	case reflect.Float64:
		v.SetFloat(0.25)
	}
}
