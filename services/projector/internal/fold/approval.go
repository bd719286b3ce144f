package fold

import (
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Statuses of approvals that are not outcomes of an approval_resolved event.
const (
	approvalStatusDecided   = "decided"
	approvalStatusRetracted = "retracted"
)

// CauseExecutionEnded is the cause of an approval request that was retracted because its execution ended.
const CauseExecutionEnded = "execution_ended"

// approvalID returns the row id of the approval request that an event is about, or "" for another event.
func approvalID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		return validRowID(d.ApprovalID)
	case events.ApprovalDecided:
		return validRowID(d.ApprovalID)
	case events.ApprovalResolved:
		return validRowID(d.ApprovalID)
	case events.ApprovalRetracted:
		return validRowID(d.ApprovalID)
	}
	return ""
}

// setRunning sets the phase of an execution whose agent is running: running or, while approval requests are open,
// waiting_for_approval.
func (x *Execution) setRunning() {
	x.Phase = phaseRunning
	if x.OpenApprovals > 0 {
		x.Phase = phaseWaiting
	}
}

// foldApproval folds an event about an approval request into the rows of the request, of its tool call, and of its
// execution, which has not ended. actor is the actor of the event's commit.
func (f *batchFold) foldApproval(a *sessionRows, s *Session, x *cachedRow[Execution], actor events.Actor, e events.Event) {
	id := approvalID(e)
	if id == "" {
		return
	}
	p := a.approvals[id]
	if d, ok := e.Data.(events.ApprovalRequested); ok {
		if p == nil {
			f.addApproval(a, s, x, id, d, e)
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
		row.Status, row.DecidedSeq, row.DecidedAt = approvalStatusDecided, s.Tip, postgresTimePointer(e.Time)
		row.Verdict, row.Decision = validText(d.Decision), payloadJSON(d)
		row.Actor = payloadJSON(events.Actor{Kind: actor.Kind, ID: actor.ID, Key: actor.Key, User: actor.User})
	case events.ApprovalResolved:
		f.endApproval(s, x, p, d.Outcome, d.Cause, e)
		if call := a.calls[p.row.ToolUseID]; call != nil {
			markChanged(&f.calls, call).Decision = validText(d.Outcome)
		}
	case events.ApprovalRetracted:
		f.endApproval(s, x, p, approvalStatusRetracted, d.Reason, e)
	}
}

// addApproval adds the row of the approval request id to the model.
func (f *batchFold) addApproval(a *sessionRows, s *Session, x *cachedRow[Execution], id string, d events.ApprovalRequested, e events.Event) {
	p := &cachedRow[Approval]{row: Approval{
		Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Execution: x.row.ID, Conversation: validRowID(e.ConversationID), Kind: validText(string(d.Kind)),
		ToolName: validText(d.ToolName), ToolUseID: validRowID(d.ToolUseID), Title: validText(d.Title), Status: statusPending, Request: *payloadJSON(d),
		RequestedSeq: s.Tip, RequestedAt: postgresTime(e.Time),
	}}
	a.approvals[id] = p
	markChanged(&f.approvals, p)
	row := markChanged(&f.executions, x)
	row.OpenApprovals++
	if row.Phase == phaseRunning {
		row.setRunning()
	}
}

// endApproval sets the status of an open approval request, whose row is p, and the cause of its end.
func (f *batchFold) endApproval(s *Session, x *cachedRow[Execution], p *cachedRow[Approval], status, cause string, e events.Event) {
	row := markChanged(&f.approvals, p)
	row.Status, row.Cause, row.EndedSeq, row.EndedAt = validText(status), validText(cause), s.Tip, postgresTimePointer(e.Time)
	execution := markChanged(&f.executions, x)
	execution.OpenApprovals--
	if execution.Phase == phaseWaiting {
		execution.setRunning()
	}
}

// retractApprovals retracts the open approval requests of an execution that ended, if their rows are in memory.
// Changes.Ended makes the store retract the others.
func (f *batchFold) retractApprovals(a *sessionRows, s *Session, x *Execution, at time.Time) {
	x.OpenApprovals = 0
	for _, p := range a.approvals {
		if p != nil && p.row.Execution == x.ID && p.row.EndedSeq == 0 {
			row := markChanged(&f.approvals, p)
			row.Status, row.Cause, row.EndedSeq, row.EndedAt = approvalStatusRetracted, CauseExecutionEnded, s.Tip, &at
		}
	}
}

// payloadJSON returns the JSON of an event's payload, as the value of a column. A payload whose raw JSON is invalid
// results in an empty object.
func payloadJSON(v any) *string {
	text, err := marshalUnescaped(v)
	if err != nil {
		text = "{}"
	}
	text = validText(text)
	return &text
}
