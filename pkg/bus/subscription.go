package bus

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	pullExpiry = 30 * time.Second
	// pullHeartbeat is the interval at which the server confirms a waiting pull request. If two heartbeats are missing,
	// the request is sent again.
	pullHeartbeat = 5 * time.Second
	// pullGrace is the maximum delay of heartbeats and responses of the server.
	pullGrace   = 2 * time.Second
	reopenDelay = time.Second
	// drainTimeout is the time that the subscription waits for messages in transit after its end.
	drainTimeout = time.Second
)

// subscription is the result of one call of Subscribe: Concurrency slots that share a consumer, and handlers that have
// released their slots.
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

	slots sync.WaitGroup
	idle  chan struct{} // closed when all slots have ended

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

func (u *subscription) start(ctx context.Context) {
	for range u.s.cfg.Concurrency {
		u.slots.Go(u.handleMessages)
	}
	go func() {
		u.slots.Wait()
		close(u.idle)
	}()
	go func() {
		defer u.s.running.Done()
		u.supervise(ctx)
		close(u.out)
	}()
}

// supervise returns when all slots have ended.
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
	if u.idleWithin(u.s.cfg.CloseTimeout) {
		return
	}
	u.kill()
	if u.idleWithin(abandonAfter) {
		return
	}
	close(u.abandon)
	<-u.idle
}

func (u *subscription) idleWithin(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-u.idle:
		return true
	case <-timer.C:
		return false
	}
}

// handleMessages runs a slot of the subscription: it handles one message at a time. It returns after a message whose
// handler has released the slot: another goroutine then has the slot.
func (u *subscription) handleMessages() {
	for u.draining.Err() == nil {
		p, err := newPull(u.s.cfg.JetStream, u.s.cfg.Stream, u.durable, u.s.cfg.PullExpiry)
		slot := true
		if err == nil {
			slot, err = u.iterate(p)
		}
		switch {
		case u.draining.Err() != nil, !slot:
			return
		case u.s.cfg.JetStream.Conn().IsClosed():
			u.logger.Error("subscription ends: the connection is closed", "error", err)
			return
		case errors.Is(err, errSilent), errors.Is(err, errMoved):
			u.logger.Debug("opening the consumer again", "error", err)
		default:
			u.logger.Warn("pull failed, opening the consumer again", "error", err)
		}
		u.reopen()
	}
}

// iterate delivers messages until the pull fails. It returns the error of the pull, or nil if the subscription is
// draining. slot is false if a handler has released the slot to another goroutine.
func (u *subscription) iterate(p *pull) (slot bool, err error) {
	defer p.close(u.requeue)
	for {
		m, err := p.next(u.draining)
		switch {
		case u.draining.Err() != nil:
			if err == nil {
				u.requeue(m)
			}
			return true, nil
		case err != nil:
			return true, err
		}
		if !u.deliver(m) {
			return false, nil
		}
	}
}

// reopen waits for the connection and creates the consumer again if it does not exist. Concurrent calls of several slots
// are serialized, at least reopenDelay apart.
func (u *subscription) reopen() {
	u.reopening.Lock()
	defer u.reopening.Unlock()
	if time.Since(u.reopened) < reopenDelay {
		timer := time.NewTimer(reopenDelay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-u.draining.Done():
		}
	}
	if err := waitConnected(u.draining, u.s.cfg.JetStream.Conn()); err != nil {
		return // the subscription is draining, or the connection is closed, which the slot detects next
	}
	if _, err := u.s.consumer(u.draining, u.topic); err != nil && u.draining.Err() == nil {
		u.logger.Error("consumer cannot be opened again, retrying", "error", err)
	}
	u.reopened = time.Now()
}
