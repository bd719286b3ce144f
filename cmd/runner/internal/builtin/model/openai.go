package model

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/shared"
)

// The defaults of Config.
const (
	DefaultRetries     = 4
	DefaultIdleTimeout = 2 * time.Minute
)

// cutShortNote is appended to the text of an earlier answer that was cut short, when the conversation is sent to the
// model.
const cutShortNote = "\n[this answer was cut short before it was finished]"

// Config configures a Client of a model API. The zero value stands for OpenAI's API.
type Config struct {
	BaseURL string // with /v1; "" for OpenAI's
	APIKey  string
	Retries int           // of a request whose stream has not begun, after 408, 409, 429, 5xx and lost connections; 0 for DefaultRetries, negative for none
	Idle    time.Duration // maximum time for which the endpoint may be silent; 0 for DefaultIdleTimeout
}

// Client requests answers from an OpenAI-compatible model API by streaming Chat Completions. It is safe for concurrent
// use.
type Client struct {
	api  openai.Client
	cfg  Config
	none *Error // set if the key is missing and the endpoint needs one
}

// NewClient returns a client of a model API. The client retries requests with jittered backoff, or after the endpoint's
// Retry-After. It does not retry a stream that has begun: the caller has its pieces already.
func NewClient(cfg Config) *Client {
	if cfg.Retries == 0 {
		cfg.Retries = DefaultRetries
	}
	cfg.Idle = cmp.Or(cfg.Idle, DefaultIdleTimeout)
	opts := []option.RequestOption{option.WithMaxRetries(max(cfg.Retries, 0))}
	if cfg.BaseURL != "" {
		opts = append(opts, option.WithBaseURL(cfg.BaseURL))
	}
	c := &Client{cfg: cfg}
	switch {
	case cfg.APIKey != "":
		opts = append(opts, option.WithAPIKey(cfg.APIKey))
	case cfg.BaseURL == "":
		c.none = &Error{Code: "MODEL_UNAUTHORIZED", Message: "no key for the model: set OPENAI_API_KEY, or OPENAI_BASE_URL to an endpoint that needs none"}
	default:
		opts = append(opts, option.WithAPIKey("none")) // the client refuses to send without one
	}
	c.api = openai.NewClient(opts...)
	return c
}

// Stream requests an answer of the model, and calls each with every piece as it arrives. If it returns an error, which
// is that of ctx or an *Error, the answer holds what arrived before.
func (c *Client) Stream(ctx context.Context, r Request, each func(Delta)) (Answer, error) {
	if c.none != nil {
		return Answer{}, c.none
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := &Error{Code: "MODEL_ERROR", Message: fmt.Sprintf("the model sent nothing for %s", c.cfg.Idle)}
	idle := time.AfterFunc(c.cfg.Idle, func() { cancel(silent) })
	defer idle.Stop()
	stream := c.api.Chat.Completions.NewStreaming(ctx, requestParams(r), option.WithMiddleware(func(req *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		idle.Reset(c.cfg.Idle) // each attempt gets the full time
		return next(req)
	}))
	defer stream.Close() //nolint:errcheck // Err reports failures
	var a answerAssembly
	for stream.Next() {
		idle.Reset(c.cfg.Idle)
		a.addChunk(stream.Current(), each)
	}
	answer := a.answer()
	err := stream.Err()
	switch {
	case err == nil && !a.finished:
		return answer, &Error{Code: "MODEL_ERROR", Message: "the model's stream ended before its answer was finished"}
	case err == nil && a.filtered:
		return answer, &Error{Code: "MODEL_ERROR", Message: "the model's provider withheld the answer (content_filter)"}
	case err == nil:
		return answer, nil
	case errors.Is(context.Cause(ctx), silent):
		return answer, silent
	case ctx.Err() != nil:
		return answer, ctx.Err()
	}
	return answer, convertError(err, r.Model, a.begun)
}

// answerAssembly assembles an answer of the model from the chunks of a stream.
type answerAssembly struct {
	text     strings.Builder
	calls    []*Call
	args     []*strings.Builder
	usage    Usage
	model    string
	begun    bool
	finished bool
	cut      bool
	filtered bool
}

// addChunk adds a chunk of the stream to the answer, and calls each with its pieces of text, thinking and tool calls.
func (a *answerAssembly) addChunk(c openai.ChatCompletionChunk, each func(Delta)) {
	a.begun = true
	a.model = cmp.Or(c.Model, a.model)
	if u := c.Usage; u.PromptTokens > 0 || u.CompletionTokens > 0 {
		a.usage = Usage{Input: uint32(u.PromptTokens), Output: uint32(u.CompletionTokens), CacheRead: uint32(u.PromptTokensDetails.CachedTokens)} //nolint:gosec // tokens
	}
	for _, choice := range c.Choices {
		if choice.Index != 0 {
			continue
		}
		if t := thinkingText(choice.Delta); t != "" {
			each(Delta{Thinking: t})
		}
		if t := choice.Delta.Content + choice.Delta.Refusal; t != "" {
			a.text.WriteString(t)
			each(Delta{Text: t})
		}
		for _, tc := range choice.Delta.ToolCalls {
			a.addCallPiece(tc, each)
		}
		switch choice.FinishReason {
		case "":
		case "length":
			a.finished, a.cut = true, true
		case "content_filter":
			a.finished, a.filtered = true, true
		default:
			a.finished = true
		}
	}
}

// addCallPiece adds a piece of a tool call to the answer. Some endpoints leave out the index or the id, and some repeat
// the name with every piece.
func (a *answerAssembly) addCallPiece(tc openai.ChatCompletionChunkChoiceDeltaToolCall, each func(Delta)) {
	i := int(tc.Index)
	if i < 0 || i > len(a.calls) {
		i = len(a.calls)
	}
	d := CallDelta{Index: i, Arguments: tc.Function.Arguments}
	if i == len(a.calls) {
		d.ID, d.Name = cmp.Or(tc.ID, fmt.Sprintf("call_%d", i+1)), tc.Function.Name
		a.calls = append(a.calls, &Call{ID: d.ID, Name: d.Name})
		a.args = append(a.args, &strings.Builder{})
	}
	a.args[i].WriteString(tc.Function.Arguments)
	each(Delta{Call: &d})
}

// answer returns the answer as received so far. Arguments of a call that are not JSON are kept as a JSON string, so
// that the loop can report them to the model.
func (a *answerAssembly) answer() Answer {
	m := Message{Role: RoleAssistant, Text: a.text.String(), Partial: !a.finished}
	for i, c := range a.calls {
		raw := json.RawMessage(cmp.Or(strings.TrimSpace(a.args[i].String()), "{}"))
		if !json.Valid(raw) {
			if !a.finished {
				continue // the call is incomplete
			}
			raw, _ = json.Marshal(string(raw)) //nolint:errchkjson // a string
		}
		c.Arguments = raw
		m.Calls = append(m.Calls, *c)
	}
	return Answer{Message: m, Usage: a.usage, Model: a.model, Cut: a.cut}
}

// thinkingText returns the model's thinking in a chunk, which compatible endpoints send in a field that is not in the
// standard.
func thinkingText(d openai.ChatCompletionChunkChoiceDelta) string {
	for _, name := range []string{"reasoning_content", "reasoning"} {
		var s string
		if f, ok := d.JSON.ExtraFields[name]; ok && json.Unmarshal([]byte(f.Raw()), &s) == nil && s != "" {
			return s
		}
	}
	return ""
}

// requestParams converts a Request to the format of the OpenAI API.
func requestParams(r Request) openai.ChatCompletionNewParams {
	p := openai.ChatCompletionNewParams{
		Model:         r.Model,
		StreamOptions: openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)},
	}
	if r.System != "" {
		p.Messages = append(p.Messages, openai.SystemMessage(r.System))
	}
	for _, m := range r.Messages {
		p.Messages = append(p.Messages, messageParam(m))
	}
	for _, t := range r.Tools {
		var schema map[string]any
		if err := json.Unmarshal(t.Schema, &schema); err != nil {
			panic(fmt.Sprintf("schema of tool %s: %v", t.Name, err)) // the schemas are constants, and a test checks them
		}
		p.Tools = append(p.Tools, openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
			Name: t.Name, Description: openai.String(t.Description), Parameters: schema,
		}))
	}
	return p
}

