package agent

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

const (
	// maxQueuedRequests is the number of requests that wait without being recorded, because too many are open. Further
	// requests are denied.
	maxQueuedRequests = 2000
	// maxPreview is the maximum size of a text of a preview in bytes.
	maxPreview = 16 << 10
	// maxPreviewPaths is the maximum number of paths of a preview.
	maxPreviewPaths = 64
	// maxApprovalInput is the maximum size of the arguments that an approval request contains, in bytes.
	maxApprovalInput = 64 << 10
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

// PermissionRequest is a request of the agent to call a tool, or a question of it to the user.
type PermissionRequest struct {
	Key       string               // the agent's own id of the request, unique in its process
	Call      permission.Call      // decides, by the policy, whether a person is asked
	Decided   *permission.Decision // if set, the policy is not applied: the adapter itself decided
	Refused   *permission.Decision // if set, this denial replaces a decision of the policy other than deny: the agent cannot take an approval
	ToolUseID string

	// The fields below are shown to the person who decides. They may have any size.
	Kind      events.ApprovalKind // "" means ApprovalTool
	Title     string
	Reason    string // why the agent asks
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

// Allowed reports whether the call may run.
func (a PermissionAnswer) Allowed() bool { return a.Outcome == events.OutcomeApproved }

// pendingRequest is a request that a person has to decide.
type pendingRequest struct {
	local        string // id in the journal; "" until the request is recorded
	id           string // id in the log
	conversation string
	request      PermissionRequest
	decision     permission.Decision
	class        string
	reply        func(PermissionAnswer)
}

// approvals holds the requests of a turn that a person decides.
type approvals struct {
	open     []*pendingRequest // recorded in the journal
	queued   []*pendingRequest // not recorded, because too many are open
	approved map[string]bool   // classes of which a person approved all requests
}

// Permit decides a request by the policy of the turn. reply is called once with the answer, unless the agent withdraws the
// request: before Permit returns, if the policy decides; otherwise later, when a person has decided or the turn ends. reply
// must not block, and must not call methods of the Turn. It is called by the goroutine that calls Permit, Verdict, Retract or
// End.
func (t *Turn) Permit(conversation string, r PermissionRequest, reply func(PermissionAnswer)) {
	t.mu.Lock()
	answer, decided := t.permit(conversation, r, reply)
	t.mu.Unlock()
	if decided {
		reply(answer)
	}
}

// permit returns the answer if nobody has to be asked. Otherwise it records the request.
func (t *Turn) permit(conversation string, r PermissionRequest, reply func(PermissionAnswer)) (PermissionAnswer, bool) {
	d := t.decide(r)
	class := ""
	if d.Action == events.PermissionAsk {
		class = t.cfg.Policy.Class(r.Call)
	}
	switch {
	case t.cfg.Journal == nil || t.end != nil:
		return PermissionAnswer{Outcome: events.OutcomeRejected, Message: endedMessage}, true
	case d.Action == events.PermissionAllow:
		return t.recordPolicy(conversation, r, d, events.OutcomeApproved), true
	case d.Action == events.PermissionDeny:
		return t.recordPolicy(conversation, r, d, events.OutcomeRejected), true
	case t.approvals.approved[class] && class != "":
		d.Action, d.Rule = events.PermissionAllow, permission.RuleApprovedClass
		return t.recordPolicy(conversation, r, d, events.OutcomeApproved), true
	case t.cfg.Policy.IsUnattended():
		d = permission.Decision{Action: events.PermissionDeny, Rule: permission.RuleUnattended, Reason: unattendedMessage}
		if t.cfg.Policy.ReportsDeniedAsSkipped() {
			d.Reason = skippedMessage
			return t.recordPolicy(conversation, r, d, events.OutcomeSkipped), true
		}
		return t.recordPolicy(conversation, r, d, events.OutcomeRejected), true
	}
	p := &pendingRequest{conversation: conversation, request: r, decision: d, class: class, reply: reply}
	switch {
	case len(t.approvals.open) < events.MaxOpenApprovals:
		t.openRequest(p)
	case len(t.approvals.queued) < maxQueuedRequests:
		t.approvals.queued = append(t.approvals.queued, p)
	default:
		d = permission.Decision{Action: events.PermissionDeny, Rule: "too-many-requests", Reason: tooManyMessage}
		return t.recordPolicy(conversation, r, d, events.OutcomeRejected), true
	}
	return PermissionAnswer{}, false
}

// decide returns the decision of the adapter or of the policy.
func (t *Turn) decide(r PermissionRequest) permission.Decision {
	if r.Decided != nil {
		return *r.Decided
	}
	d := t.cfg.Policy.Decide(r.Call)
	if r.Refused != nil && d.Action != events.PermissionDeny {
		return *r.Refused
	}
	return d
}

// recordPolicy records that the policy decided a request, and returns the answer.
func (t *Turn) recordPolicy(conversation string, r PermissionRequest, d permission.Decision, outcome string) PermissionAnswer {
	e := events.PermissionDecided{ToolName: r.Call.Tool, ToolUseID: r.ToolUseID, Decision: d.Action, Rule: d.Rule}
	a := PermissionAnswer{Outcome: outcome}
	if d.Action == events.PermissionDeny {
		e.Reason, a.Message = d.Reason, d.Reason
	}
	t.write(e.EventType(), conversation, e)
	return a
}

// openRequest records a request that a person has to decide.
func (t *Turn) openRequest(p *pendingRequest) {
	p.local = t.cfg.Journal.NewBlockID()
	p.id = runner.ApprovalID(t.cfg.ExecutionID, t.cfg.Journal.Name(), p.local)
	t.approvals.open = append(t.approvals.open, p)
	r := p.request
	e := events.ApprovalRequested{
		ApprovalID: p.local, Kind: r.Kind, ToolName: r.Call.Tool, ToolUseID: r.ToolUseID, Rule: p.decision.Rule,
		Reason: t.shown(r.Reason, nil), Title: t.shown(r.Title, nil), Editable: r.Editable, Class: t.shown(p.class, nil),
		Questions: r.Questions, Schema: r.Schema, TimeoutMs: t.cfg.Policy.TimeoutMs(),
	}
	if e.Kind == "" {
		e.Kind = events.ApprovalTool
	}
	cut := &e.Preview.Truncated
	e.Preview.Command, e.Preview.Cwd = t.shown(r.Preview.Command, cut), t.shown(r.Preview.Cwd, cut)
	e.Preview.Diff, e.Preview.URL, e.Preview.Text = t.shown(r.Preview.Diff, cut), t.shown(r.Preview.URL, cut), t.shown(r.Preview.Text, cut)
	for i, path := range r.Preview.Paths {
		if i == maxPreviewPaths {
			*cut = true
			break
		}
		e.Preview.Paths = append(e.Preview.Paths, t.shown(path, cut))
	}
	switch {
	case len(r.Input) > maxApprovalInput:
		*cut = true
	case json.Valid(r.Input): // otherwise the line could not be encoded, and nobody could decide
		e.Input = r.Input
	}
	if !json.Valid(e.Schema) {
		e.Schema = nil
	}
	t.write(e.EventType(), p.conversation, e)
}

// shown returns a text as a person may see it on a terminal: without secrets, with control characters escaped, and cut at
// maxPreview. It sets cut if it cut the text; cut may be nil.
func (t *Turn) shown(s string, cut *bool) string {
	s = t.cfg.Redact.String(s)
	whole := len(s) <= maxPreview
	s = truncate.Prefix(s, maxPreview)
	var b strings.Builder
	for _, r := range strings.ToValidUTF8(s, "\uFFFD") {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) {
			fmt.Fprintf(&b, "\\u{%x}", r)
			continue
		}
		b.WriteRune(r)
	}
	if whole && b.Len() <= maxPreview {
		return b.String()
	}
	if cut != nil {
		*cut = true
	}
	return truncate.Prefix(b.String(), maxPreview)
}

// Waiting reports whether a person has to decide a request of the turn.
func (t *Turn) Waiting() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.approvals.open) > 0
}

