// Package quota keeps what tenants store below their limits of bytes (docs/adr/0052). The read models count what the log knows; a
// Quota adds what this gateway is storing, or has stored, and the read models do not count.
package quota

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	// step is how many bytes an upload of unknown length reserves at once, if there are as many.
	step = 1 << 20
	// settleWithin is how long an upload counts whose command had no answer.
	settleWithin = 10 * time.Minute
	// maxLeftovers is how many leftovers are told apart; the oldest are added up.
	maxLeftovers = 100
	// together is the span of time whose leftovers count, and are looked for, as one.
	together = time.Minute
)

// Config of a Quota. Everything is required.
type Config struct {
	// Limit returns how many bytes a tenant may store; 0 is no limit.
	Limit func(tenant string) int64
	// Stored returns how many bytes the read models count, and the position of each projector group that they hold.
	Stored func(ctx context.Context, tenant string) (bytes int64, positions map[int]uint64, err error)
	Now    func() time.Time
}

// Quota admits what tenants store. It is safe for concurrent use.
type Quota struct {
	cfg Config

	mu      sync.Mutex
	tenants map[string]*ledger
}

// New makes a Quota.
func New(cfg Config) *Quota { return &Quota{cfg: cfg, tenants: map[string]*ledger{}} }

// ledger is what one tenant stores: what the read models counted when they were asked last, and what they do not count.
type ledger struct {
	mu        sync.Mutex
	asked     uint64 // how often the read models were asked
	seen      uint64 // the last of these whose answer is here; 0 for none
	stored    int64
	positions map[int]uint64

	holds    map[*Hold]bool
	refused  []leftover // uploads to which no event refers
	accepted []leftover // uploads that were copied: the copies are counted
}

// leftover is content that stays in a bucket until the janitor removes it.
type leftover struct {
	since time.Time
	bytes int64
	gone  func(context.Context) (bool, error) // of the last object
}

func (q *Quota) ledger(tenant string) *ledger {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.tenants[tenant]
	if l == nil {
		l = &ledger{holds: map[*Hold]bool{}}
		q.tenants[tenant] = l
	}
	return l
}

// Check returns a TENANT_STORAGE problem if the tenant stores as many bytes as it may. While the read models do not answer, what they
// answered last counts: commands do not need them.
func (q *Quota) Check(ctx context.Context, tenant string) error {
	limit := q.cfg.Limit(tenant)
	if limit == 0 {
		return nil
	}
	l := q.ledger(tenant)
	err := l.ask(ctx, q, tenant)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil && l.seen == 0 {
		return nil
	}
	used, err := l.fits(ctx, q, limit, 1)
	if err == nil && used >= limit {
		return exceeded("", used, limit)
	}
	return err
}

// Reserve admits an upload before any of it is stored. bytes is its length, or less if that is not known yet: Take reserves more. The
// error is a *problem.Error; the Hold is nil for a tenant without a limit.
func (q *Quota) Reserve(ctx context.Context, tenant string, bytes int64) (*Hold, error) {
	limit := q.cfg.Limit(tenant)
	if limit == 0 {
		return nil, nil
	}
	h := &Hold{q: q, l: q.ledger(tenant), tenant: tenant}
	if err := h.l.ask(ctx, q, tenant); err != nil {
		return nil, err
	}
	h.l.mu.Lock()
	defer h.l.mu.Unlock()
	used, err := h.l.fits(ctx, q, limit, bytes)
	switch {
	case err != nil:
		return nil, err
	case used >= limit:
		return nil, exceeded("", used, limit)
	case used+bytes > limit:
		return nil, exceeded(fmt.Sprintf("the content has %d bytes, ", bytes), used, limit)
	}
	h.reserved = bytes
	h.l.holds[h] = true
	return h, nil
}

func exceeded(what string, used, limit int64) error {
	return problem.New(problem.TenantStorage, "", fmt.Sprintf("%sthe tenant stores %d bytes, and may store %d: delete sessions or versions of skills, or have the operator "+
		"raise the limit; what is deleted counts until the janitor has removed it", what, used, limit))
}

// ask asks the read models what the tenant stores. Of answers that cross, the one to the last question counts, so that no upload is
// dropped by a later answer and missing in an earlier one.
func (l *ledger) ask(ctx context.Context, q *Quota, tenant string) error {
	l.mu.Lock()
	l.asked++
	n := l.asked
	l.mu.Unlock()
	stored, positions, err := q.cfg.Stored(ctx, tenant)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if n > l.seen {
		l.seen, l.stored, l.positions = n, stored, positions
	}
	return nil
}

// fits returns how many bytes count. What no longer does is dropped first; what the janitor may have removed is looked for if more bytes do
// not fit.
func (l *ledger) fits(ctx context.Context, q *Quota, limit, more int64) (used int64, err error) {
	now := q.cfg.Now()
	for h := range l.holds {
		if h.counted(l.positions, now) {
			delete(l.holds, h)
		}
	}
	if used = l.sum(); used+more <= limit {
		return used, nil
	}
	for _, list := range []*[]leftover{&l.refused, &l.accepted} {
		if *list, err = prune(ctx, *list); err != nil {
			return 0, err
		}
	}
	return l.sum(), nil
}

