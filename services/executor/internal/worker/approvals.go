package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// approvals are the decisions on approval requests that a follower sends to the runner. A decision takes effect when the journal
// contains approval_resolved; until then it is sent again over each new stream, which changes nothing if the runner has it already.
type approvals struct {
	inFlight map[string]bool // requests whose verdict was sent over the present stream, by id
	sent     chan sentVerdict
	granted  chan func() // a permit for the turn, after requestSlot
	waits    bool        // the turn has released its slot, because the execution waits for a person
	asks     bool        // a permit was requested and not granted yet
	failed   []string    // requests in inFlight whose verdict did not reach the runner
	classes  []string    // classes of which a person has approved all requests
}

// A sentVerdict is the result of sending a verdict to the runner.
type sentVerdict struct {
	id   string
	link *link.Link // over which the verdict was sent
	err  error
}

func newApprovals(approved []string) approvals {
	return approvals{inFlight: map[string]bool{}, sent: make(chan sentVerdict), granted: make(chan func()), classes: slices.Clone(approved)}
}

// reconnected makes all verdicts due again.
func (a *approvals) reconnected() {
	clear(a.inFlight)
	a.failed = nil
}

// retry makes the verdicts due again that did not reach the runner.
func (a *approvals) retry() {
	for _, id := range a.failed {
		delete(a.inFlight, id)
	}
	a.failed = nil
}

// sendVerdicts sends the runner the decisions on open approval requests, and rejects requests that nobody decided in time. While the
// execution waits for a person, it holds no slot; the decisions are sent when it has one again.
func (f *follower) sendVerdicts() {
	due := f.dueVerdicts()
	switch {
	case f.ended != nil || f.stop.IsStopping():
		return // the runner retracts the requests
	case len(due) == 0 && f.Session.Run.Phase == run.Waiting && len(f.approvals.inFlight) == 0:
		f.releaseSlot()
		return
	case f.approvals.waits && !f.slot.IsHeld() && (len(due) > 0 || f.Session.Run.Phase != run.Waiting):
		f.requestSlot()
	}
	if f.approvals.waits {
		return
	}
	for _, d := range due {
		f.approvals.inFlight[d.ApprovalID] = true
		f.sendVerdict(d)
	}
}

// dueVerdicts returns the open requests on which a verdict is due and not sent: those that a person decided, with the place of the decision, and
// those whose time is over, without.
func (f *follower) dueVerdicts() (due []session.Decided) {
	open := func(id string) bool {
		return slices.ContainsFunc(f.Session.Run.Approvals, func(a run.OpenApproval) bool { return a.ID == id })
	}
	maps.DeleteFunc(f.approvals.inFlight, func(id string, _ bool) bool { return !open(id) })
	for _, a := range f.Session.Run.Approvals {
		d, decided := decisionOn(f.life, a)
		switch {
		case f.approvals.inFlight[a.ID]:
		case decided:
			due = append(due, d)
		case !f.hasTimedOut(a):
		case !f.lifeAsOf.Before(f.deadlineOfRequest(a)):
			due = append(due, session.Decided{ApprovalID: a.ID})
		case !f.readAgain && !f.readingLife: // a person may have decided in time, without a hint that arrived
			f.readLife(eventlog.Leader)
		}
	}
	return due
}

// hasTimedOut reports whether the time to decide a request is over.
func (f *follower) hasTimedOut(a run.OpenApproval) bool {
	at := f.deadlineOfRequest(a)
	return !at.IsZero() && !f.w.deps.Now().Before(at)
}

// deadlineOfRequest returns the time by which a request must be decided; the zero time if there is no limit.
func (f *follower) deadlineOfRequest(a run.OpenApproval) time.Time {
	timeout := time.Duration(f.resolved.Definition.Permissions.TimeoutMs) * time.Millisecond
	if timeout == 0 {
		return time.Time{}
	}
	return a.Time.Add(timeout)
}

// decisionOn returns the decision in a life on an open request. A decision from before the request is on another one, to which a hostile
// runner gave the same id.
func decisionOn(life *session.State, a run.OpenApproval) (session.Decided, bool) {
	i := slices.IndexFunc(life.Decided, func(d session.Decided) bool { return d.ApprovalID == a.ID && d.At > a.At })
	if i < 0 {
		return session.Decided{}, false
	}
	return life.Decided[i], true
}

// sendVerdict reads the content of a decision and sends it to the runner, and returns at once. f.approvals.sent receives the result.
func (f *follower) sendVerdict(d session.Decided) {
	l, loaded, epoch := f.agent.Link, f.Session, f.Epoch
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, callTimeout)
		defer cancel()
		v, err := f.w.verdict(ctx, loaded, d)
		if err == nil {
			_, err = l.Call(ctx, runner.Command{Op: runner.OpDecide, Epoch: epoch, Verdict: &v})
		}
		select {
		case f.approvals.sent <- sentVerdict{d.ApprovalID, l, err}:
		case <-f.ctx.Done():
		}
	})
}

// verdict returns the verdict for a decision, with the answers to secret questions, which the log does not have.
func (w *Worker) verdict(ctx context.Context, l *eventlog.Loaded, d session.Decided) (v runner.ApprovalDecision, err error) {
	if d.At == 0 {
		return runner.ApprovalDecision{ApprovalDecided: events.ApprovalDecided{ApprovalID: d.ApprovalID}, Timeout: true}, nil
	}
	if v.ApprovalDecided, err = w.deps.Sessions.Decision(ctx, l, d); err != nil || len(v.Sealed) == 0 {
		return v, err
	}
	v.Answers = maps.Clone(v.Answers)
	if v.Answers == nil {
		v.Answers = map[string][]string{}
	}
	for question, key := range v.Sealed {
		texts, err := w.openAnswer(ctx, l.Tenant, key)
		switch {
		case errors.Is(err, secret.ErrUnavailable), err != nil && ctx.Err() != nil:
			return v, err
		case err != nil: // it can never be read
			w.deps.Logger.Error("a secret answer cannot be opened, the question is rejected", "session", l.ID, "approval", d.ApprovalID, "error", err)
			v.ApprovalDecided = events.ApprovalDecided{ApprovalID: d.ApprovalID, Decision: events.DecisionReject, Comment: "the secret answer cannot be read any more"}
			return v, nil
		}
		v.Answers[question] = texts
		v.Redact = append(v.Redact, texts...)
	}
	v.Sealed = nil
	return v, nil
}

