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

// verdictQueue holds which decisions on approval requests a follower has sent to the runner. A decision has taken effect when the journal
// contains approval_resolved; until then it is sent again over each new stream, which the runner ignores if it has the decision already.
type verdictQueue struct {
	inFlight map[string]bool // requests whose verdict was sent over the present stream, by id
	sent     chan sentVerdict
	granted  chan func() // a permit for the turn, after requestSlot
	waits    bool        // the turn has released its slot and its count, because the execution waits for a person or for a slot
	asks     bool        // a permit was requested and not granted yet
	failed   []string    // requests in inFlight whose verdict did not reach the runner
	classes  []string    // classes of which a person has approved all requests
}

// A sentVerdict is the result of sending a verdict, the decision on an approval request, to the runner.
type sentVerdict struct {
	id   string
	link *link.Link // over which the verdict was sent
	err  error
}

// newVerdictQueue returns an empty verdictQueue. approved are the classes of calls that a person has already approved for the execution.
func newVerdictQueue(approved []string) verdictQueue {
	return verdictQueue{inFlight: map[string]bool{}, sent: make(chan sentVerdict), granted: make(chan func()), classes: slices.Clone(approved)}
}

// markAllDue makes the follower send all verdicts again, over a new stream.
func (a *verdictQueue) markAllDue() {
	clear(a.inFlight)
	a.failed = nil
}

// markFailedDue makes the follower send the verdicts again that did not reach the runner.
func (a *verdictQueue) markFailedDue() {
	for _, id := range a.failed {
		delete(a.inFlight, id)
	}
	a.failed = nil
}

// sendVerdicts sends the runner the decisions on open approval requests, and rejections of requests that nobody decided in time. It sends
// them only while the turn holds a slot. A turn holds none while its execution waits for a person, and none if it follows an agent that
// another executor has started.
func (f *follower) sendVerdicts() {
	due := f.dueVerdicts()
	switch {
	case f.ended != nil || f.stop.IsStopping():
		return // the runner retracts the requests
	case !f.accepted:
		return // no agent of the execution runs, and the turn needs its slot to start one
	case len(due) == 0 && f.Session.Run.Phase == run.Waiting && len(f.approvals.inFlight) == 0:
		f.releaseSlot()
		return
	case !f.slot.IsHeld() && (len(due) > 0 || f.approvals.waits && f.Session.Run.Phase != run.Waiting):
		f.releaseSlot()
		f.requestSlot()
		return
	}
	for _, d := range due {
		f.approvals.inFlight[d.ApprovalID] = true
		f.sendVerdict(d)
	}
}

// dueVerdicts returns the verdicts on open approval requests that must be sent and were not sent yet: the decisions of people, with their
// position in the log, and rejections of requests whose time is over, without a position.
func (f *follower) dueVerdicts() (due []session.DecidedApproval) {
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
			due = append(due, session.DecidedApproval{ApprovalID: a.ID})
		case !f.readAgain && !f.readingLife: // a person may have decided in time, without a hint that arrived
			f.loadLife(eventlog.LeaderOnly)
		}
	}
	return due
}

// hasTimedOut reports whether the time to decide an approval request is over.
func (f *follower) hasTimedOut(a run.OpenApproval) bool {
	at := f.deadlineOfRequest(a)
	return !at.IsZero() && !f.w.deps.Now().Before(at)
}

// deadlineOfRequest returns the time by which an approval request must be decided, or the zero time if there is no limit.
func (f *follower) deadlineOfRequest(a run.OpenApproval) time.Time {
	timeout := time.Duration(f.resolved.Definition.Permissions.TimeoutMs) * time.Millisecond
	if timeout == 0 {
		return time.Time{}
	}
	return a.Time.Add(timeout)
}

// decisionOn returns the decision in a session's life on an open approval request. It ignores decisions from before the request, because a
// hostile runner may give a new request the id of an earlier one.
func decisionOn(life *session.State, a run.OpenApproval) (session.DecidedApproval, bool) {
	i := slices.IndexFunc(life.Decided, func(d session.DecidedApproval) bool { return d.ApprovalID == a.ID && d.At > a.At })
	if i < 0 {
		return session.DecidedApproval{}, false
	}
	return life.Decided[i], true
}

