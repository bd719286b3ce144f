package agent

import (
	"encoding/json"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

const (
	// maxQueuedRequests is the maximum number of permission requests of a turn that wait unrecorded, because too many are open. Further requests
	// are denied.
	maxQueuedRequests = 2000
	// maxDecidedText is the maximum size in bytes of each text in a decision of the policy.
	maxDecidedText = 16 << 10
	// maxDecidedPaths is the maximum number of paths, and of hosts, in a decision of the policy.
	maxDecidedPaths = 64
	// maxDecidedInput is the maximum size of the arguments that a decision of the policy contains, in bytes.
	maxDecidedInput = 4 << 10
)

// Reasons of denials, as the agent receives them.
const (
	skippedMessage    = "The user skipped this call. Go on without it."
	rejectedMessage   = "The user rejected this call."
	timeoutMessage    = "Nobody decided about this call in time, so that it was denied. Go on without it."
	unattendedMessage = "A person would have to approve this call, and none is there. It was denied."
	tooManyMessage    = "Too many requests wait for a decision, so that this one was denied."
	endedMessage      = "The turn ended before anybody decided."
)

// PermissionRequest is a request of the agent for permission to call a tool, or a question of the agent to the user.
type PermissionRequest struct {
	Key       string               // the agent's own id of the request, unique in its process
	Call      permission.Call      // decides, by the policy, whether a person is asked
	Decided   *permission.Decision // if set, the policy is not applied: the adapter itself decided
	Refused   *permission.Decision // if set, this denial replaces a decision of the policy other than deny: the agent cannot take an approval
	ToolUseID string

	// The fields below are shown to the person who decides. They may have any size: see newApprovalRequest.
	Kind      events.ApprovalKind // "" means ApprovalTool
	Title     string              // made from the call, not the agent's words
	Reason    string              // the agent's words about the call
	Preview   events.ApprovalPreview
	Input     json.RawMessage // the arguments
	Editable  bool            // the agent can run the call with changed arguments
	Questions []events.Question
	Schema    json.RawMessage
}

// PermissionAnswer is the answer to a PermissionRequest.
type PermissionAnswer struct {
	Outcome   string          // events.OutcomeApproved, OutcomeRejected, OutcomeSkipped or OutcomeAnswered; "" if the request ended without a decision
	Message   string          // for a denial: a sentence for the agent
	Comment   string          // with OutcomeRejected: what the person wrote; part of Message
	Arguments json.RawMessage // with OutcomeApproved: the arguments that a person changed; nil if they are not changed
	Answers   map[string][]string
	Content   json.RawMessage // the answer to an elicitation
}

// IsAllowed reports whether the call may run.
func (a PermissionAnswer) IsAllowed() bool { return a.Outcome == events.OutcomeApproved }

// pendingRequest is a permission request that waits for the decision of a person.
type pendingRequest struct {
	local        string // id in the journal; "" until the request is recorded
	id           string // id in the log
	conversation string
	request      PermissionRequest
	decision     permission.Decision
	class        string
	reply        func(PermissionAnswer)
}

// approvals holds the permission requests of a turn that wait for the decision of a person.
type approvals struct {
	open     []*pendingRequest // recorded in the journal
	queued   []*pendingRequest // not recorded, because too many are open
	approved map[string]bool   // classes of which a person approved all requests
}

// RequestPermission decides a request by the policy of the turn, or lets a person decide. reply is called once with the answer, unless the agent
// withdraws the request: before RequestPermission returns, if the policy decides; otherwise when a person has decided or the turn ends. reply must
// not block, and must not call methods of the Turn. The goroutine that calls RequestPermission, ApplyVerdict, RetractRequests or End calls it.
func (t *Turn) RequestPermission(conversation string, r PermissionRequest, reply func(PermissionAnswer)) {
	t.mu.Lock()
	answer, decided := t.decideOrAsk(conversation, r, reply)
	t.mu.Unlock()
	if decided {
		reply(answer)
	}
}

// decideOrAsk returns the answer to a request, and true, if no person has to be asked. Otherwise it records or queues the request and returns
// false.
func (t *Turn) decideOrAsk(conversation string, r PermissionRequest, reply func(PermissionAnswer)) (PermissionAnswer, bool) {
	d := t.decideByPolicy(r)
	class := ""
	if d.Action == events.PermissionAsk {
		class = t.cfg.Policy.Class(r.Call)
	}
	switch {
	case t.idle || t.end != nil:
		d = permission.Decision{Action: events.PermissionDeny, Rule: "no-turn", Reason: endedMessage}
		return t.journalPolicyDecision(conversation, r, d, events.OutcomeRejected), true
	case d.Action == events.PermissionAllow:
		return t.journalPolicyDecision(conversation, r, d, events.OutcomeApproved), true
	case d.Action == events.PermissionDeny:
		return t.journalPolicyDecision(conversation, r, d, events.OutcomeRejected), true
	case t.approvals.approved[class] && class != "":
		d.Action, d.Rule = events.PermissionAllow, permission.RuleApprovedClass
		return t.journalPolicyDecision(conversation, r, d, events.OutcomeApproved), true
	case t.cfg.Policy.IsUnattended():
		d = permission.Decision{Action: events.PermissionDeny, Rule: permission.RuleUnattended, Reason: unattendedMessage}
		if t.cfg.Policy.ReportsDeniedAsSkipped() {
			d.Reason = skippedMessage
			return t.journalPolicyDecision(conversation, r, d, events.OutcomeSkipped), true
		}
		return t.journalPolicyDecision(conversation, r, d, events.OutcomeRejected), true
	}
	p := &pendingRequest{conversation: conversation, request: r, decision: d, class: class, reply: reply}
	asked, denial := t.newApprovalRequest(p)
	switch {
	case denial != nil:
		return t.journalPolicyDecision(conversation, r, *denial, events.OutcomeRejected), true
	case len(t.approvals.open) < events.MaxOpenApprovals:
		t.recordOpenRequest(p, asked)
	case len(t.approvals.queued) < maxQueuedRequests:
		t.approvals.queued = append(t.approvals.queued, p)
	default:
		d = permission.Decision{Action: events.PermissionDeny, Rule: "too-many-requests", Reason: tooManyMessage}
		return t.journalPolicyDecision(conversation, r, d, events.OutcomeRejected), true
	}
	return PermissionAnswer{}, false
}

// decideByPolicy returns the decision on a request: that of the adapter if it has made one, else that of the turn's policy.
func (t *Turn) decideByPolicy(r PermissionRequest) permission.Decision {
	if r.Decided != nil {
		return *r.Decided
	}
	d := t.cfg.Policy.Decide(r.Call)
	if r.Refused != nil && d.Action != events.PermissionDeny {
		return *r.Refused
	}
	return d
}

// journalPolicyDecision journals that the policy decided a request, and returns the answer for the agent.
func (t *Turn) journalPolicyDecision(conversation string, r PermissionRequest, d permission.Decision, outcome string) PermissionAnswer {
	e := t.describeDecidedCall(r)
	e.Decision, e.Rule = d.Action, d.Rule
	a := PermissionAnswer{Outcome: outcome}
	if d.Action == events.PermissionDeny {
		e.Reason, a.Message = d.Reason, d.Reason
	}
	t.flushAndJournalLine(e.EventType(), conversation, e)
	return a
}

// describeDecidedCall returns a permission_decided event that describes the call of a request, without the decision.
func (t *Turn) describeDecidedCall(r PermissionRequest) events.PermissionDecided {
	e := events.PermissionDecided{ToolName: r.Call.Tool, ToolUseID: r.ToolUseID, Command: t.decidedText(r.Call.Command)}
	for _, p := range r.Call.Paths {
		if path := t.decidedText(p.Path); len(e.Paths) < maxDecidedPaths && !slices.Contains(e.Paths, path) {
			e.Paths = append(e.Paths, path)
		}
	}
	for _, host := range r.Call.Hosts[:min(len(r.Call.Hosts), maxDecidedPaths)] {
		e.Hosts = append(e.Hosts, t.decidedText(host))
	}
	if e.Command == "" && len(e.Paths)+len(e.Hosts) == 0 && len(r.Input) <= maxDecidedInput && json.Valid(r.Input) {
		e.Input = r.Input
	}
	return e
}

// decidedText returns a text in the form in which a person sees it, cut at maxDecidedText bytes.
func (t *Turn) decidedText(s string) string {
	return truncate.Prefix(t.shownText(s), maxDecidedText)
}

// recordOpenRequest journals the request e for a call that a person has to decide.
func (t *Turn) recordOpenRequest(p *pendingRequest, e events.ApprovalRequested) {
	p.local = t.cfg.Journal.NewBlockID()
	p.id = runner.ApprovalID(t.cfg.ExecutionID, t.cfg.Journal.Name(), p.local)
	t.approvals.open = append(t.approvals.open, p)
	e.ApprovalID = p.local
	t.flushAndJournalLine(e.EventType(), p.conversation, e)
}

// HasOpenRequest reports whether a request of the turn waits for the decision of a person.
func (t *Turn) HasOpenRequest() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.approvals.open) > 0
}

