package acp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	sdk "github.com/coder/acp-go-sdk"
)

// asAgent makes the test binary act as the agent; its value is the kind of agent.
const asAgent = "SPOOL_TEST_ACP_AGENT"

func TestMain(m *testing.M) {
	if kind := os.Getenv(asAgent); strings.HasPrefix(kind, badPeer) {
		os.Exit(runBadPeer(kind))
	} else if kind != "" {
		os.Exit(runScripted(kind))
	}
	os.Exit(m.Run())
}

// runScripted runs an ACP agent, based on the SDK's agent side, that does what the query says.
func runScripted(kind string) int {
	a := &scripted{kind: kind, home: os.Getenv("SPOOL_TEST_HOME"), made: make(chan *sdk.AgentSideConnection, 1), cancels: make(chan struct{}, 10)}
	a.model.Store("")
	conn := sdk.NewAgentSideConnection(a, os.Stdout, os.Stdin) // it begins to read at once
	a.made <- conn
	<-conn.Done()
	return 0
}

// scripted stores its queries in one file per session.
type scripted struct {
	sdk.Agent // a method that is not implemented ends the process
	kind      string
	home      string
	made      chan *sdk.AgentSideConnection // holds the connection
	model     atomic.Value
	cancels   chan struct{} // of kind late: one for each session/cancel
	victim    atomic.Bool   // the next turn ends at once
}

func (a *scripted) conn() *sdk.AgentSideConnection {
	c := <-a.made
	a.made <- c
	return c
}

func (a *scripted) Initialize(_ context.Context, p sdk.InitializeRequest) (sdk.InitializeResponse, error) {
	if p.ClientCapabilities.Fs.ReadTextFile || p.ClientCapabilities.Fs.WriteTextFile || p.ClientCapabilities.Terminal {
		return sdk.InitializeResponse{}, sdk.NewInvalidParams("nothing should be offered")
	}
	r := sdk.InitializeResponse{
		ProtocolVersion: sdk.ProtocolVersionNumber, AgentInfo: &sdk.Implementation{Name: "scripted", Version: "1"}, AuthMethods: []sdk.AuthMethod{},
	}
	r.AgentCapabilities.PromptCapabilities.Image = a.kind != "plain"
	switch a.kind {
	case "resumes":
		r.AgentCapabilities.SessionCapabilities.Resume = &sdk.SessionResumeCapabilities{}
		r.AgentCapabilities.SessionCapabilities.List = &sdk.SessionListCapabilities{}
	case "resume fails":
		r.AgentCapabilities.SessionCapabilities.Resume = &sdk.SessionResumeCapabilities{}
		r.AgentCapabilities.LoadSession = true
	case "loads", "loads anything":
		r.AgentCapabilities.LoadSession = true
	case "version 2":
		r.ProtocolVersion = 2
	}
	return r, nil
}

func (a *scripted) file(id sdk.SessionId) string { return filepath.Join(a.home, string(id)) }

func (a *scripted) NewSession(context.Context, sdk.NewSessionRequest) (sdk.NewSessionResponse, error) {
	if a.kind == "locked" {
		return sdk.NewSessionResponse{}, sdk.NewAuthRequired(map[string]any{"details": "log in first"})
	}
	id := sdk.SessionId(fmt.Sprintf("s%d", time.Now().UnixNano()))
	if err := os.WriteFile(a.file(id), nil, 0o600); err != nil {
		return sdk.NewSessionResponse{}, err
	}
	return sdk.NewSessionResponse{SessionId: id, ConfigOptions: a.options()}, nil
}

func (a *scripted) options() []sdk.SessionConfigOption {
	if a.kind == "plain" {
		return nil
	}
	model, ungrouped := sdk.SessionConfigOptionCategoryModel, sdk.SessionConfigSelectOptionsUngrouped{{Name: "Small", Value: "small"}, {Name: "Big", Value: "big"}}
	return []sdk.SessionConfigOption{{Select: &sdk.SessionConfigOptionSelect{
		Id: "m", Name: "Model", Category: &model, CurrentValue: "small", Type: "select", Options: sdk.SessionConfigSelectOptions{Ungrouped: &ungrouped},
	}}}
}

