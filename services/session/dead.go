package session

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session/internal/reactor"
)

// deadLetterStore reads dead letters, and retries or drops them for commands of clients. It is safe for concurrent use.
type deadLetterStore struct {
	stream *bus.StreamHandle
	react  *reactor.Reactor
}

// findLetter returns the dead letter at a sequence of the stream DEAD if it belongs to the tenant or names no tenant, and nil
// otherwise.
func (d *deadLetterStore) findLetter(ctx context.Context, tenant string, sequence uint64) (*topology.DeadLetter, error) {
	stream, err := d.stream.Open(ctx)
	if err != nil {
		return nil, err
	}
	msg, err := stream.GetMsg(ctx, sequence)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read dead letter %d: %w", sequence, err)
	}
	letter := topology.ParseDeadLetter(msg.Sequence, msg.Time, msg.Subject, msg.Header, msg.Data)
	if !strings.HasPrefix(msg.Subject, topology.DeadSubject("")) || letter.Tenant != "" && letter.Tenant != tenant {
		return nil, nil
	}
	return &letter, nil
}

// Retry implements command.DeadLetters.
func (d *deadLetterStore) Retry(ctx context.Context, tenant string, sequence uint64, cause string) error {
	letter, err := d.findLetter(ctx, tenant, sequence)
	if letter == nil || err != nil {
		return err
	}
	if !letter.IsRetryable() {
		return &command.Error{Code: "DEAD_LETTER_FINAL", Field: "id", Detail: "the letter belongs to no session, or is a command, whose sender was told to send it again: drop the letter"}
	}
	err = d.react.RepublishJob(ctx, letter.Tenant, letter.Session, cause)
	if errors.Is(err, reactor.ErrSessionGone) {
		return &command.Error{Code: "SESSION_NOT_FOUND", Field: "sessionId", Detail: "the session " + letter.Session + " of the dead letter does not exist, or was deleted: drop the letter"}
	}
	if err != nil {
		return err
	}
	return d.deleteMessage(ctx, sequence)
}

// Drop implements command.DeadLetters.
func (d *deadLetterStore) Drop(ctx context.Context, tenant string, sequence uint64) error {
	letter, err := d.findLetter(ctx, tenant, sequence)
	if letter == nil || err != nil {
		return err
	}
	return d.deleteMessage(ctx, sequence)
}

// deleteMessage deletes the message at a sequence of the stream DEAD. A message that does not exist is not an error.
func (d *deadLetterStore) deleteMessage(ctx context.Context, sequence uint64) error {
	stream, err := d.stream.Open(ctx)
	if err != nil {
		return err
	}
	if err := stream.DeleteMsg(ctx, sequence); err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return fmt.Errorf("remove dead letter %d: %w", sequence, err)
	}
	return nil
}
