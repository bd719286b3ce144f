package executor

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/holder"
	"github.com/spoolhq/spool/services/executor/internal/link"
)

// wayOut is the egress proxy as the holder uses it.
type wayOut struct{ client *egress.Client }

var _ holder.Egress = wayOut{}

// whatever is an epoch above all: the log has decided, and the proxy follows.
const whatever = math.MaxInt64

// Register registers a sandbox, or renews what is registered.
func (w wayOut) Register(ctx context.Context, g holder.Grant) error {
	_, err := w.client.Register(ctx, g.Sandbox, egress.Registration{
		Token: g.Token, Tenant: g.Tenant, Session: g.Session, Execution: g.Execution, Epoch: g.Epoch, Allow: append([]string{}, g.Allow...),
	})
	return meaning(err)
}

// Release shuts a sandbox's way out, and forgets what was journaled.
func (w wayOut) Release(ctx context.Context, sandbox string) error {
	s, err := w.client.Release(ctx, sandbox, whatever)
	if err == nil {
		err = w.client.Ack(ctx, sandbox, s.Journal, s.Last, whatever)
	}
	if err = meaning(err); errors.Is(err, holder.ErrUnknownSandbox) {
		return nil
	}
	return err
}

// Open is how many requests to models are under way.
func (w wayOut) Open(ctx context.Context, sandbox string) (int, error) {
	s, err := w.client.State(ctx, sandbox)
	return s.OpenModelRequests, meaning(err)
}

// Lines gives what was journaled about a sandbox after a line.
func (w wayOut) Lines(ctx context.Context, sandbox string, after run.Line) ([]holder.EgressLine, error) {
	lines, err := w.client.Lines(ctx, sandbox, after.Journal, after.N)
	if err != nil {
		return nil, meaning(err)
	}
	var out []holder.EgressLine
	for _, l := range lines {
		data := events.DecodePayload(l.Type, l.Data)
		out = append(out, holder.EgressLine{Execution: l.Execution, Time: l.Time, Data: data})
	}
	return out, nil
}

// Ack lets the proxy forget lines.
func (w wayOut) Ack(ctx context.Context, sandbox string, upTo run.Line) error {
	return meaning(w.client.Ack(ctx, sandbox, upTo.Journal, upTo.N, whatever))
}

func meaning(err error) error {
	var refused *egress.Error
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Code {
	case egress.CodeNotFound:
		return fmt.Errorf("%w: %w", holder.ErrUnknownSandbox, err)
	case egress.CodeFenced:
		return fmt.Errorf("%w: %w", link.ErrFenced, err)
	}
	return err
}
