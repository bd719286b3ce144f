package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

const defaultPublishTimeout = 5 * time.Second

// PublisherConfig configures a Publisher. JetStream is required; everything else may be zero.
type PublisherConfig struct {
	// JetStream is the connection's JetStream. The Publisher never closes the connection.
	JetStream jetstream.JetStream
	// Deduplicate sends the message's UUID as Nats-Msg-Id: within the stream's window a second message with that id
	// is acknowledged but not stored, even if the first was already removed from a work queue. The UUID must
	// therefore be unique per cause.
	Deduplicate bool
	// Timeout limits the publish of one message, including the wait for a reconnect; 0 means 5 s. A message's
	// context may end it earlier.
	Timeout time.Duration
	// Logger may be nil.
	Logger *slog.Logger
}

func (c *PublisherConfig) validate() error {
	if c.JetStream == nil {
		return errors.New("bus: PublisherConfig.JetStream is required")
	}
	if c.Timeout < 0 {
		return fmt.Errorf("bus: PublisherConfig.Timeout is %s, it cannot be negative", c.Timeout)
	}
	if c.Timeout == 0 {
		c.Timeout = defaultPublishTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Publisher stores messages in JetStream. It is safe for concurrent use.
type Publisher struct {
	cfg    PublisherConfig
	closed atomic.Bool
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher returns a Publisher, or an error that names the invalid setting.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Publisher{cfg: cfg}, nil
}

// Publish stores messages in order under the subject topic, and returns when the stream has acknowledged the last
// one. It stops at the first failure and returns a *PublishError that wraps an error of this package.
//
// Metadata become headers. A message without HeaderCorrelation receives the id of its context, so a handler that
// publishes must set its own context on the message (NewMessage does).
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	for i, msg := range messages {
		if err := p.publishOne(topic, msg); err != nil {
			return &PublishError{Index: i, UUID: msg.UUID, Subject: topic, Err: err}
		}
	}
	return nil
}

// Close makes further calls of Publish return ErrClosed. The connection stays open.
func (p *Publisher) Close() error {
	p.closed.Store(true)
	return nil
}

// NewMessage returns a message with ctx, for a handler to publish: the message receives the correlation id of ctx.
func NewMessage(ctx context.Context, uuid string, payload []byte) *message.Message {
	return message.NewMessageWithContext(ctx, uuid, payload)
}

// publishOne stores one message and waits for the acknowledgement. Its error wraps an error of this package.
func (p *Publisher) publishOne(topic string, msg *message.Message) error {
	if p.closed.Load() {
		return ErrClosed
	}
	out, err := marshal(topic, msg, p.cfg.Deduplicate)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(msg.Context(), p.cfg.Timeout)
	defer cancel()
	if err := waitConnected(ctx, p.cfg.JetStream.Conn()); err != nil {
		return err
	}
	ack, err := p.cfg.JetStream.PublishMsg(ctx, out)
	if err != nil {
		return toPublishError(err)
	}
	if ack.Duplicate {
		p.cfg.Logger.Debug("the stream already has this message id", "subject", topic, "stream", ack.Stream, "sequence", ack.Sequence, "message_uuid", msg.UUID)
	}
	return nil
}

// waitConnected blocks while the connection to NATS is broken. Without this wait, nats.go would buffer the message, the
// wait for the acknowledgement would time out, and the message would be stored later: the caller could not know whether
// to send it again.
func waitConnected(ctx context.Context, nc *nats.Conn) error {
	if nc.IsConnected() {
		return nil
	}
	changed := nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer nc.RemoveStatusListener(changed)
	for {
		switch status := nc.Status(); status {
		case nats.CONNECTED:
			return nil
		case nats.CLOSED, nats.DRAINING_SUBS, nats.DRAINING_PUBS:
			return fmt.Errorf("%w: the connection is %s", ErrUnavailable, status)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: the connection is %s: %w", ErrUnavailable, nc.Status(), ctx.Err())
		}
	}
}

// marshal converts a message of watermill to one of NATS: its metadata become headers, except the keys that describe a
// delivery. It returns ErrInvalidMessage for a subject or header that cannot be sent.
func marshal(topic string, msg *message.Message, deduplicate bool) (*nats.Msg, error) {
	if err := CheckSubject(topic); err != nil {
		return nil, err
	}
	out := &nats.Msg{Subject: topic, Data: msg.Payload, Header: nats.Header{}}
	for key, value := range msg.Metadata {
		if strings.HasPrefix(key, deliveryKeyPrefix) {
			continue
		}
		if err := checkHeader(key, value); err != nil {
			return nil, err
		}
		out.Header[key] = []string{value}
	}
	if id := CorrelationID(msg.Context()); id != "" && out.Header.Get(topology.HeaderCorrelation) == "" {
		if err := checkHeader(topology.HeaderCorrelation, id); err != nil {
			return nil, err
		}
		out.Header.Set(topology.HeaderCorrelation, id)
	}
	if msg.UUID == "" {
		if deduplicate {
			return nil, fmt.Errorf("%w: the UUID is empty, but deduplication requires one", ErrInvalidMessage)
		}
		return out, nil
	}
	if err := checkHeader(topology.HeaderMessageID, msg.UUID); err != nil {
		return nil, err
	}
	out.Header.Set(topology.HeaderMessageID, msg.UUID)
	if deduplicate && out.Header.Get(jetstream.MsgIDHeader) == "" {
		out.Header.Set(jetstream.MsgIDHeader, msg.UUID)
	}
	return out, nil
}
