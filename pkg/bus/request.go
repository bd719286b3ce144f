package bus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

const defaultDeadline = 10 * time.Second

// inboxes begins the name of every inbox, also of those with a user's prefix (topology.InboxPrefix).
const inboxes = "_INBOX"

// Command is a message that is answered. Subject and ID are required.
type Command struct {
	// Subject is where the command goes: a work queue takes it.
	Subject string
	// ID names the command; a retry has the same one, and the handler answers it without doing it twice.
	ID string
	// Payload is the command itself.
	Payload []byte
	// Metadata become headers beside those that Request sets.
	Metadata map[string]string
	// Deadline is when the command is not to be carried out any more. Zero means the deadline of the context, or 10 s from now.
	Deadline time.Time
}

// Answer is what a handler gave to Reply.
type Answer struct {
	Payload  []byte
	Metadata map[string]string
}

// Request stores a command in a work queue and waits for its answer until the command's deadline or the end of ctx, whichever is first.
//
// An error that wraps ErrUnavailable means that the command was not stored, and has no effect; its cause (ErrFull, ErrNoStream, …) is in the
// chain, too. ErrInvalidMessage and ErrTooLarge say the same of a command that can never be stored. ErrOutcomeUnknown means that it was
// stored, or may have been, and that no answer came: it may still take effect until its deadline.
func Request(ctx context.Context, js jetstream.JetStream, cmd Command) (*Answer, error) {
	if cmd.ID == "" {
		return nil, fmt.Errorf("%w: the command has no ID", ErrInvalidMessage)
	}
	deadline := commandDeadline(ctx, cmd)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	nc := js.Conn()
	inbox := nc.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		return nil, fmt.Errorf("command %s: %w: subscribe to the answer: %w", cmd.ID, ErrUnavailable, err)
	}
	// On a closed connection there is nothing left to unsubscribe from.
	defer func() { _ = sub.Unsubscribe() }()

	sent, err := send(ctx, js, cmd, inbox, deadline)
	if err != nil {
		return nil, fmt.Errorf("command %s: %w", cmd.ID, err)
	}
	msg, err := sub.NextMsgWithContext(ctx)
	if err != nil {
		return nil, fmt.Errorf("command %s: %w: no answer from %s: %w", cmd.ID, ErrOutcomeUnknown, cmd.Subject, errors.Join(sent, err))
	}
	answer := &Answer{Payload: msg.Data, Metadata: map[string]string{}}
	for key, values := range msg.Header {
		if len(values) > 0 {
			answer.Metadata[key] = values[0]
		}
	}
	return answer, nil
}

func commandDeadline(ctx context.Context, cmd Command) time.Time {
	deadline := cmd.Deadline
	if until, ok := ctx.Deadline(); ok && (deadline.IsZero() || until.Before(deadline)) {
		deadline = until
	}
	if deadline.IsZero() {
		deadline = time.Now().Add(defaultDeadline)
	}
	return deadline
}

// send returns err when the command was certainly not stored, and unknown when that is open: then an answer may come all the same.
func send(ctx context.Context, js jetstream.JetStream, cmd Command, inbox string, deadline time.Time) (unknown, err error) {
	// The id for deduplication is a new one: a retry whose message the stream took for a duplicate would never be answered.
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

// Reply sends the answer to a command, over core NATS: it is not stored, and if it is lost the sender learns that the outcome is unknown and
// asks again. A command without HeaderReply wants no answer, and Reply does nothing. A handler replies before it returns, after
// the effect is stored.
func Reply(nc *nats.Conn, cmd *message.Message, answer Answer) error {
	subject := cmd.Metadata.Get(topology.HeaderReply)
	if subject == "" {
		return nil
	}
	if err := CheckSubject(subject); err != nil {
		return fmt.Errorf("header %s: %w", topology.HeaderReply, err)
	}
	// The sender chose the subject, and the answer is published with the rights of this service.
	if !strings.HasPrefix(subject, inboxes) {
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
