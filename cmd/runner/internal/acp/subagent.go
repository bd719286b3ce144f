package acp

import (
	"errors"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// newSubagent returns the conversation of the sub-agent that a call of this conversation runs.
func (f *conversation) newSubagent(call string) *conversation {
	sub := &conversation{conv: call, depth: f.depth + 1}
	if f.depth > 0 {
		sub.conv = f.conv + "." + call // sub-agents may use the same ids for their calls
	}
	return sub
}

// maxHoldTime is the maximum time for which a notice of a sub-agent waits for the update with the call that runs the sub-agent.
const maxHoldTime = time.Second

// heldNotice is a notice of a sub-agent that is not journaled yet.
type heldNotice struct {
	Notice
	arrived time.Time
}

// journalHeld journals the notices of sub-agents in the order of their arrival, up to the first one whose call is unknown: a notice may arrive before
// the update with the call that runs the sub-agent. If all is set, journalHeld journals every notice.
func (s *session) journalHeld(t *agent.Turn, all bool) error {
	var errs []error
	for len(s.held) > 0 {
		n := s.held[0]
		f := s.noticeConversation(n.Notice)
		wait := maxHoldTime - s.now().Sub(n.arrived)
		if f == nil && !all && wait > 0 && s.pending && s.answered.IsZero() {
			t.SetAlarm(wait, func() {
				if err := s.journalHeld(t, true); err != nil {
					s.journalLog(t, "warn", "%s", err)
				}
			})
			break
		}
		s.held = s.held[1:]
		errs = append(errs, s.journalNotice(n.Notice, f, t))
	}
	return errors.Join(errs...)
}

// noticeConversation returns the conversation that a notice of a sub-agent belongs to, or nil if the call that runs the sub-agent is unknown.
func (s *session) noticeConversation(n Notice) *conversation {
	parent := s.conversationOf(sdk.SessionId(n.Parent))
	if parent == nil {
		return nil
	}
	call := s.calls[callKey{parent.conv, n.ParentCall}]
	switch {
	case call == nil:
		return nil
	case n.Session == n.Parent:
		return parent
	}
	s.subs[sdk.SessionId(n.Session)] = call.subagent
	return call.subagent
}

// journalNotice journals a notice of the conversation f of a sub-agent. f is nil if the call that runs the sub-agent is unknown.
func (s *session) journalNotice(n Notice, f *conversation, t *agent.Turn) error {
	if n.Request != nil {
		conversation := events.MainConversation
		if f != nil {
			conversation = f.conv
		}
		s.handleSubagentRequest(*n.Request, conversation, t)
		return nil
	}
	if f == nil && n.Session == string(s.id) && s.pending {
		f = s.main
	}
	if f == nil {
		s.journalLog(t, "info", "an update of another session %.100s: %s", n.Session, n.Update)
		return nil
	}
	kind, err := decode[updateKind](n.Update, "update of a sub-agent")
	if err != nil {
		return err
	}
	return s.journalUpdate(kind.Kind, n.Update, f, t)
}