// messageParam converts a Message to the format of the OpenAI API.
func messageParam(m Message) openai.ChatCompletionMessageParamUnion {
	switch m.Role {
	case RoleTool:
		return openai.ToolMessage(m.Text, m.CallID)
	case RoleAssistant:
		var a openai.ChatCompletionAssistantMessageParam
		if m.Partial {
			m.Text += cutShortNote
		}
		if m.Text != "" {
			a.Content.OfString = openai.String(m.Text)
		}
		for _, c := range m.Calls {
			a.ToolCalls = append(a.ToolCalls, openai.ChatCompletionMessageToolCallUnionParam{OfFunction: &openai.ChatCompletionMessageFunctionToolCallParam{
				ID: c.ID, Function: openai.ChatCompletionMessageFunctionToolCallFunctionParam{Name: c.Name, Arguments: string(c.Arguments)},
			}})
		}
		return openai.ChatCompletionMessageParamUnion{OfAssistant: &a}
	}
	if len(m.Images) == 0 {
		return openai.UserMessage(m.Text)
	}
	var parts []openai.ChatCompletionContentPartUnionParam
	if m.Text != "" {
		parts = append(parts, openai.TextContentPart(m.Text))
	}
	for _, u := range m.Images {
		parts = append(parts, openai.ImageContentPart(openai.ChatCompletionContentPartImageImageURLParam{URL: string(u)}))
	}
	return openai.UserMessage(parts)
}

// isConnectionLoss reports whether an error means that a connection ended, and not that the endpoint sent an error.
func isConnectionLoss(err error) bool {
	var lost *net.OpError
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &lost)
}

// convertError converts an error of the API client to an Error. begun reports whether a part of the answer has arrived.
func convertError(err error, model string, begun bool) *Error {
	var api *openai.Error
	if !errors.As(err, &api) {
		if begun {
			return &Error{Code: "MODEL_ERROR", Message: "the model's stream broke: " + err.Error(), Err: err, Lost: isConnectionLoss(err)}
		}
		return &Error{Code: "MODEL_ERROR", Message: "the model's endpoint cannot be reached: " + err.Error(), Err: err}
	}
	said := strings.TrimSpace(api.Message)
	if said != "" {
		said = ": " + said
	}
	e := &Error{Code: "MODEL_ERROR", Err: err}
	switch {
	case api.StatusCode == http.StatusUnauthorized || api.StatusCode == http.StatusForbidden:
		e.Code, e.Message = "MODEL_UNAUTHORIZED", fmt.Sprintf("the model's endpoint refused the key (%d)%s", api.StatusCode, said)
	case api.StatusCode == http.StatusNotFound || api.Code == "model_not_found":
		e.Code, e.Message = "MODEL_NOT_FOUND", fmt.Sprintf("the endpoint does not know the model %q%s", model, said)
	case api.StatusCode == http.StatusTooManyRequests:
		e.Code, e.Message = "MODEL_RATE_LIMITED", fmt.Sprintf("the model's endpoint is rate limited, also after retries%s", said)
	default:
		e.Message = fmt.Sprintf("the model's endpoint answered %d%s", api.StatusCode, said)
	}
	return e
}