// SetRedaction sets the secret values that the turn removes from later journal lines. Blocks that are open keep the former set for their text.
func (t *Turn) SetRedaction(set *redact.Set) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cfg.Redact = set
}

// ApplyVerdict applies a person's decision on a permission request and calls the reply of the request. It ignores a request that is not open.
func (t *Turn) ApplyVerdict(v runner.ApprovalDecision) {
	t.mu.Lock()
	replies := t.applyVerdict(v)
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// applyVerdict applies a decision for a caller that holds mu. It returns functions that call the replies, to be called without the lock.
func (t *Turn) applyVerdict(v runner.ApprovalDecision) (replies []func()) {
	i := slices.IndexFunc(t.approvals.open, func(p *pendingRequest) bool { return p.id == v.ApprovalID })
	if i < 0 || t.end != nil {
		return nil
	}
	p := t.approvals.open[i]
	answer, cause := verdictAnswer(v), events.ResolvedByPerson
	if v.Timeout {
		cause = events.ResolvedByTimeout
	}
	all := v.Decision == events.DecisionApproveAll && p.class != "" && !v.Timeout
	replies = append(replies, t.resolveRequest(p, answer, cause, all))
	if all {
		if t.approvals.approved == nil {
			t.approvals.approved = map[string]bool{}
		}
		t.approvals.approved[p.class] = true
		for _, other := range slices.Clone(t.approvals.open) {
			if other.class == p.class {
				replies = append(replies, t.resolveRequest(other, PermissionAnswer{Outcome: events.OutcomeApproved}, events.ResolvedByClass, false))
			}
		}
	}
	return append(replies, t.openQueuedRequests()...)
}

// verdictAnswer converts a person's decision to the answer for the agent.
func verdictAnswer(v runner.ApprovalDecision) PermissionAnswer {
	rejected := PermissionAnswer{Outcome: events.OutcomeRejected, Message: rejectedMessage}
	switch {
	case v.Timeout:
		rejected.Message = timeoutMessage
		return rejected
	case v.Decision == events.DecisionApprove, v.Decision == events.DecisionApproveAll:
		return PermissionAnswer{Outcome: events.OutcomeApproved, Arguments: v.Arguments}
	case v.Decision == events.DecisionSkip:
		return PermissionAnswer{Outcome: events.OutcomeSkipped, Message: skippedMessage}
	case v.Decision == events.DecisionAnswer:
		return PermissionAnswer{Outcome: events.OutcomeAnswered, Answers: v.Answers, Content: v.Content}
	case v.Comment != "":
		rejected.Message, rejected.Comment = "The user rejected this call: "+v.Comment, v.Comment
	}
	return rejected // also for an unknown decision
}

// resolveRequest journals the decision on an open request, and returns a function that calls the reply of the request.
func (t *Turn) resolveRequest(p *pendingRequest, a PermissionAnswer, cause string, all bool) func() {
	t.removeOpenRequest(p)
	t.flushAndJournalLine(events.ApprovalResolved{}.EventType(), p.conversation, events.ApprovalResolved{
		ApprovalID: p.local, Outcome: a.Outcome, Cause: cause, Class: t.shownClass(p.class), All: all,
	})
	return func() { p.reply(a) }
}

// removeOpenRequest removes a request from the list of open requests.
func (t *Turn) removeOpenRequest(p *pendingRequest) {
	t.approvals.open = slices.DeleteFunc(t.approvals.open, func(o *pendingRequest) bool { return o == p })
}

// openQueuedRequests records queued requests while there is room for open ones. It returns functions that call the replies of queued requests that
// need no person any more.
func (t *Turn) openQueuedRequests() (replies []func()) {
	for len(t.approvals.queued) > 0 && len(t.approvals.open) < events.MaxOpenApprovals {
		p := t.approvals.queued[0]
		t.approvals.queued = t.approvals.queued[1:]
		if answer, decided := t.decideOrAsk(p.conversation, p.request, p.reply); decided {
			replies = append(replies, func() { p.reply(answer) })
		}
	}
	return replies
}

// WithdrawRequest ends the request with the agent's id key, for whose answer the agent no longer waits, without calling its reply. It ignores an
// unknown key.
func (t *Turn) WithdrawRequest(key string) {
	t.mu.Lock()
	isKey := func(p *pendingRequest) bool { return p.request.Key == key }
	t.approvals.queued = slices.DeleteFunc(t.approvals.queued, isKey)
	if i := slices.IndexFunc(t.approvals.open, isKey); i >= 0 {
		t.retractRequest(t.approvals.open[i], "withdrawn")
	}
	replies := t.openQueuedRequests()
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// RetractRequests ends all requests of the turn that wait for a decision, for the given reason, and calls their replies.
func (t *Turn) RetractRequests(reason string) {
	t.mu.Lock()
	replies := t.retractRequests(reason)
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// retractRequests is RetractRequests for a caller that holds mu. It returns functions that call the replies.
func (t *Turn) retractRequests(reason string) (replies []func()) {
	for _, p := range slices.Concat(t.approvals.open, t.approvals.queued) {
		if p.local != "" {
			t.retractRequest(p, reason)
		}
		replies = append(replies, func() { p.reply(PermissionAnswer{Message: endedMessage}) })
	}
	t.approvals.queued = nil
	return replies
}

// retractRequest journals that an open request ended without a decision.
func (t *Turn) retractRequest(p *pendingRequest, reason string) {
	t.removeOpenRequest(p)
	t.flushAndJournalLine(events.ApprovalRetracted{}.EventType(), p.conversation, events.ApprovalRetracted{ApprovalID: p.local, Reason: reason})
}
