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

// newSessions are the sessions that this gateway has sent commands for and that were not in the read models at the
// last count. They count towards the tenant's limit, so that concurrent requests or a slow projector cannot exceed
// it. The zero value is empty.
type newSessions struct {
	mu      sync.Mutex
	tenants map[string]*tenantSessions
}

// tenantSessions are the ids of the newSessions of one tenant.
type tenantSessions struct {
	mu  sync.Mutex // held during a count
	ids map[string]time.Time
}

// forTenant returns the record of the new sessions of a tenant. The result is shared by all callers.
func (n *newSessions) forTenant(tenant string) *tenantSessions {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tenants == nil {
		n.tenants = map[string]*tenantSessions{}
	}
	if n.tenants[tenant] == nil {
		n.tenants[tenant] = &tenantSessions{ids: map[string]time.Time{}}
	}
	return n.tenants[tenant]
}

// withSessionLimit returns a command request that is refused with TENANT_SESSIONS if the tenant has reached its limit
// of sessions. done must be called with the outcome of the command.
func (s *Server) withSessionLimit(r commands.Request) (_ commands.Request, done func(error)) {
	prepare := r.Prepare
	var tenant, counted string // the counted session and its tenant; "" for none
	r.Prepare = func(ctx context.Context, of, session string) error {
		if most := s.SessionLimit(of); most > 0 {
			if err := s.countSession(ctx, of, session, most); err != nil {
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

// countSession adds a session to the tenant's new ones. It returns the problem TENANT_SESSIONS if the tenant has most sessions already. A session
// that the read models have is not counted again.
func (s *Server) countSession(ctx context.Context, tenant, session string, most int) error {
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
	stored, known, err := s.Reads.CountSessions(ctx, tenant, ids, most)
	if err != nil {
		return err
	}
	for _, id := range known {
		delete(n.ids, id)
		if id == session {
			return nil // a repeat of an earlier command
		}
	}
	if _, again := n.ids[session]; !again && stored+len(n.ids) >= most {
		return problem.New(problem.TenantSessions, "", fmt.Sprintf("the tenant has %d sessions, and may have %d; delete some", stored+len(n.ids), most))
	}
	n.ids[session] = now
	return nil
}

// remove removes a session whose command was refused.
func (n *tenantSessions) remove(session string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.ids, session)
}
