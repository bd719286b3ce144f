package jslog

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Append stores a commit; see eventlog.Appender. It sends identical bytes again until the outcome is known or ctx
// is done.
func (l *Log) Append(ctx context.Context, head eventlog.Head, draft events.Draft) (eventlog.Head, error) {
	draft.V = max(l.signing.CommitVersion, head.Commit.V)
	c, data, err := eventlog.SealDraft(ctx, head, draft, l.payloads)
	if err != nil {
		return eventlog.Head{}, err
	}
	a := appendAttempt{log: l, head: head, commit: c, data: data}
	next, err := a.publishUntilKnown(ctx)
	if err != nil {
		var conflict *eventlog.ConflictError
		if errors.As(err, &conflict) {
			return eventlog.Head{}, err
		}
		return eventlog.Head{}, fmt.Errorf("append to %s: %w", head.Subject, err)
	}
	return next, nil
}

// appendAttempt is the state of one Append.
type appendAttempt struct {
	log    *Log
	head   eventlog.Head
	commit events.Commit
	data   []byte
	lost   bool // a publish was not acknowledged: the commit may be stored already, or be stored later
	// maybeStored is set after the server refused a batch with this commit but may have stored a part of the batch.
	maybeStored bool
	joined      bool // the first publish went through the stream's batcher
}

// publishUntilKnown publishes the commit until its outcome is known: the commit is stored, another commit was stored
// after the same head (*eventlog.ConflictError), or the server refuses the commit.
func (a *appendAttempt) publishUntilKnown(ctx context.Context) (eventlog.Head, error) {
	b := a.log.appendBackoff()
	for {
		ack, err := a.publishOnce(ctx, b.timeout())
		if err == nil && !ack.Duplicate {
			return eventlog.Head{Subject: a.head.Subject, Seq: ack.Sequence, Hash: a.commit.Hash, Commit: a.commit}, nil
		}
		if err == nil {
			return a.handleDuplicate(ctx)
		}
		guarded := isWrongSequence(err)
		if !guarded && !isTransient(err) {
			return a.handleRefusal(ctx, err)
		}
		if !guarded {
			a.lost = true
			a.log.logger.Log(ctx, b.logLevel(), "settle an append", "subject", a.head.Subject.String(), "commit", a.commit.ID, "error", err)
			// The server cannot answer yet: wait before asking for the outcome, not only before the next publish.
			if err := b.wait(ctx, err); err != nil {
				return eventlog.Head{}, err
			}
		}
		next, known, settleErr := a.readOutcome(ctx)
		if settleErr != nil || known {
			return next, settleErr
		}
		if guarded {
			// The append was refused although no commit follows: either the head was never the subject's last
			// commit, or a replicated stream has another commit in flight.
			if err := a.checkHead(ctx); err != nil {
				return eventlog.Head{}, err
			}
			if err := b.wait(ctx, err); err != nil {
				return eventlog.Head{}, err
			}
		}
	}
}

// publishOnce sends the commit once. It returns at once if the connection breaks. Only the first publish of an append may
// share a batch: after a lost acknowledgement the other members of the batch must not depend on this one.
func (a *appendAttempt) publishOnce(ctx context.Context, timeout time.Duration) (*jetstream.PubAck, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b := a.log.batcherFor(a)
	if b == nil || a.joined {
		return a.publishSingly(ctx, timeout)
	}
	a.joined = true
	m := b.admit(a)
	if m == nil {
		defer b.finishSingle()
		return a.publishSingly(ctx, timeout)
	}
	o, err := b.awaitOutcome(ctx, m, timeout)
	if err != nil || o.ack != nil {
		return o.ack, err
	}
	a.maybeStored = o.maybeStored
	defer b.finishSingle()
	return a.publishSingly(ctx, timeout)
}

// buildMessage returns the NATS message of the commit, with the guard and the signature.
func (a *appendAttempt) buildMessage() *nats.Msg {
	msg := &nats.Msg{Subject: a.log.natsSubject(a.head.Subject), Data: a.data, Header: nats.Header{
		jetstream.ExpectedLastSubjSeqHeader: {strconv.FormatUint(a.head.ExpectedSequence(), 10)},
		jetstream.MsgIDHeader:               {a.commit.ID},
	}}
	if signature := a.log.keys.Sign(a.head.Subject, a.commit); signature != "" {
		msg.Header[topology.HeaderSignature] = []string{signature}
	}
	return msg
}

