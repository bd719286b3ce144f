package translate

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/pkg/visible"
)

// Limits of an approval request in bytes. They are above those of the runner, which limits a request before secrets are redacted again.
const (
	maxApprovalText  = 256 << 10 // a text of the request, and its paths together
	maxApprovalJSON  = 128 << 10 // the arguments
	maxApprovalForm  = 1 << 20   // the questions, and the schema
	maxApprovalClass = 1 << 10   // the class, which the state of the runs contains
)

// approvalEvent returns an event about an approval request, which withID creates with the id that the request has in the log. local
// is the runner's id of the request.
func (t *Translator) approvalEvent(l runner.JournalLine, at time.Time, local string, withID func(id string) events.Payload, now time.Time) LineResult {
	if local == "" || l.ExecutionID == "" {
		return t.badLineError(l, now)
	}
	return t.newEvent(l, at, withID(runner.ApprovalID(t.ExecutionID, t.Journal, local)))
}

// limitRequest makes an approval request of a hostile runner safe to store and to show, and reports whether a person can decide on it:
// what the call does must be whole. It cuts other texts that are too long, and escapes the characters that a reader would not see.
func limitRequest(p *events.ApprovalRequested) bool {
	switch p.Kind {
	case events.ApprovalTool, events.ApprovalPlan, events.ApprovalQuestion, events.ApprovalElicitation:
	default:
		return false
	}
	if questions, err := json.Marshal(p.Questions); err != nil || len(questions) > maxApprovalForm || len(p.Schema) > maxApprovalForm {
		return false
	}
	if p.Class = visible.Line(p.Class); len(p.Class) > maxApprovalClass {
		p.Class = "" // a class that is cut would cover other calls
	}
	for _, s := range []*string{&p.ToolName, &p.ToolUseID, &p.Rule, &p.Title} {
		*s = truncate.ValidText(visible.Line(*s), maxApprovalClass)
	}
	return limitPreview(p)
}

// limitPreview limits the texts of an approval request that show what the call does. It returns false if one is too long that a person
// must see whole.
func limitPreview(p *events.ApprovalRequested) bool {
	v := &p.Preview
	for _, c := range v.Cut {
		if len(v.Cut) > len(cutFields) || !slices.Contains(cutFields, c.Field) {
			return false
		}
	}
	v.Command, v.Cwd, v.URL = visible.Text(v.Command), visible.Line(v.Cwd), visible.Line(v.URL)
	if max(len(v.Command), len(v.Cwd), len(v.URL)) > maxApprovalText || !escapeLines(v.Paths) || !escapeLines(v.Hosts) {
		return false
	}
	for i, s := range []*string{&v.Diff, &v.Text, &p.Reason} {
		if whole := visible.Text(*s); len(whole) > maxApprovalText {
			markCut(v, cutFields[i], len(*s))
			*s = truncate.ValidText(whole, maxApprovalText)
		} else {
			*s = whole
		}
	}
	if len(p.Input) > maxApprovalJSON {
		markCut(v, "input", len(p.Input))
		p.Input = nil
	}
	return true
}

// cutFields are the fields of an approval request that may be cut.
var cutFields = []string{"diff", "text", "reason", "input"}

// markCut marks a field of a request, the whole of which has the given length in bytes, as cut.
func markCut(v *events.ApprovalPreview, field string, length int) {
	v.Truncated = true
	if !slices.ContainsFunc(v.Cut, func(c events.CutField) bool { return c.Field == field }) {
		v.Cut = append(v.Cut, events.CutField{Field: field, Bytes: uint32(length)}) //nolint:gosec // less than a line of the journal
	}
}

// escapeLines escapes the texts in list in place. It returns false if they are too long together.
func escapeLines(list []string) bool {
	size := 0
	for i, s := range list {
		list[i] = visible.Line(s)
		size += len(list[i])
	}
	return size+len(list) <= maxApprovalText // an empty path counts too
}