// sendVerdict reads the content of a decision on an approval request and sends it to the runner, in another goroutine. f.approvals.sent
// receives the result.
func (f *follower) sendVerdict(d session.DecidedApproval) {
	l, loaded, epoch := f.agent.Link, f.Session, f.Epoch
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, runnerCallTimeout)
		defer cancel()
		v, err := f.w.newVerdict(ctx, loaded, d)
		if err == nil {
			_, err = l.Call(ctx, runner.Command{Op: runner.OpDecide, Epoch: epoch, Verdict: &v})
		}
		select {
		case f.approvals.sent <- sentVerdict{d.ApprovalID, l, err}:
		case <-f.ctx.Done():
		}
	})
}

// newVerdict returns the verdict that the runner gets for a person's decision on an approval request. It includes the answers to secret
// questions, which are not in the log.
func (w *Worker) newVerdict(ctx context.Context, l *eventlog.SessionState, d session.DecidedApproval) (v runner.ApprovalDecision, err error) {
	if d.At == 0 {
		return runner.ApprovalDecision{ApprovalDecided: events.ApprovalDecided{ApprovalID: d.ApprovalID}, Timeout: true}, nil
	}
	if v.ApprovalDecided, err = w.deps.Sessions.ApprovalDecision(ctx, l, d); err != nil || len(v.Sealed) == 0 {
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

// openAnswer decrypts a person's answers to secret questions, which are stored under a key of the tenant.
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

// secretAnswers returns the answers to secret questions that people gave in earlier attempts of the execution. The agent may have kept them
// in its records, so they must be redacted.
func (t *turn) secretAnswers(ctx context.Context) (values []string, err error) {
	l, err := t.w.deps.Sessions.Load(ctx, t.Session.Tenant, t.Session.ID, eventlog.LeaderOnly) // the decisions came after the claim
	if err != nil {
		return nil, err
	}
	for _, d := range l.Life.Decided {
		v, err := t.w.newVerdict(ctx, l, d)
		if err != nil {
			return nil, err
		}
		values = append(values, v.Redact...)
	}
	return values, nil
}

// handleVerdictSent handles the result of sending a verdict: the next beat sends a verdict again that did not reach the runner. The only
// error is run.ErrFenced, if the runner has seen another executor.
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

// checkResolved returns an event of the runner unchanged, unless the event states a decision on an approval request that is not in the log.
// Then it returns an error event instead: the log must not contain an approval that no person gave, and the runner is not trusted.
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

// isDecided reports whether the log has the decision that the runner states on the i-th open approval request. i is -1 for a request that
// is not in the log.
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
		(p.Outcome == outcomeOfDecision[d.Decision] || p.Outcome == events.OutcomeRejected) && // a secret answer that cannot be read is a rejection
		(!p.All || d.Decision == events.DecisionApproveAll && p.Class != "")
}

// outcomeOfDecision maps a person's decision on an approval request to its outcome.
var outcomeOfDecision = map[string]string{
	events.DecisionApprove: events.OutcomeApproved, events.DecisionApproveAll: events.OutcomeApproved, events.DecisionSkip: events.OutcomeSkipped,
	events.DecisionReject: events.OutcomeRejected, events.DecisionAnswer: events.OutcomeAnswered,
}

// releaseSlot releases the slot of the turn. Without a slot, the turn no longer counts as a running execution.
func (f *follower) releaseSlot() {
	if !f.approvals.waits {
		f.approvals.waits = true
		f.slot.Close()
	}
}

// requestSlot requests a permit for the turn in another goroutine. f.approvals.granted receives the permit.
func (f *follower) requestSlot() {
	if f.approvals.asks {
		return
	}
	f.approvals.asks = true
	wait := f.w.admission.NewWait(f.Session)
	f.waiting.Go(func() {
		release, err := f.slot.AcquireBlocking(f.ctx, wait)
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

// setSlotPermit sets the permit of the turn's slot to a granted one. release releases the permit.
func (f *follower) setSlotPermit(release func()) {
	f.approvals.waits, f.approvals.asks = false, false
	f.slot.SetPermit(release)
}
