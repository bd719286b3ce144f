package server_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

const openaiScript = `
stream: {piece: 5}
rules:
  - match: {user: limited}
    times: 1
    steps: [{error: {status: 429, message: slow down, retry_after: 10ms}}]
  - match: {user: fault}
    steps: [{text: It begins}, {error: {status: 503, message: gone}}]
  - match: {user: patch it}
    steps: [{tool: {name: apply_patch, input: "*** Begin {{user}}"}}, {text: "patched: {{result}}"}]
  - match: {user: weather}
    steps:
      - thinking: Which city?
      - text: Let me look.
      - tools:
          - {name: get_weather, input: {city: Bern}}
          - {name: get_weather, input: {city: Zürich}}
      - text: "{{range results}}{{.}};{{end}}"
  - steps: [{text: "You said: {{user}}"}]
`

func client(url string) openai.Client {
	return openai.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey("test"))
}

func chatParams(text string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:         "m",
		Messages:      []openai.ChatCompletionMessageParamUnion{openai.SystemMessage("be brief"), openai.UserMessage(text)},
		StreamOptions: openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)},
	}
}

// chatOnce asks with the real client, streaming or not.
func chatOnce(t *testing.T, c openai.Client, p openai.ChatCompletionNewParams, stream bool) (openai.ChatCompletion, error) {
	t.Helper()
	if !stream {
		p.StreamOptions = openai.ChatCompletionStreamOptionsParam{}
		res, err := c.Chat.Completions.New(t.Context(), p)
		if err != nil {
			return openai.ChatCompletion{}, err
		}
		return *res, nil
	}
	s := c.Chat.Completions.NewStreaming(t.Context(), p)
	defer func() { _ = s.Close() }()
	var all openai.ChatCompletionAccumulator
	for s.Next() {
		if !all.AddChunk(s.Current()) {
			t.Fatalf("the client refuses chunk %s", s.Current().RawJSON())
		}
	}
	return all.ChatCompletion, s.Err()
}

func TestChatWithTheRealClient(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{false, true} {
		t.Run(map[bool]string{false: "whole", true: "streaming"}[stream], func(t *testing.T) {
			t.Parallel()
			_, url := start(t, openaiScript)
			c := client(url)
			p := chatParams("what is the weather?")
			res, err := chatOnce(t, c, p, stream)
			if err != nil {
				t.Fatal(err)
			}
			first := res.Choices[0]
			if first.Message.Content != "Let me look." || first.FinishReason != "tool_calls" || len(first.Message.ToolCalls) != 2 {
				t.Fatalf("first answer: %+v", first)
			}
			if first.Message.ToolCalls[1].Function.Arguments != `{"city":"Zürich"}` || first.Message.ToolCalls[0].ID == first.Message.ToolCalls[1].ID {
				t.Errorf("calls: %+v", first.Message.ToolCalls)
			}
			if res.Usage.PromptTokens != 7 || res.Usage.CompletionTokens != 20 || res.Usage.TotalTokens != 27 {
				t.Errorf("usage: %+v", res.Usage)
			}
			p.Messages = append(p.Messages, first.Message.ToParam())
			for i, call := range first.Message.ToolCalls {
				p.Messages = append(p.Messages, openai.ToolMessage([]string{"rain", "sun"}[i], call.ID))
			}
			if res, err = chatOnce(t, c, p, stream); err != nil {
				t.Fatal(err)
			}
			if last := res.Choices[0]; last.Message.Content != "rain;sun;" || last.FinishReason != "stop" {
				t.Errorf("last answer: %+v", last)
			}
		})
	}
}

func TestChatErrors_AreReadByTheRealClient(t *testing.T) {
	t.Parallel()
	s, url := start(t, openaiScript)
	c := client(url)
	res, err := chatOnce(t, c, chatParams("limited"), true)
	if err != nil || res.Choices[0].Message.Content != "You said: limited" || len(s.Requests()) != 2 {
		t.Errorf("the client's own retry: %v %+v after %d requests", err, res.Choices, len(s.Requests()))
	}
	if _, err := chatOnce(t, c, chatParams("fault"), true); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("an error in the middle of a stream: %v", err)
	}
	_, err = c.Chat.Completions.New(t.Context(), chatParams("fault"), option.WithMaxRetries(0))
	var api *openai.Error
	if !errors.As(err, &api) || api.StatusCode != 503 || api.Message != "gone" || api.Type != "server_error" {
		t.Errorf("an error without a stream: %v", err)
	}
}

