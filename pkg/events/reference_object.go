package events

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/truncate"
)

// ReferenceObject is the object form of a Reference, as clients write it. Kind is optional because the field that
// holds the reference implies it.
type ReferenceObject struct {
	Scope   ReferenceScope `json:"scope,omitempty"`   // "" means organization
	Org     string         `json:"org,omitempty"`     // within the scope: an organization of the tenant, or the account
	Kind    Aspect         `json:"kind,omitempty"`    // agent, instance, environment or skill: the kind of entry that the field refers to
	Slug    string         `json:"slug"`              // 1 to 64 characters: groups of a-z and 0-9 joined by single dots or hyphens
	Version string         `json:"version,omitempty"` // "" or latest, a tag, or a SHA-256 in hex
}

// CheckedReference converts the object to a Reference and checks it. field is the name of the field that holds the
// object. The error is a *ReferenceError.
func (o ReferenceObject) CheckedReference(field string) (Reference, error) {
	want := ReferenceKind(field)
	if o.Kind != "" && o.Kind != want {
		return Reference{}, &ReferenceError{"kind", fmt.Sprintf("must be %s, not %q", want, truncate.Text(string(o.Kind), 64))}
	}
	r := o.ToReference()
	return r, r.Check()
}

// ToReference converts the object to a Reference without checking it. The scope "organization" becomes the empty scope.
func (o ReferenceObject) ToReference() Reference {
	return Reference{Scope: o.Scope, Org: o.Org, Slug: o.Slug, Version: o.Version}.withoutDefaultScope()
}

// ReferenceKind returns the kind of catalogue entry to which a JSON field with the given name refers, or "" for a field
// that holds no references.
func ReferenceKind(field string) Aspect {
	switch field {
	case "agent", "agentProfileRef":
		return Agent
	case "instance":
		return Instance
	case "environments":
		return Environment
	case "skills":
		return Skill
	}
	return ""
}
