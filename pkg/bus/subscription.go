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
	// pullHeartbeat is how often the server confirms a waiting pull request; without two of them it is sent again.
	pullHeartbeat = 5 * time.Second
	// pullGrace is the delay with which heartbeats and answers of the server may arrive.
	pullGrace   = 2 * time.Second
	reopenDelay = time.Second
	// drainTimeout is how long the subscription waits for a message that was on its way when the subscription ended.
	drainTimeout = time.Second
)

// subscription is one call of Subscribe: Concurrency slots that share a consumer, and handlers that have released theirs.
type subscription struct {
	s       *Subscriber
	topic   string
	durable string
	logger  *slog.Logger
	out     chan *message.Message

	draining context.Context // ends when no further message is wanted
	drain    context.CancelFunc
	base     context.Context // of every message; ends when handlers have had their time
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
	// Both keep the caller's values and neither its end: that only starts the drain.
	u.draining, u.drain = context.WithCancel(context.WithoutCancel(ctx))
	u.base, u.kill = context.WithCancel(context.WithoutCancel(ctx))
	return u
}

func (u *subscription) start(ctx context.Context) {
	for range u.s.cfg.Concurrency {
		u.slots.Go(u.slot)
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

// slot handles one message at a time. It returns after a message whose handler has released the slot: another
// goroutine then has the slot.
func (u *subscription) slot() {
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

// iterate returns the error that ended the pull, nil when the subscription is draining, or false when a handler has released the slot.
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
		if !u.deliver(m, p.askedAt) {
			return false, nil
		}
	}
}

// reopen waits for the connection and makes the consumer again if it is gone. Slots that come together do it once.
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
		return // draining, or closed, which the slot sees next
	}
	if _, err := u.s.consumer(u.draining, u.topic); err != nil && u.draining.Err() == nil {
		u.logger.Error("consumer cannot be opened again, retrying", "error", err)
	}
	u.reopened = time.Now()
}
