package session

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// An approval request can be decided once, while it is open, in the ways that it allows.
func TestDecideApproval(t *testing.T) {
	id := events.DeriveID(events.KindApproval, "a")
	tool := &OpenApproval{Kind: events.ApprovalTool, Class: "commands", Editable: true}
	question, elicitation := &OpenApproval{Kind: events.ApprovalQuestion}, &OpenApproval{Kind: events.ApprovalElicitation}
	object := json.RawMessage(`{"command":"ls"}`)
	for name, c := range map[string]struct {
		open *OpenApproval
		d    events.ApprovalDecided
		code string // "" for accepted
		at   string // the field
	}{
		"approve":                                {tool, events.ApprovalDecided{Decision: events.DecisionApprove}, "", ""},
		"approve with changed arguments":         {tool, events.ApprovalDecided{Decision: events.DecisionApprove, Arguments: object}, "", ""},
		"approve all":                            {tool, events.ApprovalDecided{Decision: events.DecisionApproveAll}, "", ""},
		"skip":                                   {tool, events.ApprovalDecided{Decision: events.DecisionSkip}, "", ""},
		"reject with a comment":                  {tool, events.ApprovalDecided{Decision: events.DecisionReject, Comment: "no"}, "", ""},
		"answer a question":                      {question, events.ApprovalDecided{Decision: events.DecisionAnswer, Answers: map[string][]string{"q": {"a"}}}, "", ""},
		"answer a secret question":               {question, events.ApprovalDecided{Decision: events.DecisionAnswer, Sealed: map[string]string{"q": "acme.x.1"}}, "", ""},
		"a secret answer with an approval":       {tool, events.ApprovalDecided{Decision: events.DecisionApprove, Sealed: map[string]string{"q": "acme.x.1"}}, CodeInvalid, "answers"},
		"answer an elicitation":                  {elicitation, events.ApprovalDecided{Decision: events.DecisionAnswer, Content: object}, "", ""},
		"reject a question":                      {question, events.ApprovalDecided{Decision: events.DecisionReject}, "", ""},
		"a request that is not open":             {nil, events.ApprovalDecided{Decision: events.DecisionApprove}, CodeApprovalNotOpen, ""},
		"an unknown decision":                    {tool, events.ApprovalDecided{Decision: "yes"}, CodeInvalid, "decision"},
		"no decision":                            {tool, events.ApprovalDecided{}, CodeInvalid, "decision"},
		"approve all without a class":            {&OpenApproval{}, events.ApprovalDecided{Decision: events.DecisionApproveAll}, CodeInvalid, "decision"},
		"approve a question":                     {question, events.ApprovalDecided{Decision: events.DecisionApprove}, CodeInvalid, "decision"},
		"answer a call":                          {tool, events.ApprovalDecided{Decision: events.DecisionAnswer, Answers: map[string][]string{"q": {"a"}}}, CodeInvalid, "decision"},
		"answer a question without answers":      {question, events.ApprovalDecided{Decision: events.DecisionAnswer}, CodeInvalid, "answers"},
		"answer an elicitation without content":  {elicitation, events.ApprovalDecided{Decision: events.DecisionAnswer}, CodeInvalid, "content"},
		"content that is no object":              {elicitation, events.ApprovalDecided{Decision: events.DecisionAnswer, Content: json.RawMessage(`[1]`)}, CodeInvalid, "content"},
		"arguments that the agent cannot change": {&OpenApproval{}, events.ApprovalDecided{Decision: events.DecisionApprove, Arguments: object}, CodeNotEditable, "arguments"},
		"arguments that are no object":           {tool, events.ApprovalDecided{Decision: events.DecisionApprove, Arguments: json.RawMessage(`null`)}, CodeInvalid, "arguments"},
		"arguments with a rejection":             {tool, events.ApprovalDecided{Decision: events.DecisionReject, Arguments: object}, CodeInvalid, "arguments"},
		"a comment with an approval":             {tool, events.ApprovalDecided{Decision: events.DecisionApprove, Comment: "ok"}, CodeInvalid, "comment"},
		"a comment of 17 KiB":                    {tool, events.ApprovalDecided{Decision: events.DecisionReject, Comment: strings.Repeat("x", 17<<10)}, CodeInvalid, "comment"},
	} {
		t.Run(name, func(t *testing.T) {
			s := State{Status: Open, Active: QueryRef{ExecutionID: "exe"}}
			c.d.ApprovalID = id
			command := DecideApproval{CommandBase: CommandBase{events.CommandMeta{CommandID: "cmd", Now: time.Unix(1, 0)}}, ApprovalDecided: c.d, ExecutionID: "exe", Open: c.open}
			list, err := Decide(s, command)
			var refused *Error
			if errors.As(err, &refused) != (c.code != "") || refused != nil && (refused.Code != c.code || refused.Field != c.at) || err == nil && len(list) != 1 {
				t.Fatalf("%d events, %v; want the code %q and the field %q", len(list), err, c.code, c.at)
			}
			if err != nil {
				return
			}
			s = Fold(s, "cmd", list)
			if list, err = Decide(s, command); err != nil || len(list) != 0 {
				t.Errorf("the command again: %d events, %v; want none", len(list), err)
			}
			command.CommandID = "other"
			if _, err = Decide(s, command); !errors.As(err, &refused) || refused.Code != CodeApprovalDecided {
				t.Errorf("a second decision: %v, want %s", err, CodeApprovalDecided)
			}
		})
	}
}

// A state remembers the decisions on all requests that may be open, and forgets them with the next execution.
func TestDecided_IsBounded(t *testing.T) {
	s := State{Status: Open, Active: QueryRef{ExecutionID: "exe"}, Queue: []QueryRef{{ExecutionID: "next"}}}
	for range 10 * maxRememberedDecisions {
		s = Evolve(s, events.Event{ExecutionID: "exe", Data: events.ApprovalDecided{ApprovalID: "x"}})
	}
	s = Evolve(s, events.Event{ExecutionID: "exe", Data: events.ApprovalDecided{ApprovalID: "last"}})
	if n := len(s.Decided); n != maxRememberedDecisions || n <= events.MaxOpenApprovals || s.Decided[n-1].ApprovalID != "last" {
		t.Errorf("%d decisions, the last %+v", n, s.Decided[n-1])
	}
	if s = s.WithCommitSeq(7); s.Decided[0].At != 7 {
		t.Errorf("settled %+v", s.Decided[0])
	}
	if s = Evolve(s, events.Event{ExecutionID: "next", Data: events.ExecutionDispatched{}}); s.Decided != nil {
		t.Errorf("after the next dispatch: %+v", s.Decided)
	}
}
