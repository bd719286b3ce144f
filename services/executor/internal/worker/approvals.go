package worker

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/link"
)

// approvals are the decisions on approval requests that a follower sends to the runner. A decision takes effect when the journal
// contains approval_resolved; until then it is sent again over each new stream, which changes nothing if the runner has it already.
type approvals struct {
	inFlight map[string]bool // requests whose verdict was sent over the present stream, by id
	sent     chan sentVerdict
	granted  chan func() // a permit for the turn, after requestSlot
	waits    bool        // the turn has released its slot, because the execution waits for a person
	asks     bool        // a permit was requested and not granted yet
}

// A sentVerdict is the result of sending a verdict to the runner.
type sentVerdict struct {
	id   string
	link *link.Link // over which the verdict was sent
	err  error
}

func newApprovals() approvals {
	return approvals{inFlight: map[string]bool{}, sent: make(chan sentVerdict), granted: make(chan func())}
}

// reconnected makes all verdicts due again.
func (a *approvals) reconnected() { clear(a.inFlight) }

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
	timeout := time.Duration(f.resolved.Definition.Permissions.TimeoutMs) * time.Millisecond
	for _, a := range f.Session.Run.Approvals {
		i := slices.IndexFunc(f.life.Decided, func(d session.Decided) bool { return d.ApprovalID == a.ID })
		switch {
		case f.approvals.inFlight[a.ID]:
		case i >= 0:
			due = append(due, f.life.Decided[i])
		case timeout > 0 && !f.w.deps.Now().Before(a.Time.Add(timeout)):
			due = append(due, session.Decided{ApprovalID: a.ID})
		}
	}
	return due
}

// sendVerdict reads the content of a decision and sends it to the runner, and returns at once. f.approvals.sent receives the result.
func (f *follower) sendVerdict(d session.Decided) {
	l, loaded, epoch := f.agent.Link, f.Session, f.Epoch
	f.waiting.Go(func() {
		ctx, cancel := context.WithTimeout(f.ctx, callTimeout)
		defer cancel()
		v := runner.Verdict{ApprovalDecided: events.ApprovalDecided{ApprovalID: d.ApprovalID}, Timeout: d.At == 0}
		var err error
		if !v.Timeout {
			v.ApprovalDecided, err = f.w.deps.Sessions.Decision(ctx, loaded, d)
		}
		if err == nil {
			_, err = l.Call(ctx, runner.Command{Op: runner.OpDecide, Epoch: epoch, Verdict: &v})
		}
		select {
		case f.approvals.sent <- sentVerdict{d.ApprovalID, l, err}:
		case <-f.ctx.Done():
		}
	})
}

// handleVerdictSent makes a verdict that did not reach the runner due again. The next beat sends it.
func (f *follower) handleVerdictSent(v sentVerdict) {
	if v.err == nil || v.link != f.agent.Link {
		return
	}
	var refused *runner.Error
	if errors.As(v.err, &refused) {
		f.Log.Error("the runner refused a decision on an approval request", "approval", v.id, "error", v.err)
		return // sent again over the next stream
	}
	f.Log.Warn("a decision on an approval request did not reach the runner, trying again", "approval", v.id, "error", v.err)
	delete(f.approvals.inFlight, v.id)
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
