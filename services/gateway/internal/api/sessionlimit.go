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

// forgetAfter is how long a session counts whose command had no answer, and that never came into the read models.
const forgetAfter = 10 * time.Minute

// newSessions are the sessions that this gateway has sent commands for, and that the read models did not hold yet when
// they were last counted. They count as the tenant's, so that many requests at once, or a projector that is behind, let
// no more sessions in than the limit. Its zero value is empty.
type newSessions struct {
	mu      sync.Mutex
	tenants map[string]*newOf
}

// newOf are those of one tenant.
type newOf struct {
	mu  sync.Mutex // held while sessions are counted
	ids map[string]time.Time
}

func (n *newSessions) of(tenant string) *newOf {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tenants == nil {
		n.tenants = map[string]*newOf{}
	}
	if n.tenants[tenant] == nil {
		n.tenants[tenant] = &newOf{ids: map[string]time.Time{}}
	}
	return n.tenants[tenant]
}

// limited returns a command that makes a session, which is refused with TENANT_SESSIONS once the tenant has as many as
// it may. done must be called with the outcome of the command.
func (s *Server) limited(r commands.Request) (_ commands.Request, done func(error)) {
	prepare := r.Prepare
	var tenant, counted string // the session that was counted, "" for none
	r.Prepare = func(ctx context.Context, of, session string) error {
		if most := s.SessionLimit(of); most > 0 {
			if err := s.count(ctx, of, session, most); err != nil {
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
			s.made.of(tenant).remove(counted)
		}
	}
}

// count adds a session to those that are new, unless the tenant has as many as it may.
func (s *Server) count(ctx context.Context, tenant, session string, most int) error {
	n := s.made.of(tenant)
	n.mu.Lock()
	defer n.mu.Unlock()
	now := s.Now()
	ids := []string{session}
	for id, at := range n.ids {
		if now.Sub(at) > forgetAfter {
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
			return nil // the command is sent again
		}
	}
	if _, again := n.ids[session]; !again && stored+len(n.ids) >= most {
		return problem.New(problem.TenantSessions, "", fmt.Sprintf("the tenant has %d sessions, and may have %d; delete some", stored+len(n.ids), most))
	}
	n.ids[session] = now
	return nil
}

func (n *newOf) remove(session string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.ids, session)
}
