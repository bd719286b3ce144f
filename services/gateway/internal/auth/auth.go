package auth

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// DefaultTenant is the tenant of requests without a key, and of keys that the root key creates without naming a
// tenant.
const DefaultTenant = "default"

// MinRootKey is the shortest length of a root key, in characters.
const MinRootKey = 32

// Principal is the authenticated caller of a request.
type Principal struct {
	Tenant string
	KeyID  string // id of the API key, RootKeyID, or "" if authentication is off
	Admin  bool   // whether it may manage keys, limits and budgets of any tenant

	Role   events.KeyRole // role of the API key
	Agents []string       // slugs of the only agents that the API key may use; empty means all

	User    string // end user of the application, as stated in the request; "" for none
	Address string // IP address of the client
}

// RootKeyID is the KeyID of the Principal of a request with the root key.
const RootKeyID = "root"

// Actor returns the principal in the form that the log stores.
func (p Principal) Actor() events.Actor {
	if p.KeyID == "" {
		return events.Actor{Kind: "user", ID: "local", User: p.User, Address: p.Address}
	}
	return events.Actor{Kind: "key", ID: p.KeyID, Key: p.KeyID, User: p.User, Address: p.Address}
}

// Keys reads API keys from the read models.
type Keys interface {
	KeyByHash(ctx context.Context, sha256 string) (reads.Key, bool, error)
	KeyRefusals(ctx context.Context, ids []string) (map[string]string, error)
}

// Config configures an Authenticator.
type Config struct {
	Required bool   // requests without a key are refused
	RootKey  string // "" for none
	Keys     Keys
}

// Authenticator authenticates requests. It has no cache: a revoked key is refused as soon as the read models contain
// the revocation.
type Authenticator struct {
	cfg      Config
	rootHash string
}

// New validates the config and returns an Authenticator.
func New(cfg Config) (*Authenticator, error) {
	a := &Authenticator{cfg: cfg}
	if cfg.Keys == nil {
		return nil, errors.New("auth: Keys is required")
	}
	if cfg.RootKey != "" {
		if len(cfg.RootKey) < MinRootKey {
			return nil, fmt.Errorf("root-key (SPOOL_ROOT_KEY) has %d characters; it needs %d or more random characters", len(cfg.RootKey), MinRootKey)
		}
		a.rootHash = Hash(cfg.RootKey)
	}
	return a, nil
}

// Authenticate returns the principal for the value of the header Authorization. A key is checked even if no key is
// required.
func (a *Authenticator) Authenticate(ctx context.Context, header string) (Principal, error) {
	p, hash, err := a.inspect(header)
	if err != nil || hash == "" {
		return p, err
	}
	found, ok, err := a.cfg.Keys.KeyByHash(ctx, hash)
	if err != nil {
		return Principal{}, err
	}
	if !ok {
		return Principal{}, unauthenticated("the API key is not valid: it was revoked, has expired, or was not created on this server")
	}
	return Principal{Tenant: found.Tenant, KeyID: found.ID, Role: found.Role, Agents: found.Agents}, nil
}

// Inspect returns an error for a header that Authenticate would refuse without a look-up. It does not block.
func (a *Authenticator) Inspect(header string) error {
	_, _, err := a.inspect(header)
	return err
}

// inspect returns the principal if no look-up is needed, or the hash of the key to look up.
func (a *Authenticator) inspect(header string) (p Principal, hash string, err error) {
	if header == "" {
		if a.cfg.Required {
			return p, "", unauthenticated("send an API key in header Authorization: Bearer " + KeyPrefix + "…")
		}
		return Principal{Tenant: DefaultTenant, Admin: true, Role: events.RoleAdmin}, "", nil
	}
	scheme, key, _ := strings.Cut(header, " ")
	key = strings.TrimSpace(key)
	if !strings.EqualFold(scheme, "Bearer") || key == "" {
		return p, "", unauthenticated("header Authorization must be Bearer and an API key")
	}
	hash = Hash(key)
	if a.rootHash != "" && subtle.ConstantTimeCompare([]byte(hash), []byte(a.rootHash)) == 1 {
		return Principal{Tenant: DefaultTenant, KeyID: RootKeyID, Admin: true, Role: events.RoleAdmin}, "", nil
	}
	if !WellFormed(key) {
		return p, "", unauthenticated("the API key is not valid: it is mistyped or not a Spool key")
	}
	return p, hash, nil
}

func unauthenticated(detail string) error {
	return problem.New(problem.Unauthenticated, "Authorization", detail)
}

type contextKey struct{}

// With returns a context that carries the principal of a request. manages reports whether the request manages API
// keys, limits or budgets, which is all that the root key may do: for any other request of the root key With returns
// FORBIDDEN. All protocols (REST, SSE, WebSocket, gRPC) call With before the handler.
func With(ctx context.Context, p Principal, manages bool) (context.Context, error) {
	if p.KeyID == RootKeyID && !manages {
		return ctx, problem.New(problem.Forbidden, "Authorization", "the root key can only manage API keys, limits and budgets: create a key with it (spool keys create NAME, or POST /api/keys) and send that key")
	}
	return context.WithValue(ctx, contextKey{}, p), nil
}

// From returns the principal of a request, or UNAUTHENTICATED if With was not called.
func From(ctx context.Context) (Principal, error) {
	p, ok := ctx.Value(contextKey{}).(Principal)
	if !ok {
		return Principal{}, unauthenticated("the request was not authenticated")
	}
	return p, nil
}
