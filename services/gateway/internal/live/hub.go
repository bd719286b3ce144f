// Package live is the one engine behind WebSocket, SSE and gRPC streams. A feed
// follows one session for all clients of this gateway: one core subscription to
// LIVE, no JetStream consumer. Each client is a Reader, which pulls: it holds
// its cursor and how much text of each open block it has, and nothing waits for
// it. What a feed no longer holds a Reader reads from Postgres.
package live

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Source is what is read of Postgres.
type Source interface {
	// Tip is a session's end and the text in flight there.
	Tip(ctx context.Context, tenant, session string) (reads.Tip, error)
	// Events reads kept events after a cursor.
	Events(ctx context.Context, tenant, session string, q reads.Query) (reads.Page, error)
	// Visible reports SESSION_NOT_FOUND unless a session is of one of the agents; no agents mean all.
	Visible(ctx context.Context, tenant, session string, agents []string) error
	// Reaches says how far Postgres is with sessions.
	Reaches(ctx context.Context, tenant string, sessions []string) (map[string]reads.Reach, error)
	// Progress says how far the projector groups are.
	Progress(ctx context.Context) (map[int]reads.Progress, error)
}

// Config of a Hub. Source, NATS, Logger and Admission are required; zero numbers mean the defaults.
type Config struct {
	Source    Source
	NATS      *nats.Conn
	Logger    *slog.Logger
	Admission *admission.Admission // what Readers give out takes from it

	RoomWait   time.Duration // how long a Reader waits for room in Admission; 0 means 30 s
	CheckEvery time.Duration // how often Postgres is compared with what was sent; 0 means 2 s
	LagAfter   time.Duration // how far behind the read models may be before clients are told; 0 means 5 s
	PageEvents int           // events that are read or sent at once; 0 means 200
	RingEvents int           // events that a feed holds for its Readers; 0 means 256
	RingBytes  int           // and bytes; 0 means 256 KiB

	Metrics Metrics
}

// Metrics counts; a nil function counts nothing.
type Metrics struct {
	Feeds   func(n int) // feeds that are open, by how many they changed
	Readers func(n int)
	Reread  func(why string) // a feed read Postgres again: start, hole, text, behind, projector, overflow
}

func (c *Config) defaults() {
	for _, d := range []struct {
		value *time.Duration
		unset time.Duration
	}{{&c.RoomWait, 30 * time.Second}, {&c.CheckEvery, 2 * time.Second}, {&c.LagAfter, 5 * time.Second}} {
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
	lanes     = 4    // goroutines that take what LIVE brings; a session stays in one
	laneDepth = 1024 // messages; past it NATS drops, and the next look at Postgres makes up for it
	refills   = 8    // reads of Postgres at once for feeds, so that a storm of joins leaves room for other reads
)

// Hub holds the feeds of a gateway.
type Hub struct {
	cfg   Config
	lanes [lanes]chan *nats.Msg
	slots chan struct{}
	lag   lag

	mu     sync.Mutex
	feeds  map[string]*feed // by LIVE subject
	run    context.Context  // of Run; nil before
	work   sync.WaitGroup   // goroutines of feeds
	closed bool
}

// NewHub makes a Hub; Run makes it work.
func NewHub(cfg Config) *Hub {
	cfg.defaults()
	h := &Hub{cfg: cfg, slots: make(chan struct{}, refills), feeds: map[string]*feed{}}
	for i := range h.lanes {
		h.lanes[i] = make(chan *nats.Msg, laneDepth)
	}
	return h
}

// Run moves what LIVE brings to the feeds and compares them with Postgres, until
// ctx ends. Readers end with it. It calls started when Join can be used.
func (h *Hub) Run(ctx context.Context, started func()) error {
	projectors := make(chan *nats.Msg, topology.ProjectorGroups)
	sub, err := h.cfg.NATS.ChanSubscribe(topology.CtlProjector, projectors)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.run = ctx
	h.mu.Unlock()
	var wg sync.WaitGroup
	for _, lane := range h.lanes {
		wg.Go(func() { h.deliver(ctx, lane) })
	}
	started()
	h.check(ctx, projectors)
	h.close()
	wg.Wait()
	if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		return err
	}
	return nil
}

