// Package quota enforces the storage limits of tenants (docs/adr/0052). The read models count the bytes that the log
// knows about; a Quota adds the bytes that this gateway is storing, or has stored, and that the read models do not
// count yet.
package quota

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const (
	// reserveStep is the number of bytes that an upload of unknown length reserves at once, if the tenant has that many
	// left.
	reserveStep = 1 << 20
	// unknownTimeout is the time for which an upload counts against its tenant's limit if the command about it got no
	// answer.
	unknownTimeout = 10 * time.Minute
	// maxLeftovers is the largest number of leftovers of a tenant that a ledger distinguishes; the oldest ones are
	// merged.
	maxLeftovers = 100
	// mergeSpan is the length of time within which leftovers are merged into one.
	mergeSpan = time.Minute
)

// Config configures a Quota. Every field is required.
type Config struct {
	// Limit returns how many bytes a tenant may store; 0 means no limit.
	Limit func(tenant string) int64
	// Stored returns the number of bytes that the read models count, and the position of each projector group in
	// them.
	Stored func(ctx context.Context, tenant string) (bytes int64, positions map[int]uint64, err error)
	Now    func() time.Time
	// Partitions is how the log distributes ids over the projector's groups.
	Partitions events.Partitioning
}

// Quota compares uploads of tenants with the tenants' storage limits, and admits those that fit. It is safe for
// concurrent use.
type Quota struct {
	cfg Config

	mu      sync.Mutex
	tenants map[string]*ledger
}

// New returns a Quota.
func New(cfg Config) *Quota { return &Quota{cfg: cfg, tenants: map[string]*ledger{}} }

// ledger holds the storage that one tenant uses: the last count of the read models, and uploads that this count does
// not include.
type ledger struct {
	mu        sync.Mutex
	queries   uint64 // number of queries that were sent to the read models
	answered  uint64 // number of the latest query that was answered; 0 for none
	stored    int64
	positions map[int]uint64

	holds    map[*Hold]bool
	refused  []leftover // uploads that no event refers to
	accepted []leftover // uploads whose copies are counted
}

// leftover is an upload that counts against its tenant's limit until the janitor has removed the upload from its
// bucket, because no event counts the upload, or only a copy of it.
type leftover struct {
	since   time.Time
	bytes   int64
	removed func(context.Context) (bool, error) // reports whether the janitor has removed the last object; see usedBytes
}

// ledger returns the ledger of a tenant, and creates it if needed.
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

// Check returns a TENANT_STORAGE problem if the tenant has reached its limit. While the read models do not respond,
// the last count is used, because commands must not depend on them.
func (q *Quota) Check(ctx context.Context, tenant string) error {
	limit := q.cfg.Limit(tenant)
	if limit == 0 {
		return nil
	}
	l := q.ledger(tenant)
	err := l.refresh(ctx, q, tenant)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil && l.answered == 0 {
		return nil
	}
	used, err := l.usedBytes(ctx, q, limit, 1)
	if err == nil && used >= limit {
		return errExceeded("", used, limit)
	}
	return err
}

// Reserve admits an upload before any of it is stored. bytes is its length, or less if the length is unknown; Take
// reserves the rest. The error is a *problem.Error. The Hold is nil for a tenant without a limit.
func (q *Quota) Reserve(ctx context.Context, tenant string, bytes int64) (*Hold, error) {
	limit := q.cfg.Limit(tenant)
	if limit == 0 {
		return nil, nil
	}
	h := &Hold{quota: q, ledger: q.ledger(tenant), tenant: tenant}
	if err := h.ledger.refresh(ctx, q, tenant); err != nil {
		return nil, err
	}
	h.ledger.mu.Lock()
	defer h.ledger.mu.Unlock()
	used, err := h.ledger.usedBytes(ctx, q, limit, bytes)
	switch {
	case err != nil:
		return nil, err
	case used >= limit:
		return nil, errExceeded("", used, limit)
	case used+bytes > limit:
		return nil, errExceeded(fmt.Sprintf("the content has %d bytes, ", bytes), used, limit)
	}
	h.reserved = bytes
	h.ledger.holds[h] = true
	return h, nil
}

// errExceeded returns the TENANT_STORAGE problem; what is a phrase about the content, or "".
func errExceeded(what string, used, limit int64) error {
	return problem.New(problem.TenantStorage, "", fmt.Sprintf("%sthe tenant stores %d bytes, and may store %d: delete sessions or versions of skills, or have the operator "+
		"raise the limit; what is deleted counts until the janitor has removed it", what, used, limit))
}

// refresh updates the ledger from the read models. If answers overtake each other, the answer to the latest query wins;
// otherwise an upload could be dropped because of a later answer and be missing in an earlier one.
func (l *ledger) refresh(ctx context.Context, q *Quota, tenant string) error {
	l.mu.Lock()
	l.queries++
	n := l.queries
	l.mu.Unlock()
	stored, positions, err := q.cfg.Stored(ctx, tenant)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if n > l.answered {
		l.answered, l.stored, l.positions = n, stored, positions
	}
	return nil
}

// usedBytes returns the number of bytes that the tenant uses. It first drops the holds that the read models count now. If more bytes do not
// fit then, it also asks which leftovers the janitor has removed, and drops these. The error is an error of that question.
func (l *ledger) usedBytes(ctx context.Context, q *Quota, limit, more int64) (used int64, err error) {
	now := q.cfg.Now()
	for h := range l.holds {
		if h.isCounted(l.positions, now) {
			delete(l.holds, h)
		}
	}
	if used = l.countedBytes(); used+more <= limit {
		return used, nil
	}
	for _, list := range []*[]leftover{&l.refused, &l.accepted} {
		if *list, err = pruneLeftovers(ctx, *list); err != nil {
			return 0, err
		}
	}
	return l.countedBytes(), nil
}