func (a *scripted) SetSessionConfigOption(_ context.Context, p sdk.SetSessionConfigOptionRequest) (sdk.SetSessionConfigOptionResponse, error) {
	if v := p.ValueId; v == nil || v.ConfigId != "m" || v.Value != "big" {
		return sdk.SetSessionConfigOptionResponse{}, sdk.NewInvalidParams("no such model")
	}
	a.model.Store("big")
	return sdk.SetSessionConfigOptionResponse{ConfigOptions: a.options()}, nil
}

func (a *scripted) ListSessions(context.Context, sdk.ListSessionsRequest) (sdk.ListSessionsResponse, error) {
	return sdk.ListSessionsResponse{Sessions: []sdk.SessionInfo{}}, nil
}

func (a *scripted) ResumeSession(_ context.Context, p sdk.ResumeSessionRequest) (sdk.ResumeSessionResponse, error) {
	if a.kind == "resume fails" {
		return sdk.ResumeSessionResponse{}, sdk.NewInternalError(map[string]any{"details": "no active session"})
	}
	_, err := os.ReadFile(a.file(p.SessionId))
	return sdk.ResumeSessionResponse{}, err
}

// LoadSession repeats the conversation.
func (a *scripted) LoadSession(ctx context.Context, p sdk.LoadSessionRequest) (sdk.LoadSessionResponse, error) {
	raw, err := os.ReadFile(a.file(p.SessionId))
	if a.kind == "loads anything" && errors.Is(err, fs.ErrNotExist) {
		return sdk.LoadSessionResponse{}, os.WriteFile(a.file(p.SessionId), nil, 0o600)
	}
	if err != nil {
		return sdk.LoadSessionResponse{}, err
	}
	for line := range strings.Lines(string(raw)) {
		a.tell(ctx, p.SessionId, sdk.UpdateUserMessageText(line))
		a.tell(ctx, p.SessionId, sdk.UpdateAgentMessageText("REPEATED "+line))
		a.tell(ctx, p.SessionId, sdk.StartToolCall("old", "old tool"))
	}
	return sdk.LoadSessionResponse{}, nil
}

func (a *scripted) Cancel(context.Context, sdk.CancelNotification) error {
	if a.kind == "late" {
		a.cancels <- struct{}{}
	}
	return nil
}

