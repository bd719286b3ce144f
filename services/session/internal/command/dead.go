package command

import (
	"context"

	"github.com/spoolhq/spool/pkg/api/command"
)

// DeadLetters is what people may do about messages that were given up. Its refusals are *command.Error. A letter that is
// not there was dealt with before, which is no error: the gateway looked for it first.
type DeadLetters interface {
	// Retry has the letter's session looked at again, and removes the letter.
	Retry(ctx context.Context, tenant string, sequence uint64, cause string) error
	// Drop removes the letter.
	Drop(ctx context.Context, tenant string, sequence uint64) error
}

// dead retries or drops a dead letter.
func (h *Handler) dead(ctx context.Context, c command.Command) (command.Answer, error) {
	var b command.DeadLetter
	if err := decode(c, &b); err != nil {
		return command.Answer{}, err
	}
	if c.Type == command.TypeRetryDead {
		return command.Answer{}, h.cfg.Dead.Retry(ctx, c.Tenant, b.Sequence, c.ID)
	}
	return command.Answer{}, h.cfg.Dead.Drop(ctx, c.Tenant, b.Sequence)
}
