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
	"time"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
)

// Sandbox is a registered one. Safe for concurrent use.
type Sandbox struct {
	Journal *journal.Journal

	id      string
	most    int               // connections
	hash    [sha256.Size]byte // guarded by the registry
	mu      sync.Mutex
	reg     stored
	allow   egress.Allowlist
	servers map[string]*Server // MCP servers by name
	bill    Bill
	conns   map[net.Conn]bool
	blind   map[net.Conn]egress.Target // tunnels that nobody looks into
	model   int                        // open requests to models
	busy    int                        // open requests of all kinds
	calm    chan struct{}              // closed when busy falls to 0
	silent  chan struct{}              // closed when model falls to 0
}

func newSandbox(id string, most int, j *journal.Journal) *Sandbox {
	return &Sandbox{id: id, most: most, Journal: j, conns: map[net.Conn]bool{}, blind: map[net.Conn]egress.Target{}, calm: make(chan struct{}), silent: make(chan struct{})}
}

// ID is sbx_….
func (s *Sandbox) ID() string { return s.id }

// set puts what is registered in the place of the former, and gives the former's charges.
func (s *Sandbox) set(reg stored, allow egress.Allowlist, hash [sha256.Size]byte, servers map[string]*Server, charges []charge) (former []charge) {
	defer s.recall()
	s.mu.Lock()
	defer s.mu.Unlock()
	if reg.Execution != s.reg.Execution || s.bill.unpriced == nil {
		s.bill.unpriced = &unpriced{}
	}
	former, s.bill.charges = s.bill.charges, charges
	s.reg, s.allow, s.hash, s.servers = reg, allow, hash, servers
	return former
}

// release gives the charges that end with it.
func (s *Sandbox) release(reg stored) (former []charge) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reg = reg
	former, s.bill.charges = s.bill.charges, nil
	return former
}

func (s *Sandbox) registration() stored {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reg
}

// fence returns an *api.Error if the epoch is lower than the registered one.
func (s *Sandbox) fence(epoch uint64) error {
	if have := s.registration().Epoch; epoch < have {
		return &api.Error{Code: api.CodeFenced, Field: "epoch", Detail: fmt.Sprintf("epoch: %d is lower than %d, which holds the sandbox", epoch, have)}
	}
	return nil
}

// State is what is known of it now.
func (s *Sandbox) State() api.State {
	first, last := s.Journal.Span()
	s.mu.Lock()
	defer s.mu.Unlock()
	allow := s.reg.Allow
	if allow == nil {
		allow = []string{}
	}
	return api.State{
		Sandbox: s.id, Tenant: s.reg.Tenant, Session: s.reg.Session, Execution: s.reg.Execution, Epoch: s.reg.Epoch, Allow: allow,
		Journal: s.Journal.Name(), First: first, Last: last, OpenModelRequests: s.model, OpenConnections: len(s.conns), Upstreams: slices.Sorted(maps.Keys(s.servers)), Released: !s.reg.Released.IsZero(),
	}
}

// Execution is the one that lines are about now.
func (s *Sandbox) Execution() string { return s.registration().Execution }

// Who is whose the sandbox is now.
func (s *Sandbox) Who() journal.Who {
	reg := s.registration()
	return journal.Who{Sandbox: s.id, Tenant: reg.Tenant, Session: reg.Session, Execution: reg.Execution}
}

// Log is a logger that names whose the sandbox is.
func (s *Sandbox) Log(l *slog.Logger) *slog.Logger {
	reg := s.registration()
	return l.With("sandbox", s.id, "tenant", reg.Tenant, "session", reg.Session, "execution", reg.Execution)
}

// Server is an MCP server of the sandbox, nil if there is none of the name.
func (s *Sandbox) Server(name string) *Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.servers[name]
}

// Bill is what a call that begins now is charged to.
func (s *Sandbox) Bill() Bill {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bill
}

// Access tells what the allowlist allows of a target.
func (s *Sandbox) Access(t egress.Target) egress.Access {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allow.Access(t)
}

// AllowsProvider reports whether the allowlist allows model providers a feature.
func (s *Sandbox) AllowsProvider(feature string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allow.AllowsProvider(feature)
}

// Tunnel counts a tunnel that nobody looks into, until end is called. It is cut
// when the allowlist has not all methods of its target any more; false when that is so already.
func (s *Sandbox) Tunnel(c net.Conn, t egress.Target) (end func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.allow.Access(t).All() {
		return nil, false
	}
	s.blind[c] = t
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.blind, c)
	}, true
}

// recall cuts tunnels that were opened under an allowlist which let them be.
func (s *Sandbox) recall() {
	s.mu.Lock()
	var list []net.Conn
	for c, t := range s.blind {
		if !s.allow.Access(t).All() {
			list = append(list, c)
		}
	}
	s.mu.Unlock()
	for _, c := range list { // each of them leaves, which takes the lock
		c.Close() //nolint:errcheck // what matters is that it ends
	}
}

// Reaches tells whether the sandbox may use a route.
func (s *Sandbox) Reaches(route string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reg.Routes == nil || slices.Contains(*s.reg.Routes, route)
}

// Join counts a connection, which a release cuts; false when there are too many, or the sandbox is released.
func (s *Sandbox) Join(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) >= s.most || !s.reg.Released.IsZero() {
		return false
	}
	s.conns[c] = true
	return true
}

// Leave counts a connection's end.
func (s *Sandbox) Leave(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// Begin counts a request; the function that it gives counts its end.
func (s *Sandbox) Begin(model bool) (done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy++
	if model {
		s.model++
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if model {
			if s.model--; s.model == 0 {
				close(s.silent)
				s.silent = make(chan struct{})
			}
		}
		if s.busy--; s.busy == 0 {
			close(s.calm)
			s.calm = make(chan struct{})
		}
	}
}

func (s *Sandbox) quiet() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.busy == 0
}

// cut closes the connections.
func (s *Sandbox) cut() {
	s.mu.Lock()
	list := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	for _, c := range list { // each of them leaves, which takes the lock
		c.Close() //nolint:errcheck // what matters is that it ends
	}
}

// settle waits until no request is open and all lines are on disk.
func (s *Sandbox) settle(ctx context.Context) error {
	return s.settled(ctx, func() (int, <-chan struct{}) { return s.busy, s.calm })
}

// Settle waits until no request to a model is open and all lines are on disk.
func (s *Sandbox) Settle(ctx context.Context) error {
	return s.settled(ctx, func() (int, <-chan struct{}) { return s.model, s.silent })
}

// settled waits until none of what is counted is open; count is called with the lock held.
func (s *Sandbox) settled(ctx context.Context, count func() (open int, none <-chan struct{})) error {
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
	last := s.Journal.Settle()
	for {
		changed := s.Journal.Changed()
		if _, durable := s.Journal.Span(); durable >= last {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("journal lines do not reach the disk: %w", ctx.Err())
		}
	}
}

// Since is how long ago a time was in whole milliseconds, within 32 bits.
func Since(t time.Time) uint32 {
	return uint32(min(max(time.Since(t).Milliseconds(), 0), 1<<32-1)) //nolint:gosec // within bounds
}