func (a *scripted) tell(ctx context.Context, id sdk.SessionId, u sdk.SessionUpdate) {
	if err := a.conn().SessionUpdate(ctx, sdk.SessionNotification{SessionId: id, Update: u}); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

func (a *scripted) say(ctx context.Context, id sdk.SessionId, text string) {
	a.tell(ctx, id, sdk.UpdateAgentMessageText(text))
}

// Prompt does what the last text says.
func (a *scripted) Prompt(ctx context.Context, p sdk.PromptRequest) (sdk.PromptResponse, error) {
	if a.victim.Swap(false) {
		return sdk.PromptResponse{StopReason: sdk.StopReasonCancelled}, nil
	}
	var texts, images []string
	for _, b := range p.Prompt {
		switch {
		case b.Text != nil:
			texts = append(texts, b.Text.Text)
		case b.Image != nil:
			images = append(images, b.Image.MimeType)
		}
	}
	said, err := os.ReadFile(a.file(p.SessionId))
	if err != nil {
		return sdk.PromptResponse{}, err
	}
	asked := texts[len(texts)-1]
	if err := os.WriteFile(a.file(p.SessionId), []byte(string(said)+asked+"\n"), 0o600); err != nil {
		return sdk.PromptResponse{}, err
	}
	end := func(r sdk.StopReason) (sdk.PromptResponse, error) { return sdk.PromptResponse{StopReason: r}, nil }
	switch what, _, _ := strings.Cut(asked, ":"); what {
	case "which number was it?":
		_, after, _ := strings.Cut(string(said), "Remember the number ")
		number, _, _ := strings.Cut(after, " ")
		a.say(ctx, p.SessionId, "You asked me to remember "+number+".")
	case "talk for ever", "talk for ever again":
		a.say(ctx, p.SessionId, "and on and on")
		<-ctx.Done()
		return end(sdk.StopReasonCancelled)
	case "recall":
		a.say(ctx, p.SessionId, "before: "+strings.ReplaceAll(string(said), "\n", ","))
	case "everything":
		a.say(ctx, p.SessionId, fmt.Sprintf("texts %q images %q model %q", texts, images, a.model.Load()))
	case "plan":
		a.plan(ctx, p.SessionId)
	case "work":
		a.work(ctx, p.SessionId)
	case "usage":
		return a.usage(ctx, p.SessionId)
	case "max_tokens", "max_turn_requests", "refusal", "cancelled", "bored":
		a.say(ctx, p.SessionId, "so far")
		return end(sdk.StopReason(what))
	case "permission":
		return a.permission(ctx, p.SessionId, asked)
	case "status":
		return sdk.PromptResponse{}, &sdk.RequestError{Code: -32603, Message: "Internal error", Data: map[string]any{"status": 429, "details": "slow down"}}
	case "die":
		a.say(ctx, p.SessionId, "dying")
		return sdk.PromptResponse{}, syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "noise":
		a.noise(p.SessionId)
		a.say(ctx, p.SessionId, "still here")
	case "quiet":
		<-ctx.Done() // it prints nothing
	case "wait":
		a.say(ctx, p.SessionId, "waiting")
		<-ctx.Done()
		return end(sdk.StopReasonCancelled)
	case "wait twice": // until it was asked to stop twice; then the next turn ends at once
		a.say(ctx, p.SessionId, "waiting")
		for range 2 {
			<-a.cancels
		}
		a.victim.Store(true)
		return end(sdk.StopReasonCancelled)
	default:
		a.say(ctx, p.SessionId, "You said: "+asked+". Ça va, 世界.")
	}
	return end(sdk.StopReasonEndTurn)
}

func (a *scripted) plan(ctx context.Context, id sdk.SessionId) {
	entry := func(status sdk.PlanEntryStatus) sdk.PlanEntry {
		return sdk.PlanEntry{Content: "Think", Priority: sdk.PlanEntryPriorityHigh, Status: status}
	}
	a.tell(ctx, id, sdk.UpdateAgentThoughtText("hm, "))
	a.tell(ctx, id, sdk.UpdateAgentThoughtText("well"))
	a.tell(ctx, id, sdk.UpdatePlan(entry(sdk.PlanEntryStatusPending)))
	a.tell(ctx, id, sdk.UpdatePlan(entry(sdk.PlanEntryStatusCompleted)))
	a.say(ctx, id, "planned")
}

// work is a tool that streams its output and changes a file.
func (a *scripted) work(ctx context.Context, id sdk.SessionId) {
	text := func(s string) sdk.ToolCallUpdateOpt {
		return sdk.WithUpdateContent([]sdk.ToolCallContent{sdk.ToolContent(sdk.TextBlock(s))})
	}
	a.tell(ctx, id, sdk.StartToolCall("c1", "Run the tests", sdk.WithStartKind(sdk.ToolKindExecute), sdk.WithStartRawInput(map[string]any{"n": 1})))
	a.tell(ctx, id, sdk.UpdateToolCall("c1", sdk.WithUpdateStatus(sdk.ToolCallStatusInProgress), text("one\n")))
	a.tell(ctx, id, sdk.UpdateToolCall("c1", text("one\ntwo\n")))
	a.tell(ctx, id, sdk.UpdateToolCall("c1", sdk.WithUpdateStatus(sdk.ToolCallStatusFailed), text("one\ntwo\nthree\n")))
	a.tell(ctx, id, sdk.StartToolCall("c2", "Edit", sdk.WithStartKind(sdk.ToolKindEdit), sdk.WithStartLocations([]sdk.ToolCallLocation{{Path: "a.txt"}})))
	a.tell(ctx, id, sdk.UpdateToolCall("c2", sdk.WithUpdateStatus(sdk.ToolCallStatusCompleted),
		sdk.WithUpdateContent([]sdk.ToolCallContent{sdk.ToolDiffContent("a.txt", "new\n", "old\n"), sdk.ToolTerminalRef("t1")})))
	a.tell(ctx, id, sdk.StartToolCall("c3", "Look", sdk.WithStartStatus(sdk.ToolCallStatusCompleted), sdk.WithStartRawOutput(map[string]any{"output": "seen"})))
	a.say(ctx, id, "worked")
}

func (a *scripted) usage(ctx context.Context, id sdk.SessionId) (sdk.PromptResponse, error) {
	for _, cost := range []float64{0.5, 0.75} {
		a.tell(ctx, id, sdk.SessionUpdate{UsageUpdate: &sdk.SessionUsageUpdate{
			SessionUpdate: "usage_update", Used: 10, Size: 100, Cost: &sdk.Cost{Amount: cost, Currency: "USD"},
		}})
	}
	a.say(ctx, id, "used")
	return sdk.PromptResponse{StopReason: sdk.StopReasonEndTurn, Usage: &sdk.Usage{
		InputTokens: 7, OutputTokens: 3, ThoughtTokens: sdk.Ptr(2), CachedReadTokens: sdk.Ptr(5), TotalTokens: 17,
	}}, nil
}

// permission requests permission for a call; "permission: kind path options…".
func (a *scripted) permission(ctx context.Context, id sdk.SessionId, asked string) (sdk.PromptResponse, error) {
	words := strings.Fields(asked)[1:]
	kind := sdk.ToolKind(words[0])
	call := sdk.ToolCallUpdate{ToolCallId: "c1", Title: sdk.Ptr("a tool"), Kind: &kind}
	if words[1] != "-" {
		call.Locations = []sdk.ToolCallLocation{{Path: words[1]}}
	}
	r := sdk.RequestPermissionRequest{SessionId: id, ToolCall: call, Options: []sdk.PermissionOption{}}
	for _, o := range words[2:] {
		r.Options = append(r.Options, sdk.PermissionOption{Kind: sdk.PermissionOptionKind(o), Name: o, OptionId: sdk.PermissionOptionId("opt-" + o)})
	}
	answer, err := a.conn().RequestPermission(ctx, r)
	if err != nil {
		return sdk.PromptResponse{}, err
	}
	got := "cancelled"
	if answer.Outcome.Selected != nil {
		got = string(answer.Outcome.Selected.OptionId)
	}
	a.say(ctx, id, "answered "+got)
	return sdk.PromptResponse{StopReason: sdk.StopReasonEndTurn}, nil
}

// noise prints lines that an agent should not print.
func (a *scripted) noise(id sdk.SessionId) {
	for _, line := range []string{
		"this is not JSON",
		`{"jsonrpc":"2.0","id":99,"result":{}}`,
		`{"jsonrpc":"2.0","id":"x","result":{}}`,
		`{"jsonrpc":"2.0"}`,
		`[1,2]`,
		`{"jsonrpc":"2.0","method":"_other/thing","params":{}}`,
		`{"jsonrpc":"2.0","id":"q1","method":"terminal/create","params":{}}`,
		`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"` + string(id) + `","update":{"sessionUpdate":"brand_new","content":{"type":"text","text":"x"}}}}`,
		`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"other","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"x"}}}}`,
		`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"` + string(id) + `","update":{"sessionUpdate":"agent_message_chunk","content":7}}}`,
		`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"` + string(id) + `","update":{"sessionUpdate":"tool_call","toolCallId":"c9","title":"odd","status":"completed","rawInput":{"n":9007199254740993},"content":[{"type":"hologram"}]}}}`,
		`{"jsonrpc":"2.0","id":"q2","method":"session/request_permission","params":{"sessionId":7}}`,
	} {
		if _, err := io.WriteString(os.Stdout, line+"\n"); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}
