package builtin_test

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/cmd/runner/internal/profile"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// unstable are texts that differ in every run: ids, folders, durations.
var unstable = []struct{ from, to string }{
	{`agt-[A-Z2-7]+`, "agt-1"}, {`,"durationMs":\d+`, ""}, {`"path":"/[^"]*/spool/`, `"path":"/state/spool/`}, {`"bytes":\d+`, `"bytes":1`},
}

func TestGoldenTurn(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t,
		func(w http.ResponseWriter, _ *http.Request) {
			send(w,
				chunk(`{"role":"assistant","reasoning_content":"First I "}`, ""), chunk(`{"reasoning_content":"write it."}`, ""),
				chunk(`{"content":"I write "}`, ""), chunk(`{"content":"it. 🧵"}`, ""),
				chunk(`{"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"name":"write_file","arguments":"{\"path\":\"/mnt/workspace/sum.py\","}}]}`, ""),
				chunk(`{"tool_calls":[{"index":0,"function":{"arguments":"\"content\":\"print(1+2)\\n\"}"}}]}`, ""),
				chunk(`{"tool_calls":[{"index":1,"id":"call_b","type":"function","function":{"name":"run_code","arguments":"{\"language\":\"bash\",\"code\":\"cat sum.py; exit 3\"}"}}]}`, ""),
				chunk(`{}`, "tool_calls"), usage, "[DONE]")
		},
		calls("call_c", "read_file", `{"path":"../outside"}`),
		says("Done: 3."),
	)
	place := newPlace(t)
	lines := startSpool(t, e, place, "", nil).turn("write a program", nil)
	agenttest.CheckAnchors(t, lines, events.KindToolResult)
	agenttest.CompareJournal(t, filepath.Join("testdata", "turn.jsonl"), lines, func(text []byte) []byte {
		for _, u := range unstable {
			text = regexp.MustCompile(u.from).ReplaceAll(text, []byte(u.to))
		}
		return text
	})
	if got, err := os.ReadFile(place.Workspace + "/sum.py"); err != nil || string(got) != "print(1+2)\n" {
		t.Errorf("the file is %q, %v", got, err)
	}
	// The second request has the results of the calls.
	second := e.seen()[1].Messages
	if got := second[len(second)-1]; got.Role != "tool" || got.ToolCallID != "call_b" || !strings.Contains(got.Content.(string), "exit status 3") {
		t.Errorf("result for the model: %+v", got)
	}
}

func TestHistoryWithinAndAcrossProcesses(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, says("I will."), calls("call_1", "list_directory", `{}`), says("It is empty."), says("plum"))
	place := newPlace(t)
	if err := profile.Save(place.State, profile.Profile{MemoryFile: "be kind"}); err != nil {
		t.Fatal(err)
	}
	s := startSpool(t, e, place, "", map[string]string{"OPENAI_MODEL": "from-env"})
	s.turn("remember plum", nil)
	lines := s.turn("list", nil)
	id := ""
	for _, l := range lines {
		if l.Type == "transcript_written" {
			w := decode[events.TranscriptWritten](t, l)
			id = w.AgentSessionID
			if info, err := os.Stat(w.Path); err != nil || info.Size() != int64(w.Bytes) {
				t.Errorf("%+v, but %v %v", w, info, err)
			}
		}
	}
	s.close()
	startSpool(t, e, place, id, nil).turn("which word?", nil)
	last := e.seen()[3]
	var roles []string
	for _, m := range last.Messages {
		roles = append(roles, m.Role)
	}
	if got, want := strings.Join(roles, " "), "system user assistant user assistant tool assistant user"; got != want {
		t.Errorf("history %s, want %s", got, want)
	}
	if s := last.Messages[0].Content.(string); !strings.Contains(s, "/mnt/workspace") || !strings.Contains(s, "be kind") {
		t.Errorf("system prompt %q", s)
	}
	if e.seen()[0].Model != "from-env" || len(last.Tools) != 4 {
		t.Errorf("model %s, %d tools", e.seen()[0].Model, len(last.Tools))
	}
	// A missing transcript is reported.
	lost := startSpool(t, e, newPlace(t), "agt-LOST", nil)
	for range 2 {
		lines = lost.turn("which word?", nil)
		if end := decode[runner.TurnEnd](t, lines[len(lines)-1]); end.Code != runner.CodeConversationLost || !strings.Contains(end.Message, "agt-LOST") {
			t.Errorf("ended %+v", end)
		}
	}
	lost.query.ContinueAfterLoss = true
	lines = lost.turn("which word?", nil)
	if !strings.Contains(string(lines[1].Data), "TRANSCRIPT_LOST") {
		t.Errorf("second line %s", lines[1].Data)
	}
}