func TestModelsWithTheRealClient(t *testing.T) {
	t.Parallel()
	_, url := start(t, "models: [one, org/two]\nrules: [{steps: [{text: x}]}]")
	c := client(url)
	page, err := c.Models.List(t.Context())
	if err != nil || len(page.Data) != 2 || page.Data[1].ID != "org/two" {
		t.Fatalf("list: %v %+v", err, page)
	}
	if m, err := c.Models.Get(t.Context(), "org/two"); err != nil || m.ID != "org/two" {
		t.Errorf("get: %v %+v", err, m)
	}
	var api *openai.Error
	if _, err := c.Models.Get(t.Context(), "three"); !errors.As(err, &api) || api.StatusCode != 404 {
		t.Errorf("get an unknown one: %v", err)
	}
}

// respond asks with the real client, streaming or not, and returns the last response.
func respond(t *testing.T, c openai.Client, p responses.ResponseNewParams, stream bool) responses.Response {
	t.Helper()
	if !stream {
		res, err := c.Responses.New(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		return *res
	}
	s := c.Responses.NewStreaming(t.Context(), p)
	defer func() { _ = s.Close() }()
	var text strings.Builder
	var last responses.Response
	for number := int64(0); s.Next(); number++ {
		e := s.Current()
		if e.SequenceNumber != number {
			t.Errorf("event %s has number %d, want %d", e.Type, e.SequenceNumber, number)
		}
		switch e := e.AsAny().(type) {
		case responses.ResponseTextDeltaEvent:
			text.WriteString(e.Delta)
		case responses.ResponseCompletedEvent:
			last = e.Response
		case responses.ResponseFailedEvent:
			last = e.Response
		}
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	if got := last.OutputText(); last.Status == responses.ResponseStatusCompleted && got != text.String() {
		t.Errorf("the deltas say %q, the response %q", text.String(), got)
	}
	return last
}

func TestResponsesWithTheRealClient(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{false, true} {
		t.Run(map[bool]string{false: "whole", true: "streaming"}[stream], func(t *testing.T) {
			t.Parallel()
			_, url := start(t, openaiScript)
			c := client(url)
			input := []responses.ResponseInputItemUnionParam{
				responses.ResponseInputItemParamOfMessage("be brief", responses.EasyInputMessageRoleDeveloper),
				responses.ResponseInputItemParamOfMessage("what is the weather?", responses.EasyInputMessageRoleUser),
			}
			p := responses.ResponseNewParams{Model: "m", Input: responses.ResponseNewParamsInputUnion{OfInputItemList: input}}
			res := respond(t, c, p, stream)
			if res.Status != responses.ResponseStatusCompleted || res.OutputText() != "Let me look." || len(res.Output) != 4 {
				t.Fatalf("first response: %s", res.RawJSON())
			}
			if reasoning := res.Output[0].AsReasoning(); reasoning.Summary[0].Text != "Which city?" {
				t.Errorf("reasoning: %+v", reasoning)
			}
			for i, output := range []string{"rain", "sun"} {
				call := res.Output[2+i].AsFunctionCall()
				var args struct{ City string }
				if err := json.Unmarshal([]byte(call.Arguments), &args); err != nil || call.Name != "get_weather" || args.City == "" {
					t.Errorf("call: %v %+v", err, call)
				}
				result := responses.ResponseInputItemParamOfFunctionCallOutput(output)
				result.OfFunctionCallOutput.CallID = openai.String(call.CallID)
				input = append(input, responses.ResponseInputItemParamOfFunctionCall(call.Arguments, call.CallID, call.Name), result)
			}
			p.Input.OfInputItemList = input
			if res = respond(t, c, p, stream); res.OutputText() != "rain;sun;" || res.Usage.TotalTokens != res.Usage.InputTokens+res.Usage.OutputTokens {
				t.Errorf("last response: %s", res.RawJSON())
			}
		})
	}
}

func TestResponsesFreeTextToolAndFailure(t *testing.T) {
	t.Parallel()
	_, url := start(t, openaiScript)
	c := client(url)
	p := responses.ResponseNewParams{Model: "m", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("patch it")}}
	var api *openai.Error
	if _, err := c.Responses.New(t.Context(), p); !errors.As(err, &api) || !strings.Contains(api.Message, "offers no tool") {
		t.Errorf("without the tool: %v", err)
	}
	p.Tools = []responses.ToolUnionParam{{OfCustom: &responses.CustomToolParam{Name: "apply_patch"}}}
	for _, stream := range []bool{false, true} {
		if call := respond(t, c, p, stream).Output[0].AsCustomToolCall(); call.Name != "apply_patch" || call.Input != "*** Begin patch it" {
			t.Errorf("stream %v: %+v", stream, call)
		}
	}
	p = responses.ResponseNewParams{Model: "m", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("fault")}}
	if res := respond(t, c, p, true); res.Status != responses.ResponseStatusFailed || res.Error.Message != "gone" {
		t.Errorf("failure: %s", res.RawJSON())
	}
}
