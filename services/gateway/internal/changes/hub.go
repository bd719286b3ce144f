// Package changes follows the changes of all sessions of a tenant: what lists of sessions show. Postgres has every change with its position in the log;
// a message of LIVE only says that there is a new one. So a client that comes back with its cursor, to any gateway, receives each session that changed
// meanwhile once, in its present state.
package changes

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// ReadModels reads the changes of a tenant's sessions, for a Hub.
type ReadModels interface {
	ChangeTip(ctx context.Context) (tip reads.ChangeCursor, complete bool, err error)
	CheckChangeCursor(ctx context.Context, field string, after reads.ChangeCursor) error
	ParseChangeCursor(field, text string) (reads.ChangeCursor, error)
	Changes(ctx context.Context, tenant string, after reads.ChangeCursor) (list []reads.SessionChange, next reads.ChangeCursor, more bool, err error)
}

// Config configures a Hub. Zero durations mean the defaults; all other fields are required.
type Config struct {
	ReadModels ReadModels
	NATS       *nats.Conn
	Logger     *slog.Logger
	Admission  *admission.Admission // counts the bytes that Readers return
	// BytesTimeout is the maximum time that a Reader waits for bytes of Admission; 0 means 30 s.
	BytesTimeout time.Duration
	CheckEvery   time.Duration // interval of reads without a message of LIVE, which may be lost; 0 means 2 s
	Pause        time.Duration // minimum time between two reads for a tenant; 0 means 100 ms
}

// Hub wakes the Readers of each tenant, and shares their reads of Postgres.
type Hub struct {
	cfg Config

	mu      sync.Mutex
	tenants map[string]*tenant // those that have Readers
	run     context.Context    // context of Run; nil before
}

// tenant is the state that the Readers of a tenant share.
type tenant struct {
	readers int
	changed chan struct{} // closed at the next announcement of a change
	rounds  uint64        // counts the announcements
	shared  map[string]*sharedRead
	last    time.Time // when the last read began
}

// sharedRead is a read of the changes after a cursor, whose result all Readers with this cursor use.
type sharedRead struct {
	round uint64
	done  chan struct{}
	list  []reads.SessionChange
	next  reads.ChangeCursor
	more  bool
	err   error
}

// NewHub returns a Hub. Run starts it.
func NewHub(cfg Config) *Hub {
	if cfg.BytesTimeout == 0 {
		cfg.BytesTimeout = 30 * time.Second
	}
	if cfg.CheckEvery == 0 {
		cfg.CheckEvery = 2 * time.Second
	}
	if cfg.Pause == 0 {
		cfg.Pause = 100 * time.Millisecond
	}
	return &Hub{cfg: cfg, tenants: map[string]*tenant{}}
}

// Run wakes Readers until ctx ends, which ends them as well. It calls started when Join can be used.
func (h *Hub) Run(ctx context.Context, started func()) error {
	messages := make(chan *nats.Msg, 1024)
	sub, err := h.cfg.NATS.ChanSubscribe(events.LiveSubject("*", readmodel.ChangesToken), messages)
	if err != nil {
		return err
	}
	takeovers := make(chan *nats.Msg, 64)
	projectors, err := h.cfg.NATS.ChanSubscribe(topology.ProjectorStartSubject, takeovers)
	if err != nil {
		return errors.Join(err, sub.Unsubscribe())
	}
	h.mu.Lock()
	h.run = ctx
	h.mu.Unlock()
	started()
	tick := time.NewTicker(h.cfg.CheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			for _, s := range []*nats.Subscription{sub, projectors} {
				if err := s.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
					h.cfg.Logger.Warn("unsubscribe", "subject", s.Subject, "error", err)
				}
			}
			return nil
		case m := <-messages:
			h.wake(strings.Split(m.Subject, ".")[1])
		case <-takeovers:
			h.wakeAll()
		case <-tick.C:
			h.wakeAll()
		}
	}
}

// wake wakes the Readers of a tenant.
func (h *Hub) wake(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t := h.tenants[name]; t != nil {
		t.wake()
	}
}

// wakeAll wakes all Readers.
func (h *Hub) wakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range h.tenants {
		t.wake()
	}
}

// wake wakes the Readers of the tenant. mu must be held.
func (t *tenant) wake() {
	t.rounds++
	close(t.changed)
	t.changed = make(chan struct{})
}

// Reader returns the changes of a tenant's sessions, from a cursor on. It must be used by one goroutine.
type Reader struct {
	hub    *Hub
	tenant string
	agents []string
	cursor reads.ChangeCursor
	held   *admission.Request
}

