package translate

import (
	"encoding/json"
	"reflect"
	"slices"
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
		Preview: events.ApprovalPreview{Command: "ls", Diff: long, Text: long},
		Input:   json.RawMessage(`"` + long + `"`), Editable: true,
	}).(events.ApprovalRequested)
	if !ok {
		t.Fatalf("the request became %T", got)
	}
	raw, err := json.Marshal(got)
	cut := []events.CutField{{Field: "diff", Bytes: 2 << 20}, {Field: "text", Bytes: 2 << 20}, {Field: "reason", Bytes: 2 << 20}, {Field: "input", Bytes: 2<<20 + 2}}
	if err != nil || len(raw) > 1<<20 || !got.Preview.Truncated || !slices.Equal(got.Preview.Cut, cut) || got.Input != nil || got.Class != "" || !got.Editable {
		t.Errorf("%d bytes, %v, cut %v, class of %d bytes", len(raw), err, got.Preview.Cut, len(got.Class))
	}
	for what, r := range map[string]events.ApprovalRequested{
		"an unknown kind":     {ApprovalID: "b1", Kind: "magic"},
		"a question too long": {ApprovalID: "b1", Kind: events.ApprovalQuestion, Questions: []events.Question{{ID: "q", Question: long}}},
		"a schema too long":   {ApprovalID: "b1", Kind: events.ApprovalElicitation, Schema: json.RawMessage(`"` + long + `"`)},
		"no id":               {Kind: events.ApprovalTool},
		"a command too long":  {ApprovalID: "b1", Kind: events.ApprovalTool, Preview: events.ApprovalPreview{Command: long}},
		"a folder too long":   {ApprovalID: "b1", Kind: events.ApprovalTool, Preview: events.ApprovalPreview{Cwd: long}},
		"a URL too long":      {ApprovalID: "b1", Kind: events.ApprovalTool, Preview: events.ApprovalPreview{URL: long}},
		"too many files":      {ApprovalID: "b1", Kind: events.ApprovalTool, Preview: events.ApprovalPreview{Paths: strings.SplitAfter(long, "x")}},
		"too many hosts":      {ApprovalID: "b1", Kind: events.ApprovalTool, Preview: events.ApprovalPreview{Hosts: []string{long}}},
		"an unknown field":    {ApprovalID: "b1", Kind: events.ApprovalTool, Preview: events.ApprovalPreview{Cut: []events.CutField{{Field: "command", Bytes: 1}}}},
	} {
		if e, ok := request(t, fresh(), r).(events.Error); !ok || e.Code != CodeBadLine {
			t.Errorf("%s: %+v", what, e)
		}
	}
}

// TestApproval_EscapesARequest tests that the host escapes the characters that a reader would not see, because a hostile
// runner does not.
func TestApproval_EscapesARequest(t *testing.T) {
	t.Parallel()
	got, ok := request(t, fresh(), events.ApprovalRequested{
		ApprovalID: "b1", Kind: events.ApprovalTool, ToolName: "Ba\u200bsh", Title: "a\nb", Reason: "a\n\u202eb", Class: "c\u3164", Rule: "r\x1b",
		Preview: events.ApprovalPreview{Command: "ls\n\u034frm", Cwd: "/\n", Paths: []string{"a\n\ufe0f"}, Hosts: []string{"h\u00ad"}, URL: "u\n", Diff: "+\r\n", Text: "\x1b]0;\na\x07"},
	}).(events.ApprovalRequested)
	if !ok {
		t.Fatal("the request was refused")
	}
	want := events.ApprovalRequested{
		ApprovalID: got.ApprovalID, Kind: events.ApprovalTool, ToolName: `Ba\u{200b}sh`, Title: `a\u{a}b`, Reason: "a\n\\u{202e}b", Class: `c\u{3164}`, Rule: `r\u{1b}`,
		Preview: events.ApprovalPreview{Command: "ls\n\\u{34f}rm", Cwd: `/\u{a}`, Paths: []string{`a\u{a}\u{fe0f}`}, Hosts: []string{`h\u{ad}`}, URL: `u\u{a}`, Diff: "+\\u{d}\n", Text: "\\u{1b}]0;\na\\u{7}"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
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
