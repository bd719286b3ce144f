package api

import (
	"context"
	"errors"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/signin"
)

// CreateSignInCode creates a code that can be exchanged once for a session with the rights of the caller.
func (s *Server) CreateSignInCode(ctx context.Context, _ *spoolv1.CreateSignInCodeRequest) (*spoolv1.CreateSignInCodeResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	grant, err := s.Auth.GrantOf(p)
	if err != nil {
		return nil, err
	}
	code, err := s.SignIn.CreateCode(ctx, grant)
	if err != nil {
		return nil, err
	}
	return &spoolv1.CreateSignInCodeResponse{Code: code, ValidMs: uint32(topology.SignInCodeTTL.Milliseconds())}, nil
}

// ExchangeSignInCode exchanges a code or an API key for a session credential or a session cookie. Its caller is not
// authenticated.
func (s *Server) ExchangeSignInCode(ctx context.Context, r *spoolv1.ExchangeSignInCodeRequest) (*spoolv1.ExchangeSignInCodeResponse, error) {
	from := signin.ClientFrom(ctx)
	if r.GetCookie() {
		if from.Cookies == nil {
			return nil, problem.Invalid("cookie", "session cookies exist over REST only; leave the field out for a session credential")
		}
		if err := from.Cookies.CheckOrigin(); err != nil {
			return nil, err
		}
	}
	grant, err := s.identify(ctx, from, r)
	if err != nil {
		return nil, err
	}
	out := &spoolv1.ExchangeSignInCodeResponse{Tenant: grant.Tenant, Role: string(grant.Role)}
	if !r.GetCookie() {
		credential, expires, err := s.SignIn.CreateSession(ctx, grant)
		out.Credential, out.ExpiresAt = credential, wirejson.TimestampOf(expires)
		return out, err
	}
	value, until, err := s.SignIn.CreateCookie(ctx, grant)
	if err != nil {
		return nil, err
	}
	// The cookie is replaced, so nothing would end its former session.
	if err := s.endCookie(ctx, from); err != nil {
		return nil, err
	}
	from.Cookies.SetCookie(value, until)
	out.ExpiresAt, out.CsrfToken = wirejson.TimestampOf(until), auth.CSRFToken(value)
	return out, nil
}

// identify returns the grant for the proof in a request: a code, an API key, or else the API key in the header. It limits
// the refused proofs of an address.
func (s *Server) identify(ctx context.Context, from signin.Client, r *spoolv1.ExchangeSignInCodeRequest) (g auth.Grant, err error) {
	var issuer signin.Issuer = signin.Codes{Store: s.SignIn, Auth: s.Auth}
	proof := r.GetCode()
	if key := r.GetApiKey(); key != "" {
		if proof != "" {
			return g, problem.Invalid("apiKey", "send a code or an API key, not both")
		}
		issuer, proof = signin.Keys{Auth: s.Auth}, key
	} else if proof == "" && from.Key != "" {
		issuer, proof = signin.Keys{Auth: s.Auth}, from.Key
	}
	end, err := s.Failures.Begin(from.Address)
	if err != nil {
		return g, err
	}
	defer func() { end(isUnauthenticated(err)) }()
	return issuer.Issue(ctx, proof)
}

// isUnauthenticated reports whether a proof was refused.
func isUnauthenticated(err error) bool {
	var p *problem.Error
	return errors.As(err, &p) && p.Code == problem.Unauthenticated
}

// endCookie ends the session of the client's cookie, if it has one.
func (s *Server) endCookie(ctx context.Context, from signin.Client) error {
	if !auth.IsWellFormedToken(auth.CookiePrefix, from.Cookie) {
		return nil
	}
	return s.SignIn.EndSession(ctx, auth.HashKey(from.Cookie))
}

// GetSignInSession returns who the caller is, and the CSRF token of its session cookie.
func (s *Server) GetSignInSession(ctx context.Context, _ *spoolv1.GetSignInSessionRequest) (*spoolv1.SignInSession, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	out := &spoolv1.SignInSession{Tenant: p.Tenant, Role: string(p.Role), Agents: p.Agents, KeyId: p.KeyID}
	if !p.SessionEnd.IsZero() {
		out.ExpiresAt = wirejson.TimestampOf(p.SessionEnd)
	}
	if from := signin.ClientFrom(ctx); from.Cookie != "" && auth.HashKey(from.Cookie) == p.SessionHash {
		out.CsrfToken = auth.CSRFToken(from.Cookie)
	}
	if p.KeyID == "" {
		return out, nil
	}
	keys, err := s.Reads.Keys(ctx, p.Tenant, nil)
	for _, k := range keys {
		if k.GetKeyId() == p.KeyID {
			out.KeyName = k.GetName()
		}
	}
	return out, err
}

// DeleteSignInSession ends the caller's session.
func (s *Server) DeleteSignInSession(ctx context.Context, _ *spoolv1.DeleteSignInSessionRequest) (*spoolv1.DeleteSignInSessionResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	if p.SessionHash == "" {
		return nil, problem.Invalid("Authorization", "an API key has no session that could be ended; revoke the key instead")
	}
	if err := s.SignIn.EndSession(ctx, p.SessionHash); err != nil {
		return nil, err
	}
	if from := signin.ClientFrom(ctx); from.Cookies != nil && from.Cookie != "" && auth.HashKey(from.Cookie) == p.SessionHash {
		from.Cookies.ClearCookie()
	}
	return &spoolv1.DeleteSignInSessionResponse{}, nil
}