func TestQueryDecidesModelAndPrompt(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, says("ok"))
	s := startSpool(t, e, newPlace(t), "", map[string]string{"OPENAI_MODEL": "from-env"})
	s.query = runner.Query{Model: "from-query", SystemPrompt: "be brief", Parts: []events.Part{{Type: "text", Text: "what is this?"}, {Type: "image", MediaType: "image/png", Data: "AAAA"}}}
	lines := s.turn("", nil)
	got := e.seen()[0]
	if got.Model != "from-query" || got.Messages[0].Content != "be brief" {
		t.Errorf("model %s, system %v", got.Model, got.Messages[0].Content)
	}
	if parts := fmt.Sprint(got.Messages[1].Content); !strings.Contains(parts, "what is this?") || !strings.Contains(parts, "data:image/png;base64,AAAA") {
		t.Errorf("parts %s", parts)
	}
	if b := completed(t, lines, events.KindAssistantText); len(b) != 1 || b[0].Model != "test-model-1" {
		t.Errorf("text %+v", b)
	}
}

func TestModelErrors_HaveTheirCodes(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		answers  []http.HandlerFunc
		code     string
		says     string
		requests int
	}{
		"rate limited once": {[]http.HandlerFunc{fails(429, "rate", "slow down"), says("ok")}, "", "", 2},
		"overloaded once":   {[]http.HandlerFunc{fails(503, "x", "busy"), says("ok")}, "", "", 2},
		"timeout, conflict": {[]http.HandlerFunc{fails(408, "x", "t"), fails(409, "x", "c"), says("ok")}, "", "", 3},
		"rate limited":      {[]http.HandlerFunc{fails(429, "rate", "slow down")}, "MODEL_RATE_LIMITED", "slow down", 5},
		"server down":       {[]http.HandlerFunc{fails(500, "x", "broken")}, "MODEL_ERROR", "500", 5},
		"bad key":           {[]http.HandlerFunc{fails(401, "invalid_api_key", "who are you")}, "MODEL_UNAUTHORIZED", "who are you", 1},
		"no such model":     {[]http.HandlerFunc{fails(404, "model_not_found", "no gpt-9")}, "MODEL_NOT_FOUND", "no gpt-9", 1},
		"bad request":       {[]http.HandlerFunc{fails(400, "x", "too long")}, "MODEL_ERROR", "too long", 1},
		"ends too early":    {[]http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) { send(w, chunk(`{"content":"a"}`, ""), "[DONE]") }}, "MODEL_ERROR", "before its answer", 1},
		"breaks half-way":   {[]http.HandlerFunc{breaks(chunk(`{"content":"half"}`, ""))}, "MODEL_ERROR", "broke", 5},
		"breaks when whole": {[]http.HandlerFunc{breaks(chunk(`{"content":"all"}`, ""), chunk(`{}`, "stop"))}, "", "", 1},
		"says it is whole":  {[]http.HandlerFunc{stalls(chunk(`{"content":"all"}`, ""), chunk(`{}`, "stop"))}, "", "", 1},
		"fails when whole": {[]http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) {
			send(w, chunk(`{"content":"all"}`, "stop"), `{"error":{"message":"exploded"}}`)
		}}, "MODEL_ERROR", "exploded", 1},
		"withheld": {[]http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) { send(w, chunk(`{}`, "content_filter"), "[DONE]") }}, "MODEL_ERROR", "content_filter", 1},
		"error in a stream": {[]http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) {
			send(w, chunk(`{"content":"a"}`, ""), `{"error":{"message":"exploded"}}`)
		}}, "MODEL_ERROR", "exploded", 1},
		"says nothing":       {[]http.HandlerFunc{stalls()}, "MODEL_ERROR", "nothing for 100ms", 1},
		"says no more":       {[]http.HandlerFunc{stalls(chunk(`{"content":"a"}`, ""))}, "MODEL_ERROR", "nothing for 100ms", 1},
		"is no model at all": {[]http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) { send(w, "<html>") }}, "MODEL_ERROR", "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEndpoint(t, tc.answers...)
			env := map[string]string{}
			if strings.HasPrefix(name, "says") {
				env["SPOOL_AGENT_MODEL_TIMEOUT"] = "100ms"
			}
			end := ended(t, startSpool(t, e, newPlace(t), "", env).turn("x", nil))
			want := runner.OutcomeFailed
			if tc.code == "" {
				want = runner.OutcomeCompleted
			}
			if end.Outcome != want || end.Code != tc.code || !strings.Contains(end.Message, tc.says) {
				t.Errorf("end %+v", end)
			}
			if n := len(e.seen()); n != tc.requests {
				t.Errorf("%d requests, want %d", n, tc.requests)
			}
		})
	}
}

