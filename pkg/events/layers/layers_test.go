package layers_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
)

func env(slug, version string, variables map[string]events.Variable) layers.Environment {
	return layers.Environment{Ref: events.Reference{Slug: slug, Version: version}, Spec: events.EnvironmentSpec{Variables: variables}}
}

// codes returns the codes of all joined errors.
func codes(err error) string {
	var out []string
	var walk func(error)
	walk = func(err error) {
		if list, ok := err.(interface{ Unwrap() []error }); ok {
			for _, e := range list.Unwrap() {
				walk(e)
			}
			return
		}
		var e *layers.VariableError
		if errors.As(err, &e) {
			out = append(out, e.Code+" "+e.Name)
		} else if err != nil {
			out = append(out, err.Error())
		}
	}
	walk(err)
	return strings.Join(out, "; ")
}

func lines(list []events.Provenance) string {
	var out []string
	for _, p := range list {
		s := p.Name + " from " + p.From + ": " + p.Value
		if p.Secret {
			s = p.Name + " from " + p.From + ": secret " + p.Sealed + p.Value
		}
		out = append(out, s)
	}
	return strings.Join(out, "\n")
}

func TestMergeVariables_AppliesTheOrderOfLayers(t *testing.T) {
	t.Parallel()
	type declared = map[string]events.Declaration
	type variables = map[string]events.Variable
	type environments = []layers.Environment
	for name, c := range map[string]struct {
		agent declared
		envs  environments
		run   variables
		want  string
		codes string
	}{
		"nothing":                   {nil, nil, nil, "", ""},
		"agent alone":               {declared{"A": {Value: "1"}, "B": {}}, nil, nil, "A from agent: 1\nB from agent: ", ""},
		"declared and not required": {declared{"T": {Secret: true}}, nil, nil, "", ""},
		"environment over agent":    {declared{"A": {Value: "1"}}, environments{env("e", "x", variables{"A": {Value: "2"}})}, nil, "A from e@x: 2", ""},
		"the later one wins":        {nil, environments{env("e", "x", variables{"A": {Value: "1"}, "B": {Value: "1"}}), env("f", "y", variables{"A": {Value: "2"}})}, nil, "A from f@y: 2\nB from e@x: 1", ""},
		"run over all":              {declared{"A": {Value: "1"}}, environments{env("e", "x", variables{"A": {Value: "2"}})}, variables{"A": {Value: "3"}}, "A from run: 3", ""},
		"the winner says secret":    {nil, environments{env("e", "x", variables{"A": {Value: "1"}, "B": {Secret: true, Sealed: "k"}})}, variables{"A": {Secret: true, Sealed: "s"}, "B": {Value: "2"}}, "A from run: secret s\nB from run: 2", ""},
		"required and given":        {declared{"T": {Required: true, Secret: true}}, environments{env("e", "x", variables{"T": {Secret: true, Sealed: "k"}})}, nil, "T from e@x: secret k", ""},
		"required by the run":       {declared{"T": {Required: true}}, nil, variables{"T": {Value: ""}}, "T from run: ", ""},
		"required with a value":     {declared{"T": {Required: true, Value: "v"}}, nil, nil, "T from agent: v", ""},
		"missing":                   {declared{"T": {Required: true}, "S": {Required: true, Secret: true}, "U": {}}, nil, nil, "U from agent: ", "ENVIRONMENT_MISSING S; ENVIRONMENT_MISSING T"},
		"two versions":              {nil, environments{env("e", "x", variables{"A": {}}), env("f", "x", nil), env("e", "y", nil)}, nil, "A from e@x: ", "ENVIRONMENT_CONFLICT e"},
		"one version twice":         {nil, environments{env("e", "x", variables{"A": {Value: "1"}}), env("f", "x", variables{"A": {Value: "2"}}), env("e", "x", variables{"A": {Value: "1"}})}, nil, "A from e@x: 1", ""},
		"scopes in two ways": {nil, environments{{Ref: events.Reference{Scope: events.ScopeOrganization, Slug: "e", Version: "x"}}, {Ref: events.Reference{Slug: "e", Version: "y"}}}, nil, "",
			"ENVIRONMENT_CONFLICT e"},
		"reserved": {declared{"PATH": {Value: "x"}}, environments{env("e", "x", variables{"SPOOL_X": {}, "ok": {}})}, variables{"HOME": {}}, "ok from e@x: ",
			"ENVIRONMENT_RESERVED PATH; ENVIRONMENT_RESERVED SPOOL_X; ENVIRONMENT_RESERVED HOME"},
		"no name": {declared{"A-B": {Value: "x"}}, nil, variables{"": {}, "1A": {}}, "", "ENVIRONMENT_CONFLICT A-B; ENVIRONMENT_CONFLICT ; ENVIRONMENT_CONFLICT 1A"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := layers.MergeVariables(c.agent, c.envs, c.run)
			if lines(got) != c.want || codes(err) != c.codes {
				t.Errorf("merged to\n%s\n%s\nwant\n%s\n%s", lines(got), codes(err), c.want, c.codes)
			}
		})
	}
}

