package acp

import (
	"encoding/json"
	"slices"
	"testing"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
)

// Agents differ in whether they ignore case in the names of arguments. The policy sees a path or a command by every spelling.
func TestArguments_AreReadInEveryCase(t *testing.T) {
	t.Parallel()
	for input, want := range map[string][]string{
		`{"File_Path":"/etc/passwd"}`: {"/etc/passwd"}, `{"FILEPATH":"a","parentdir":"b"}`: {"a", "a", "b"}, "{\"path\u017f\":[\"c\"]}": {"c"}, `{"Pattern":"../x"}`: {"../x"},
	} {
		got, ok := pathsInArguments(json.RawMessage(input))
		slices.Sort(got)
		if !ok || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %t, want %q", input, got, ok, want)
		}
	}
	if got, ok := parseCallArguments(json.RawMessage(`{"Command":"rm -rf data"}`)); !ok || got.Command != "rm -rf data" {
		t.Errorf("%+v, %t", got, ok)
	}
}

// A call with two arguments that name its command or its folder is denied: a person would see one, and the agent might use the other.
func TestArguments_WithTwoCommandsAreDenied(t *testing.T) {
	t.Parallel()
	for _, input := range []string{
		`{"command":"ls","cmd":"rm -rf data"}`, `{"command":["rm","-rf","data"],"cmd":"ls"}`, `{"Command":"ls","CMD":"rm"}`, `{"command":"ls","cwd":"/a","workdir":"/b"}`,
	} {
		s := OpenSession(Dialect{}, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, &agenttest.Stdin{}).(*session)
		call := ToolCall{ID: "c", Kind: sdk.ToolKindExecute, Input: json.RawMessage(input)}
		if r := s.newPermissionRequest(call, ToolCall{ID: "c"}, nil); r.Decided == nil || r.Decided.Rule != ruleUnreadableRequest {
			t.Errorf("%s: %+v, the command is %q", input, r.Decided, r.Call.Command)
		}
	}
	if got, ok := parseCallArguments(json.RawMessage(`{"command":null,"cmd":"ls"}`)); !ok || got.Cmd != "ls" {
		t.Errorf("%+v, %t", got, ok)
	}
}

// A call with an argument in two spellings is denied, whatever its kind: the policy would judge one, and the agent might run the other.
func TestArguments_InTwoCasesAreDenied(t *testing.T) {
	t.Parallel()
	for kind, input := range map[sdk.ToolKind]string{
		"read": `{"path":"ok","Path":"/etc/passwd"}`, "edit": `{"file_path":"ok","FILE_PATH":"/etc/passwd"}`, "execute": `{"command":"ls","Command":"rm -rf data"}`, "fetch": `{"url":"https://a.example","URL":"https://b.example"}`,
	} {
		s := OpenSession(Dialect{}, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, &agenttest.Stdin{}).(*session)
		call := ToolCall{ID: "c", Kind: kind, Input: json.RawMessage(input)}
		if r := s.newPermissionRequest(call, ToolCall{ID: "c"}, nil); r.Decided == nil || r.Decided.Rule != ruleUnreadableRequest {
			t.Errorf("%s %s: %+v", kind, input, r.Decided)
		}
		if r := s.newPermissionRequest(ToolCall{ID: "c", Kind: kind}, call, nil); r.Decided == nil || r.Decided.Rule != ruleUnreadableRequest {
			t.Errorf("%s %s in the call itself: %+v", kind, input, r.Decided)
		}
	}
	// The arguments of tools that the policy does not interpret are free.
	s := OpenSession(Dialect{}, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, &agenttest.Stdin{}).(*session)
	if r := s.newPermissionRequest(ToolCall{ID: "c", Kind: sdk.ToolKindOther, Input: json.RawMessage(`{"id":1,"ID":2}`)}, ToolCall{ID: "c"}, nil); r.Decided != nil {
		t.Errorf("another tool: %+v", r.Decided)
	}
}
