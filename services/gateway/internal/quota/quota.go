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
	// reserveStepBytes is the number of bytes that an upload of unknown length reserves at once, if the tenant has that many
	// left.
	reserveStepBytes = 1 << 20
	// unknownOutcomeTimeout is the time for which an upload counts against its tenant's limit if the command about it got no
	// answer.
	unknownOutcomeTimeout = 10 * time.Minute
	// maxLeftovers is the largest number of leftovers of a tenant that are kept separately; the oldest ones are
	// merged.
	maxLeftovers = 100
	// leftoverMergeSpan is the length of time within which leftovers are merged into one.
	leftoverMergeSpan = time.Minute
)

// Config configures a Quota. Every field is required.
type Config struct {
	// Limit returns how many bytes a tenant may store; 0 means no limit.
	Limit func(tenant string) int64
	// Stored returns the number of bytes that the read models count, and the position of each projector group in
	// them.
	Stored func(ctx context.Context, tenant string) (bytes int64, positions map[int]uint64, err error)
	Now    func() time.Time
	// Partitions describes the distribution of ids over the projector's groups.
	Partitions events.Partitioning
}

// Quota compares uploads of tenants with the tenants' storage limits, and admits those that fit. It is safe for
// concurrent use.
type Quota struct {
	cfg Config

	mu      sync.Mutex
	tenants map[string]*tenantStorage
}

// New returns a Quota.
func New(cfg Config) *Quota { return &Quota{cfg: cfg, tenants: map[string]*tenantStorage{}} }

