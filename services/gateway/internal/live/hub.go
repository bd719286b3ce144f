// Package live is the shared implementation of WebSocket, SSE and gRPC streams. A feed follows one session for all
// clients of this gateway: its events from LIVE and Postgres, its text in flight from the frames of executors and from
// DELTAS. A feed has one core NATS subscription and no JetStream consumer; frames have one subscription for each
// partition. Each client has a Reader, which pulls events: it holds its cursor and how much text of each open block it
// has returned. A slow Reader blocks neither its feed nor other Readers. A Reader reads events that the feed no longer
// holds from Postgres, and text from DELTAS.
package live

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// ReadModels reads sessions and their events from the read models, for a Hub.
type ReadModels interface {
	// Tip returns the end of a session and its open blocks.
	Tip(ctx context.Context, tenant, session string) (reads.SessionTip, error)
	// Events returns stored events after a cursor.
	Events(ctx context.Context, tenant, session string, q reads.EventQuery) (reads.EventPage, error)
	// CheckVisible returns SESSION_NOT_FOUND unless the session belongs to one of the agents; no agents mean all.
	CheckVisible(ctx context.Context, tenant, session string, agents []string) error
	// Tips returns the seq of the last event of each session in the read models.
	Tips(ctx context.Context, tenant string, sessions []string) (map[string]uint32, error)
	// Progress returns how far each projector group is.
	Progress(ctx context.Context) (map[int]reads.GroupProgress, error)
}

// Config configures a Hub. ReadModels, NATS, Logger and Admission are required; zero numbers mean the defaults.
type Config struct {
	ReadModels ReadModels
	// Partitions describes the distribution of ids over the projector's groups.
	Partitions events.Partitioning
	NATS       *nats.Conn
	Logger     *slog.Logger
	Admission  *admission.Admission // counts the bytes that Readers return

	BytesTimeout time.Duration // maximum time that a Reader waits for bytes of Admission; 0 means 30 s
	CheckEvery   time.Duration // interval of comparisons with Postgres; 0 means 2 s
	LagAfter     time.Duration // lag of the read models above which clients are notified; 0 means 5 s
	PageEvents   int           // events in one read of Postgres; 0 means 200
	RingEvents   int           // largest number of events in a feed; 0 means 256
	RingBytes    int           // largest number of bytes in a feed; 0 means 256 KiB

	Metrics Metrics
}

// Metrics are functions that the Hub calls to count its feeds, Readers and reads; a nil function counts nothing.
type Metrics struct {
	Feeds   func(n int) // change of the number of open feeds
	Readers func(n int)
	// Reread is called when a feed reads Postgres, with why start, hole, metadata, behind, reconnect or projector, when
	// DELTAS is read for feeds of a partition, with text, and when frames were lost, with text-frame, text-behind or
	// text-reconnect.
	Reread func(why string)
}

// setDefaults replaces zero fields by their defaults.
func (c *Config) setDefaults() {
	for _, d := range []struct {
		value *time.Duration
		unset time.Duration
	}{{&c.BytesTimeout, 30 * time.Second}, {&c.CheckEvery, 2 * time.Second}, {&c.LagAfter, 5 * time.Second}} {
		if *d.value == 0 {
			*d.value = d.unset
		}
	}
	for _, d := range []struct {
		value *int
		unset int
	}{{&c.PageEvents, 200}, {&c.RingEvents, 256}, {&c.RingBytes, 256 << 10}} {
		if *d.value == 0 {
			*d.value = d.unset
		}
	}
	if c.Metrics.Feeds == nil {
		c.Metrics.Feeds = func(int) {}
	}
	if c.Metrics.Readers == nil {
		c.Metrics.Readers = func(int) {}
	}
	if c.Metrics.Reread == nil {
		c.Metrics.Reread = func(string) {}
	}
}

const (
	laneCount          = 4    // goroutines that handle messages of LIVE; all messages of a session use the same one
	laneMessages       = 1024 // messages; if a lane is full, NATS drops messages, and the next comparison with Postgres recovers them
	maxConcurrentReads = 8    // concurrent reads of Postgres and of DELTAS, each, so that many joins leave capacity for other reads
)

