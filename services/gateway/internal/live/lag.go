package live

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// lagTracker determines whether the read models are behind the log. That is the case if they report it themselves, if they
// have not reached the position of a command that this gateway sent (for example because no projector runs), or if they
// cannot be read.
type lagTracker struct {
	mu      sync.Mutex
	pending map[int]pendingPosition // by projector group: the first position that the read models have not reached
	readAt  time.Time               // when the progress was last read
}

// pendingPosition is the position (sequence in the log's stream) of a command that this gateway sent and that the read
// models have not reached, and when it was recorded.
type pendingPosition struct {
	seq uint64
	at  time.Time
}

// RecordCommit records that the log contains a commit at a position of a session or catalogue entry. The read models
// are behind until they have reached the position.
func (h *Hub) RecordCommit(id, position string) {
	p, err := eventlog.ParsePosition(position)
	if err != nil {
		return
	}
	h.lag.mu.Lock()
	defer h.lag.mu.Unlock()
	if h.lag.pending == nil {
		h.lag.pending = map[int]pendingPosition{}
	}
	if _, waits := h.lag.pending[h.cfg.Partitions.GroupOfID(id)]; !waits {
		h.lag.pending[h.cfg.Partitions.GroupOfID(id)] = pendingPosition{p.Seq, time.Now()}
	}
}

// updateLag reads how far the read models are behind the log for each projector group, and passes it to the feeds of
// the group's sessions.
func (h *Hub) updateLag(ctx context.Context) {
	progress, err := h.cfg.ReadModels.Progress(ctx)
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	h.lag.mu.Lock()
	if err == nil || h.lag.readAt.IsZero() {
		h.lag.readAt = now
	}
	groups := map[int]Lag{}
	for group := range h.cfg.Partitions.GroupCount() {
		groups[group] = h.lag.groupLag(group, progress, now, h.cfg.LagAfter)
	}
	h.lag.mu.Unlock()
	for _, list := range h.startedFeeds(func(*feed) bool { return true }) {
		for _, f := range list {
			f.setLag(groups[h.cfg.Partitions.GroupOfID(f.session)])
		}
	}
}

// groupLag returns the lag of a projector group; progress is nil if it could not be read. A lag shorter than after is
// returned as the zero Lag. mu must be held.
func (l *lagTracker) groupLag(group int, progress map[int]reads.GroupProgress, now time.Time, after time.Duration) Lag {
	behind := now.Sub(l.readAt)
	if p, ok := progress[group]; ok {
		behind = p.Lag
		if w, waits := l.pending[group]; waits && p.Position >= w.seq {
			delete(l.pending, group)
		} else if waits {
			behind = max(behind, now.Sub(w.at))
		}
	}
	if behind < after {
		return Lag{}
	}
	return Lag{Lagging: true, LagMs: uint32(min(behind.Milliseconds(), math.MaxUint32))}
}

// setLag sets how far the read models are behind for the feed's session, and wakes the Readers if the lag began or
// ended.
func (f *feed) setLag(l Lag) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lagging.Lagging != l.Lagging {
		f.wakeReaders()
	}
	f.lagging = l
}
