package permission

import (
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// Explanation is the decision of a policy on a call, with the rule and the reason.
type Explanation struct {
	Action string `json:"action"`           // allow, ask or deny
	Rule   string `json:"rule"`             // as in permission_decided
	Text   string `json:"text,omitempty"`   // the rule as JSON, if it is one of a list
	Layer  string `json:"layer"`            // tools, execution, agent or preset
	Reason string `json:"reason,omitempty"` // for a denial: the sentence for the agent
	Class  string `json:"class,omitempty"`  // for a call that is asked about: the calls that "approve all" covers
	// Unattended is the answer to a call that a person would decide if nobody is there to decide: deny or skip.
	Unattended string `json:"unattended,omitempty"`
}

// Explain returns the decision on a call with the rule that decides and its reason.
func (p *Policy) Explain(c Call) (Explanation, error) {
	s := newAnalyzedCall(c)
	d, layer, r := p.decide(s)
	e := Explanation{Action: d.Action, Rule: d.Rule, Layer: layer, Reason: d.Reason}
	if r != nil {
		text, err := json.Marshal(r.PermissionRule)
		if err != nil {
			return Explanation{}, fmt.Errorf("encode %s: %w", r.name, err)
		}
		e.Text = string(text)
	}
	if d.Action == events.PermissionAsk {
		e.Class = s.class()
		e.Unattended = events.UnattendedDeny
		if p.ReportsDeniedAsSkipped() {
			e.Unattended = events.UnattendedSkip
		}
	}
	return e, nil
}
