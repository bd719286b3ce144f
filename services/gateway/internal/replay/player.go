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

// maxReads is the number of replays of a gateway that may read Postgres and NATS at the same time, so that other reads
// have capacity. maxTenantReads is the part of it that one tenant may use, so that other tenants do not wait for all of
// its replays.
const (
	maxReads       = 8
	maxTenantReads = maxReads / 2
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

// tenantSlots limits how many reads of NATS one tenant's replays do at the same time.
type tenantSlots struct {
	slots chan struct{}
	users int // replays that hold a slot or wait for one
}

// New returns a Player.
func New(cfg Config) *Player {
	return &Player{cfg: cfg, slots: make(chan struct{}, maxReads), tenants: map[string]*tenantSlots{}}
}

// peek calls deltas.Reader.Peek and waits for a slot if that call reads from NATS. remedy is the advice for the client if
// the read fails.
func (p *Player) peek(ctx context.Context, tenant, remedy string, from *deltas.Reader) (events.Delta, bool, error) {
	if !from.Buffered() {
		release, err := p.slot(ctx, tenant)
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

// slot blocks until the tenant may read from NATS, because fewer than maxReads replays, and fewer than maxTenantReads
// of the tenant, do so. The caller must call release after its read.
func (p *Player) slot(ctx context.Context, tenant string) (release func(), err error) {
	s := p.join(tenant)
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		p.leave(tenant, s)
		return nil, context.Cause(ctx)
	}
	leave := func() {
		<-s.slots
		p.leave(tenant, s)
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

// join returns the slots of a tenant, and counts one more user of them.
func (p *Player) join(tenant string) *tenantSlots {
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

// leave counts one user less of a tenant's slots, and removes the slots if they have no users any more.
func (p *Player) leave(tenant string, s *tenantSlots) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users--; s.users == 0 {
		delete(p.tenants, tenant)
	}
}
