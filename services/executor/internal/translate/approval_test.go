package translate

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// request translates an approval request of a runner.
func request(t *testing.T, tr *Translator, r events.ApprovalRequested) events.Payload {
	t.Helper()
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return one(t, tr, line(tr.Last+1, r.EventType(), string(raw))).Event.Data
}

// A request of a hostile runner is limited before the log, the state of the runs and the read models get it.
func TestApproval_LimitsARequest(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 2<<20)
	got, ok := request(t, fresh(), events.ApprovalRequested{
		ApprovalID: "b1", Kind: events.ApprovalTool, ToolName: long, ToolUseID: long, Rule: long, Reason: long, Title: long, Class: long,
		Preview: events.ApprovalPreview{Command: long, Cwd: long, Paths: strings.Split(strings.Repeat("p ", 99), " "), Diff: long, URL: long, Text: long},
		Input:   json.RawMessage(`"` + long + `"`), Editable: true,
	}).(events.ApprovalRequested)
	if !ok {
		t.Fatalf("the request became %T", got)
	}
	raw, err := json.Marshal(got)
	if err != nil || len(raw) > 512<<10 || !got.Preview.Truncated || len(got.Preview.Paths) != 64 || got.Input != nil || got.Class != "" || !got.Editable {
		t.Errorf("%d bytes, %v, %d paths, class of %d bytes", len(raw), err, len(got.Preview.Paths), len(got.Class))
	}
	for what, r := range map[string]events.ApprovalRequested{
		"an unknown kind":     {ApprovalID: "b1", Kind: "magic"},
		"a question too long": {ApprovalID: "b1", Kind: events.ApprovalQuestion, Questions: []events.Question{{ID: "q", Question: long}}},
		"a schema too long":   {ApprovalID: "b1", Kind: events.ApprovalElicitation, Schema: json.RawMessage(`"` + long + `"`)},
		"no id":               {Kind: events.ApprovalTool},
	} {
		if e, ok := request(t, fresh(), r).(events.Error); !ok || e.Code != CodeBadLine {
			t.Errorf("%s: %+v", what, e)
		}
	}
}

// A request that is within the limits is not changed, except its id.
func TestApproval_KeepsARequest(t *testing.T) {
	t.Parallel()
	r := events.ApprovalRequested{
		ApprovalID: "b1", Kind: events.ApprovalTool, ToolName: "Bash", Class: "commands that begin with `ls`", Editable: true, TimeoutMs: 5,
		Preview: events.ApprovalPreview{Command: strings.Repeat("é", 8<<10), Paths: []string{"a"}}, Input: json.RawMessage(`{"command":"ls"}`),
	}
	got := request(t, fresh(), r).(events.ApprovalRequested)
	r.ApprovalID = got.ApprovalID
	want, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if raw, err := json.Marshal(got); err != nil || string(raw) != string(want) {
		t.Errorf("%s, %v\nwant %s", raw, err, want)
	}
}

// A runner that has the journal name and the request id of another execution does not get the id of that request.
func TestApproval_IDsDependOnTheExecution(t *testing.T) {
	t.Parallel()
	ids := map[string]bool{}
	for _, execution := range []string{"exe_1", "exe_2"} {
		tr := fresh()
		tr.ExecutionID = execution
		l := line(1, "approval_requested", `{"approvalId":"b1","kind":"tool"}`)
		l.ExecutionID = execution
		ids[one(t, tr, l).Event.Data.(events.ApprovalRequested).ApprovalID] = true
	}
	if len(ids) != 2 {
		t.Errorf("ids of two executions: %v", ids)
	}
}
