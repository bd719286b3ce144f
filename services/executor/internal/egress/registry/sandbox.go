package registry

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
)

// Sandbox is a sandbox that is registered with the proxy. It is safe for concurrent use.
type Sandbox struct {
	Journal *journal.Journal

	id       string
	maxConns int
	hash     [sha256.Size]byte // of the token; guarded by the registry

	mu         sync.Mutex
	reg        storedRegistration
	allow      egress.Allowlist
	servers    map[string]*MCPServer // MCP servers by name
	registered chan struct{}         // closed when an executor registers the sandbox with this process
	charges    ChargedBudgets
	conns      map[net.Conn]bool
	tunnels    map[net.Conn]egress.Target // those whose requests the proxy does not see
	openModels int                        // open requests to models
	open       int                        // open requests of all kinds
	noneOpen   chan struct{}              // closed when open falls to 0
	noModels   chan struct{}              // closed when openModels falls to 0
}

func newSandbox(id string, maxConns int, j *journal.Journal) *Sandbox {
	return &Sandbox{id: id, maxConns: maxConns, Journal: j, conns: map[net.Conn]bool{}, tunnels: map[net.Conn]egress.Target{}, registered: make(chan struct{}), noneOpen: make(chan struct{}), noModels: make(chan struct{})}
}

// ID returns the sandbox's id, sbx_….
func (s *Sandbox) ID() string { return s.id }

// setRegistration replaces the sandbox's registration, and closes the tunnels that the new allowlist does not allow. It returns
// the budgets of the former registration.
func (s *Sandbox) setRegistration(reg storedRegistration, allow egress.Allowlist, hash [sha256.Size]byte, servers map[string]*MCPServer, charges []chargedBudget) (former []chargedBudget) {
	defer s.closeTunnels()
	s.mu.Lock()
	defer s.mu.Unlock()
	if reg.Execution != s.reg.Execution || s.charges.unpriced == nil {
		s.charges.unpriced = &unpricedModel{}
	}
	former, s.charges.list = s.charges.list, charges
	s.reg, s.allow, s.hash, s.servers = reg, allow, hash, servers
	select {
	case <-s.registered:
	default:
		close(s.registered)
	}
	return former
}

// setReleased replaces the registration by that of a released sandbox, and returns the budgets of the former registration.
func (s *Sandbox) setReleased(reg storedRegistration) (former []chargedBudget) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reg = reg
	former, s.charges.list = s.charges.list, nil
	return former
}

// registration returns the present registration of the sandbox.
func (s *Sandbox) registration() storedRegistration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reg
}

// checkEpoch returns an *api.Error if an epoch is lower than that of the registration.
func (s *Sandbox) checkEpoch(epoch uint64) error {
	if have := s.registration().Epoch; epoch < have {
		return &api.Error{Code: api.CodeFenced, Field: "epoch", Detail: fmt.Sprintf("epoch: %d is lower than the registered %d", epoch, have)}
	}
	return nil
}

// State returns the sandbox's registration and the numbers of its journal lines, without the certificate authority.
func (s *Sandbox) State() api.SandboxState {
	first, last := s.Journal.LineSpan()
	s.mu.Lock()
	defer s.mu.Unlock()
	allow := s.reg.Allow
	if allow == nil {
		allow = []string{}
	}
	return api.SandboxState{
		Sandbox: s.id, Tenant: s.reg.Tenant, Session: s.reg.Session, Execution: s.reg.Execution, Epoch: s.reg.Epoch, Allow: allow,
		Journal: s.Journal.Name(), First: first, Last: last, OpenModelRequests: s.openModels, OpenConnections: len(s.conns), Upstreams: slices.Sorted(maps.Keys(s.servers)), Released: !s.reg.Released.IsZero(),
	}
}

// Execution returns the id of the execution for which the sandbox is registered, "" for none.
func (s *Sandbox) Execution() string { return s.registration().Execution }

// Owner returns the tenant, session and execution for which the sandbox is registered.
func (s *Sandbox) Owner() journal.Owner {
	reg := s.registration()
	return journal.Owner{Sandbox: s.id, Tenant: reg.Tenant, Session: reg.Session, Execution: reg.Execution}
}

// WithSandbox returns a logger that adds the ids of the sandbox and of its tenant, session and execution to each message.
func (s *Sandbox) WithSandbox(l *slog.Logger) *slog.Logger {
	reg := s.registration()
	return l.With("sandbox", s.id, "tenant", reg.Tenant, "session", reg.Session, "execution", reg.Execution)
}

// MCPServer returns the sandbox's MCP server with a name, or nil if it has none.
func (s *Sandbox) MCPServer(name string) *MCPServer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.servers[name]
}

