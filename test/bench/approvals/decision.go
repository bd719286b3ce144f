package approvals

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// maxDecisionMs is the performance target: the maximum time, in milliseconds at the median, by which a decision through
// Spool may be slower than an answer to the same agent without Spool.
const maxDecisionMs = 50

// approvalConversation is a conversation with an agent, with or without Spool, that asks a person about one call of a
// tool in each turn.
type approvalConversation interface {
	// Ask returns the time from the decision about the call to its result.
	Ask(ctx context.Context, text string) (time.Duration, error)
	Close() error
}

// compareDecisions measures the time from the decision about a call to the call's result, in alternating turns of an
// agent without Spool and of a session. It reports the row of docs/performance.md. The first turn of each is not
// measured.
func compareDecisions(ctx context.Context, b *harness.Bench, sys *system.System, a bareagent.Agent, path, url string, decisions int) (err error) {
	warm, err := a.Warm(path, filepath.Join(b.Dir, "bare-"+a.Architecture), url)
	if err != nil {
		return fmt.Errorf("on bare stdio: %w", err)
	}
	defer func() { err = errors.Join(err, warm.Close()) }()
	bare, ok := warm.(bareagent.PermissionConversation)
	if !ok {
		return fmt.Errorf("%T is no Asker", warm)
	}
	slug := "asks-" + a.Architecture
	if err := applyAgent(ctx, sys, slug, a.Architecture, &events.Permissions{Preset: events.PresetAsk}); err != nil {
		return err
	}
	s, err := newSession(ctx, sys, slug)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	var times [2][]time.Duration // on bare stdio, through Spool
	for i := range decisions + 1 {
		for kind, c := range []approvalConversation{bare, s} {
			d, err := timeDecision(ctx, c)
			if err != nil {
				return fmt.Errorf("turn %d of %T: %w", i, c, err)
			}
			if i > 0 {
				times[kind] = append(times[kind], d)
			}
		}
	}
	return b.ReportRow(decisionRow(a.Name, s, times[1], times[0]))
}

// timeDecision takes a turn in which the agent asks about one call, approves the call, and returns the time from the
// decision to the call's result.
func timeDecision(ctx context.Context, c approvalConversation) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	return c.Ask(ctx, oneCommandMessage)
}

// decisionRow returns the row of docs/performance.md that compares decisions through Spool (through) with decisions
// without Spool (bare).
func decisionRow(agent string, s *session, through, bare []time.Duration) row.Row {
	p50, base := row.Percentile(through, 0.5), row.Percentile(bare, 0.5)
	return row.Row{
		What:     "decision about a call, POST to the call's result on the WebSocket, local, " + agent,
		Target:   fmt.Sprintf("p50 at most +%d ms over the same warm agent on bare stdio", maxDecisionMs),
		Measured: fmt.Sprintf("%+.1f ms, of %d decisions", p50-base, len(through)),
		Against:  fmt.Sprintf("bare p50 %.1f ms, p99 %.1f ms", base, row.Percentile(bare, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(through, 0.99), OK: p50-base <= maxDecisionMs,
		Note: fmt.Sprintf("approval_decided received after %.1f ms, approval_resolved after %.1f ms; permissions with the preset ask; the decision is posted as soon as the request arrives; the call runs touch",
			row.Percentile(s.decided[1:], 0.5), row.Percentile(s.resolved[1:], 0.5)),
	}
}

// Ask posts text as a message, approves the call about which the agent asks, and returns the time from the decision to
// the call's result. It implements approvalConversation.
func (s *session) Ask(ctx context.Context, text string) (time.Duration, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var posted, result time.Time
	_, err := s.client.TakeTurn(ctx, s.socket, s.id, text, func(w events.WireEvent, received time.Time) error {
		switch d := w.Event().Data.(type) {
		case events.ApprovalDecided:
			s.decided = append(s.decided, received.Sub(posted))
		case events.ApprovalResolved:
			s.resolved = append(s.resolved, received.Sub(posted))
		case events.ApprovalRequested:
			if !posted.IsZero() {
				return errors.New("the agent asked about a second call")
			}
			posted = time.Now()
			// The result may arrive before the response.
			go func() {
				if err := s.client.DecideApproval(ctx, d.ApprovalID, events.DecisionApprove); err != nil && ctx.Err() == nil {
					cancel(fmt.Errorf("decide: %w", err))
				}
			}()
		case events.BlockStart:
			result = firstResultTime(result, d.Block, received)
		case events.BlockComplete:
			result = firstResultTime(result, d.Block, received)
		}
		return nil
	})
	if err == nil && (posted.IsZero() || result.Before(posted)) {
		err = errors.New("the agent did not ask, or the call has no result")
	}
	return result.Sub(posted), errors.Join(err, context.Cause(ctx))
}

// firstResultTime returns the time at which the first result of a call was received: result unless it is zero,
// otherwise received if the block b is a result, otherwise zero.
func firstResultTime(result time.Time, b events.Block, received time.Time) time.Time {
	if result.IsZero() && b.Kind == events.KindToolResult && b.Status != events.StatusPending {
		return received
	}
	return result
}
