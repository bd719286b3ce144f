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
	// checkBatch is the number of sessions whose last events are read from Postgres with one statement.
	checkBatch = 500
	// checkGrace is the longest time between the commit of a session's rows to Postgres and the arrival of their
	// message on LIVE. A feed that is still behind Postgres after that has missed a message.
	checkGrace = 50 * time.Millisecond
)

// check compares all feeds with Postgres at the configured interval and after each reconnection to NATS, and the feeds
// of a group when its projector starts.
func (h *Hub) check(ctx context.Context, started <-chan *nats.Msg, connected <-chan nats.Status) {
	tick := time.NewTicker(h.cfg.CheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.compare(ctx, "behind", func(*feed) bool { return true })
			h.checkFrames(ctx)
			h.updateLag(ctx)
		case <-connected:
			// Announcements and frames are lost until the server has the subscriptions again.
			h.flush(ctx)
			h.rereadAllText("reconnect")
			h.compare(ctx, "reconnect", func(*feed) bool { return true })
		case msg := <-started:
			h.projectorStarted(ctx, msg.Data)
		}
	}
}

// projectorStarted compares the feeds of the group whose projector announced its start.
func (h *Hub) projectorStarted(ctx context.Context, data []byte) {
	var s readmodel.ProjectorStarted
	if err := json.Unmarshal(data, &s); err != nil {
		h.cfg.Logger.Warn("decode projector announcement: comparing all sessions with Postgres", "error", err)
		h.compare(ctx, "projector", func(*feed) bool { return true })
		return
	}
	h.compare(ctx, "projector", func(f *feed) bool { return h.cfg.Partitions.Group(f.session) == s.Group })
}

// flush blocks until the NATS server has all subscriptions of the gateway, for a second at most.
func (h *Hub) flush(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := h.cfg.NATS.FlushWithContext(ctx); err != nil {
		h.cfg.Logger.Info("NATS did not confirm the subscriptions: announcements may be missing until the next comparison with Postgres", "error", err)
	}
}

// compare compares the feeds for which which returns true with Postgres, and makes those that are behind read from it. why is the reason for
// the metric Reread.
func (h *Hub) compare(ctx context.Context, why string, which func(*feed) bool) {
	type stored struct {
		feeds []*feed
		tips  map[string]uint32
	}
	var batches []stored
	for tenant, list := range h.started(which) {
		for batch := range slices.Chunk(list, checkBatch) {
			ids := make([]string, len(batch))
			for i, f := range batch {
				ids[i] = f.session
			}
			tips, err := h.cfg.Source.Tips(ctx, tenant, ids)
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
	case <-time.After(checkGrace):
	}
	for _, b := range batches {
		for _, f := range b.feeds {
			tip, found := b.tips[f.session]
			f.compare(tip, found, why)
		}
	}
}

// started returns the feeds that have started and for which which returns true, by tenant.
func (h *Hub) started(which func(*feed) bool) map[string][]*feed {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := map[string][]*feed{}
	for _, f := range h.feeds {
		select {
		case <-f.ready:
			if which(f) {
				out[f.tenant] = append(out[f.tenant], f)
			}
		default:
		}
	}
	return out
}

// compare makes the feed read Postgres if the feed is behind tip, the session's last event there, or if Postgres does not have the session
// (found is false). It also requests missing text, and drops events that every Reader has returned.
func (f *feed) compare(tip uint32, found bool, why string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !found || tip > f.tip {
		f.reread(why)
	}
	f.checkText(time.Now())
	low := f.tip
	for r := range f.readers {
		low = min(low, r.cursor)
	}
	if n, _ := slices.BinarySearchFunc(f.ring, low+1, func(frame Frame, seq uint32) int { return int(int64(frame.Seq) - int64(seq)) }); n > 0 {
		f.evict(n)
		if len(f.ring) == 0 {
			f.ring = nil
		}
	}
}