// openAnswer returns a sealed answer to a secret question.
func (w *Worker) openAnswer(ctx context.Context, tenant, key string) (texts []string, err error) {
	if w.deps.Secrets == nil {
		return nil, errors.New("the executor has no key for secrets")
	}
	value, err := w.deps.Secrets.Open(ctx, tenant, key)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(value), &texts); err != nil {
		return nil, errors.New("the secret answer is not a list of texts")
	}
	return texts, nil
}

// secretAnswers returns the answers to secret questions that a person gave in earlier attempts of the execution: the agent may have kept
// them in its records.
func (t *turn) secretAnswers(ctx context.Context) (values []string, err error) {
	l, err := t.w.deps.Sessions.Load(ctx, t.Session.Tenant, t.Session.ID, eventlog.Leader) // the decisions came after the claim
	if err != nil {
		return nil, err
	}
	for _, d := range l.Life.Decided {
		v, err := t.w.verdict(ctx, l, d)
		if err != nil {
			return nil, err
		}
		values = append(values, v.Redact...)
	}
	return values, nil
}

// handleVerdictSent makes the next beat send a verdict again that did not reach the runner. The only error is run.ErrFenced: the runner has
// seen another executor.
func (f *follower) handleVerdictSent(v sentVerdict) error {
	if v.err == nil || v.link != f.agent.Link {
		return nil
	}
	if errors.Is(v.err, link.ErrFenced) {
		return fmt.Errorf("%w: %w", run.ErrFenced, v.err)
	}
	var refused *runner.CommandError
	if errors.As(v.err, &refused) {
		f.Log.Error("the runner refused a decision on an approval request", "approval", v.id, "error", v.err)
		return nil // sent again over the next stream
	}
	f.Log.Warn("a decision on an approval request did not reach the runner, trying again", "approval", v.id, "error", v.err)
	f.approvals.failed = append(f.approvals.failed, v.id)
	return nil
}

// checkResolved returns the event of the runner, or an error event in its place if it states a decision on an approval request that is not in
// the log: a runner is not trusted, and neither the log nor a later attempt may have an approval that no person gave.
func (f *follower) checkResolved(e events.Event) events.Event {
	p, ok := e.Data.(events.ApprovalResolved)
	if !ok {
		return e
	}
	i := slices.IndexFunc(f.Session.Run.Approvals, func(a run.OpenApproval) bool { return a.ID == p.ApprovalID })
	if i >= 0 {
		p.Class = f.Session.Run.Approvals[i].Class // which the person saw
	}
	if !f.isDecided(p, i) {
		e.Data = events.Error{Code: translate.CodeForged, Message: "the runner claims that approval request " + p.ApprovalID + " was decided; the log has no such decision"}
		return e
	}
	if p.All {
		f.approvals.classes = append(f.approvals.classes, p.Class)
	}
	e.Data = p
	return e
}

// isDecided reports whether the log has the decision that the runner states on the i-th open request. i is -1 for a request that is not stored.
func (f *follower) isDecided(p events.ApprovalResolved, i int) bool {
	switch {
	case p.Cause == events.ResolvedByClass: // the request may be part of the same commit
		return p.Outcome == events.OutcomeApproved && !p.All && p.Class != "" && slices.Contains(f.approvals.classes, p.Class)
	case i < 0:
		return false
	case p.Cause == events.ResolvedByTimeout:
		return p.Outcome == events.OutcomeRejected && !p.All && f.hasTimedOut(f.Session.Run.Approvals[i])
	}
	d, ok := decisionOn(f.life, f.Session.Run.Approvals[i])
	return ok && p.Cause == events.ResolvedByPerson &&
		(p.Outcome == outcomes[d.Decision] || p.Outcome == events.OutcomeRejected) && // a secret answer that cannot be read is a rejection
		(!p.All || d.Decision == events.DecisionApproveAll && p.Class != "")
}

// outcomes are the outcomes of decisions.
var outcomes = map[string]string{
	events.DecisionApprove: events.OutcomeApproved, events.DecisionApproveAll: events.OutcomeApproved, events.DecisionSkip: events.OutcomeSkipped,
	events.DecisionReject: events.OutcomeRejected, events.DecisionAnswer: events.OutcomeAnswered,
}

// releaseSlot releases the slot of the turn.
func (f *follower) releaseSlot() {
	if !f.approvals.waits {
		f.approvals.waits = true
		f.slot.Close()
	}
}

// requestSlot requests a permit for the turn; f.approvals.granted receives it.
func (f *follower) requestSlot() {
	if f.approvals.asks {
		return
	}
	f.approvals.asks = true
	f.waiting.Go(func() {
		release, err := f.slot.AcquireBlocking(f.ctx)
		if err != nil {
			return // the follower ends
		}
		select {
		case f.approvals.granted <- release:
		case <-f.ctx.Done():
			release()
		}
	})
}

// holdSlot makes a granted permit the slot of the turn.
func (f *follower) holdSlot(release func()) {
	f.approvals.waits, f.approvals.asks = false, false
	f.slot.Acquired(release)
}
