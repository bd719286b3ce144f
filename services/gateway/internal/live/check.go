package live

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/readmodel"
)

const (
	// checkBatchSessions is the number of sessions whose last events are read from Postgres with one statement.
	checkBatchSessions = 500
	// tipCheckGrace is the longest time between the commit of a session's rows to Postgres and the arrival of their
	// message on LIVE. A feed that is still behind Postgres after that has missed a message.
	tipCheckGrace = 50 * time.Millisecond
)

// checkFeeds compares all feeds with Postgres at the configured interval and after each reconnection to NATS. When a
// projector of a group starts, checkFeeds compares the feeds of that group.
func (h *Hub) checkFeeds(ctx context.Context, started <-chan *nats.Msg, connected <-chan nats.Status) {
	tick := time.NewTicker(h.cfg.CheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.compareFeeds(ctx, "behind", func(*feed) bool { return true })
			h.checkFrames(ctx)
			h.updateLag(ctx)
		case <-connected:
			// Announcements and frames are lost until the server has the subscriptions again.
			h.flushSubscriptions(ctx)
			h.rereadAllText("reconnect")
			h.compareFeeds(ctx, "reconnect", func(*feed) bool { return true })
		case msg := <-started:
			h.handleProjectorStart(ctx, msg.Data)
		}
	}
}

// handleProjectorStart handles the message with which a projector announces its start: it compares the feeds of the
// projector's group with Postgres.
func (h *Hub) handleProjectorStart(ctx context.Context, data []byte) {
	var s readmodel.ProjectorStarted
	if err := json.Unmarshal(data, &s); err != nil {
		h.cfg.Logger.Warn("decode projector announcement: comparing all sessions with Postgres", "error", err)
		h.compareFeeds(ctx, "projector", func(*feed) bool { return true })
		return
	}
	h.compareFeeds(ctx, "projector", func(f *feed) bool { return h.cfg.Partitions.GroupOfID(f.session) == s.Group })
}

// flushSubscriptions blocks until the NATS server has all subscriptions of the gateway, for a second at most.
func (h *Hub) flushSubscriptions(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := h.cfg.NATS.FlushWithContext(ctx); err != nil {
		h.cfg.Logger.Info("NATS did not confirm the subscriptions: announcements may be missing until the next comparison with Postgres", "error", err)
	}
}

// compareFeeds compares the feeds for which matches returns true with Postgres, and makes those that are behind read
// the missing events from it. reason is counted in the metric Reread.
func (h *Hub) compareFeeds(ctx context.Context, reason string, matches func(*feed) bool) {
	type stored struct {
		feeds []*feed
		tips  map[string]uint32
	}
	var batches []stored
	for tenant, list := range h.startedFeeds(matches) {
		for batch := range slices.Chunk(list, checkBatchSessions) {
			ids := make([]string, len(batch))
			for i, f := range batch {
				ids[i] = f.session
			}
			tips, err := h.cfg.ReadModels.Tips(ctx, tenant, ids)
			if err != nil {
				if ctx.Err() == nil {
					h.cfg.Logger.Warn("compare open streams with Postgres: will retry", "error", err)
				}
				return
			}
			batches = append(batches, stored{batch, tips})
		}
	}
	if len(batches) == 0 {
		return
	}
	select {
	case <-ctx.Done():
		return
	case <-time.After(tipCheckGrace):
	}
	for _, b := range batches {
		for _, f := range b.feeds {
			tip, found := b.tips[f.session]
			f.compareTip(tip, found, reason)
		}
	}
}

// startedFeeds returns, by tenant, the feeds that have been loaded and for which matches returns true.
func (h *Hub) startedFeeds(matches func(*feed) bool) map[string][]*feed {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := map[string][]*feed{}
	for _, f := range h.feeds {
		select {
		case <-f.ready:
			if matches(f) {
				out[f.tenant] = append(out[f.tenant], f)
			}
		default:
		}
	}
	return out
}

// compareTip makes the feed read Postgres if the feed is behind tip, the session's last event there, or if Postgres
// does not have the session (found is false). It also requests missing text, and drops the events that every Reader
// has returned.
func (f *feed) compareTip(tip uint32, found bool, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !found || tip > f.tip {
		f.startReread(reason)
	}
	f.checkOpenText(time.Now())
	low := f.tip
	for r := range f.readers {
		low = min(low, r.cursor)
	}
	if n, _ := slices.BinarySearchFunc(f.ring, low+1, func(frame Frame, seq uint32) int { return int(int64(frame.Seq) - int64(seq)) }); n > 0 {
		f.evictOldest(n)
		if len(f.ring) == 0 {
			f.ring = nil
		}
	}
}
