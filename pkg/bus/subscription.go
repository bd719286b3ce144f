package bus

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	pullExpiry = 30 * time.Second
	// pullHeartbeat is how often the server confirms a waiting pull request; twice as long without one and it is sent again.
	pullHeartbeat = 5 * time.Second
	// pullRecheck is the wait after which Next is called once more, see next.
	pullRecheck = 10 * time.Millisecond
	reopenDelay = time.Second
	// drainTimeout bounds the wait for a message that was on its way when the subscription ended.
	drainTimeout = time.Second
)

// subscription is one call of Subscribe: Concurrency slots that share a consumer.
type subscription struct {
	s        *Subscriber
	topic    string
	consumer jetstream.Consumer
	logger   *slog.Logger
	out      chan *message.Message

	draining context.Context // ends when no further message is wanted
	drain    context.CancelFunc
	base     context.Context // of every message; ends when handlers have had their time
	kill     context.CancelFunc
	abandon  chan struct{} // closed when nobody waits for handlers any more

	slots sync.WaitGroup
	idle  chan struct{} // closed when all slots have ended

	reopening sync.Mutex
	reopened  time.Time
}

func newSubscription(ctx context.Context, s *Subscriber, topic string, consumer jetstream.Consumer) *subscription {
	u := &subscription{
		s: s, topic: topic, consumer: consumer,
		logger:  s.cfg.Logger.With("stream", s.cfg.Stream, "durable", consumer.CachedInfo().Name, "topic", topic),
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

// slot has at most one message at a time. Each slot has its own iterator that asks for exactly one: a message that was fetched ahead
// would wait without a heartbeat, and be delivered to a second handler.
func (u *subscription) slot() {
	for u.draining.Err() == nil {
		it, err := u.consumer.Messages(jetstream.PullMaxMessages(1),
			jetstream.PullExpiry(u.s.cfg.PullExpiry), jetstream.PullHeartbeat(min(pullHeartbeat, u.s.cfg.PullExpiry/3)))
		if err == nil {
			err = u.iterate(it)
		}
		switch {
		case u.draining.Err() != nil:
			return
		case u.s.cfg.JetStream.Conn().IsClosed():
			u.logger.Error("subscription ends: the connection is closed", "error", err)
			return
		}
		u.logger.Warn("pull failed, opening the consumer again", "error", err)
		u.reopen()
	}
}

// iterate returns the error that ended the iterator, or nil when the subscription is draining.
func (u *subscription) iterate(it jetstream.MessagesContext) error {
	defer u.drainIterator(it)
	for u.draining.Err() == nil {
		jm, err := u.next(it)
		switch {
		case jm != nil && u.draining.Err() != nil:
			u.giveBack(jm)
		case jm != nil:
			u.deliver(jm)
		case u.draining.Err() != nil:
		case errors.Is(err, jetstream.ErrNoHeartbeat):
			// The request is lost, or the consumer is: nats.go sends the request again, but would do so for ever.
			u.logger.Debug("no heartbeat for a pull request")
			u.reopen()
		default:
			return err
		}
	}
	return nil
}

// next waits for a message in two steps. In nats.go v1.55.0, Next sends no pull request if the goroutine that sent the one before has not yet
// noted its end, and with PullMaxMessages(1) nothing else sends one, so that it waits for twice the heartbeat (seen about once in
// 10,000 messages). A second call makes up for that.
func (u *subscription) next(it jetstream.MessagesContext) (jetstream.Msg, error) {
	jm, err := it.Next(jetstream.NextMaxWait(pullRecheck))
	if errors.Is(err, nats.ErrTimeout) {
		return it.Next(jetstream.NextContext(u.draining))
	}
	return jm, err
}

// drainIterator gives back a message that arrived after the last Next.
func (u *subscription) drainIterator(it jetstream.MessagesContext) {
	it.Drain()
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	for {
		jm, err := it.Next(jetstream.NextContext(ctx))
		if err != nil {
			return
		}
		u.giveBack(jm)
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