// publishSingly publishes the commit in a message of its own. It returns nats.ErrTimeout if there is no acknowledgement in time.
func (a *appendAttempt) publishSingly(ctx context.Context, timeout time.Duration) (*jetstream.PubAck, error) {
	return a.log.publisher.publish(ctx, a.buildMessage(), timeout)
}

// handleDuplicate handles a commit id that the server already knows while the expected sequence matches: either this
// append was stored by an earlier try, or the stored commit was purged since and the append is a conflict.
func (a *appendAttempt) handleDuplicate(ctx context.Context) (eventlog.Head, error) {
	next, known, err := a.readOutcome(ctx)
	if err == nil && !known {
		err = &eventlog.ConflictError{Subject: a.head.Subject, Expected: a.head.ExpectedSequence()}
	}
	return next, err
}

// readOutcome reads the first commit of the subject after the expected sequence. If there is one, the outcome of the
// append is known: that commit is the one to append, or another one, which is a conflict.
func (a *appendAttempt) readOutcome(ctx context.Context) (next eventlog.Head, known bool, err error) {
	s := a.head.Subject
	m, err := a.log.getFromLeader(ctx, a.log.streamName(s), getRequest{Seq: a.head.ExpectedSequence() + 1, NextFor: a.log.natsSubject(s)})
	if errors.Is(err, eventlog.ErrNotFound) {
		return eventlog.Head{}, false, nil
	}
	if err != nil {
		return eventlog.Head{}, false, err
	}
	next, err = a.log.decodeHead(ctx, s, m)
	var foreign *eventlog.ForeignError
	if errors.As(err, &foreign) {
		return eventlog.Head{}, true, &eventlog.ConflictError{Subject: s, Expected: a.head.ExpectedSequence()}
	}
	if err != nil {
		return eventlog.Head{}, false, err
	}
	if next.Commit.ID != a.commit.ID {
		return eventlog.Head{}, true, &eventlog.ConflictError{Subject: s, Expected: a.head.ExpectedSequence()}
	}
	return next, true, nil
}

// checkHead returns a *eventlog.ConflictError if the head is not the subject's last commit.
func (a *appendAttempt) checkHead(ctx context.Context) error {
	last, err := a.log.Last(ctx, a.head.Subject, eventlog.LeaderOnly)
	if err != nil {
		return err
	}
	if last.ExpectedSequence() < a.head.ExpectedSequence() {
		return &eventlog.ConflictError{Subject: a.head.Subject, Expected: a.head.ExpectedSequence()}
	}
	return nil
}

// handleRefusal returns the result of an append whose last try was finally refused. An earlier try may still have
// been stored.
func (a *appendAttempt) handleRefusal(ctx context.Context, why error) (eventlog.Head, error) {
	why = classifyError(why)
	if !a.lost && !a.maybeStored {
		return eventlog.Head{}, why
	}
	next, known, err := a.readOutcome(ctx)
	if err != nil || known {
		return next, err
	}
	if !a.lost {
		return eventlog.Head{}, why // the server answered every try
	}
	// The unacknowledged try may still arrive, so the outcome is unknown.
	return eventlog.Head{}, fmt.Errorf("%w: an earlier try was not acknowledged, then: %w", eventlog.ErrUnavailable, why)
}

// isWrongSequence reports whether the server refused the expected sequence. Replicated streams use a different error
// code for it.
func isWrongSequence(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) &&
		(api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

// Error codes of the server for which nats.go has no names.
const (
	codeAccountFull           jetstream.ErrorCode = 10002
	codeInsufficientResources jetstream.ErrorCode = 10023
	codeStorageExceeded       jetstream.ErrorCode = 10047
	codeStoreFailed           jetstream.ErrorCode = 10077 // a limit of the stream was reached, or the disk failed
)

// classifyError wraps an error of a publish in eventlog.ErrTooLarge, eventlog.ErrFull or eventlog.ErrUnavailable.
func classifyError(err error) error {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: %w", eventlog.ErrTooLarge, err)
	case errors.As(err, &api) && api.ErrorCode == jetstream.JSErrCodeStreamMessageExceedsMaximum:
		return fmt.Errorf("%w: %w", eventlog.ErrTooLarge, err)
	case errors.As(err, &api) && (api.ErrorCode == codeAccountFull || api.ErrorCode == codeStoreFailed || api.ErrorCode == codeStorageExceeded || api.ErrorCode == codeInsufficientResources):
		return fmt.Errorf("%w: %w", eventlog.ErrFull, err)
	}
	return fmt.Errorf("%w: %w", eventlog.ErrUnavailable, err)
}