func TestBrokenAnswerStaysInTheHistory(t *testing.T) {
	t.Parallel()
	half := breaks(chunk(`{"content":"The first half"}`, ""), chunk(`{"tool_calls":[{"index":0,"id":"call_1","function":{"name":"write_file","arguments":"{\"path\""}}]}`, ""))
	e := newEndpoint(t, half, half, half, half, half, says("ok"))
	s := startSpool(t, e, newPlace(t), "", nil)
	lines := s.turn("one", nil)
	if b := completed(t, lines, events.KindToolUse); len(b) != 5 || b[4].Status != events.StatusError || b[4].Input != nil {
		t.Errorf("tool calls %+v", b)
	}
	s.turn("two", nil)
	m := e.seen()[5].Messages
	if got := fmt.Sprint(m[2].Content); m[2].Role != "assistant" || !strings.HasPrefix(got, "The first half") || !strings.Contains(got, "cut short") || len(m[2].ToolCalls) != 0 {
		t.Errorf("the broken answer is remembered as %+v", m[2])
	}
}

// An answer whose connection is lost is discarded, and requested again: a restart of the egress proxy does not cost the turn.
func TestBrokenAnswer_IsRequestedAgain(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, breaks(chunk(`{"content":"The first half"}`, "")), says("The whole"), says("ok"))
	s := startSpool(t, e, newPlace(t), "", nil)
	lines := s.turn("one", nil)
	if end := ended(t, lines); end.Outcome != runner.OutcomeCompleted || end.Result != "The whole" {
		t.Errorf("end %+v", end)
	}
	if b := completed(t, lines, events.KindAssistantText); len(b) != 2 || b[0].Status != events.StatusError || b[1].Content != "The whole" || b[1].Status != events.StatusComplete {
		t.Errorf("texts %+v", b)
	}
	s.turn("two", nil)
	if m := e.seen()[2].Messages; len(m) != 4 || fmt.Sprint(m[2].Content) != "The whole" {
		t.Errorf("the model is sent %+v", m)
	}
}

func TestInterruptWhileTheModelSpeaks(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, stalls(chunk(`{"content":"Once upon"}`, "")), says("ok"))
	s := startSpool(t, e, newPlace(t), "", nil)
	lines := s.turn("a story", func(report string) {
		if strings.Contains(report, "Once upon") && strings.Contains(report, `"op":"text"`) {
			if err := s.session.Interrupt(); err != nil {
				t.Error(err)
			}
		}
	})
	if end := ended(t, lines); end.Outcome != runner.OutcomeInterrupted {
		t.Errorf("end %+v", end)
	}
	if b := completed(t, lines, events.KindAssistantText); len(b) != 1 || b[0].Status != events.StatusError || b[0].Content != "Once upon" {
		t.Errorf("text %+v", b)
	}
	if end := ended(t, s.turn("go on", nil)); end.Outcome != runner.OutcomeCompleted {
		t.Errorf("after an interrupt: %+v", end)
	}
	if m := e.seen()[1].Messages; len(m) != 4 || !strings.Contains(fmt.Sprint(m[2].Content), "Once upon") {
		t.Errorf("history %+v", m)
	}
}

func TestInterruptWhileAProgramRuns(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, func(w http.ResponseWriter, _ *http.Request) {
		send(w,
			chunk(`{"tool_calls":[{"index":0,"id":"call_1","function":{"name":"run_code","arguments":"{\"language\":\"bash\",\"code\":\"echo started; sleep 600\"}"}},`+
				`{"index":1,"id":"call_2","function":{"name":"list_directory","arguments":"{}"}}]}`, ""),
			chunk(`{}`, "tool_calls"), "[DONE]")
	}, says("ok"))
	s := startSpool(t, e, newPlace(t), "", nil)
	began := time.Now()
	lines := s.turn("run", func(report string) {
		if strings.Contains(report, `"op":"permission"`) {
			if err := s.session.Interrupt(); err != nil {
				t.Error(err)
			}
		}
	})
	if end := ended(t, lines); end.Outcome != runner.OutcomeInterrupted || time.Since(began) > patience {
		t.Errorf("end %+v after %s", end, time.Since(began))
	}
	s.turn("go on", nil)
	var answered []string
	for _, m := range e.seen()[1].Messages {
		if m.Role == "tool" {
			answered = append(answered, m.ToolCallID)
		}
	}
	if strings.Join(answered, " ") != "call_1 call_2" {
		t.Errorf("calls with a result: %v", answered)
	}
}

