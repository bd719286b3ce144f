package events

import (
	"slices"
	"time"
)

// Role is what an API key may do in its tenant. Each role includes the ones below it.
type Role string

// The roles, from the least to the most.
const (
	RoleUse     Role = "use"     // sessions, executions, their events and files
	RoleOperate Role = "operate" // the catalogue, deletion of sessions, dead letters
	RoleAdmin   Role = "admin"   // API keys
)

// Roles returns all roles, from the least to the most.
func Roles() []Role { return []Role{RoleUse, RoleOperate, RoleAdmin} }

// Known reports whether r is a role.
func (r Role) Known() bool { return slices.Contains(Roles(), r) }

// Includes reports whether r may do all that other may. An unknown role includes nothing.
func (r Role) Includes(other Role) bool {
	return r.Known() && other.Known() && slices.Index(Roles(), r) >= slices.Index(Roles(), other)
}

// MaxKeyAgents is how many agents an API key may be limited to.
const MaxKeyAgents = 64

// KeyRights are the rights of an API key.
type KeyRights struct {
	Role      Role      `json:"role,omitempty"`     // use, operate, admin; empty means admin
	Agents    []string  `json:"agents,omitempty"`   // slugs of the only agents that the key may use; empty for all
	ExpiresAt time.Time `json:"expiresAt,omitzero"` // after which the key is refused, by the clock of Postgres; absent for never
}

// RoleOf returns the role, also of a key that was made before there were roles.
func (r KeyRights) RoleOf() Role {
	if r.Role == "" {
		return RoleAdmin
	}
	return r.Role
}

// AllowsAgent reports whether a key that is limited to the agents may use an agent. No agents mean no limit.
func AllowsAgent(agents []string, slug string) bool {
	return len(agents) == 0 || slices.Contains(agents, slug)
}

// Excess returns the JSON name of the first right that r has and other has not; "" if there is none.
func (r KeyRights) Excess(other KeyRights) string {
	switch {
	case !other.RoleOf().Includes(r.RoleOf()):
		return "role"
	case len(other.Agents) > 0 && (len(r.Agents) == 0 || slices.ContainsFunc(r.Agents, func(a string) bool { return !slices.Contains(other.Agents, a) })):
		return "agents"
	case !other.ExpiresAt.IsZero() && (r.ExpiresAt.IsZero() || r.ExpiresAt.After(other.ExpiresAt)):
		return "expires"
	}
	return ""
}

// KeyCreated is an API key, of which only the hash is kept.
type KeyCreated struct {
	KeyID     string    `json:"keyId"`
	Name      string    `json:"name"`
	Prefix    string    `json:"prefix"`              // the first characters, to recognise it by
	SHA256    string    `json:"sha256"`              // hex, of the whole key
	Rights    KeyRights `json:"rights,omitzero"`     // absent in events of builds without roles, where a key could do everything in its tenant
	CreatedBy string    `json:"createdBy,omitempty"` // the key that made it; absent where the root key or nobody in particular did, and in events of builds that left it to the commit's actor
}

// KeyRevoked ends an API key.
type KeyRevoked struct {
	KeyID  string `json:"keyId"`
	Reason string `json:"reason,omitempty"` // maker_revoked, expired; absent where a request asked for it
	Cause  string `json:"cause,omitempty"`  // of maker_revoked: the key whose revocation revoked this one
}

// The reasons of KeyRevoked.
const (
	KeyMakerRevoked = "maker_revoked"
	KeyExpired      = "expired"
)
