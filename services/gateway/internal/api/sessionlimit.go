package api

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// newSessionTTL is the time for which a new session counts against its tenant's limit if the command that creates it
// got no answer and the session never appears in the read models.
const newSessionTTL = 10 * time.Minute

// uncountedSessions are the sessions that this gateway has sent commands for and that were not in the read models at the
// last count. They count towards the tenant's limit, so that concurrent requests or a slow projector cannot exceed
// it. The zero value is empty.
type uncountedSessions struct {
	mu      sync.Mutex
	tenants map[string]*tenantUncounted
}

// tenantUncounted holds the ids of the uncountedSessions of one tenant.
type tenantUncounted struct {
	mu  sync.Mutex // held during a count
	ids map[string]time.Time
}

// forTenant returns the uncounted sessions of a tenant. All callers share the result.
func (n *uncountedSessions) forTenant(tenant string) *tenantUncounted {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tenants == nil {
		n.tenants = map[string]*tenantUncounted{}
	}
	if n.tenants[tenant] == nil {
		n.tenants[tenant] = &tenantUncounted{ids: map[string]time.Time{}}
	}
	return n.tenants[tenant]
}

// withSessionLimit returns the command request r with a Prepare function that refuses the command with
// TENANT_SESSIONS if the tenant has reached its limit of sessions. done must be called with the outcome of the
// command.
func (s *Server) withSessionLimit(r commands.Request) (_ commands.Request, done func(error)) {
	prepare := r.Prepare
	var tenant, counted string // the counted session and its tenant; "" for none
	r.Prepare = func(ctx context.Context, of, session string) error {
		if most := s.SessionLimit(of); most > 0 {
			if err := s.admitSession(ctx, of, session, most); err != nil {
				return err
			}
			tenant, counted = of, session
		}
		if prepare == nil {
			return nil
		}
		return prepare(ctx, of, session)
	}
	return r, func(err error) {
		var p *problem.Error
		if counted != "" && errors.As(err, &p) && p.Code != problem.Unavailable {
			s.newSessions.forTenant(tenant).remove(counted)
		}
	}
}

// admitSession adds a session to the tenant's uncounted ones. It returns the problem TENANT_SESSIONS if the tenant
// already has limit sessions. A session that the read models contain is not added.
func (s *Server) admitSession(ctx context.Context, tenant, session string, limit int) error {
	n := s.newSessions.forTenant(tenant)
	n.mu.Lock()
	defer n.mu.Unlock()
	now := s.Now()
	ids := []string{session}
	for id, at := range n.ids {
		if now.Sub(at) > newSessionTTL {
			delete(n.ids, id)
			continue
		}
		ids = append(ids, id)
	}
	stored, known, err := s.Reads.CountSessions(ctx, tenant, ids, limit)
	if err != nil {
		return err
	}
	for _, id := range known {
		delete(n.ids, id)
		if id == session {
			return nil // a repeat of an earlier command
		}
	}
	if _, again := n.ids[session]; !again && stored+len(n.ids) >= limit {
		return problem.New(problem.TenantSessions, "", fmt.Sprintf("the tenant has %d sessions, and may have %d; delete some", stored+len(n.ids), limit))
	}
	n.ids[session] = now
	return nil
}

// remove removes a session whose command was refused from the tenant's uncounted ones.
func (n *tenantUncounted) remove(session string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.ids, session)
}
