package meter

import (
	"cmp"
	"encoding/json"
	"math"
	"mime"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Dialect is the format in which a model provider's API reports usage.
type Dialect string

// The dialects.
const (
	None      Dialect = ""
	Messages  Dialect = "messages"  // Anthropic's Messages
	Chat      Dialect = "chat"      // OpenAI's Chat Completions, Completions and Embeddings
	Responses Dialect = "responses" // OpenAI's Responses
)

// DialectOf returns the dialect of the answer to a request with the given path, or None if the request is not a model
// call.
func DialectOf(path string) Dialect {
	switch {
	case strings.HasSuffix(path, "/messages"):
		return Messages
	case strings.HasSuffix(path, "/completions"), strings.HasSuffix(path, "/embeddings"):
		return Chat
	case strings.HasSuffix(path, "/responses"), strings.HasSuffix(path, "/responses/compact"):
		return Responses
	}
	return None
}

// Limits of a Result's texts, in bytes.
const (
	maxModelBytes = 200
	maxErrorBytes = 500
)

// Response is an io.Writer that reads the usage, the model and the error from the body of a model provider's answer.
// Write never fails. It is not safe for concurrent use.
type Response struct {
	doc    *fieldScanner
	events *sse // nil for a plain document

	usage  usage
	model  string
	failed string
	seen   bool
}

// usage is the usage that was read so far, in any dialect.
type usage struct {
	events.Usage
	cacheWrite1h uint32 // the part of CacheWriteTokens that is cached for an hour
}

// NewResponse returns a Response for a body with a content type.
func NewResponse(contentType string) *Response {
	r := &Response{doc: newFields("model", "usage", "error", "message:text", "code:text", "type:text",
		"message.model", "message.usage", "response.model", "response.usage", "response.error")}
	if kind, _, err := mime.ParseMediaType(contentType); err == nil && kind == "text/event-stream" {
		r.events = &sse{doc: r.doc, done: r.take}
	}
	return r
}

func (r *Response) Write(p []byte) (int, error) {
	if r.events != nil {
		return r.events.Write(p)
	}
	return r.doc.Write(p)
}

// Result is the usage, model and error that the answer to a model request reports.
type Result struct {
	Model string // as the answer names it
	Usage events.Usage
	Hour  uint32 // the part of Usage.CacheWriteTokens that is cached for an hour
	Seen  bool   // the answer reports usage
	Error string // of the answer, "" if it has none
}

// Result returns what was read. The caller must not write after it.
func (r *Response) Result() Result {
	if r.events == nil {
		r.take()
	} else {
		r.events.endEvent() // a stream may end without its last blank line
	}
	return Result{Model: truncate.ValidText(r.model, maxModelBytes), Usage: r.usage.Usage, Hour: r.usage.cacheWrite1h, Seen: r.seen, Error: truncate.ValidText(r.failed, maxErrorBytes)}
}

// take updates the result from the fields of a document, or of one event of a stream.
func (r *Response) take() {
	d := r.doc
	r.model = cmp.Or(d.string("message.model"), d.string("response.model"), d.string("model"), r.model)
	for _, at := range []string{"usage", "message.usage", "response.usage"} {
		if raw, ok := d.found[at]; ok {
			r.count(raw)
		}
	}
	for _, at := range []string{"error", "response.error"} {
		if raw, ok := d.found[at]; ok {
			r.fail(raw)
		}
	}
	if r.events != nil && d.string("type") == "error" && d.found["error"] == nil { // in the Responses dialect the event itself has the error's fields
		r.failed = joinError(d.string("code"), d.string("message"))
	}
}

// wireUsage is the JSON form of usage in all dialects. A field that is absent or null does not change the former value.
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

	PromptDetail *wireDetail `json:"prompt_tokens_details"`
	InputDetail  *wireDetail `json:"input_tokens_details"`
}

type wireDetail struct {
	Cached  *float64 `json:"cached_tokens"`
	Written *float64 `json:"cache_write_tokens"`
}

// count updates the result from a usage object. Usage objects are totals, so each replaces the values of earlier ones.
// OpenAI's input tokens include cached tokens, Anthropic's do not; InputTokens never includes them.
func (r *Response) count(raw json.RawMessage) {
	var w wireUsage
	if json.Unmarshal(raw, &w) != nil {
		return
	}
	if string(raw) != "null" {
		r.seen = true
	}
	u := &r.usage
	set(&u.InputTokens, w.Input)
	set(&u.OutputTokens, w.Output)
	set(&u.CacheReadTokens, w.CacheRead)
	set(&u.CacheWriteTokens, w.CacheWrite)
	if w.CacheDetail != nil {
		set(&u.cacheWrite1h, w.CacheDetail.Hour)
	}
	set(&u.InputTokens, w.Prompt)
	set(&u.OutputTokens, w.Completion)
	for _, d := range []*wireDetail{w.PromptDetail, w.InputDetail} {
		if d == nil || w.Prompt == nil && w.Input == nil {
			continue
		}
		set(&u.CacheReadTokens, d.Cached)
		set(&u.CacheWriteTokens, d.Written)
		cached := uint64(u.CacheReadTokens) + uint64(u.CacheWriteTokens)
		u.InputTokens -= uint32(min(cached, uint64(u.InputTokens))) //nolint:gosec // at most InputTokens
	}
}

func set(to *uint32, v *float64) {
	if v != nil && *v >= 0 && *v <= math.MaxUint32 {
		*to = uint32(*v)
	}
}

// fail sets the error of the result, from a JSON object with type or code, and message, or from a string.
func (r *Response) fail(raw json.RawMessage) {
	var e struct {
		Type    string `json:"type"`
		Code    any    `json:"code"`
		Message string `json:"message"`
	}
	if json.Unmarshal(raw, &e) == nil {
		code, _ := e.Code.(string)
		if text := joinError(cmp.Or(e.Type, code), e.Message); text != "" {
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