// Hide makes the turn remove the values of a set from all that follows. Blocks that are open keep the former set for their text.
func (t *Turn) Hide(set *redact.Set) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cfg.Redact = set
}

// Verdict applies the decision on a request and calls its reply. It ignores a request that is not open.
func (t *Turn) Verdict(v runner.ApprovalDecision) {
	t.mu.Lock()
	replies := t.verdict(v)
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// verdict returns the calls of the replies.
func (t *Turn) verdict(v runner.ApprovalDecision) (replies []func()) {
	i := slices.IndexFunc(t.approvals.open, func(p *pendingRequest) bool { return p.id == v.ApprovalID })
	if i < 0 || t.end != nil {
		return nil
	}
	p := t.approvals.open[i]
	answer, cause := answerOf(v), events.ResolvedByPerson
	if v.Timeout {
		cause = events.ResolvedByTimeout
	}
	all := v.Decision == events.DecisionApproveAll && p.class != "" && !v.Timeout
	replies = append(replies, t.resolve(p, answer, cause, all))
	if all {
		if t.approvals.approved == nil {
			t.approvals.approved = map[string]bool{}
		}
		t.approvals.approved[p.class] = true
		for _, other := range slices.Clone(t.approvals.open) {
			if other.class == p.class {
				replies = append(replies, t.resolve(other, PermissionAnswer{Outcome: events.OutcomeApproved}, events.ResolvedByClass, false))
			}
		}
	}
	return append(replies, t.openQueued()...)
}

// answerOf returns the answer for the agent.
func answerOf(v runner.ApprovalDecision) PermissionAnswer {
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

// resolve records the end of an open request and returns the call of its reply.
func (t *Turn) resolve(p *pendingRequest, a PermissionAnswer, cause string, all bool) func() {
	t.removeOpen(p)
	t.write(events.ApprovalResolved{}.EventType(), p.conversation, events.ApprovalResolved{
		ApprovalID: p.local, Outcome: a.Outcome, Cause: cause, Class: t.shown(p.class, nil), All: all,
	})
	return func() { p.reply(a) }
}

func (t *Turn) removeOpen(p *pendingRequest) {
	t.approvals.open = slices.DeleteFunc(t.approvals.open, func(o *pendingRequest) bool { return o == p })
}

// openQueued records queued requests while there is room, and returns the calls of the replies to those that are decided.
func (t *Turn) openQueued() (replies []func()) {
	for len(t.approvals.queued) > 0 && len(t.approvals.open) < events.MaxOpenApprovals {
		p := t.approvals.queued[0]
		t.approvals.queued = t.approvals.queued[1:]
		if answer, decided := t.permit(p.conversation, p.request, p.reply); decided {
			replies = append(replies, func() { p.reply(answer) })
		}
	}
	return replies
}

// Withdraw ends a request that the agent no longer waits for, without a reply. It ignores an unknown key.
func (t *Turn) Withdraw(key string) {
	t.mu.Lock()
	isKey := func(p *pendingRequest) bool { return p.request.Key == key }
	t.approvals.queued = slices.DeleteFunc(t.approvals.queued, isKey)
	if i := slices.IndexFunc(t.approvals.open, isKey); i >= 0 {
		t.retract(t.approvals.open[i], "withdrawn")
	}
	replies := t.openQueued()
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// Retract ends all requests without a decision and calls their replies.
func (t *Turn) Retract(reason string) {
	t.mu.Lock()
	replies := t.retractAll(reason)
	t.mu.Unlock()
	for _, reply := range replies {
		reply()
	}
}

// retractAll returns the calls of the replies.
func (t *Turn) retractAll(reason string) (replies []func()) {
	for _, p := range slices.Concat(t.approvals.open, t.approvals.queued) {
		if p.local != "" {
			t.retract(p, reason)
		}
		replies = append(replies, func() { p.reply(PermissionAnswer{Message: endedMessage}) })
	}
	t.approvals.queued = nil
	return replies
}

// retract records that an open request ended without a decision.
func (t *Turn) retract(p *pendingRequest, reason string) {
	t.removeOpen(p)
	t.write(events.ApprovalRetracted{}.EventType(), p.conversation, events.ApprovalRetracted{ApprovalID: p.local, Reason: reason})
}