// close ends every feed, and with them their Readers.
func (h *Hub) close() {
	h.mu.Lock()
	h.closed = true
	list := make([]*feed, 0, len(h.feeds))
	for _, f := range h.feeds {
		list = append(list, f)
	}
	h.mu.Unlock()
	for _, f := range list {
		f.fail(errStopping())
	}
	h.work.Wait()
}

func errStopping() error {
	return problem.New(problem.Unavailable, "", "this gateway is stopping; connect again with your cursor")
}

func (h *Hub) deliver(ctx context.Context, lane <-chan *nats.Msg) {
	for {
		select {
		case <-ctx.Done():
			return
		case msg := <-lane:
			h.mu.Lock()
			f := h.feeds[msg.Subject]
			h.mu.Unlock()
			if f != nil {
				f.live(msg.Data)
			}
		}
	}
}

// lane of a session: always the same, so that its messages stay in order.
func (h *Hub) lane(session string) chan *nats.Msg {
	return h.lanes[events.Partition(session)%lanes]
}

// Join gives a Reader that begins after a cursor, the seq of the last event that
// the client has. The session must be of one of the agents; no agents mean all. The ids must have been checked. Its errors are *problem.Error:
// SESSION_NOT_FOUND, CURSOR_AHEAD, CURSOR_EXPIRED, UNAVAILABLE.
func (h *Hub) Join(ctx context.Context, tenant string, agents []string, session string, after uint32) (*Reader, error) {
	return h.join(ctx, tenant, agents, session, func(uint32) uint32 { return after })
}

// JoinTip is Join after the session's last event.
func (h *Hub) JoinTip(ctx context.Context, tenant string, agents []string, session string) (*Reader, error) {
	return h.join(ctx, tenant, agents, session, func(tip uint32) uint32 { return tip })
}

// join gives a Reader whose cursor is computed from the session's tip.
func (h *Hub) join(ctx context.Context, tenant string, agents []string, session string, cursor func(tip uint32) uint32) (*Reader, error) {
	if err := h.cfg.Source.Visible(ctx, tenant, session, agents); err != nil {
		return nil, err
	}
	f, err := h.feed(tenant, session)
	if err != nil {
		return nil, err
	}
	r := &Reader{feed: f, wake: make(chan struct{}, 1), held: h.cfg.Admission.Hold(tenant)}
	select {
	case <-f.ready:
		err = f.startErr
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err == nil {
		r.cursor = cursor(r.Tip())
		err = f.admit(ctx, r)
	}
	if err != nil {
		h.leave(f)
		return nil, problem.From(err)
	}
	h.cfg.Metrics.Readers(1)
	return r, nil
}

// feed gives the session's feed, which the caller then holds, and starts one if there is none.
func (h *Hub) feed(tenant, session string) (*feed, error) {
	subject := events.LiveSubject(tenant, session)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || h.run == nil {
		return nil, errStopping()
	}
	if f := h.feeds[subject]; f != nil {
		f.holders++
		return f, nil
	}
	f := &feed{hub: h, tenant: tenant, session: session, ready: make(chan struct{}), holders: 1}
	sub, err := h.cfg.NATS.ChanSubscribe(subject, h.lane(session))
	if err != nil {
		return nil, problem.New(problem.Unavailable, "", "NATS does not answer; try again").Because(err)
	}
	f.sub = sub
	h.feeds[subject] = f
	h.cfg.Metrics.Feeds(1)
	h.work.Go(func() { f.start(h.run) })
	return f, nil
}

// leave gives a feed up; the last one to leave ends it.
func (h *Hub) leave(f *feed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f.holders--; f.holders > 0 {
		return
	}
	h.forget(f)
}

// forget takes a feed out, if it is still in; mu is held.
func (h *Hub) forget(f *feed) {
	subject := events.LiveSubject(f.tenant, f.session)
	if h.feeds[subject] != f {
		return
	}
	delete(h.feeds, subject)
	h.cfg.Metrics.Feeds(-1)
	if err := f.sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) && !errors.Is(err, nats.ErrBadSubscription) {
		h.cfg.Logger.Warn("a subscription to LIVE could not be ended", "subject", subject, "error", err)
	}
}
