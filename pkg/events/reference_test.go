package events_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

var digest = strings.Repeat("0a", 32)

func TestParseReference_RoundTrips(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]events.Reference{
		"o.g/a":                           {Org: "o.g", Slug: "a"},
		"a":                               {Slug: "a"},
		"a-b.c9":                          {Slug: "a-b.c9"},
		"a@latest":                        {Slug: "a", Version: "latest"},
		"a@v1.2_x":                        {Slug: "a", Version: "v1.2_x"},
		"a@" + digest:                     {Slug: "a", Version: digest},
		"org/a":                           {Org: "org", Slug: "a"},
		"platform/a":                      {Scope: events.ScopePlatform, Slug: "a"},
		"platform/org/a@v1":               {Scope: events.ScopePlatform, Org: "org", Slug: "a", Version: "v1"},
		"identity_account/acc/a":          {Scope: events.ScopeAccount, Org: "acc", Slug: "a"},
		"organization/a":                  {Slug: "a"},
		"organization/org/a":              {Org: "org", Slug: "a"},
		"organization/platform/a":         {Org: "platform", Slug: "a"},
		"organization/organization/a":     {Org: "organization", Slug: "a"},
		"platform/platform/platform":      {Scope: events.ScopePlatform, Org: "platform", Slug: "platform"},
		"platform":                        {Slug: "platform"},
		"organization@stable":             {Slug: "organization", Version: "stable"},
		strings.Repeat("a", 64):           {Slug: strings.Repeat("a", 64)},
		"a@" + strings.Repeat("0", 63):    {Slug: "a", Version: strings.Repeat("0", 63)},
		"a@_":                             {Slug: "a", Version: "_"},
		"identity_account/organization/a": {Scope: events.ScopeAccount, Org: "organization", Slug: "a"},
	} {
		got, err := events.ParseReference(in)
		if err != nil || got != want {
			t.Errorf("%s is read as %+v, %v", in, got, err)
		}
		if back, err := events.ParseReference(got.String()); err != nil || back != got {
			t.Errorf("%s prints as %s, which is read as %+v, %v", in, got, back, err)
		}
	}
}

func TestParseReference_NamesTheInvalidField(t *testing.T) {
	t.Parallel()
	for in, field := range map[string]string{
		"": "slug", "A": "slug", "a b": "slug", "a.": "slug", ".a": "slug", "-a": "slug", "a--b": "slug", "a.-b": "slug", "a_b": "slug", "é": "slug", "a\x00": "slug", "a*": "slug", "a>": "slug",
		strings.Repeat("a", 65): "slug", "org/": "slug", "platform/": "slug", "/a": "org", "A/b": "org", "a..b/c": "org", "identity_account/a": "org", "identity_account": "slug",
		"a/b/c": "", "platform/a/b/c": "", "//a": "", "a@": "version", "a@A": "version", "a@.x": "version", "a@-x": "version", "a@v@w": "version", "a@" + strings.ToUpper(digest): "version",
		"a@" + strings.Repeat("x", 65): "version", "a@v 1": "version", "@v": "slug", strings.Repeat("a", 600): "",
	} {
		got, err := events.ParseReference(in)
		var wrong *events.ReferenceError
		if !errors.As(err, &wrong) || wrong.Field != field || wrong.Detail == "" || len(err.Error()) > 400 {
			t.Errorf("%.70q is read as %+v, %v; want an error of field %q", in, got, err, field)
		}
	}
}

func TestReference_ReadsStringsAndObjects(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]events.Reference{
		`"platform/a@v1"`: {Scope: events.ScopePlatform, Slug: "a", Version: "v1"},
		`{"slug":"a"}`:    {Slug: "a"},
		`{"scope":"organization","org":"o","slug":"a","version":"v"}`: {Org: "o", Slug: "a", Version: "v"},
		`{"slug":"Not Checked"}`: {Slug: "Not Checked"}, // decoding does not check; the reader calls Check
		`null`:                   {},
	} {
		var got events.Reference
		if err := json.Unmarshal([]byte(in), &got); err != nil || got != want {
			t.Errorf("%s is read as %+v, %v", in, got, err)
		}
	}
	for _, in := range []string{`""`, `"A"`, `{"slug":"a","kind":"agent"}`, `{"slug":1}`, `7`, `[]`, `"a`, `true`} {
		var got events.Reference
		if err := json.Unmarshal([]byte(in), &got); err == nil {
			t.Errorf("%s is read as %+v", in, got)
		}
	}
	b, err := json.Marshal(events.Reference{Scope: events.ScopePlatform, Slug: "a"})
	if err != nil || string(b) != `{"scope":"platform","slug":"a"}` {
		t.Errorf("written as %s, %v", b, err)
	}
}

