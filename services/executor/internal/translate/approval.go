package translate

import (
	"encoding/json"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Limits of an approval request in bytes. They are above those of the runner, which cuts a request before secrets are redacted again.
const (
	maxApprovalText  = 32 << 10  // a text of the request
	maxApprovalJSON  = 128 << 10 // the arguments
	maxApprovalForm  = 1 << 20   // the questions, and the schema
	maxApprovalPaths = 64        // paths of the preview
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

// limitRequest cuts texts of an approval request that are too long, which only a hostile runner sends, and reports whether a person
// can decide on the rest.
func limitRequest(p *events.ApprovalRequested) bool {
	switch p.Kind {
	case events.ApprovalTool, events.ApprovalPlan, events.ApprovalQuestion, events.ApprovalElicitation:
	default:
		return false
	}
	if questions, err := json.Marshal(p.Questions); err != nil || len(questions) > maxApprovalForm || len(p.Schema) > maxApprovalForm {
		return false
	}
	if len(p.Class) > maxApprovalClass {
		p.Class = "" // a class that is cut would cover other calls
	}
	for _, s := range []*string{&p.ToolName, &p.ToolUseID, &p.Rule} {
		*s = truncate.ValidText(*s, maxApprovalClass)
	}
	for _, s := range []*string{&p.Reason, &p.Title} {
		*s = truncate.ValidText(*s, maxApprovalText)
	}
	v := &p.Preview
	cut := len(v.Paths) > maxApprovalPaths || len(p.Input) > maxApprovalJSON
	if cut {
		v.Paths = v.Paths[:min(len(v.Paths), maxApprovalPaths)]
	}
	if len(p.Input) > maxApprovalJSON {
		p.Input = nil
	}
	texts := []*string{&v.Command, &v.Cwd, &v.Diff, &v.URL, &v.Text}
	for i := range v.Paths {
		texts = append(texts, &v.Paths[i])
	}
	for _, s := range texts {
		cut = cut || len(*s) > maxApprovalText
		*s = truncate.ValidText(*s, maxApprovalText)
	}
	v.Truncated = v.Truncated || cut
	return true
}