func TestTurnLimit_EndsTheTurn(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, calls("call_1", "list_directory", `{}`))
	end := ended(t, startSpool(t, e, newPlace(t), "", map[string]string{"SPOOL_AGENT_MAX_STEPS": "3"}).turn("loop", nil))
	if end.Outcome != runner.OutcomeFailed || end.Code != "TURN_LIMIT" || !strings.Contains(end.Message, "SPOOL_AGENT_MAX_STEPS") || len(e.seen()) != 3 {
		t.Errorf("end %+v after %d requests", end, len(e.seen()))
	}
	if end.Usage.InputTokens != 30 || end.Usage.OutputTokens != 15 || end.Usage.CacheReadTokens != 12 {
		t.Errorf("usage %+v", end.Usage)
	}
}

func TestCallsThatCannotRun_AreReportedToTheModel(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ tool, arguments, says string }{
		"unknown tool":    {"fly", `{}`, "EXECUTION_ERROR: there is no tool"},
		"no JSON":         {"read_file", `{"path":`, "EXECUTION_ERROR: arguments"},
		"unknown field":   {"read_file", `{"file":"x"}`, `EXECUTION_ERROR: arguments: json: unknown field "file"`},
		"outside":         {"write_file", `{"path":"/etc/passwd","content":"x"}`, "PERMISSION_DENIED: /etc/passwd is outside"},
		"missing":         {"read_file", `{"path":"none"}`, "FILE_NOT_FOUND"},
		"the model's key": {"run_code", `{"language":"bash","code":"env | grep -c -e sk-secret"}`, "EXECUTION_ERROR: 0"},
		"too slow":        {"run_code", `{"language":"bash","code":"sleep 600"}`, "TIMEOUT"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEndpoint(t, calls("call_1", tc.tool, tc.arguments), says("I see."))
			lines := startSpool(t, e, newPlace(t), "", map[string]string{"SPOOL_AGENT_CODE_TIMEOUT": "500ms"}).turn("x", nil)
			if end := ended(t, lines); end.Outcome != runner.OutcomeCompleted {
				t.Errorf("end %+v", end)
			}
			b := completed(t, lines, events.KindToolResult)
			if len(b) != 1 || !b[0].IsError || b[0].ToolUseID != "call_1" || !strings.HasPrefix(b[0].Output, tc.says) {
				t.Errorf("result %+v", b)
			}
			if got := fmt.Sprint(e.seen()[1].Messages[3].Content); !strings.HasPrefix(got, tc.says) {
				t.Errorf("the model was told %q", got)
			}
		})
	}
}

// A process that was killed during a turn leaves a transcript with which the session can be resumed.
func TestTranscript_OfACrashCanBeResumed(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, says("ok"))
	place := newPlace(t)
	path, err := builtin.Adapter{}.TranscriptPath(place, "agt-1")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	crashed := `{"role":"user","text":"go"}` + "\n" + `{"role":"assistant","calls":[{"id":"call_9","name":"run_code","arguments":{}}]}` + "\n" + `{"role":"too`
	if err := os.WriteFile(path, []byte(crashed), 0o600); err != nil {
		t.Fatal(err)
	}
	if end := ended(t, startSpool(t, e, place, "agt-1", nil).turn("well?", nil)); end.Outcome != runner.OutcomeCompleted {
		t.Errorf("end %+v", end)
	}
	m := e.seen()[0].Messages
	if len(m) != 5 || m[3].ToolCallID != "call_9" || m[4].Content != "well?" {
		t.Errorf("history %+v", m)
	}
}

func TestProcessRefusesBadSettings(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]string{"SPOOL_AGENT_MAX_STEPS": "many", "SPOOL_AGENT_MODEL_TIMEOUT": "-1s", "SPOOL_AGENT_CODE_TIMEOUT": "soon"} {
		p := builtin.AgentProcess{Workspace: t.TempDir(), State: t.TempDir(), Getenv: func(k string) string {
			if k == name {
				return value
			}
			return ""
		}}
		if err := p.Run(t.Context(), strings.NewReader(""), &strings.Builder{}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s=%s: %v", name, value, err)
		}
	}
}

func TestMissingKey_EndsTheTurn(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, says("ok"))
	end := ended(t, startSpool(t, e, newPlace(t), "", map[string]string{"OPENAI_BASE_URL": "", "OPENAI_API_KEY": ""}).turn("x", nil))
	if end.Code != "MODEL_UNAUTHORIZED" || !strings.Contains(end.Message, "OPENAI_API_KEY") {
		t.Errorf("end %+v", end)
	}
}