// Join returns a Reader for the sessions of the agents; no agents mean all. after is the cursor of the client, "" to begin with the next change; the
// error about a wrong one names the field.
func (h *Hub) Join(ctx context.Context, name string, agents []string, field, after string) (*Reader, error) {
	r := &Reader{hub: h, tenant: name, agents: agents, held: h.cfg.Admission.BeginStreamData(name)}
	var err error
	if after == "" {
		r.cursor, _, err = h.cfg.ReadModels.ChangeTip(ctx)
	} else if r.cursor, err = h.cfg.ReadModels.ParseChangeCursor(field, after); err == nil {
		err = h.cfg.ReadModels.CheckChangeCursor(ctx, field, r.cursor)
	}
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run == nil || h.run.Err() != nil {
		return nil, errStopping()
	}
	t := h.tenants[name]
	if t == nil {
		t = &tenant{changed: make(chan struct{}), shared: map[string]*sharedRead{}}
		h.tenants[name] = t
	}
	t.readers++
	return r, nil
}

// errStopping returns the error with which Readers end when the Hub stops.
func errStopping() error {
	return problem.New(problem.Unavailable, "", "this gateway is stopping; connect again with your cursor")
}

// Close ends the use of the Reader.
func (r *Reader) Close() {
	r.held.End()
	r.hub.mu.Lock()
	defer r.hub.mu.Unlock()
	t := r.hub.tenants[r.tenant]
	if t.readers--; t.readers == 0 {
		delete(r.hub.tenants, r.tenant)
	}
}

// Cursor returns the position up to which the Reader has returned all changes.
func (r *Reader) Cursor() string { return r.cursor.String() }

// Next blocks until there are changes, and returns them. Their bytes count against the limits of the gateway until the next call.
func (r *Reader) Next(ctx context.Context) ([]reads.SessionChange, error) {
	r.held.ReleaseBytesBeyond(0)
	for {
		changed, wait := r.hub.pause(r.tenant)
		if err := sleep(ctx, r.hub.run, wait); err != nil {
			return nil, err
		}
		list, next, more, err := r.hub.read(ctx, r.tenant, r.cursor)
		if err != nil {
			return nil, err
		}
		if len(r.agents) > 0 {
			list = slices.DeleteFunc(slices.Clone(list), func(c reads.SessionChange) bool { return !slices.Contains(r.agents, c.Agent) })
		}
		size := int64(0)
		for _, c := range list {
			size += int64(len(c.JSON))
		}
		if err := r.held.ReserveBytesBefore(ctx, size, time.Now().Add(r.hub.cfg.BytesTimeout)); err != nil {
			return nil, err
		}
		r.cursor = next
		if len(list) > 0 {
			return list, nil
		}
		if more {
			continue
		}
		select {
		case <-changed:
		case <-r.hub.run.Done():
			return nil, errStopping()
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// sleep blocks for a time, or until ctx ends or the Hub stops.
func sleep(ctx, hub context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-hub.Done():
		return errStopping()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// pause returns a channel that is closed at the tenant's next announcement, and how long a Reader must wait before it reads.
func (h *Hub) pause(name string) (changed <-chan struct{}, wait time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.tenants[name]
	return t.changed, h.cfg.Pause - time.Since(t.last)
}

// read returns the changes after a cursor. Readers with the same cursor share the read, unless it failed or a change was announced since it began.
func (h *Hub) read(ctx context.Context, name string, after reads.ChangeCursor) ([]reads.SessionChange, reads.ChangeCursor, bool, error) {
	key := after.String()
	h.mu.Lock()
	t := h.tenants[name]
	s := t.shared[key]
	if s == nil || s.round != t.rounds {
		for k, old := range t.shared {
			if old.round != t.rounds {
				delete(t.shared, k)
			}
		}
		s = &sharedRead{round: t.rounds, done: make(chan struct{})}
		t.shared[key], t.last = s, time.Now()
		go func() {
			defer close(s.done)
			if s.list, s.next, s.more, s.err = h.cfg.ReadModels.Changes(h.run, name, after); s.err == nil {
				return
			}
			h.mu.Lock()
			defer h.mu.Unlock()
			if t.shared[key] == s { // later Readers read again
				delete(t.shared, key)
			}
		}()
	}
	h.mu.Unlock()
	select {
	case <-s.done:
		return s.list, s.next, s.more, s.err
	case <-ctx.Done():
		return nil, nil, false, context.Cause(ctx)
	}
}
