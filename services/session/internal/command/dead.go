package command

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
)

// DeadLetters retries and drops dead letters. If it refuses a request, the error is a *command.Error. A letter that
// does not exist is no error: it was retried or dropped before, because the gateway checks that it exists.
type DeadLetters interface {
	// Retry makes the services look at the letter's session again, and removes the letter.
	Retry(ctx context.Context, tenant string, sequence uint64, cause string) error
	// Drop removes the letter.
	Drop(ctx context.Context, tenant string, sequence uint64) error
}

// handleDeadLetter retries or drops a dead letter.
func (h *Handler) handleDeadLetter(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.DeadLetter
	if err := decodeBody(c, &b); err != nil {
		return command.Answer{}, err
	}
	if c.Type == command.TypeRetryDeadLetter {
		return command.Answer{}, h.cfg.Dead.Retry(ctx, c.Tenant, b.Sequence, c.ID)
	}
	return command.Answer{}, h.cfg.Dead.Drop(ctx, c.Tenant, b.Sequence)
}
