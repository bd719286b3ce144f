package auth

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// DefaultTenant is the tenant of requests without a key, and of keys that the root key creates without naming a
// tenant.
const DefaultTenant = "default"

// NoTenant stands for the tenant of requests that need no key, against whose limits all of them count. No tenant has this
// name.
const NoTenant = "-"

// MinRootKeyLength is the shortest length of a root key, in characters.
const MinRootKeyLength = 32

// Principal is the authenticated caller of a request.
type Principal struct {
	Tenant string
	KeyID  string // id of the API key, RootKeyID, or "" for the local key and if authentication is off
	Admin  bool   // whether it may manage keys, limits and budgets of any tenant

	Role   events.KeyRole // role of the API key
	Agents []string       // slugs of the only agents that the API key may use; empty means all

	// SessionEnd is when the caller's session ends at the latest; zero for a caller without a session.
	SessionEnd time.Time
	// SessionHash is the hash of the caller's session credential or cookie; "" for a caller without a session.
	SessionHash string

	User    string // end user of the application, as stated in the request; "" for none
	Address string // IP address of the client
}

// RootKeyID is the KeyID of the Principal of a request with the root key.
const RootKeyID = "root"

// Actor returns the principal in the form in which events of the log have their author.
func (p Principal) Actor() events.Actor {
	if p.KeyID == "" {
		return events.Actor{Kind: "user", ID: "local", User: p.User, Address: p.Address}
	}
	return events.Actor{Kind: "key", ID: p.KeyID, Key: p.KeyID, User: p.User, Address: p.Address}
}

// KeyStore reads API keys from the read models.
type KeyStore interface {
	KeyByHash(ctx context.Context, sha256 string) (reads.APIKey, bool, error)
	KeyRefusals(ctx context.Context, ids []string) (map[string]string, error)
}

// Grant holds the rights of a code or a session credential, which are those of the key that created the code.
type Grant struct {
	Tenant string         `json:"tenant"`
	KeyID  string         `json:"keyId"` // "" for the local key
	Admin  bool           `json:"admin,omitempty"`
	Role   events.KeyRole `json:"role"`
	Agents []string       `json:"agents,omitempty"`
	// LocalKey is the SHA-256 of the local key at the time of the grant, if KeyID is "".
	LocalKey string    `json:"localKey,omitempty"`
	Expires  time.Time `json:"expires,omitzero"` // when the session ends unless it is renewed
	// Until is when a session cookie ends at the latest. It is zero for a session credential, which is not renewed.
	Until time.Time `json:"until,omitzero"`
}

// SessionStore reads sessions.
type SessionStore interface {
	// Session returns the grant of the session credential or cookie with a hash, and renews a cookie's session. ok is
	// false if there is none, or it has expired.
	Session(ctx context.Context, hash string) (g Grant, ok bool, err error)
}

// Config configures an Authenticator. Keys, Sessions and Now are required.
type Config struct {
	Required bool   // requests without a key are refused
	RootKey  string // "" for none
	// LocalKey is a key in the form of NewKey whose holder may do what a caller without a key may do if Required is not
	// set; "" for none.
	LocalKey string
	Keys     KeyStore
	Sessions SessionStore
	Now      func() time.Time
}

// Authenticator authenticates requests. It has no cache: a revoked key is refused as soon as the read models contain
// the revocation.
type Authenticator struct {
	cfg       Config
	rootHash  string
	localHash string
}

// New validates the config and returns an Authenticator.
func New(cfg Config) (*Authenticator, error) {
	a := &Authenticator{cfg: cfg}
	if cfg.Keys == nil || cfg.Sessions == nil || cfg.Now == nil {
		return nil, errors.New("auth: Keys, Sessions and Now are required")
	}
	if cfg.RootKey != "" {
		if len(cfg.RootKey) < MinRootKeyLength {
			return nil, fmt.Errorf("root-key (SPOOL_ROOT_KEY) has %d characters; it needs %d or more random characters", len(cfg.RootKey), MinRootKeyLength)
		}
		a.rootHash = HashKey(cfg.RootKey)
	}
	if cfg.LocalKey != "" {
		if !IsWellFormedKey(cfg.LocalKey) {
			return nil, errors.New("the local key is mistyped or not a Spool key")
		}
		a.localHash = HashKey(cfg.LocalKey)
	}
	return a, nil
}

// Authenticate returns the principal for the value of the header Authorization. A key is checked even if no key is
// required.
func (a *Authenticator) Authenticate(ctx context.Context, header string) (Principal, error) {
	p, hash, session, err := a.parseHeader(header)
	switch {
	case err != nil || hash == "":
		return p, err
	case session:
		return a.authenticateSession(ctx, hash)
	}
	found, ok, err := a.cfg.Keys.KeyByHash(ctx, hash)
	if err != nil {
		return Principal{}, err
	}
	if !ok {
		return Principal{}, unauthenticatedProblem("the API key is not valid: it was revoked, has expired, or was not created on this server")
	}
	return Principal{Tenant: found.Tenant, KeyID: found.ID, Role: found.Role, Agents: found.Agents}, nil
}

// AuthenticateCookie returns the principal for the value of a session cookie.
func (a *Authenticator) AuthenticateCookie(ctx context.Context, value string) (Principal, error) {
	if !IsWellFormedToken(CookiePrefix, value) {
		return Principal{}, problem.New(problem.Unauthenticated, "Cookie", "the session cookie is malformed; sign in again")
	}
	return a.authenticateSession(ctx, HashKey(value))
}

// RequiresKey reports whether requests without a key or a session are refused.
func (a *Authenticator) RequiresKey() bool { return a.cfg.Required }

