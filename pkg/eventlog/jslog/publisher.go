package jslog

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events/compact"
)

// maxInboxes is the number of inboxes that a log keeps. Further concurrent publishes use the inbox of the connection.
const maxInboxes = 32

// inboxCapacity is the number of late acknowledgements that a free inbox holds until its next publish discards them.
const inboxCapacity = 8

// publisher publishes single messages and waits for their acknowledgements. The reader of the connection passes an
// acknowledgement directly to the goroutine that waits for it: other ways to publish start one or two goroutines in
// between, and a publish is so short that this is a noticeable part of it.
type publisher struct {
	nc *nats.Conn

	mu      sync.Mutex
	free    []*inbox
	inboxes int           // free or in use
	broken  chan struct{} // closed when the connection breaks; nil before the first publish
}

// inbox receives the acknowledgement of one publish at a time. Each publish has a reply subject of its own, so that a
// late acknowledgement is not taken for that of a later publish.
type inbox struct {
	prefix    string
	published uint64
	messages  chan *nats.Msg
	timer     *time.Timer
}

// publish publishes msg, whose Reply it sets, and returns the acknowledgement. It returns nats.ErrTimeout if there is
// no acknowledgement in time. If the connection breaks, publish returns nats.ErrDisconnected at once.
func (p *publisher) publish(ctx context.Context, msg *nats.Msg, timeout time.Duration) (*jetstream.PubAck, error) {
	in, broken, err := p.takeInbox()
	if err != nil {
		return nil, err
	}
	if in == nil {
		return p.publishWithConnInbox(ctx, msg, timeout)
	}
	defer p.returnInbox(in)
	in.published++
	msg.Reply = in.prefix + strconv.FormatUint(in.published, 10)
	if err := p.nc.PublishMsg(msg); err != nil {
		return nil, err
	}
	in.timer.Reset(timeout)
	defer in.timer.Stop()
	for {
		select {
		case reply := <-in.messages:
			if reply.Subject == msg.Reply {
				return decodeAck(reply)
			}
		case <-broken:
			return nil, nats.ErrDisconnected
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-in.timer.C:
			return nil, nats.ErrTimeout
		}
	}
}

// publishWithConnInbox does what publish does, with the inbox of the connection instead of one of the publisher's own.
func (p *publisher) publishWithConnInbox(ctx context.Context, msg *nats.Msg, timeout time.Duration) (*jetstream.PubAck, error) {
	try, cancel := context.WithTimeoutCause(ctx, timeout, nats.ErrTimeout)
	defer cancel()
	reply, err := p.nc.RequestMsgWithContext(try, msg)
	switch {
	case err == nil:
		return decodeAck(reply)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case try.Err() != nil:
		return nil, context.Cause(try)
	}
	return nil, err
}

// takeInbox returns an inbox for one publish, or nil if all are in use. The caller must pass the inbox to returnInbox
// afterwards. broken is closed when the connection breaks.
func (p *publisher) takeInbox() (in *inbox, broken <-chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.broken == nil {
		statuses := p.nc.StatusChanged(nats.RECONNECTING, nats.CLOSED)
		if p.nc.IsClosed() { // it may have been closed before the call, and watchConnection would never return
			p.nc.RemoveStatusListener(statuses)
			return nil, nil, nats.ErrConnectionClosed
		}
		p.broken = make(chan struct{})
		go p.watchConnection(statuses)
	}
	if n := len(p.free); n > 0 {
		in, p.free = p.free[n-1], p.free[:n-1]
		return in, p.broken, nil
	}
	if p.inboxes == maxInboxes {
		return nil, p.broken, nil
	}
	in = &inbox{prefix: p.nc.NewInbox() + ".", messages: make(chan *nats.Msg, inboxCapacity), timer: time.NewTimer(0)}
	in.timer.Stop()
	if _, err := p.nc.ChanSubscribe(in.prefix+"*", in.messages); err != nil {
		return nil, nil, err
	}
	p.inboxes++
	return in, p.broken, nil
}

// returnInbox makes an inbox available for another publish.
func (p *publisher) returnInbox(in *inbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, in)
}

// watchConnection ends the waits of all publishes whenever the connection breaks. It returns when the connection is closed.
func (p *publisher) watchConnection(statuses <-chan nats.Status) {
	for status := range statuses {
		p.mu.Lock()
		close(p.broken)
		p.broken = make(chan struct{})
		p.mu.Unlock()
		if status == nats.CLOSED {
			return
		}
	}
}

// decodeAck decodes the answer to a publish. An error of the server is a *jetstream.APIError.
func decodeAck(reply *nats.Msg) (*jetstream.PubAck, error) {
	if len(reply.Data) == 0 && reply.Header.Get("Status") == "503" {
		return nil, jetstream.ErrNoStreamResponse
	}
	// encoding/json would take a noticeable part of the time of an append.
	r := compact.NewReader(reply.Data)
	r.Expect("{")
	stored := &jetstream.PubAck{Stream: r.OptionalString(`"stream":`), Domain: r.OptionalString(`,"domain":`)}
	r.Expect(`,"seq":`)
	stored.Sequence = r.Uint(math.MaxUint64)
	r.Expect("}")
	if r.AtEnd() && stored.Stream != "" {
		return stored, nil
	}
	var ack struct {
		Error *jetstream.APIError `json:"error"`
		*jetstream.PubAck
	}
	switch err := json.Unmarshal(reply.Data, &ack); {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", jetstream.ErrInvalidJSAck, err)
	case ack.Error != nil:
		return nil, ack.Error
	case ack.PubAck == nil || ack.Stream == "":
		return nil, jetstream.ErrInvalidJSAck
	}
	return ack.PubAck, nil
}
