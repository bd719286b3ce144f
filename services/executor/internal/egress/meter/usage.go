package meter

import (
	"cmp"
	"encoding/json"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Dialect is the format in which a model provider's API reports usage.
type Dialect string

// The dialects.
const (
	DialectNone      Dialect = ""
	DialectMessages  Dialect = "messages"  // Anthropic's Messages
	DialectChat      Dialect = "chat"      // OpenAI's Chat Completions, Completions and Embeddings
	DialectResponses Dialect = "responses" // OpenAI's Responses
)

// DialectOf returns the dialect of the answer to a request with the given path, or DialectNone if the request is not a
// model call.
func DialectOf(path string) Dialect {
	switch {
	case strings.HasSuffix(path, "/messages"):
		return DialectMessages
	case strings.HasSuffix(path, "/completions"), strings.HasSuffix(path, "/embeddings"):
		return DialectChat
	case strings.HasSuffix(path, "/responses"), strings.HasSuffix(path, "/responses/compact"):
		return DialectResponses
	}
	return DialectNone
}

// Limits of a Result's texts, in bytes.
const (
	maxModelNameBytes = 200
	maxErrorBytes     = 500
)

// ResponseMeter is an io.Writer that reads the usage, the model and the error from the body of a model provider's answer, a JSON document or a
// stream of server-sent events. Write never fails. It is not safe for concurrent use.
type ResponseMeter struct {
	doc    *fieldScanner
	events *sseParser // nil for a document, and before the first byte
	begun  bool

	usage  usage
	model  string
	failed string
	seen   bool
}

// usage is the token usage that was read so far from an answer, in any dialect.
type usage struct {
	events.Usage
	cacheWrite1h uint32 // the part of CacheWriteTokens that is cached for an hour
}

// NewResponseMeter returns a ResponseMeter for an answer's body.
func NewResponseMeter() *ResponseMeter {
	return &ResponseMeter{doc: newFieldScanner("model", "usage", "error", "code", "message:text", "object:text", "type:text",
		"message.model", "message.usage", "response.model", "response.usage", "response.error")}
}

// Write parses the next part of the body. The first byte decides what the body is, because some servers send a stream as another media type, or an
// error as a document in place of a stream.
func (r *ResponseMeter) Write(p []byte) (int, error) {
	n := len(p)
	if !r.begun {
		for len(p) > 0 && strings.IndexByte(ignoredPrefix, p[0]) >= 0 {
			p = p[1:]
		}
		if len(p) == 0 {
			return n, nil
		}
		r.begun = true
		if p[0] != '{' && p[0] != '[' {
			r.events = &sseParser{doc: r.doc, done: r.updateResult}
		}
	}
	var to io.Writer = r.doc
	if r.events != nil {
		to = r.events
	}
	to.Write(p) //nolint:errcheck // neither fails
	return n, nil
}

// ignoredPrefix holds the bytes that may precede an answer: white space, and those of a byte order mark.
const ignoredPrefix = " \t\r\n\xef\xbb\xbf"

// Result is the usage, model and error that the answer to a model request reports.
type Result struct {
	Model string // as the answer names it
	Usage events.Usage
	Hour  uint32 // the part of Usage.CacheWriteTokens that is cached for an hour
	Seen  bool   // the answer reports usage
	Error string // of the answer, "" if it has none
}

// Result returns what was read from the answer. The caller must not write to the ResponseMeter afterwards.
func (r *ResponseMeter) Result() Result {
	if r.events == nil {
		r.updateResult()
	} else {
		r.events.endEvent() // a stream may end without its last blank line
	}
	return Result{Model: truncate.ValidText(r.model, maxModelNameBytes), Usage: r.usage.Usage, Hour: r.usage.cacheWrite1h, Seen: r.seen, Error: truncate.ValidText(r.failed, maxErrorBytes)}
}

// updateResult updates the result with the captured fields of a document, or of one event of a stream.
func (r *ResponseMeter) updateResult() {
	d := r.doc
	r.model = cmp.Or(d.stringOf("message.model"), d.stringOf("response.model"), d.stringOf("model"), r.model)
	for _, at := range []string{"usage", "message.usage", "response.usage"} {
		if raw, ok := d.found[at]; ok {
			r.countUsage(raw)
		}
	}
	for _, at := range []string{"error", "response.error"} {
		if raw, ok := d.found[at]; ok {
			r.setError(raw)
		}
	}
	kind, text := "", ""
	if r.events != nil {
		kind, text = r.events.kind, string(r.events.text)
	}
	isError := kind == "error" || d.stringOf("type") == "error" || d.stringOf("object") == "error"
	if isError && d.found["error"] == nil { // the document, or the event, itself has the error's fields
		r.failed = cmp.Or(joinError(codeText(d.found["code"]), d.stringOf("message")), strings.TrimSpace(text), r.failed)
	}
}

// codeText returns the code of an error, which is a string or a number in JSON.
func codeText(raw json.RawMessage) string {
	var code any
	if json.Unmarshal(raw, &code) != nil {
		return ""
	}
	switch code := code.(type) {
	case string:
		return code
	case float64:
		return strconv.FormatFloat(code, 'f', -1, 64)
	}
	return ""
}

// wireUsage is the JSON object with the token usage, with the fields of all dialects. A field that is absent or null does
// not change the earlier value.
type wireUsage struct {
	Input       *float64 `json:"input_tokens"`
	Output      *float64 `json:"output_tokens"`
	CacheRead   *float64 `json:"cache_read_input_tokens"`
	CacheWrite  *float64 `json:"cache_creation_input_tokens"`
	CacheDetail *struct {
		Hour *float64 `json:"ephemeral_1h_input_tokens"`
	} `json:"cache_creation"`

	Prompt     *float64 `json:"prompt_tokens"`
	Completion *float64 `json:"completion_tokens"`

	PromptDetail *wireTokenDetails `json:"prompt_tokens_details"`
	InputDetail  *wireTokenDetails `json:"input_tokens_details"`
}

type wireTokenDetails struct {
	Cached  *float64 `json:"cached_tokens"`
	Written *float64 `json:"cache_write_tokens"`
}

// countUsage updates the result from a JSON usage object. The numbers in such objects are totals, so they replace those of
// earlier objects. OpenAI's input tokens include cached tokens, Anthropic's do not; InputTokens never includes them.
func (r *ResponseMeter) countUsage(raw json.RawMessage) {
	var w wireUsage
	if json.Unmarshal(raw, &w) != nil {
		return
	}
	if string(raw) != "null" {
		r.seen = true
	}
	u := &r.usage
	setIfPresent(&u.InputTokens, w.Input)
	setIfPresent(&u.OutputTokens, w.Output)
	setIfPresent(&u.CacheReadTokens, w.CacheRead)
	setIfPresent(&u.CacheWriteTokens, w.CacheWrite)
	if w.CacheDetail != nil {
		setIfPresent(&u.cacheWrite1h, w.CacheDetail.Hour)
	}
	setIfPresent(&u.InputTokens, w.Prompt)
	setIfPresent(&u.OutputTokens, w.Completion)
	for _, d := range []*wireTokenDetails{w.PromptDetail, w.InputDetail} {
		if d == nil || w.Prompt == nil && w.Input == nil {
			continue
		}
		setIfPresent(&u.CacheReadTokens, d.Cached)
		setIfPresent(&u.CacheWriteTokens, d.Written)
		cached := uint64(u.CacheReadTokens) + uint64(u.CacheWriteTokens)
		u.InputTokens -= uint32(min(cached, uint64(u.InputTokens))) //nolint:gosec // at most InputTokens
	}
}

// setIfPresent sets *to to *v if v is not nil and fits into a uint32.
func setIfPresent(to *uint32, v *float64) {
	if v != nil && *v >= 0 && *v <= math.MaxUint32 {
		*to = uint32(*v)
	}
}

// setError sets the error of the result from JSON: an object with a type or code and a message, or a string.
func (r *ResponseMeter) setError(raw json.RawMessage) {
	var e struct {
		Type    string          `json:"type"`
		Code    json.RawMessage `json:"code"`
		Message string          `json:"message"`
	}
	if json.Unmarshal(raw, &e) == nil {
		if text := joinError(cmp.Or(e.Type, codeText(e.Code)), e.Message); text != "" {
			r.failed = text
		}
		return
	}
	var s string
	if json.Unmarshal(raw, &s) == nil && s != "" {
		r.failed = s
	}
}

// joinError returns kind and message, or the one that is not "".
func joinError(kind, message string) string {
	if kind == "" || message == "" {
		return cmp.Or(message, kind)
	}
	return kind + ": " + message
}
