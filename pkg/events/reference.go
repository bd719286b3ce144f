package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// Scope says whose a catalogue entry is.
type Scope string

// The scopes. What is the platform's lies under PlatformTenant and is read by every tenant.
const (
	ScopePlatform     Scope = "platform"
	ScopeOrganization Scope = "organization" // the tenant's; "" means this one
	ScopeAccount      Scope = "identity_account"
)

// PlatformTenant owns what every tenant may use; only the root key writes there.
const PlatformTenant = "platform"

// Latest is the tag that every new version gets.
const Latest = "latest"

// Reference names a version of a catalogue entry. Its string form is
// [platform/|identity_account/][org/]slug[@version]; one that is read, from there or
// from JSON, has the empty scope for organization, so that references to the same are equal.
type Reference struct {
	Scope   Scope  `json:"scope,omitempty"`   // "" means organization
	Org     string `json:"org,omitempty"`     // within the scope: an organization of the tenant, or the account
	Slug    string `json:"slug"`              // 1 to 64 characters: groups of a-z and 0-9 joined by single dots or hyphens
	Version string `json:"version,omitempty"` // "" or latest, a tag, or a SHA-256 in hex
}

// ReferenceError says what is wrong with a reference, and where.
type ReferenceError struct {
	Field  string // of the reference: scope, org, slug or version; "" for the whole
	Detail string
}

func (e *ReferenceError) Error() string {
	if e.Field == "" {
		return e.Detail
	}
	return e.Field + ": " + e.Detail
}

// maxReference bounds the string form in bytes.
const maxReference = 512

// ParseReference reads the string form back.
func ParseReference(s string) (Reference, error) {
	if len(s) > maxReference {
		return Reference{}, &ReferenceError{Detail: fmt.Sprintf("a reference has at most %d bytes", maxReference)}
	}
	path, version, tagged := strings.Cut(s, "@")
	if tagged && version == "" {
		return Reference{}, &ReferenceError{"version", "nothing follows the @: leave it out for the latest version"}
	}
	r := Reference{Version: version}
	parts := strings.Split(path, "/")
	switch Scope(parts[0]) {
	case ScopePlatform, ScopeOrganization, ScopeAccount:
		if len(parts) > 1 {
			r.Scope, parts = Scope(parts[0]), parts[1:]
		}
	}
	switch len(parts) {
	case 1:
		r.Slug = parts[0]
	case 2:
		r.Org, r.Slug = parts[0], parts[1]
		if r.Org == "" {
			return Reference{}, &ReferenceError{"org", "nothing stands before the slash"}
		}
	default:
		return Reference{}, &ReferenceError{Detail: fmt.Sprintf("%q is not [scope/][org/]slug[@version]", clip(s, 64))}
	}
	r = r.plain()
	return r, r.Check()
}

// plain leaves out the scope that the empty one stands for.
func (r Reference) plain() Reference {
	if r.Scope == ScopeOrganization {
		r.Scope = ""
	}
	return r
}

// String is the form that ParseReference reads.
func (r Reference) String() string {
	var b strings.Builder
	r = r.plain()
	switch Scope(r.Org) {
	case ScopePlatform, ScopeOrganization:
		if r.Scope == "" { // an organization of this name would be read as a scope
			b.WriteString(string(ScopeOrganization) + "/")
		}
	}
	if r.Scope != "" {
		b.WriteString(string(r.Scope) + "/")
	}
	if r.Org != "" {
		b.WriteString(r.Org + "/")
	}
	b.WriteString(r.Slug)
	if r.Version != "" {
		b.WriteString("@" + r.Version)
	}
	return b.String()
}

// UnmarshalJSON takes the object, or the string form.
func (r *Reference) UnmarshalJSON(raw []byte) error {
	if bytes.HasPrefix(raw, []byte{'"'}) {
		var s string
		err := json.Unmarshal(raw, &s)
		if err == nil {
			*r, err = ParseReference(s)
		}
		return err
	}
	type object Reference // without this method
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	err := dec.Decode((*object)(r))
	*r = r.plain()
	return err
}

// Check reports a *ReferenceError unless every part is well formed.
func (r Reference) Check() error {
	switch r.Scope {
	case "", ScopeOrganization, ScopePlatform:
	case ScopeAccount:
		if r.Org == "" {
			return &ReferenceError{"org", "of scope identity_account it names the account, and must be there"}
		}
	default:
		return &ReferenceError{"scope", fmt.Sprintf("%q is none of platform, organization and identity_account", clip(string(r.Scope), 64))}
	}
	if r.Org != "" && !isSlug(r.Org) {
		return &ReferenceError{"org", fmt.Sprintf("%q is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens", clip(r.Org, 64))}
	}
	if !isSlug(r.Slug) {
		return &ReferenceError{"slug", fmt.Sprintf("%q is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens", clip(r.Slug, 64))}
	}
	if r.Version != "" && !IsTag(r.Version) && !IsDigest(r.Version) {
		return &ReferenceError{"version", fmt.Sprintf("%q is neither a tag (1 to 64 characters of a-z, 0-9, dots, hyphens and underscores) nor a SHA-256 in hex", clip(r.Version, 64))}
	}
	return nil
}

// Tenant that the entry lies under, as seen by a tenant.
func (r Reference) Tenant(own string) string {
	if r.Scope == ScopePlatform {
		return PlatformTenant
	}
	return own
}

// Subject of the entry's chain in the log.
func (r Reference) Subject(kind Aspect, tenant string) Subject {
	scope := r.Scope
	if scope == "" {
		scope = ScopeOrganization
	}
	tenant = r.Tenant(tenant)
	return Subject{Tenant: tenant, ID: CatalogueID(kind, tenant, string(scope), r.Org, r.Slug), Aspect: kind}
}

// Bare is the reference without its version: the entry itself.
func (r Reference) Bare() Reference {
	r.Version = ""
	return r.plain()
}

// IsDigest tells whether s is a SHA-256 in lower-case hex.
func IsDigest(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// maxName bounds slugs and tags in characters.
const maxName = 64

// IsTag tells whether s may name a version. What looks like a digest is none.
func IsTag(s string) bool {
	ok := len(s) > 0 && len(s) <= maxName && !IsDigest(s) && s[0] != '.' && s[0] != '-'
	for i := 0; ok && i < len(s); i++ {
		c := s[i]
		ok = c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_'
	}
	return ok
}

// isSlug is ^[a-z0-9]+([.-][a-z0-9]+)*$, as agent skills are named.
func isSlug(s string) bool {
	if s == "" || len(s) > maxName {
		return false
	}
	joint := true
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9':
			joint = false
		case (c == '.' || c == '-') && !joint:
			joint = true
		default:
			return false
		}
	}
	return !joint
}
