package signin

import (
	"context"

	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Issuer is a source of identities: it turns a proof, such as a code, into the rights of a session. A session depends on
// its issuer only until it begins: from then on it has the rights of the key that its grant names, and ends with that key.
type Issuer interface {
	// Issue returns the grant for a proof. The error is UNAUTHENTICATED if the proof is not valid.
	Issue(ctx context.Context, proof string) (auth.Grant, error)
}

// Codes is the Issuer whose proofs are the codes of a Store.
type Codes struct {
	Store *Store
	Auth  *auth.Authenticator
}

// Issue takes the code and returns its grant.
func (c Codes) Issue(ctx context.Context, code string) (auth.Grant, error) {
	g, ok, err := c.Store.TakeCode(ctx, code)
	if err != nil {
		return g, err
	}
	if !ok {
		return g, problem.New(problem.Unauthenticated, "code", "the code is not valid: it was exchanged already, has expired, or is mistyped; get another one, for example with spool open")
	}
	return g, c.Auth.CheckGrant(ctx, g)
}

// Keys is the Issuer whose proofs are API keys and the local key.
type Keys struct {
	Auth *auth.Authenticator
}

// Issue returns a grant with the rights of the key.
func (k Keys) Issue(ctx context.Context, key string) (auth.Grant, error) {
	p, err := k.Auth.Authenticate(ctx, "Bearer "+key)
	if err != nil {
		return auth.Grant{}, err
	}
	if ctx, err = auth.With(ctx, p, false); err != nil { // refuses the root key
		return auth.Grant{}, err
	}
	if p, err = auth.From(ctx); err != nil {
		return auth.Grant{}, err
	}
	return k.Auth.GrantOf(p)
}
