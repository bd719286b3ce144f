package meter

import (
	"cmp"
	"encoding/json"
	"math"
	"mime"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/events"
)

// Dialect is the way an endpoint tells of usage.
type Dialect string

// The dialects.
const (
	None      Dialect = ""
	Messages  Dialect = "messages"  // Anthropic's Messages
	Chat      Dialect = "chat"      // OpenAI's Chat Completions, Completions and Embeddings
	Responses Dialect = "responses" // OpenAI's Responses
)

// DialectOf gives the dialect of a request by the end of its path; None for
// what is not a call of a model.
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

// Bounds of what is told of an answer.
const (
	maxModel = 200
	maxError = 500
)

// Response reads usage, model and error off an answer's body as it passes. It is
// an io.Writer that never fails. Not safe for concurrent use.
type Response struct {
	doc    *fields
	events *sse // nil for a plain document

	usage  usage
	model  string
	failed string
	seen   bool
}

// usage is the sum of what all dialects tell.
type usage struct {
	events.Usage
	cacheWrite1h uint32 // of CacheWriteTokens, those kept for an hour
}

// NewResponse makes one for a body of a content type.
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

// Result is what an answer told.
type Result struct {
	Model string // as the answer names it
	Usage events.Usage
	Hour  uint32 // of Usage.CacheWriteTokens, those that are kept for an hour
	Seen  bool   // the answer told its usage
	Error string // the answer's own, "" if it is none
}

// Result gives what was seen so far; after it nothing is written any more.
func (r *Response) Result() Result {
	if r.events == nil {
		r.take()
	} else {
		r.events.endEvent() // a stream may break off, or end without its last blank line
	}
	return Result{Model: clip(r.model, maxModel), Usage: r.usage.Usage, Hour: r.usage.cacheWrite1h, Seen: r.seen, Error: clip(r.failed, maxError)}
}

// take reads the fields of one document, or of one event of a stream.
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
	if r.events != nil && d.string("type") == "error" && d.found["error"] == nil { // the Responses dialect has the error's fields in the event
		r.failed = say(d.string("code"), d.string("message"))
	}
}

// wireUsage has the fields of all dialects; what is absent or null keeps what was told before.
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

// count takes a usage object. Each replaces what an earlier one said, since all
// of them are totals. OpenAI's input contains what came from the cache, and
// Anthropic's does not; here it never does.
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

// fail takes an error: an object with type or code, and message, or a text.
func (r *Response) fail(raw json.RawMessage) {
	var e struct {
		Type    string `json:"type"`
		Code    any    `json:"code"`
		Message string `json:"message"`
	}
	if json.Unmarshal(raw, &e) == nil {
		code, _ := e.Code.(string)
		if text := say(cmp.Or(e.Type, code), e.Message); text != "" {
			r.failed = text
		}
		return
	}
	var s string
	if json.Unmarshal(raw, &s) == nil && s != "" {
		r.failed = s
	}
}

func say(kind, message string) string {
	if kind == "" || message == "" {
		return cmp.Or(message, kind)
	}
	return kind + ": " + message
}

// clip cuts a text to so many bytes, between characters.
func clip(s string, most int) string {
	if len(s) <= most {
		return strings.ToValidUTF8(s, "�")
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return strings.ToValidUTF8(s[:most], "�") + "…"
}