// sum adds what the read models do not count. An accepted upload is counted by its copy, so such uploads matter only where they are
// more than all that is counted: whoever stores and deletes in turn does not store without bounds.
func (l *ledger) sum() int64 {
	var accepted int64
	for _, x := range l.accepted {
		accepted += x.bytes
	}
	used := max(l.stored, accepted)
	for _, x := range l.refused {
		used += x.bytes
	}
	for h := range l.holds {
		used += h.reserved
	}
	return used
}

// prune drops what the janitor has removed: it removes what is older first.
func prune(ctx context.Context, list []leftover) ([]leftover, error) {
	for len(list) > 0 {
		gone, err := list[0].gone(ctx)
		if err != nil || !gone {
			return list, err
		}
		list = list[1:]
	}
	return list, nil
}

// add adds a leftover to a list, which is ascending by time.
func (q *Quota) add(list []leftover, bytes int64, gone func(context.Context) (bool, error)) []leftover {
	now := q.cfg.Now()
	if n := len(list); n > 0 && now.Sub(list[n-1].since) < together {
		list[n-1].bytes += bytes
		list[n-1].gone = gone
		return list
	}
	return apart(list, leftover{now, bytes, gone})
}

// apart adds a leftover that is told apart from those before it.
func apart(list []leftover, x leftover) []leftover {
	if len(list) == maxLeftovers {
		list[1].bytes += list[0].bytes
		list = list[1:]
	}
	return append(list, x)
}

// Hold is what one upload takes. A nil Hold is one of a tenant without a limit. Take and one of Accepted, Copied, Refused, Waiting and Unknown
// are called by one goroutine, one after the other.
type Hold struct {
	q        *Quota
	l        *ledger
	tenant   string
	taken    int64 // bytes that have come
	reserved int64 // bytes that count; guarded by l.mu

	// Guarded by l.mu. Until then the upload is in progress.
	group int
	seq   uint64    // of the event that counts it; 0 while there is none
	until time.Time // when it no longer counts, where that is not known from an event
}

// counted reports whether the read models count the upload, or never will.
func (h *Hold) counted(positions map[int]uint64, now time.Time) bool {
	return h.seq > 0 && positions[h.group] >= h.seq || !h.until.IsZero() && now.After(h.until)
}

// Take is called before further bytes of the upload are stored. It returns a TENANT_STORAGE problem if they do not fit.
func (h *Hold) Take(ctx context.Context, bytes int64) error {
	if h == nil {
		return nil
	}
	more := h.taken + bytes - h.reserved
	if more > 0 {
		limit := h.q.cfg.Limit(h.tenant)
		if err := h.l.ask(ctx, h.q, h.tenant); err != nil {
			return err
		}
		h.l.mu.Lock()
		defer h.l.mu.Unlock()
		used, err := h.l.fits(ctx, h.q, limit, max(more, step))
		if err != nil {
			return err
		}
		if limit > 0 && used+more > limit {
			return exceeded(fmt.Sprintf("after %d bytes of the content ", h.taken), used, limit)
		}
		if limit == 0 || used+step <= limit {
			more = max(more, step)
		}
		h.reserved += more
	}
	h.taken += bytes
	return nil
}

// settle ends the upload; what it reserved and did not take is free.
func (h *Hold) settle(do func()) {
	if h == nil {
		return
	}
	h.l.mu.Lock()
	defer h.l.mu.Unlock()
	h.reserved = h.taken
	do()
}

// Accepted says that an event at a position counts the upload; about is the id that the position is of.
func (h *Hold) Accepted(about, position string) {
	h.settle(func() {
		h.until = h.q.cfg.Now().Add(settleWithin)
		if p, err := eventlog.ParsePosition(position); err == nil {
			h.group, h.seq, h.until = readmodel.Group(about), p.Seq, time.Time{}
		}
	})
}

// Copied is Accepted of an upload of which a copy is counted, and which stays until gone reports true.
func (h *Hold) Copied(about, position string, gone func(context.Context) (bool, error)) {
	h.Accepted(about, position)
	h.settle(func() { h.l.accepted = h.q.add(h.l.accepted, h.taken, gone) })
}

// Refused says that no event refers to the upload: it counts until gone reports true.
func (h *Hold) Refused(gone func(context.Context) (bool, error)) {
	h.settle(func() {
		delete(h.l.holds, h)
		if h.taken > 0 {
			h.l.refused = h.q.add(h.l.refused, h.taken, gone)
		}
	})
}

// Waiting says that a later command may refer to the upload: it counts until gone reports true, since an event counts it then or since it
// was removed.
func (h *Hold) Waiting(gone func(context.Context) (bool, error)) {
	h.settle(func() {
		delete(h.l.holds, h)
		if h.taken > 0 {
			h.l.refused = apart(h.l.refused, leftover{h.q.cfg.Now(), h.taken, gone})
		}
	})
}

// Unknown says that the command which refers to the upload had no answer.
func (h *Hold) Unknown() {
	h.settle(func() { h.until = h.q.cfg.Now().Add(settleWithin) })
}
