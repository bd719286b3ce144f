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

// deadLetters reads, retries and drops dead letters for commands of clients. It is safe for concurrent use.
type deadLetters struct {
	stream *bus.StreamHandle
	react  *reactor.Reactor
}

// letter reads a dead letter of a tenant, or one that names no tenant. It returns nil if there is none.
func (d *deadLetters) letter(ctx context.Context, tenant string, sequence uint64) (*topology.DeadLetter, error) {
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
func (d *deadLetters) Retry(ctx context.Context, tenant string, sequence uint64, cause string) error {
	letter, err := d.letter(ctx, tenant, sequence)
	if letter == nil || err != nil {
		return err
	}
	if !letter.IsRetryable() {
		return &command.Error{Code: "DEAD_LETTER_FINAL", Field: "id", Detail: "the letter is of no session, or is a command, whose sender was told to send it again; drop it"}
	}
	err = d.react.Again(ctx, letter.Tenant, letter.Session, cause)
	if errors.Is(err, reactor.ErrGone) {
		return &command.Error{Code: "SESSION_NOT_FOUND", Field: "sessionId", Detail: "the session " + letter.Session + " of the dead letter does not exist, or was deleted; drop the letter"}
	}
	if err != nil {
		return err
	}
	return d.remove(ctx, sequence)
}

// Drop implements command.DeadLetters.
func (d *deadLetters) Drop(ctx context.Context, tenant string, sequence uint64) error {
	letter, err := d.letter(ctx, tenant, sequence)
	if letter == nil || err != nil {
		return err
	}
	return d.remove(ctx, sequence)
}

func (d *deadLetters) remove(ctx context.Context, sequence uint64) error {
	stream, err := d.stream.Open(ctx)
	if err != nil {
		return err
	}
	if err := stream.DeleteMsg(ctx, sequence); err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return fmt.Errorf("remove dead letter %d: %w", sequence, err)
	}
	return nil
}