// tenantStorage holds how many bytes one tenant stores: the last count of the read models, and the uploads that this
// count does not include.
type tenantStorage struct {
	mu        sync.Mutex
	queries   uint64 // number of queries that were sent to the read models
	answered  uint64 // number of the latest query that was answered; 0 for none
	stored    int64
	positions map[int]uint64

	holds    map[*UploadHold]bool
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

// storageOf returns the tenantStorage of a tenant, and creates it if needed.
func (q *Quota) storageOf(tenant string) *tenantStorage {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.tenants[tenant]
	if l == nil {
		l = &tenantStorage{holds: map[*UploadHold]bool{}}
		q.tenants[tenant] = l
	}
	return l
}

// CheckLimit returns a TENANT_STORAGE problem if the tenant has reached its storage limit. While the read models do
// not respond, the last count is used, because commands must not depend on them.
func (q *Quota) CheckLimit(ctx context.Context, tenant string) error {
	limit := q.cfg.Limit(tenant)
	if limit == 0 {
		return nil
	}
	l := q.storageOf(tenant)
	err := l.refreshStored(ctx, q, tenant)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil && l.answered == 0 {
		return nil
	}
	used, err := l.usedBytes(ctx, q, limit, 1)
	if err == nil && used >= limit {
		return errLimitExceeded("", used, limit)
	}
	return err
}

// Reserve admits an upload before any of it is stored. bytes is its length, or less if the length is unknown; ReserveBytes
// reserves the rest. The error is a *problem.Error. The UploadHold is nil for a tenant without a limit.
func (q *Quota) Reserve(ctx context.Context, tenant string, bytes int64) (*UploadHold, error) {
	limit := q.cfg.Limit(tenant)
	if limit == 0 {
		return nil, nil
	}
	h := &UploadHold{quota: q, storage: q.storageOf(tenant), tenant: tenant}
	if err := h.storage.refreshStored(ctx, q, tenant); err != nil {
		return nil, err
	}
	h.storage.mu.Lock()
	defer h.storage.mu.Unlock()
	used, err := h.storage.usedBytes(ctx, q, limit, bytes)
	switch {
	case err != nil:
		return nil, err
	case used >= limit:
		return nil, errLimitExceeded("", used, limit)
	case used+bytes > limit:
		return nil, errLimitExceeded(fmt.Sprintf("the content has %d bytes, ", bytes), used, limit)
	}
	h.reserved = bytes
	h.storage.holds[h] = true
	return h, nil
}

// errLimitExceeded returns the problem TENANT_STORAGE; what is a phrase about the content that exceeds the limit, or
// "".
func errLimitExceeded(what string, used, limit int64) error {
	return problem.New(problem.TenantStorage, "", fmt.Sprintf("%sthe tenant stores %d bytes, and may store %d: delete sessions or versions of skills, or have the operator "+
		"raise the limit; what is deleted counts until the janitor has removed it", what, used, limit))
}

// refreshStored updates the tenant's stored bytes from the read models. If answers overtake each other, the answer to
// the latest query wins; otherwise an upload could be dropped because of a later answer and be missing in an earlier
// one.
func (l *tenantStorage) refreshStored(ctx context.Context, q *Quota, tenant string) error {
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

// usedBytes returns the number of bytes that the tenant stores. It first drops the holds that the read models count
// now. If more bytes do not fit then, it also finds out which leftovers the janitor has removed, and drops them. The
// error is that of the check whether a leftover was removed.
func (l *tenantStorage) usedBytes(ctx context.Context, q *Quota, limit, more int64) (used int64, err error) {
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
func (l *tenantStorage) countedBytes() int64 {
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
func (q *Quota) addLeftover(list []leftover, bytes int64, removed func(context.Context) (bool, error)) []leftover {
	now := q.cfg.Now()
	if n := len(list); n > 0 && now.Sub(list[n-1].since) < leftoverMergeSpan {
		list[n-1].bytes += bytes
		list[n-1].removed = removed
		return list
	}
	return appendLeftover(list, leftover{now, bytes, removed})
}

// appendLeftover appends a leftover without merging it.
func appendLeftover(list []leftover, x leftover) []leftover {
	if len(list) == maxLeftovers {
		list[1].bytes += list[0].bytes
		list = list[1:]
	}
	return append(list, x)
}

// UploadHold is the storage that one upload takes from its tenant's limit until the read models count it. A nil
// UploadHold belongs to a tenant without a limit. A single goroutine must call ReserveBytes any number of times, and then one
// of the methods whose names begin with Settle.
type UploadHold struct {
	quota    *Quota
	storage  *tenantStorage
	tenant   string
	taken    int64 // bytes received
	reserved int64 // bytes counted; guarded by storage.mu

	// The following fields are guarded by storage.mu and zero while the upload is in progress.
	group int
	seq   uint64    // seq of the event that counts it; 0 for none
	until time.Time // when it stops counting, if no event determines that
}

// isCounted reports whether the upload no longer counts on its own: the read models count it, or they never will.
func (h *UploadHold) isCounted(positions map[int]uint64, now time.Time) bool {
	return h.seq > 0 && positions[h.group] >= h.seq || !h.until.IsZero() && now.After(h.until)
}

// ReserveBytes must be called before further bytes of the upload are stored. It returns a TENANT_STORAGE problem if the
// tenant's limit has no room for them.
func (h *UploadHold) ReserveBytes(ctx context.Context, bytes int64) error {
	if h == nil {
		return nil
	}
	more := h.taken + bytes - h.reserved
	if more > 0 {
		limit := h.quota.cfg.Limit(h.tenant)
		if err := h.storage.refreshStored(ctx, h.quota, h.tenant); err != nil {
			return err
		}
		h.storage.mu.Lock()
		defer h.storage.mu.Unlock()
		used, err := h.storage.usedBytes(ctx, h.quota, limit, max(more, reserveStepBytes))
		if err != nil {
			return err
		}
		if limit > 0 && used+more > limit {
			return errLimitExceeded(fmt.Sprintf("after %d bytes of the content ", h.taken), used, limit)
		}
		if limit == 0 || used+reserveStepBytes <= limit {
			more = max(more, reserveStepBytes)
		}
		h.reserved += more
	}
	h.taken += bytes
	return nil
}

// settleWith ends the upload: it releases bytes that were reserved and not taken, and calls do. The lock of the
// tenant's storage is held meanwhile.
func (h *UploadHold) settleWith(do func()) {
	if h == nil {
		return
	}
	h.storage.mu.Lock()
	defer h.storage.mu.Unlock()
	h.reserved = h.taken
	do()
}

// SettleAccepted ends an upload that an event of the log counts. position is the position of that event, and about
// the id of the session or catalogue entry that the position belongs to.
func (h *UploadHold) SettleAccepted(about, position string) {
	h.settleWith(func() {
		h.until = h.quota.cfg.Now().Add(unknownOutcomeTimeout)
		if p, err := eventlog.ParsePosition(position); err == nil {
			h.group, h.seq, h.until = h.quota.cfg.Partitions.GroupOfID(about), p.Seq, time.Time{}
		}
	})
}

// SettleCopied is like SettleAccepted, for an upload that was copied: the event counts the copy, and the upload
// itself also counts until the function removed reports that it was removed.
func (h *UploadHold) SettleCopied(about, position string, removed func(context.Context) (bool, error)) {
	h.SettleAccepted(about, position)
	h.settleWith(func() { h.storage.accepted = h.quota.addLeftover(h.storage.accepted, h.taken, removed) })
}

// SettleRefused ends an upload to which no event refers. The upload counts until the function removed reports that it
// was removed. The quota calls that function only when another upload of the tenant would not fit; an error of it
// makes that upload fail.
func (h *UploadHold) SettleRefused(removed func(context.Context) (bool, error)) {
	h.settleWith(func() {
		delete(h.storage.holds, h)
		if h.taken > 0 {
			h.storage.refused = h.quota.addLeftover(h.storage.refused, h.taken, removed)
		}
	})
}

// SettleUnreferenced ends an upload to which no event refers yet, but to which a later command may refer. The upload
// counts until the function removed reports true: then an event counts the upload, or the upload was removed.
func (h *UploadHold) SettleUnreferenced(removed func(context.Context) (bool, error)) {
	h.settleWith(func() {
		delete(h.storage.holds, h)
		if h.taken > 0 {
			h.storage.refused = appendLeftover(h.storage.refused, leftover{h.quota.cfg.Now(), h.taken, removed})
		}
	})
}

// SettleUnknown ends an upload whose command got no answer. The upload counts for unknownOutcomeTimeout.
func (h *UploadHold) SettleUnknown() {
	h.settleWith(func() { h.until = h.quota.cfg.Now().Add(unknownOutcomeTimeout) })
}