// Hub holds the feeds of a gateway: one for each session that clients follow.
type Hub struct {
	cfg   Config
	lanes [laneCount]chan *nats.Msg
	slots chan struct{} // limits concurrent reads of Postgres
	lag   lagTracker

	textSlots chan struct{} // limits concurrent reads of DELTAS
	waiting   atomic.Int64  // bytes of text that waits in all feeds

	mu         sync.Mutex
	feeds      map[string]*feed   // by LIVE subject
	partitions map[int]*partition // those that have feeds
	run        context.Context    // context of Run; nil before
	work       sync.WaitGroup     // counts the goroutines of feeds
	closed     bool

	stopped context.Context // ends when the Hub stops
	stop    context.CancelFunc
}

// NewHub returns a Hub. Run starts it.
func NewHub(cfg Config) *Hub {
	cfg.setDefaults()
	h := &Hub{cfg: cfg, slots: make(chan struct{}, maxConcurrentReads), textSlots: make(chan struct{}, maxConcurrentReads), feeds: map[string]*feed{}, partitions: map[int]*partition{}}
	h.stopped, h.stop = context.WithCancel(context.Background())
	for i := range h.lanes {
		h.lanes[i] = make(chan *nats.Msg, laneMessages)
	}
	return h
}

// Run delivers messages of LIVE to the feeds and compares the feeds with Postgres, until ctx ends. All Readers end
// with it. It calls started when Join can be used.
func (h *Hub) Run(ctx context.Context, started func()) error {
	projectors := make(chan *nats.Msg, h.cfg.Partitions.GroupCount())
	sub, err := h.cfg.NATS.ChanSubscribe(topology.ProjectorStartSubject, projectors)
	if err != nil {
		return err
	}
	connected := h.cfg.NATS.StatusChanged(nats.CONNECTED)
	defer h.cfg.NATS.RemoveStatusListener(connected)
	h.mu.Lock()
	h.run = ctx
	h.mu.Unlock()
	var wg sync.WaitGroup
	for _, lane := range h.lanes {
		wg.Go(func() { h.deliverMessages(ctx, lane) })
	}
	started()
	h.checkFeeds(ctx, projectors, connected)
	h.closeFeeds()
	wg.Wait()
	if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		return err
	}
	return nil
}

// closeFeeds ends every feed and its Readers.
func (h *Hub) closeFeeds() {
	h.stop()
	h.mu.Lock()
	h.closed = true
	list := make([]*feed, 0, len(h.feeds))
	for _, f := range h.feeds {
		list = append(list, f)
	}
	h.mu.Unlock()
	for _, f := range list {
		f.endReaders(errHubStopping())
	}
	h.work.Wait()
}

// ContextUntilStop returns a context that ends with ctx, or when the Hub stops. The caller must call cancel.
func (h *Hub) ContextUntilStop(ctx context.Context) (_ context.Context, cancel func()) {
	ctx, end := context.WithCancelCause(ctx)
	detach := context.AfterFunc(h.stopped, func() { end(errHubStopping()) })
	return ctx, func() {
		detach()
		end(nil)
	}
}

// errHubStopping returns the error with which Readers end when the Hub stops.
func errHubStopping() error {
	return problem.New(problem.Unavailable, "", "this gateway is stopping; connect again with your cursor")
}

// deliverMessages passes the messages of LIVE that arrive on a channel of the Hub to the feeds of their sessions,
// until ctx ends.
func (h *Hub) deliverMessages(ctx context.Context, lane <-chan *nats.Msg) {
	for {
		select {
		case <-ctx.Done():
			return
		case msg := <-lane:
			h.mu.Lock()
			f := h.feeds[msg.Subject]
			h.mu.Unlock()
			if f != nil {
				f.handleLiveMessage(msg.Data)
			}
		}
	}
}