func TestCheckVariableName_RefusesInvalidNames(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"A", "_", "a1_", "path", "SPOOL", "SPOOLX", "HOMER", strings.Repeat("A", 128)} {
		if err := layers.CheckVariableName(ok); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "1", "A B", "A=B", "A\x00", "É", "A-B", strings.Repeat("A", 129), "PATH", "HOME", "LD_PRELOAD", "https_proxy", "ANTHROPIC_API_KEY", "SPOOL_", "SPOOL_KEY"} {
		var wrong *layers.VariableError
		if err := layers.CheckVariableName(bad); !errors.As(err, &wrong) || wrong.Name != bad {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestExpandPlaceholders_ReplacesPlaceholders(t *testing.T) {
	t.Parallel()
	value := func(name string) (string, bool) {
		v, ok := map[string]string{"A": "1", "B": "${A}$", "EMPTY": ""}[name]
		return v, ok
	}
	for in, c := range map[string]struct{ want, codes, open string }{
		"":                {"", "", ""},
		"plain":           {"plain", "", ""},
		"${A}":            {"1", "", ""},
		"x${A}${A}y":      {"x11y", "", ""},
		"${B}":            {"${A}$", "", ""}, // a value is not expanded again
		"${EMPTY}":        {"", "", ""},
		"$$":              {"$", "", ""},
		"$${A}":           {"${A}", "", ""},
		"$$${A}":          {"$1", "", ""},
		"$":               {"$", "", ""},
		"$A":              {"$A", "", ""},
		"a$ b":            {"a$ b", "", ""},
		"${A":             {"${A", "", "open"},
		"${":              {"${", "", "open"},
		"${A${A}":         {"", "ENVIRONMENT_MISSING A${A", "ENVIRONMENT_CONFLICT A${A"},
		"${}":             {"", "ENVIRONMENT_MISSING ", "ENVIRONMENT_CONFLICT "},
		"${NO}-${A}-${X}": {"-1-", "ENVIRONMENT_MISSING NO; ENVIRONMENT_MISSING X", ""},
		"${HOME}":         {"", "ENVIRONMENT_MISSING HOME", "ENVIRONMENT_RESERVED HOME"},
		"}${A}}":          {"}1}", "", ""},
		"é${A}\x00":       {"é1\x00", "", ""},
	} {
		got, err := layers.ExpandPlaceholders(in, value)
		if got != c.want || codes(err) != c.codes {
			t.Errorf("%q becomes %q, %s", in, got, codes(err))
		}
		check := codes(layers.CheckPlaceholders(in))
		if c.open == "open" && !strings.Contains(check, "is not closed") || c.open != "open" && check != c.open {
			t.Errorf("%q is checked with %q", in, check)
		}
	}
	if got := layers.PlaceholderNames("${B}$$${A} ${B}"); strings.Join(got, " ") != "B A B" {
		t.Errorf("placeholders are %v", got)
	}
}

func FuzzExpand(f *testing.F) {
	for _, s := range []string{"", "$", "$$", "${A}", "${A", "$${A}", "$$${A}}", "x${A}y${B}$", "${${A}}", "\xff${\xff}"} {
		f.Add(s, "v")
	}
	f.Fuzz(func(t *testing.T, s, value string) {
		names := layers.PlaceholderNames(s)
		var asked []string
		got, err := layers.ExpandPlaceholders(s, func(name string) (string, bool) { asked = append(asked, name); return value, true })
		if err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		if strings.Join(asked, "\n") != strings.Join(names, "\n") {
			t.Fatalf("%q: asked for %q, placeholders are %q", s, asked, names)
		}
		if want := len(s) - strings.Count(s, "$"); len(names) == 0 && len(got) < want || len(got) < len(names)*len(value) {
			t.Fatalf("%q becomes %q", s, got)
		}
		// A text in which every dollar sign is doubled expands to itself.
		if same, err := layers.ExpandPlaceholders(strings.ReplaceAll(s, "$", "$$"), nil); err != nil || same != s {
			t.Fatalf("%q, with its dollar signs doubled, becomes %q, %v", s, same, err)
		}
		if len(names) == 0 && !strings.Contains(s, "$$") && got != s {
			t.Fatalf("%q has no placeholder and becomes %q", s, got)
		}
		_, err = layers.ExpandPlaceholders(s, func(string) (string, bool) { return "", false })
		if (err == nil) != (len(names) == 0) {
			t.Fatalf("%q: without values the error is %v", s, err)
		}
		if layers.CheckPlaceholders(s) == nil {
			for _, n := range names {
				if err := layers.CheckVariableName(n); err != nil {
					t.Fatalf("%q was accepted: %v", s, err)
				}
			}
			if strings.HasSuffix(s, "${") && !strings.HasSuffix(s, "$${") {
				t.Fatalf("%q was accepted", s)
			}
		}
	})
}