// countedBytes returns the bytes that count against the tenant's limit. The field stored includes accepted uploads after a delay,
// so accepted uploads count only if they are larger than stored. That bounds a client that stores and deletes alternately.
func (l *ledger) countedBytes() int64 {
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

// pruneLeftovers drops leftovers that the janitor has removed. The janitor removes older content first.
func pruneLeftovers(ctx context.Context, list []leftover) ([]leftover, error) {
	for len(list) > 0 {
		gone, err := list[0].removed(ctx)
		if err != nil || !gone {
			return list, err
		}
		list = list[1:]
	}
	return list, nil
}

// addLeftover appends a leftover to a list that is sorted by time, or merges the leftover into the last one.
func (q *Quota) addLeftover(list []leftover, bytes int64, gone func(context.Context) (bool, error)) []leftover {
	now := q.cfg.Now()
	if n := len(list); n > 0 && now.Sub(list[n-1].since) < mergeSpan {
		list[n-1].bytes += bytes
		list[n-1].removed = gone
		return list
	}
	return appendLeftover(list, leftover{now, bytes, gone})
}

// appendLeftover appends a leftover without merging it.
func appendLeftover(list []leftover, x leftover) []leftover {
	if len(list) == maxLeftovers {
		list[1].bytes += list[0].bytes
		list = list[1:]
	}
	return append(list, x)
}

// Hold is the storage that one upload takes from its tenant's limit until the read models count it. A nil Hold belongs
// to a tenant without a limit. A single goroutine must call Take any number of times, and then one of Accept,
// AcceptCopy, Refuse, CountUntil and SettleUnknown.
type Hold struct {
	quota    *Quota
	ledger   *ledger
	tenant   string
	taken    int64 // bytes received
	reserved int64 // bytes counted; guarded by ledger.mu

	// The following fields are guarded by ledger.mu and zero while the upload is in progress.
	group int
	seq   uint64    // seq of the event that counts it; 0 for none
	until time.Time // when it stops counting, if no event determines that
}

// isCounted reports whether the read models count the upload, so that the ledger must not, or whether they never will.
func (h *Hold) isCounted(positions map[int]uint64, now time.Time) bool {
	return h.seq > 0 && positions[h.group] >= h.seq || !h.until.IsZero() && now.After(h.until)
}

// Take must be called before further bytes of the upload are stored. It returns a TENANT_STORAGE problem if they do
// not fit.
func (h *Hold) Take(ctx context.Context, bytes int64) error {
	if h == nil {
		return nil
	}
	more := h.taken + bytes - h.reserved
	if more > 0 {
		limit := h.quota.cfg.Limit(h.tenant)
		if err := h.ledger.refresh(ctx, h.quota, h.tenant); err != nil {
			return err
		}
		h.ledger.mu.Lock()
		defer h.ledger.mu.Unlock()
		used, err := h.ledger.usedBytes(ctx, h.quota, limit, max(more, reserveStep))
		if err != nil {
			return err
		}
		if limit > 0 && used+more > limit {
			return errExceeded(fmt.Sprintf("after %d bytes of the content ", h.taken), used, limit)
		}
		if limit == 0 || used+reserveStep <= limit {
			more = max(more, reserveStep)
		}
		h.reserved += more
	}
	h.taken += bytes
	return nil
}

// settle ends the upload. Bytes that were reserved and not taken are released.
func (h *Hold) settle(do func()) {
	if h == nil {
		return
	}
	h.ledger.mu.Lock()
	defer h.ledger.mu.Unlock()
	h.reserved = h.taken
	do()
}

// Accept ends the upload: an event at position counts it. about is the id that the position belongs to.
func (h *Hold) Accept(about, position string) {
	h.settle(func() {
		h.until = h.quota.cfg.Now().Add(unknownTimeout)
		if p, err := eventlog.ParsePosition(position); err == nil {
			h.group, h.seq, h.until = h.quota.cfg.Partitions.GroupOfID(about), p.Seq, time.Time{}
		}
	})
}

// AcceptCopy is like Accept, for an upload that was copied: the event counts the copy, and the upload itself stays
// until gone reports true.
func (h *Hold) AcceptCopy(about, position string, gone func(context.Context) (bool, error)) {
	h.Accept(about, position)
	h.settle(func() { h.ledger.accepted = h.quota.addLeftover(h.ledger.accepted, h.taken, gone) })
}

// Refuse ends an upload to which no event refers. The upload counts until gone reports true. The quota calls gone only when another
// upload of the tenant would not fit, which fails if gone returns an error.
func (h *Hold) Refuse(gone func(context.Context) (bool, error)) {
	h.settle(func() {
		delete(h.ledger.holds, h)
		if h.taken > 0 {
			h.ledger.refused = h.quota.addLeftover(h.ledger.refused, h.taken, gone)
		}
	})
}

// CountUntil ends an upload to which a later command may refer. The upload counts until gone reports true: then an
// event counts the upload, or the upload was removed.
func (h *Hold) CountUntil(gone func(context.Context) (bool, error)) {
	h.settle(func() {
		delete(h.ledger.holds, h)
		if h.taken > 0 {
			h.ledger.refused = appendLeftover(h.ledger.refused, leftover{h.quota.cfg.Now(), h.taken, gone})
		}
	})
}

// SettleUnknown ends an upload whose command got no answer. The upload counts for unknownTimeout.
func (h *Hold) SettleUnknown() {
	h.settle(func() { h.until = h.quota.cfg.Now().Add(unknownTimeout) })
}
