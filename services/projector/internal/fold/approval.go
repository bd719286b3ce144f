package fold

import (
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Statuses of approvals that are not outcomes of an approval_resolved event.
const (
	statusDecided   = "decided"
	statusRetracted = "retracted"
)

// CauseExecutionEnded is the cause of an approval request that was retracted because its execution ended.
const CauseExecutionEnded = "execution_ended"

// approvalID returns the row key of the approval request that an event is about, or "".
func approvalID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		return rowKey(d.ApprovalID)
	case events.ApprovalDecided:
		return rowKey(d.ApprovalID)
	case events.ApprovalResolved:
		return rowKey(d.ApprovalID)
	case events.ApprovalRetracted:
		return rowKey(d.ApprovalID)
	}
	return ""
}

// run sets the phase of an execution whose agent runs.
func (x *Execution) run() {
	x.Phase = phaseRunning
	if x.OpenApprovals > 0 {
		x.Phase = phaseWaiting
	}
}

// foldApproval folds an event into the row of the approval request that it is about, into the execution, which has not ended, and into the
// row of the call. The actor is that of the event's commit.
func (f *folding) foldApproval(a *aggregate, s *Session, x *entry[Execution], actor events.Actor, e events.Event) {
	id := approvalID(e)
	if id == "" {
		return
	}
	p := a.approvals[id]
	if d, ok := e.Data.(events.ApprovalRequested); ok {
		if p == nil {
			f.openApproval(a, s, x, id, d, e)
		}
		return
	}
	if p == nil || p.row.EndedSeq > 0 || p.row.Execution != x.row.ID {
		return
	}
	switch d := e.Data.(type) {
	case events.ApprovalDecided:
		if p.row.DecidedSeq > 0 {
			return
		}
		row := markChanged(&f.approvals, p)
		row.Status, row.DecidedSeq, row.DecidedAt = statusDecided, s.Tip, pgTimePointer(e.Time)
		row.Verdict, row.Decision = clean(d.Decision), jsonText(d)
		row.Actor = jsonText(events.Actor{Kind: actor.Kind, ID: actor.ID, Key: actor.Key, User: actor.User})
	case events.ApprovalResolved:
		f.endApproval(s, x, p, d.Outcome, d.Cause, e)
		if call := a.calls[p.row.ToolUseID]; call != nil {
			markChanged(&f.calls, call).Decision = clean(d.Outcome)
		}
	case events.ApprovalRetracted:
		f.endApproval(s, x, p, statusRetracted, d.Reason, e)
	}
}

// openApproval adds the row of an approval request.
func (f *folding) openApproval(a *aggregate, s *Session, x *entry[Execution], id string, d events.ApprovalRequested, e events.Event) {
	p := &entry[Approval]{row: Approval{
		Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Execution: x.row.ID, Conversation: rowKey(e.ConversationID), Kind: clean(string(d.Kind)),
		ToolName: clean(d.ToolName), ToolUseID: rowKey(d.ToolUseID), Title: clean(d.Title), Status: statusPending, Request: *jsonText(d),
		RequestedSeq: s.Tip, RequestedAt: pgTime(e.Time),
	}}
	a.approvals[id] = p
	markChanged(&f.approvals, p)
	row := markChanged(&f.executions, x)
	row.OpenApprovals++
	if row.Phase == phaseRunning {
		row.run()
	}
}

// endApproval ends the row of an open approval request.
func (f *folding) endApproval(s *Session, x *entry[Execution], p *entry[Approval], status, cause string, e events.Event) {
	row := markChanged(&f.approvals, p)
	row.Status, row.Cause, row.EndedSeq, row.EndedAt = clean(status), clean(cause), s.Tip, pgTimePointer(e.Time)
	execution := markChanged(&f.executions, x)
	execution.OpenApprovals--
	if execution.Phase == phaseWaiting {
		execution.run()
	}
}

// retractApprovals ends the open approval requests of an execution that ended. Changes.Ended handles rows that are not in memory.
func (f *folding) retractApprovals(a *aggregate, s *Session, x *Execution, at time.Time) {
	x.OpenApprovals = 0
	for _, p := range a.approvals {
		if p != nil && p.row.Execution == x.ID && p.row.EndedSeq == 0 {
			row := markChanged(&f.approvals, p)
			row.Status, row.Cause, row.EndedSeq, row.EndedAt = statusRetracted, CauseExecutionEnded, s.Tip, &at
		}
	}
}

// jsonText returns the JSON of a payload as a row value. A payload that came from the log always encodes, except one with invalid raw JSON, which
// is stored as an empty object.
func jsonText(v any) *string {
	text, err := marshal(v)
	if err != nil {
		text = "{}"
	}
	text = clean(text)
	return &text
}
