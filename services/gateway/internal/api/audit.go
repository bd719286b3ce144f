package api

import (
	"context"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Page sizes of the audit.
const (
	defaultAuditPageSize = 50
	maxAuditPageSize     = 100
)

// ListAudit lists who did what in the caller's tenant.
func (s *Server) ListAudit(ctx context.Context, r *spoolv1.ListAuditRequest) (*spoolv1.ListAuditResponse, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return nil, err
	}
	n := int(r.GetPageSize())
	if n == 0 {
		n = defaultAuditPageSize
	}
	if n > maxAuditPageSize {
		return nil, problem.Invalid("pageSize", "value is larger than %d", maxAuditPageSize)
	}
	list, next, err := s.Reads.Audit(ctx, p.Tenant, reads.AuditFilter{Session: r.GetSession(), Actor: r.GetActor(), Since: r.GetSince()}, r.GetPageToken(), n)
	return &spoolv1.ListAuditResponse{Entries: list, NextPageToken: next}, err
}