// GrantOf returns what a code that the principal creates, or a session that it begins, grants. It returns FORBIDDEN for a
// principal with a session, whose rights could otherwise outlive it.
func (a *Authenticator) GrantOf(p Principal) (Grant, error) {
	if !p.SessionEnd.IsZero() {
		return Grant{}, problem.New(problem.Forbidden, "Authorization", "a session cannot create codes or other sessions; use an API key")
	}
	g := Grant{Tenant: p.Tenant, KeyID: p.KeyID, Admin: p.Admin, Role: p.Role, Agents: p.Agents}
	if p.KeyID == "" {
		g.LocalKey = a.localHash
	}
	return g, nil
}

// authenticateSession returns the principal of the session credential or cookie with a hash. The key with which the
// sign-in began must still be accepted.
func (a *Authenticator) authenticateSession(ctx context.Context, hash string) (Principal, error) {
	g, ok, err := a.cfg.Sessions.Session(ctx, hash)
	switch {
	case err != nil:
		return Principal{}, err
	case !ok:
		return Principal{}, unauthenticatedProblem("the session is not valid or has ended; sign in again")
	}
	if err := a.CheckGrant(ctx, g); err != nil {
		return Principal{}, err
	}
	end := g.Expires
	if !g.Until.IsZero() {
		end = g.Until
	}
	return Principal{Tenant: g.Tenant, KeyID: g.KeyID, Admin: g.Admin, Role: g.Role, Agents: g.Agents, SessionEnd: end, SessionHash: hash}, nil
}

// CheckGrant returns UNAUTHENTICATED if the key from which a grant comes is no longer accepted.
func (a *Authenticator) CheckGrant(ctx context.Context, g Grant) error {
	accepted := isHash(g.LocalKey, a.localHash) || a.localHash == "" && !a.cfg.Required
	if g.KeyID != "" {
		refusals, err := a.cfg.Keys.KeyRefusals(ctx, []string{g.KeyID})
		if err != nil {
			return err
		}
		why, known := refusals[g.KeyID]
		accepted = known && why == ""
	}
	if !accepted {
		return unauthenticatedProblem("the key with which the sign-in began is no longer valid; sign in again")
	}
	return nil
}

// CheckHeader returns an error for a value of the header Authorization that cannot be valid, without a look-up of the
// key. It does not block.
func (a *Authenticator) CheckHeader(header string) error {
	_, _, _, err := a.parseHeader(header)
	return err
}

// parseHeader parses a value of the header Authorization. It returns the principal if no look-up of a key is needed,
// or else the hash of the key, or of the session credential, to look up.
func (a *Authenticator) parseHeader(header string) (p Principal, hash string, session bool, err error) {
	if header == "" {
		if a.cfg.Required {
			return p, "", false, unauthenticatedProblem("send an API key in header Authorization: Bearer " + KeyPrefix + "…; for spool up, name its data folder with --data, or send the key that spool keys local prints")
		}
		return localPrincipal(), "", false, nil
	}
	scheme, key, _ := strings.Cut(header, " ")
	key = strings.TrimSpace(key)
	if !strings.EqualFold(scheme, "Bearer") || key == "" {
		return p, "", false, unauthenticatedProblem("header Authorization must be Bearer and an API key")
	}
	hash = HashKey(key)
	if isHash(hash, a.rootHash) {
		return Principal{Tenant: DefaultTenant, KeyID: RootKeyID, Admin: true, Role: events.RoleAdmin}, "", false, nil
	}
	if isHash(hash, a.localHash) {
		return localPrincipal(), "", false, nil
	}
	session = IsWellFormedToken(SessionPrefix, key)
	if !session && !IsWellFormedKey(key) {
		return p, "", false, unauthenticatedProblem("the API key is not valid: it is mistyped or not a Spool key")
	}
	return p, hash, session, nil
}

// localPrincipal returns the principal of the user who runs the gateway on the machine: a caller with the local key, or
// without a key if none is required.
func localPrincipal() Principal {
	return Principal{Tenant: DefaultTenant, Admin: true, Role: events.RoleAdmin}
}

// isHash reports in constant time whether hash is want. It returns false if want is "".
func isHash(hash, want string) bool {
	return want != "" && subtle.ConstantTimeCompare([]byte(hash), []byte(want)) == 1
}

// unauthenticatedProblem returns the problem UNAUTHENTICATED with a detail.
func unauthenticatedProblem(detail string) error {
	return problem.New(problem.Unauthenticated, "Authorization", detail)
}

// principalKey is the key under which a context holds the Principal of its request.
type principalKey struct{}

// With returns a context that carries the principal of a request. manages reports whether the request manages API
// keys, limits or budgets, which is all that the root key may do: for any other request of the root key With returns
// FORBIDDEN. All protocols (REST, SSE, WebSocket, gRPC) call With before the handler.
func With(ctx context.Context, p Principal, manages bool) (context.Context, error) {
	if p.KeyID == RootKeyID && !manages {
		return ctx, problem.New(problem.Forbidden, "Authorization", "the root key can only manage API keys, limits and budgets: create a key with it (spool keys create NAME, or POST /api/keys) and send that key")
	}
	return context.WithValue(ctx, principalKey{}, p), nil
}

// From returns the principal of a request, or UNAUTHENTICATED if With was not called.
func From(ctx context.Context) (Principal, error) {
	p, ok := ctx.Value(principalKey{}).(Principal)
	if !ok {
		return Principal{}, unauthenticatedProblem("the request was not authenticated")
	}
	return p, nil
}
