package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/truncate"
)

// ReferenceScope is the kind of the owner of a catalogue entry: the platform, the tenant or an account.
type ReferenceScope string

// The scopes. Entries of the platform are stored under PlatformTenant and can be read by every tenant.
const (
	ScopePlatform     ReferenceScope = "platform"
	ScopeOrganization ReferenceScope = "organization" // the tenant; "" means this scope
	ScopeAccount      ReferenceScope = "identity_account"
)

// PlatformTenant is the tenant of the entries that every tenant may use. Only the root key may write them.
const PlatformTenant = "platform"

// LatestTag is the tag that always names the newest version.
const LatestTag = "latest"

// Reference names a version of a catalogue entry. Its string form is
// [platform/|identity_account/][org/]slug[@version]. Parsing, from the string form or from JSON, turns the scope
// organization into "", so that equal references compare equal.
type Reference struct {
	Scope   ReferenceScope `json:"scope,omitempty"`   // "" means organization
	Org     string         `json:"org,omitempty"`     // within the scope: an organization of the tenant, or the account
	Slug    string         `json:"slug"`              // 1 to 64 characters: groups of a-z and 0-9 joined by single dots or hyphens
	Version string         `json:"version,omitempty"` // "" or latest, a tag, or a SHA-256 in hex
}

// ReferenceError is returned for a reference that is not valid.
type ReferenceError struct {
	Field  string // scope, org, slug or version; "" if the error concerns the whole reference
	Detail string
}

func (e *ReferenceError) Error() string {
	if e.Field == "" {
		return e.Detail
	}
	return e.Field + ": " + e.Detail
}

// maxReferenceBytes is the maximum size in bytes of a reference in its string form.
const maxReferenceBytes = 512

// ParseReference parses a reference in the form that Reference.String returns.
func ParseReference(s string) (Reference, error) {
	if len(s) > maxReferenceBytes {
		return Reference{}, &ReferenceError{Detail: fmt.Sprintf("a reference has at most %d bytes", maxReferenceBytes)}
	}
	path, version, tagged := strings.Cut(s, "@")
	if tagged && version == "" {
		return Reference{}, &ReferenceError{"version", "is empty: omit the @ for the latest version"}
	}
	r := Reference{Version: version}
	parts := strings.Split(path, "/")
	switch ReferenceScope(parts[0]) {
	case ScopePlatform, ScopeOrganization, ScopeAccount:
		if len(parts) > 1 {
			r.Scope, parts = ReferenceScope(parts[0]), parts[1:]
		}
	}
	switch len(parts) {
	case 1:
		r.Slug = parts[0]
	case 2:
		r.Org, r.Slug = parts[0], parts[1]
		if r.Org == "" {
			return Reference{}, &ReferenceError{"org", "is empty: name an organization before the slash, or omit the slash"}
		}
	default:
		return Reference{}, &ReferenceError{Detail: fmt.Sprintf("%q is not [scope/][org/]slug[@version]", truncate.Text(s, 64))}
	}
	r = r.withoutDefaultScope()
	return r, r.Check()
}

// withoutDefaultScope returns r with scope "" instead of organization.
func (r Reference) withoutDefaultScope() Reference {
	if r.Scope == ScopeOrganization {
		r.Scope = ""
	}
	return r
}

// String returns the form that ParseReference reads.
func (r Reference) String() string {
	var b strings.Builder
	r = r.withoutDefaultScope()
	switch ReferenceScope(r.Org) {
	case ScopePlatform, ScopeOrganization:
		if r.Scope == "" { // parsing would take an organization of this name for a scope
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

// UnmarshalJSON decodes the object form or the string form.
func (r *Reference) UnmarshalJSON(raw []byte) error {
	if bytes.HasPrefix(raw, []byte{'"'}) {
		var s string
		err := json.Unmarshal(raw, &s)
		if err == nil {
			*r, err = ParseReference(s)
		}
		return err
	}
	type object Reference // a type without this method
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	err := dec.Decode((*object)(r))
	*r = r.withoutDefaultScope()
	return err
}

// Check returns a *ReferenceError for the first part that is not well formed.
func (r Reference) Check() error {
	switch r.Scope {
	case "", ScopeOrganization, ScopePlatform:
	case ScopeAccount:
		if r.Org == "" {
			return &ReferenceError{"org", "is empty: the scope identity_account requires the name of the account"}
		}
	default:
		return &ReferenceError{"scope", fmt.Sprintf("%q is not one of platform, organization and identity_account", truncate.Text(string(r.Scope), 64))}
	}
	if r.Org != "" && !isSlug(r.Org) {
		return &ReferenceError{"org", fmt.Sprintf("%q is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens", truncate.Text(r.Org, 64))}
	}
	if !isSlug(r.Slug) {
		return &ReferenceError{"slug", fmt.Sprintf("%q is not 1 to 64 characters of a-z and 0-9, in groups joined by single dots or hyphens", truncate.Text(r.Slug, 64))}
	}
	if r.Version != "" && !IsTag(r.Version) && !IsDigest(r.Version) {
		return &ReferenceError{"version", fmt.Sprintf("%q is neither a tag (1 to 64 characters of a-z, 0-9, dots, hyphens and underscores) nor a SHA-256 in hex", truncate.Text(r.Version, 64))}
	}
	return nil
}

// OwnerTenant returns the tenant that owns the entry to which r refers: PlatformTenant, or else own, the tenant that
// uses the reference.
func (r Reference) OwnerTenant(own string) string {
	if r.Scope == ScopePlatform {
		return PlatformTenant
	}
	return own
}

// Subject returns the log subject of the catalogue entry to which r refers. tenant is the tenant that uses the
// reference.
func (r Reference) Subject(kind Aspect, tenant string) Subject {
	scope := r.Scope
	if scope == "" {
		scope = ScopeOrganization
	}
	tenant = r.OwnerTenant(tenant)
	return Subject{Tenant: tenant, ID: CatalogueID(kind, tenant, string(scope), r.Org, r.Slug), Aspect: kind}
}

// WithoutVersion returns the reference without its version. It identifies the entry itself.
func (r Reference) WithoutVersion() Reference {
	r.Version = ""
	return r.withoutDefaultScope()
}

// IsDigest reports whether s is a SHA-256 in lower-case hex.
func IsDigest(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// maxTagLength is the maximum length of slugs and tags in characters.
const maxTagLength = 64

// IsTag reports whether s is a valid tag. A digest is not a tag.
func IsTag(s string) bool {
	ok := len(s) > 0 && len(s) <= maxTagLength && !IsDigest(s) && s[0] != '.' && s[0] != '-'
	for i := 0; ok && i < len(s); i++ {
		c := s[i]
		ok = c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_'
	}
	return ok
}

// isSlug reports whether s matches ^[a-z0-9]+([.-][a-z0-9]+)*$, the form of agent skill names.
func isSlug(s string) bool {
	if s == "" || len(s) > maxTagLength {
		return false
	}
	afterSeparator := true
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9':
			afterSeparator = false
		case (c == '.' || c == '-') && !afterSeparator:
			afterSeparator = true
		default:
			return false
		}
	}
	return !afterSeparator
}
