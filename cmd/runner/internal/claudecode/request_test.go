package claudecode

import (
	"encoding/json"
	"testing"
)

// The CLI reads members of JSON by their exact names. What a person is shown must come from the same members.
func TestParseQuestions_ReadsExactNames(t *testing.T) {
	t.Parallel()
	got := parseQuestions(json.RawMessage(`{"questions":[{"question":"Delete it?","Question":"Keep it?","options":[{"label":"Yes","Label":"No"}],"multiSelect":true,"MultiSelect":false}],"Questions":[]}`))
	if len(got) != 1 || got[0].Question != "Delete it?" || !got[0].Multiple || len(got[0].Options) != 1 || got[0].Options[0].Label != "Yes" {
		t.Errorf("%+v", got)
	}
	for _, input := range []string{`{"questions":5}`, `{"questions":[5]}`, `{"questions":[{"options":5}]}`, `{}`, `[]`} {
		if got := parseQuestions(json.RawMessage(input)); got != nil {
			t.Errorf("%s: %+v", input, got)
		}
	}
}

func TestDescribeInput_ReadsExactNames(t *testing.T) {
	t.Parallel()
	if got := describeInput(json.RawMessage(`{"command":"rm -rf data","Command":"ls"}`), "/w"); got != "rm -rf data" {
		t.Errorf("%q", got)
	}
}
