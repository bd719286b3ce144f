package api

import (
	"context"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// CreateSignInCode creates a code that can be exchanged once for a session credential with the rights of the caller.
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

// ExchangeSignInCode exchanges a code for a session credential. Its caller has no key.
func (s *Server) ExchangeSignInCode(ctx context.Context, r *spoolv1.ExchangeSignInCodeRequest) (*spoolv1.ExchangeSignInCodeResponse, error) {
	grant, ok, err := s.SignIn.TakeCode(ctx, r.GetCode())
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, problem.New(problem.Unauthenticated, "code", "the code is not valid: it was exchanged already, has expired, or is mistyped; get another one, for example with spool open")
	}
	if err := s.Auth.CheckGrant(ctx, grant); err != nil {
		return nil, err
	}
	credential, expires, err := s.SignIn.CreateSession(ctx, grant)
	if err != nil {
		return nil, err
	}
	return &spoolv1.ExchangeSignInCodeResponse{Credential: credential, ExpiresAt: wirejson.TimestampOf(expires), Tenant: grant.Tenant, Role: string(grant.Role)}, nil
}