func TestReferenceCheck_RefusesInvalidReferences(t *testing.T) {
	t.Parallel()
	for field, r := range map[string]events.Reference{
		"scope": {Scope: "world", Slug: "a"}, "org": {Scope: events.ScopeAccount, Slug: "a"}, "slug": {Org: "o"}, "version": {Slug: "a", Version: "V"},
	} {
		var wrong *events.ReferenceError
		if err := r.Check(); !errors.As(err, &wrong) || wrong.Field != field {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func TestReferenceSubject_IdentifiesTheEntry(t *testing.T) {
	t.Parallel()
	plain := events.Reference{Slug: "a"}
	of := func(r events.Reference) events.Subject { return r.Subject(events.Agent, "acme") }
	for name, r := range map[string]events.Reference{
		"with its scope": {Scope: events.ScopeOrganization, Slug: "a"}, "with a version": {Slug: "a", Version: digest},
	} {
		if of(r) != of(plain) || r.WithoutVersion() != plain {
			t.Errorf("%s another entry: %v", name, of(r))
		}
	}
	seen := map[string]bool{of(plain).ID: true}
	for _, r := range []events.Reference{
		{Org: "a", Slug: "a"}, {Scope: events.ScopePlatform, Slug: "a"}, {Scope: events.ScopeAccount, Org: "a", Slug: "a"}, {Slug: "b"}, {Org: "platform", Slug: "a"},
	} {
		s := of(r)
		if seen[s.ID] {
			t.Errorf("%s has the id of another", r)
		}
		seen[s.ID] = true
		if want := r.OwnerTenant("acme"); s.Tenant != want || (r.Scope == events.ScopePlatform) != (want == events.PlatformTenant) {
			t.Errorf("the subject of %s has the tenant %s", r, s.Tenant)
		}
	}
	if plain.Subject(events.Skill, "acme").ID == of(plain).ID || of(events.Reference{Scope: events.ScopePlatform, Slug: "a"}) != (events.Reference{Scope: events.ScopePlatform, Slug: "a"}).Subject(events.Agent, "other") {
		t.Error("the subject does not depend on kind and tenant as expected")
	}
}

// FuzzParseReference tests that an accepted reference prints to a text that is read as the same reference, is well
// formed, and contains nothing that could break a subject.
func FuzzParseReference(f *testing.F) {
	for _, s := range []string{"", "a", "platform/a", "organization/platform/a", "identity_account/x/a@v1", "o/a@" + digest, "a@latest", "a/b/c/d", "*", "a.>", "é@\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := events.ParseReference(s)
		if err != nil {
			var wrong *events.ReferenceError
			if !errors.As(err, &wrong) {
				t.Fatalf("%q: the error is a %T", s, err)
			}
			return
		}
		if err := r.Check(); err != nil {
			t.Fatalf("%q is read as %+v, which is not well formed: %v", s, r, err)
		}
		if back, err := events.ParseReference(r.String()); err != nil || back != r {
			t.Fatalf("%q prints as %s, which is read as %+v, %v", s, r, back, err)
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var back events.Reference
		if err := json.Unmarshal(b, &back); err != nil || back != r {
			t.Fatalf("%q is written as %s, which is read as %+v, %v", s, b, back, err)
		}
		subject := r.Subject(events.Agent, "acme")
		if err := subject.Check(); err != nil {
			t.Fatal(err)
		}
		if got, err := events.ParseSubject(subject.String()); err != nil || got != subject {
			t.Fatalf("%q: subject %s is read as %+v, %v", s, subject, got, err)
		}
		for _, token := range []string{string(r.Scope), r.Org, r.Slug, r.Version} {
			if strings.ContainsAny(token, " \t\r\n\x00*>/@") {
				t.Fatalf("%q: part %q", s, token)
			}
		}
	})
}
