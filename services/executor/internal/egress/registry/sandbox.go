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
	spent   Budget             // what was used of the registered execution's; only its used fields
	unknown string             // a model without a price that it called, with a budget in dollars
	conns   map[net.Conn]bool
	model   int           // open requests to models
	busy    int           // open requests of all kinds
	changed chan struct{} // closed when epoch or release change, and when it is forgotten
	calm    chan struct{} // closed when busy falls to 0
	gone    bool
}

func newSandbox(id string, most int, j *journal.Journal) *Sandbox {
	return &Sandbox{id: id, most: most, Journal: j, conns: map[net.Conn]bool{}, changed: make(chan struct{}), calm: make(chan struct{})}
}

// ID is sbx_….
func (s *Sandbox) ID() string { return s.id }

func (s *Sandbox) set(reg stored, allow egress.Allowlist, hash [sha256.Size]byte, servers map[string]*Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	higher := reg.Epoch != s.reg.Epoch || !s.reg.Released.IsZero()
	if reg.Execution != s.reg.Execution {
		s.spent, s.unknown = Budget{}, ""
	}
	if b := reg.Budget; b != nil {
		s.spent.UsedTokens, s.spent.UsedCostUSD = max(s.spent.UsedTokens, b.UsedTokens), max(s.spent.UsedCostUSD, b.UsedCostUSD)
	}
	s.reg, s.allow, s.hash, s.servers = reg, allow, hash, servers
	if higher {
		s.tell()
	}
}

func (s *Sandbox) release(reg stored) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reg = reg
	s.tell()
}

func (s *Sandbox) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	s.tell()
}

func (s *Sandbox) tell() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Sandbox) registration() stored {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reg
}

// Fence is an *Error unless the epoch is what is registered, or higher.
func (s *Sandbox) Fence(epoch uint64) error { return s.fence(epoch) }

func (s *Sandbox) fence(epoch uint64) error {
	if have := s.registration().Epoch; epoch < have {
		return &Error{Code: CodeFenced, Field: "epoch", Detail: fmt.Sprintf("epoch: %d is lower than %d, which holds the sandbox", epoch, have)}
	}
	return nil
}

// Watch tells the epoch, whether the sandbox is released, and whether it is
// forgotten; the channel is closed when that changes.
func (s *Sandbox) Watch() (epoch uint64, released, gone bool, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reg.Epoch, !s.reg.Released.IsZero(), s.gone, s.changed
}

// State is what is known of it now.
func (s *Sandbox) State() State {
	first, last := s.Journal.Span()
	s.mu.Lock()
	defer s.mu.Unlock()
	allow := s.reg.Allow
	if allow == nil {
		allow = []string{}
	}
	return State{
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

// Spend counts what a call of an execution took. A model without a price cannot be counted in dollars.
func (s *Sandbox) Spend(execution, model string, tokens uint64, costUSD float64, priced bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if execution != s.reg.Execution {
		return
	}
	s.spent.UsedTokens += tokens
	s.spent.UsedCostUSD += costUSD
	if !priced && tokens > 0 {
		s.unknown = model
	}
}

// Exhausted says what of the execution's budget is used up, "" for nothing.
func (s *Sandbox) Exhausted() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.reg.Budget
	switch {
	case b == nil:
	case b.Tokens > 0 && s.spent.UsedTokens >= b.Tokens:
		return fmt.Sprintf("the execution has used %d tokens, and its budget is %d", s.spent.UsedTokens, b.Tokens)
	case b.CostUSD > 0 && s.spent.UsedCostUSD >= b.CostUSD:
		return fmt.Sprintf("the execution has cost $%.4f, and its budget is $%.4f", s.spent.UsedCostUSD, b.CostUSD)
	case b.CostUSD > 0 && s.unknown != "":
		return fmt.Sprintf("the execution has a budget of $%.4f, and the price table has no price for model %.100s", b.CostUSD, s.unknown)
	}
	return ""
}

// Allows tells whether the allowlist names the target.
func (s *Sandbox) Allows(t egress.Target) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allow.Allows(t)
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
			s.model--
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
	for {
		s.mu.Lock()
		busy, calm := s.busy, s.calm
		s.mu.Unlock()
		if busy == 0 {
			break
		}
		select {
		case <-calm:
		case <-ctx.Done():
			return fmt.Errorf("%d requests do not end: %w", busy, ctx.Err())
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
