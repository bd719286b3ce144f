package bus

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	pullExpiry = 30 * time.Second
	// pullHeartbeat is the interval at which the server confirms a waiting pull request. If two heartbeats are missing,
	// the request is sent again.
	pullHeartbeat = 5 * time.Second
	// maxServerDelay is the maximum delay of heartbeats and responses of the server.
	maxServerDelay    = 2 * time.Second
	minReopenInterval = time.Second
	// maxPullers is the maximum number of pullers of a subscription. The server looks at all of them for each message.
	maxPullers = 16
	// drainTimeout is the time that the subscription waits for messages in transit after its end.
	drainTimeout = time.Second
)

// subscription is the result of one call of Subscribe: Concurrency slots, each of which handles one message at a time, and
// handlers that have released their slots.
type subscription struct {
	s       *Subscriber
	topic   string
	durable string
	logger  *slog.Logger
	out     chan *message.Message

	draining context.Context // ends when no further message is requested
	drain    context.CancelFunc
	base     context.Context // parent of every message's context; ends when handlers must return
	kill     context.CancelFunc
	abandon  chan struct{} // closed when Close no longer waits for handlers

	running sync.WaitGroup // slot groups and deliveries
	idle    chan struct{}  // closed when all of running have ended

	reopening sync.Mutex
	reopened  time.Time
}

func newSubscription(ctx context.Context, s *Subscriber, topic, durable string) *subscription {
	u := &subscription{
		s: s, topic: topic, durable: durable,
		logger:  s.cfg.Logger.With("stream", s.cfg.Stream, "durable", durable, "topic", topic),
		out:     make(chan *message.Message),
		abandon: make(chan struct{}),
		idle:    make(chan struct{}),
	}
	// Both contexts have the values of ctx. The end of ctx does not cancel them; it only starts the drain.
	u.draining, u.drain = context.WithCancel(context.WithoutCancel(ctx))
	u.base, u.kill = context.WithCancel(context.WithoutCancel(ctx))
	return u
}

// start starts the slot groups, and the goroutine that ends them; see supervise.
func (u *subscription) start(ctx context.Context) {
	pulls := min(maxPullers, u.s.cfg.Concurrency)
	for i := range pulls {
		g := &slotGroup{u: u, size: (u.s.cfg.Concurrency + i) / pulls, freed: make(chan struct{}, 1)}
		g.free.Store(int64(g.size))
		u.running.Go(g.pullMessages)
	}
	go func() {
		u.running.Wait()
		close(u.idle)
	}()
	go func() {
		defer u.s.running.Done()
		u.supervise(ctx)
		close(u.out)
	}()
}

// supervise ends the subscription when ctx ends or Close is called: it drains the subscription, cancels the handlers
// after CloseTimeout, and abandons the handlers that do not return. It returns when all slot groups and deliveries have
// ended.
func (u *subscription) supervise(ctx context.Context) {
	defer u.kill()
	defer u.drain()
	select {
	case <-u.idle:
		return
	case <-ctx.Done():
	case <-u.s.closing:
	}
	u.drain()
	if u.endsWithin(u.s.cfg.CloseTimeout) {
		return
	}
	u.kill()
	if u.endsWithin(cancelledHandlerTimeout) {
		return
	}
	close(u.abandon)
	<-u.idle
}

// endsWithin waits up to d, and reports whether all slot groups and deliveries have ended.
func (u *subscription) endsWithin(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-u.idle:
		return true
	case <-timer.C:
		return false
	}
}

// recreateConsumer waits for the connection and creates the consumer again if it does not exist. Concurrent calls are serialized,
// at least minReopenInterval apart.
func (u *subscription) recreateConsumer() {
	u.reopening.Lock()
	defer u.reopening.Unlock()
	if time.Since(u.reopened) < minReopenInterval {
		timer := time.NewTimer(minReopenInterval)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-u.draining.Done():
		}
	}
	if err := waitConnected(u.draining, u.s.cfg.JetStream.Conn()); err != nil {
		return // the subscription is draining, or the connection is closed, which the slot detects next
	}
	if _, err := u.s.ensureConsumer(u.draining, u.topic); err != nil && u.draining.Err() == nil {
		u.logger.Error("consumer cannot be opened again, retrying", "error", err)
	}
	u.reopened = time.Now()
}

// slotGroup is a set of slots of a subscription, which share one puller. A subscription has several groups, so that
// slots that are released one after the other do not wait for each other's requests.
type slotGroup struct {
	u     *subscription
	size  int
	free  atomic.Int64  // slots without a message; only pullMessages takes slots
	freed chan struct{} // receives after a slot was released; it has room for one value
}

// pullMessages requests messages for the free slots and starts a delivery for each, until the subscription drains or the
// connection is closed.
func (g *slotGroup) pullMessages() {
	for g.u.draining.Err() == nil {
		p, err := newPuller(g.u.s.cfg.JetStream, g.u.s.cfg.Stream, g.u.durable, g.u.s.cfg.PullExpiry, g.size)
		if err == nil {
			err = g.deliverFrom(p)
		}
		switch {
		case g.u.draining.Err() != nil:
			return
		case g.u.s.cfg.JetStream.Conn().IsClosed():
			g.u.logger.Error("subscription ends: the connection is closed", "error", err)
			return
		case errors.Is(err, errNoHeartbeat), errors.Is(err, errConsumerMoved):
			g.u.logger.Debug("opening the consumer again", "error", err)
		default:
			g.u.logger.Warn("pull failed, opening the consumer again", "error", err)
		}
		g.u.recreateConsumer()
	}
}

// deliverFrom receives messages from a puller and starts a delivery for each. It returns the error of the puller, or
// nil if the subscription is draining.
func (g *slotGroup) deliverFrom(p *puller) error {
	defer p.close(g.u.requeue)
	for {
		m, err := p.nextMessage(g.u.draining, func() int { return int(g.free.Load()) }, g.freed)
		switch {
		case g.u.draining.Err() != nil:
			if err == nil {
				g.u.requeue(m)
			}
			return nil
		case err != nil:
			return err
		case g.free.Load() == 0:
			g.u.requeue(m) // the server has served a request that was taken for lost
			continue
		}
		g.free.Add(-1)
		g.u.running.Go(func() { g.u.deliver(m, g.releaseSlot) })
	}
}

// releaseSlot makes a slot available for another message.
func (g *slotGroup) releaseSlot() {
	g.free.Add(1)
	select {
	case g.freed <- struct{}{}:
	default: // pullMessages has not yet received the previous one, and will look at free
	}
}