// sessionLane returns the channel on which the Hub receives a session's messages of LIVE. It is always the same for a
// session, so that messages stay in order.
func (h *Hub) sessionLane(session string) chan *nats.Msg {
	return h.lanes[events.Partition(session)%laneCount]
}

// Join returns a Reader that starts after a cursor, which is the seq of the last event that the client has. The
// session must belong to one of the agents; no agents mean all. The caller must have checked the ids. The error is a
// *problem.Error: SESSION_NOT_FOUND, CURSOR_AHEAD, CURSOR_EXPIRED or UNAVAILABLE.
func (h *Hub) Join(ctx context.Context, tenant string, agents []string, session string, after uint32) (*Reader, error) {
	return h.join(ctx, tenant, agents, session, func(uint32) uint32 { return after })
}

// JoinTip is like Join with the session's last event as the cursor.
func (h *Hub) JoinTip(ctx context.Context, tenant string, agents []string, session string) (*Reader, error) {
	return h.join(ctx, tenant, agents, session, func(tip uint32) uint32 { return tip })
}

// join returns a Reader that starts after the cursor that the function cursor returns for the session's tip. Its
// errors are those of Join.
func (h *Hub) join(ctx context.Context, tenant string, agents []string, session string, cursor func(tip uint32) uint32) (*Reader, error) {
	if err := h.cfg.ReadModels.CheckVisible(ctx, tenant, session, agents); err != nil {
		return nil, err
	}
	f, err := h.acquireFeed(tenant, session)
	if err != nil {
		return nil, err
	}
	r := &Reader{feed: f, wake: make(chan struct{}, 1), held: h.cfg.Admission.BeginStreamData(tenant)}
	select {
	case <-f.ready:
		err = f.startErr
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err == nil {
		r.cursor = cursor(r.Tip())
		err = f.addReader(ctx, r)
	}
	if err != nil {
		h.releaseFeed(f)
		return nil, problem.From(err)
	}
	h.cfg.Metrics.Readers(1)
	return r, nil
}

// acquireFeed returns the session's feed and counts one more user of it. It creates the feed if there is none. The
// caller must call releaseFeed.
func (h *Hub) acquireFeed(tenant, session string) (*feed, error) {
	subject := events.LiveSubject(tenant, session)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || h.run == nil {
		return nil, errHubStopping()
	}
	if f := h.feeds[subject]; f != nil {
		f.users++
		return f, nil
	}
	f := &feed{hub: h, tenant: tenant, session: session, ready: make(chan struct{}), users: 1, complete: neverComplete}
	sub, err := h.cfg.NATS.ChanSubscribe(subject, h.sessionLane(session))
	if err == nil {
		if err = h.acquirePartition(session); err != nil {
			h.unsubscribe(sub)
		}
	}
	if err != nil {
		return nil, problem.New(problem.Unavailable, "", "NATS does not answer; try again").WithCause(err)
	}
	f.sub = sub
	h.feeds[subject] = f
	h.cfg.Metrics.Feeds(1)
	h.work.Go(func() { f.load(h.run) })
	return f, nil
}

// releaseFeed counts one user less of a feed. The feed ends with its last user.
func (h *Hub) releaseFeed(f *feed) {
	h.mu.Lock()
	f.users--
	ended := f.users == 0
	if ended {
		h.removeFeed(f)
	}
	h.mu.Unlock()
	if ended {
		f.releaseText()
	}
}

// removeFeed removes a feed from the hub, if the hub still has it. mu must be held.
func (h *Hub) removeFeed(f *feed) {
	subject := events.LiveSubject(f.tenant, f.session)
	if h.feeds[subject] != f {
		return
	}
	delete(h.feeds, subject)
	h.cfg.Metrics.Feeds(-1)
	h.unsubscribe(f.sub)
	h.releasePartition(f)
}

// unsubscribe ends a NATS subscription. It logs failures.
func (h *Hub) unsubscribe(sub *nats.Subscription) {
	if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) && !errors.Is(err, nats.ErrBadSubscription) {
		h.cfg.Logger.Warn("unsubscribe", "subject", sub.Subject, "error", err)
	}
}
