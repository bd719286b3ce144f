package bus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

const defaultCommandTimeout = 10 * time.Second

// inboxNamePrefix is the prefix of the name of every inbox, including those with a user's prefix (topology.InboxPrefix).
const inboxNamePrefix = "_INBOX"

// Command is a message that requests a response. Subject and ID are required.
type Command struct {
	// Subject is the subject of the command, which a work queue must have.
	Subject string
	// ID identifies the command. A retry must use the same id; the handler then responds without repeating the
	// effect.
	ID string
	// Payload is the command itself.
	Payload []byte
	// Metadata become headers, in addition to those that Request sets.
	Metadata map[string]string
	// Deadline is the time after which the command must not be carried out. Zero means the deadline of the context,
	// or 10 s from now.
	Deadline time.Time
}

// Answer is the response that a handler passed to Reply.
type Answer struct {
	Payload  []byte
	Metadata map[string]string
}

// Request stores a command in a work queue and waits for its response until the command's deadline or the end of
// ctx, whichever comes first.
//
// An error that wraps ErrUnavailable means that the command was not stored and has no effect; its cause (ErrFull,
// ErrNoStream, …) is in the chain. ErrInvalidMessage and ErrTooLarge mean that the command can never be stored.
// ErrOutcomeUnknown means that the command was or may have been stored and that no response arrived: it may still
// take effect until its deadline.
func Request(ctx context.Context, js jetstream.JetStream, cmd Command) (*Answer, error) {
	if cmd.ID == "" {
		return nil, fmt.Errorf("%w: the command has no ID", ErrInvalidMessage)
	}
	deadline := commandDeadline(ctx, cmd)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	nc := js.Conn()
	inbox := nc.NewInbox()
	responses := make(chan *nats.Msg, 1) // SubscribeSync would allocate 512 KB
	sub, err := nc.ChanSubscribe(inbox, responses)
	if err != nil {
		return nil, fmt.Errorf("command %s: %w: subscribe to the response: %w", cmd.ID, ErrUnavailable, err)
	}
	closed := make(chan struct{})
	ended := sync.OnceFunc(func() { close(closed) })
	sub.SetClosedHandler(func(string) { ended() })
	// On a closed connection there is nothing left to unsubscribe from.
	defer func() { _ = sub.Unsubscribe() }()

	sent, err := storeCommand(ctx, js, cmd, inbox, deadline)
	if err != nil {
		return nil, fmt.Errorf("command %s: %w", cmd.ID, err)
	}
	var msg *nats.Msg
	select {
	case msg = <-responses:
	case <-closed:
		err = nats.ErrConnectionClosed
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("command %s: %w: no response from %s: %w", cmd.ID, ErrOutcomeUnknown, cmd.Subject, errors.Join(sent, err))
	}
	answer := &Answer{Payload: msg.Data, Metadata: map[string]string{}}
	for key, values := range msg.Header {
		if len(values) > 0 {
			answer.Metadata[key] = values[0]
		}
	}
	return answer, nil
}

// commandDeadline returns the deadline of the command or that of ctx, whichever is earlier, or defaultCommandTimeout
// from now if there is neither.
func commandDeadline(ctx context.Context, cmd Command) time.Time {
	deadline := cmd.Deadline
	if until, ok := ctx.Deadline(); ok && (deadline.IsZero() || until.Before(deadline)) {
		deadline = until
	}
	if deadline.IsZero() {
		deadline = time.Now().Add(defaultCommandTimeout)
	}
	return deadline
}

// storeCommand returns err if the command was certainly not stored. It returns unknown if that is uncertain: a response may
// still arrive.
func storeCommand(ctx context.Context, js jetstream.JetStream, cmd Command, inbox string, deadline time.Time) (unknown, err error) {
	// The deduplication id is new for each request: the stream would drop a retry with the same id, and it would
	// never be answered.
	msg := NewMessage(ctx, watermill.NewUUID(), cmd.Payload)
	for key, value := range cmd.Metadata {
		msg.Metadata.Set(key, value)
	}
	msg.Metadata.Set(topology.HeaderCommandID, cmd.ID)
	msg.Metadata.Set(topology.HeaderReply, inbox)
	msg.Metadata.Set(topology.HeaderTimeToLive, max(time.Until(deadline), 0).String())
	if CorrelationID(ctx) == "" && cmd.Metadata[topology.HeaderCorrelation] == "" {
		msg.Metadata.Set(topology.HeaderCorrelation, cmd.ID)
	}
	publisher, err := NewPublisher(PublisherConfig{JetStream: js, Deduplicate: true})
	if err != nil {
		return nil, err
	}
	err = publisher.Publish(cmd.Subject, msg)
	switch {
	case err == nil:
		return nil, nil
	case errors.Is(err, ErrOutcomeUnknown):
		return err, nil
	case errors.Is(err, ErrUnavailable), errors.Is(err, ErrInvalidMessage), errors.Is(err, ErrTooLarge):
		return nil, err
	default:
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
}

// Reply sends the response to a command over core NATS. A response is not stored: if it is lost, the sender gets
// ErrOutcomeUnknown and repeats the command. Reply does nothing for a command without HeaderReply. A handler must
// call it after its effect is stored and before it returns.
func Reply(nc *nats.Conn, cmd *message.Message, answer Answer) error {
	subject := cmd.Metadata.Get(topology.HeaderReply)
	if subject == "" {
		return nil
	}
	if err := CheckSubject(subject); err != nil {
		return fmt.Errorf("header %s: %w", topology.HeaderReply, err)
	}
	// The sender chose the subject, but the response is published with the permissions of this service.
	if !strings.HasPrefix(subject, inboxNamePrefix) {
		return fmt.Errorf("%w: header %s: %.64q is not an inbox", ErrInvalidMessage, topology.HeaderReply, subject)
	}
	out := &nats.Msg{Subject: subject, Data: answer.Payload, Header: nats.Header{}}
	for key, value := range answer.Metadata {
		if err := checkHeader(key, value); err != nil {
			return err
		}
		out.Header[key] = []string{value}
	}
	if err := nc.PublishMsg(out); err != nil {
		return fmt.Errorf("reply to %s: %w", subject, err)
	}
	return nil
}
