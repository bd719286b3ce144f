package replay

import (
	"context"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxReadingReplays is the number of replays of a gateway that may read Postgres and NATS at the same time, so that other reads
// have capacity. maxTenantReads is the part of it that one tenant may use, so that other tenants do not wait for all of
// its replays.
const (
	maxReadingReplays = 8
	maxTenantReads    = maxReadingReplays / 2
)

// Config configures a Player. Every field is required.
type Config struct {
	Partitions events.Partitioning // how the log distributes ids over partitions
	Live       *live.Hub
	Reads      *reads.Store
	NATS       *nats.Conn
	Admission  *admission.Admission
}

// Player opens replays. It is safe for concurrent use.
type Player struct {
	cfg   Config
	slots chan struct{}

	mu      sync.Mutex
	tenants map[string]*tenantSlots // tenants that are reading or waiting
}

// tenantSlots limits how many replays of one tenant read at the same time.
type tenantSlots struct {
	slots chan struct{}
	users int // replays that hold a slot or wait for one
}

// New returns a Player.
func New(cfg Config) *Player {
	return &Player{cfg: cfg, slots: make(chan struct{}, maxReadingReplays), tenants: map[string]*tenantSlots{}}
}

// peekDelta returns the next delta without consuming it, as deltas.Reader.Peek does. It waits for a read slot if Peek
// has to read from NATS. remedy is the advice for the client if the read fails.
func (p *Player) peekDelta(ctx context.Context, tenant, remedy string, from *deltas.Reader) (events.Delta, bool, error) {
	if !from.Buffered() {
		release, err := p.acquireReadSlot(ctx, tenant)
		if err != nil {
			return events.Delta{}, false, err
		}
		defer release()
	}
	d, ok, err := from.Peek(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return d, false, context.Cause(ctx)
		}
		return d, false, problem.New(problem.Unavailable, "", "the text in flight cannot be read from NATS; "+remedy).WithCause(err)
	}
	return d, ok, nil
}

// acquireReadSlot blocks until fewer than maxReadingReplays replays, and fewer than maxTenantReads of the tenant,
// read at the same time. The caller must call release after its read.
func (p *Player) acquireReadSlot(ctx context.Context, tenant string) (release func(), err error) {
	s := p.acquireTenantSlots(tenant)
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		p.releaseTenantSlots(tenant, s)
		return nil, context.Cause(ctx)
	}
	leave := func() {
		<-s.slots
		p.releaseTenantSlots(tenant, s)
	}
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
	return func() {
		<-p.slots
		leave()
	}, nil
}

// acquireTenantSlots returns the read slots of a tenant, and counts one more user of them.
func (p *Player) acquireTenantSlots(tenant string) *tenantSlots {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.tenants[tenant]
	if s == nil {
		s = &tenantSlots{slots: make(chan struct{}, maxTenantReads)}
		p.tenants[tenant] = s
	}
	s.users++
	return s
}

// releaseTenantSlots counts one user less of a tenant's read slots, and removes the slots if they have no users any
// more.
func (p *Player) releaseTenantSlots(tenant string, s *tenantSlots) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users--; s.users == 0 {
		delete(p.tenants, tenant)
	}
}
