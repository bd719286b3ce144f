package events

import (
	"slices"
	"time"
)

// KeyRole is a set of operations that an API key may perform in its tenant. Each role includes the operations of the
// lower roles.
type KeyRole string

// The roles, from the least to the most powerful.
const (
	RoleUse     KeyRole = "use"     // sessions, executions, their events and files
	RoleOperate KeyRole = "operate" // the catalogue, deletion of sessions, dead letters
	RoleAdmin   KeyRole = "admin"   // API keys
)

// KeyRoles returns all roles, from the least to the most powerful.
func KeyRoles() []KeyRole { return []KeyRole{RoleUse, RoleOperate, RoleAdmin} }

// IsKnown reports whether r is one of KeyRoles.
func (r KeyRole) IsKnown() bool { return slices.Contains(KeyRoles(), r) }

// Includes reports whether r permits everything that other permits. An unknown role includes nothing.
func (r KeyRole) Includes(other KeyRole) bool {
	return r.IsKnown() && other.IsKnown() && slices.Index(KeyRoles(), r) >= slices.Index(KeyRoles(), other)
}

// MaxKeyAgents is the maximum number of agents that an API key may be restricted to.
const MaxKeyAgents = 64

// KeyRights are the rights of an API key: its role, the agents that it may use, and when it expires.
type KeyRights struct {
	Role      KeyRole   `json:"role,omitempty"`     // use, operate, admin; empty means admin
	Agents    []string  `json:"agents,omitempty"`   // slugs of the only agents that the key may use; empty means all
	ExpiresAt time.Time `json:"expiresAt,omitzero"` // the key is rejected from this time on, by the clock of Postgres; zero means it never expires
}

// EffectiveRole returns the role of the key. It is RoleAdmin for keys of earlier builds, which have no role.
func (r KeyRights) EffectiveRole() KeyRole {
	if r.Role == "" {
		return RoleAdmin
	}
	return r.Role
}

// AllowsAgent reports whether a key that is restricted to agents may use the agent slug. An empty list means no
// restriction.
func AllowsAgent(agents []string, slug string) bool {
	return len(agents) == 0 || slices.Contains(agents, slug)
}

// FirstExcess returns the JSON name of the first right of r that other does not have, or "" if other has all of them.
func (r KeyRights) FirstExcess(other KeyRights) string {
	switch {
	case !other.EffectiveRole().Includes(r.EffectiveRole()):
		return "role"
	case len(other.Agents) > 0 && (len(r.Agents) == 0 || slices.ContainsFunc(r.Agents, func(a string) bool { return !slices.Contains(other.Agents, a) })):
		return "agents"
	case !other.ExpiresAt.IsZero() && (r.ExpiresAt.IsZero() || r.ExpiresAt.After(other.ExpiresAt)):
		return "expires"
	}
	return ""
}

// KeyCreated records an API key, of which only the hash is stored.
type KeyCreated struct {
	KeyID     string    `json:"keyId"`
	Name      string    `json:"name"`
	Prefix    string    `json:"prefix"`              // the first characters of the key, for display
	SHA256    string    `json:"sha256"`              // hex, of the whole key
	Rights    KeyRights `json:"rights,omitzero"`     // absent in events of builds without roles; such a key has all rights in its tenant
	CreatedBy string    `json:"createdBy,omitempty"` // id of the key that created this one; absent if the root key or an unauthenticated client did, and in events of builds that recorded it only as the commit's actor
}

// KeyRevoked revokes an API key.
type KeyRevoked struct {
	KeyID  string `json:"keyId"`
	Reason string `json:"reason,omitempty"` // maker_revoked, expired; absent if a client requested it
	Cause  string `json:"cause,omitempty"`  // for maker_revoked: the key whose revocation revoked this one
}

// The reasons of KeyRevoked.
const (
	KeyRevokedWithMaker = "maker_revoked"
	KeyRevokedExpired   = "expired"
)