// AwaitRegistration blocks until an executor has registered the sandbox since the start of this process, or ctx ends. Before that
// the sandbox has no MCP servers.
func (s *Sandbox) AwaitRegistration(ctx context.Context) error {
	select {
	case <-s.registered:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// IsRestored reports whether the registration is still the one that was read from disk when this process started.
func (s *Sandbox) IsRestored() bool {
	select {
	case <-s.registered:
		return false
	default:
		return true
	}
}

// ChargedBudgets returns the budgets to which a model call is charged if it begins now.
func (s *Sandbox) ChargedBudgets() ChargedBudgets {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.charges
}

// AllowedAccess returns what the sandbox's allowlist allows at a target.
func (s *Sandbox) AllowedAccess(t egress.Target) egress.Access {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allow.Access(t)
}

// AllowsProvider reports whether the sandbox's allowlist allows a feature of model providers.
func (s *Sandbox) AllowsProvider(feature string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allow.AllowsProvider(feature)
}

// AddTunnel records the connection c of a tunnel in which the proxy reads no requests, until the caller calls remove. If a later
// registration does not allow all methods of the target, the Sandbox closes c. If the present registration does not allow them,
// ok is false, and AddTunnel neither records nor closes c.
func (s *Sandbox) AddTunnel(c net.Conn, t egress.Target) (remove func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.allow.Access(t).AllowsAll() {
		return nil, false
	}
	s.tunnels[c] = t
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.tunnels, c)
	}, true
}

// closeTunnels closes the tunnels that the allowlist does not allow any more.
func (s *Sandbox) closeTunnels() {
	s.mu.Lock()
	var list []net.Conn
	for c, t := range s.tunnels {
		if !s.allow.Access(t).AllowsAll() {
			list = append(list, c)
		}
	}
	s.mu.Unlock()
	for _, c := range list { // without the lock, which a closed connection takes in RemoveConn
		c.Close() //nolint:errcheck // a connection that fails to close is broken
	}
}

// AllowsRoute reports whether the sandbox may use a route.
func (s *Sandbox) AllowsRoute(route string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reg.Routes == nil || slices.Contains(*s.reg.Routes, route)
}

// AddConn records a connection of the sandbox to the proxy, so that a release closes it. It returns false if the sandbox has too
// many connections or is released.
func (s *Sandbox) AddConn(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) >= s.maxConns || !s.reg.Released.IsZero() {
		return false
	}
	s.conns[c] = true
	return true
}

// RemoveConn removes a connection of the sandbox that has ended.
func (s *Sandbox) RemoveConn(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// BeginRequest counts an open request of the sandbox until the caller calls done. model is true for a request to a model.
func (s *Sandbox) BeginRequest(model bool) (done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open++
	if model {
		s.openModels++
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if model {
			if s.openModels--; s.openModels == 0 {
				close(s.noModels)
				s.noModels = make(chan struct{})
			}
		}
		if s.open--; s.open == 0 {
			close(s.noneOpen)
			s.noneOpen = make(chan struct{})
		}
	}
}

// hasOpenRequests reports whether a request of the sandbox is open.
func (s *Sandbox) hasOpenRequests() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open > 0
}

// closeConns closes all connections of the sandbox to the proxy.
func (s *Sandbox) closeConns() {
	s.mu.Lock()
	list := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	for _, c := range list { // without the lock, which a closed connection takes in RemoveConn
		c.Close() //nolint:errcheck // a connection that fails to close is broken
	}
}

// awaitAllRequests blocks until the sandbox has no open request and all its journal lines are on disk.
func (s *Sandbox) awaitAllRequests(ctx context.Context) error {
	return s.awaitRequests(ctx, func() (int, <-chan struct{}) { return s.open, s.noneOpen })
}

// AwaitModelRequests blocks until the sandbox has no open model request and all its journal lines are on disk.
func (s *Sandbox) AwaitModelRequests(ctx context.Context) error {
	return s.awaitRequests(ctx, func() (int, <-chan struct{}) { return s.openModels, s.noModels })
}

// awaitRequests blocks until count returns 0 open requests and all journal lines of the sandbox are on disk. It calls count with
// the lock held.
func (s *Sandbox) awaitRequests(ctx context.Context, count func() (open int, none <-chan struct{})) error {
	for {
		s.mu.Lock()
		open, none := count()
		s.mu.Unlock()
		if open == 0 {
			break
		}
		select {
		case <-none:
		case <-ctx.Done():
			return fmt.Errorf("%d requests do not end: %w", open, ctx.Err())
		}
	}
	last := s.Journal.FlushDenials()
	for {
		changed := s.Journal.Changed()
		if _, durable := s.Journal.LineSpan(); durable >= last {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("journal lines do not reach the disk: %w", ctx.Err())
		}
	}
}
