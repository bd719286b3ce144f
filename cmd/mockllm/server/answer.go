package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// dialect parses the requests and writes the answers of one API, in the API's wire format.
type dialect interface {
	// parse decodes a request.
	parse(body []byte) (*Conversation, error)
	// stream returns a sink that streams an answer to w.
	stream(w http.ResponseWriter, h answerHeader) sink
	// whole returns the body of an answer that is not streamed.
	whole(h answerHeader, blocks []block, e ending) any
	// fault returns the body of an error.
	fault(f *fault) any
}

// answer returns the handler of a dialect's requests for answers.
func (s *Server) answer(d dialect) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec := s.records.begin(r, s.config.Now())
		outcome := "complete"
		defer func() { rec.end(outcome) }()
		c, f := s.read(w, r, d, rec)
		if f != nil {
			outcome = s.fail(w, d, f)
			return
		}
		p, err := s.plan(c)
		if err != nil {
			outcome = s.fail(w, d, &fault{status: http.StatusBadRequest, message: "mockllm: " + err.Error()})
			return
		}
		rec.setRule(p.rule)
		p, ok := s.playLeadingDelays(r.Context(), p)
		switch {
		case !ok:
			outcome = "interrupted"
		case len(p.parts) > 0 && p.parts[0].kind == stepError:
			outcome = s.fail(w, d, p.parts[0].fault)
		default:
			outcome = s.send(w, r, d, c, p)
		}
		if outcome == "broken" {
			// This is the only way to make the client see a cut connection. The HTTP server does not log it.
			panic(http.ErrAbortHandler)
		}
	}
}

// read parses the request, or returns the error to answer with.
func (s *Server) read(w http.ResponseWriter, r *http.Request, d dialect, rec *record) (*Conversation, *fault) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.config.MaxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, &fault{status: http.StatusRequestEntityTooLarge, message: fmt.Sprintf("the request is larger than %d bytes", tooLarge.Limit)}
	case err != nil:
		return nil, &fault{status: http.StatusBadRequest, message: "read the request: " + err.Error()}
	}
	rec.setBody(body)
	c, err := d.parse(body)
	if err == nil {
		rec.setConversation(c)
		err = c.check()
	}
	if err != nil {
		return nil, &fault{status: http.StatusBadRequest, message: err.Error()}
	}
	if len(s.script.models) > 0 && !slices.Contains(s.script.models, c.Model) {
		return nil, &fault{status: http.StatusNotFound, message: "model: " + c.Model}
	}
	return c, nil
}

// playLeadingDelays waits for the delays before the first output, so that an error after them still has its HTTP status. It returns the
// plan without them, and false if the client is gone.
func (s *Server) playLeadingDelays(ctx context.Context, p plan) (plan, bool) {
	for len(p.parts) > 0 && p.parts[0].kind == stepDelay {
		if wait(ctx, p.parts[0].delay) != nil {
			return p, false
		}
		p.parts = p.parts[1:]
	}
	return p, true
}

// send sends the answer of a plan and returns its outcome: complete, broken, interrupted, or an error with its status.
func (s *Server) send(w http.ResponseWriter, r *http.Request, d dialect, c *Conversation, p plan) string {
	content := c.digest()
	h := answerHeader{id: answerID(content, s.counts.countUse("request\x00"+content)), model: c.Model, created: s.config.Now().Unix(),
		input: tokens(c.inputBytes), usage: c.Usage}
	w.Header().Set("Request-Id", "req_"+h.id)
	w.Header().Set("X-Request-Id", "req_"+h.id)
	var whole wholeAnswer
	out := sink(&whole)
	if c.Stream {
		out = d.stream(w, h)
	}
	err := play(r.Context(), p, h.id, out)
	switch {
	case errors.Is(err, errBroken):
		return "broken"
	case err != nil:
		return "interrupted" // the client is gone
	case c.Stream:
		return p.outcome()
	case whole.ending.fault != nil:
		return s.fail(w, d, whole.ending.fault)
	}
	s.write(w, http.StatusOK, d.whole(h, whole.blocks, whole.ending))
	return "complete"
}

// outcome returns the outcome of a plan that was sent completely.
func (p plan) outcome() string {
	for _, part := range p.parts {
		if part.fault != nil {
			return fmt.Sprintf("error %d", part.fault.status)
		}
	}
	return "complete"
}

// answerID returns an id that depends only on the content of the request and on how often it came before.
func answerID(content string, before int) string {
	sum := sha256.Sum256([]byte(content + strconv.Itoa(before)))
	return hex.EncodeToString(sum[:12])
}

// blockID returns the id of a block of an answer.
func blockID(answer string, index int) string {
	sum := sha256.Sum256([]byte(answer + "/" + strconv.Itoa(index)))
	return hex.EncodeToString(sum[:12])
}

// fail answers with an error in the dialect's format, and returns the outcome.
func (s *Server) fail(w http.ResponseWriter, d dialect, f *fault) string {
	if f.retryAfter > 0 {
		seconds := math.Ceil(f.retryAfter.Seconds())
		w.Header().Set("Retry-After", strconv.Itoa(int(seconds)))
		w.Header().Set("Retry-After-Ms", strconv.FormatInt(f.retryAfter.Milliseconds(), 10))
	}
	s.write(w, f.status, d.fault(f))
	return fmt.Sprintf("error %d", f.status)
}

func (s *Server) write(w http.ResponseWriter, status int, v any) {
	body, err := marshal(v)
	if err != nil {
		s.log.Error("mockllm: encode answer", "error", err)
		status, body = http.StatusInternalServerError, []byte(`{"error":{"message":"mockllm: encode answer"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		s.log.Debug("mockllm: the client left", "error", err)
	}
}

// countTokens answers a request of Anthropic's that counts tokens.
func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) {
	d := anthropic{counting: true}
	rec := s.records.begin(r, s.config.Now())
	c, f := s.read(w, r, d, rec)
	if f != nil {
		rec.end(s.fail(w, d, f))
		return
	}
	s.write(w, http.StatusOK, object{"input_tokens", tokens(c.inputBytes)})
	rec.end("complete")
}

// defaultModels are listed if the script names none; then any model is accepted.
var defaultModels = []string{"mock-model", "claude-sonnet-4-5", "gpt-5"}

func (s *Server) modelNames() []string {
	if len(s.script.models) > 0 {
		return s.script.models
	}
	return defaultModels
}

// modelObject returns a model in a format that both vendors' clients read.
func modelObject(id string) object {
	return object{"id", id, "type", "model", "object", "model", "display_name", id,
		"created_at", time.Unix(0, 0).UTC().Format(time.RFC3339), "created", 0, "owned_by", "mockllm"}
}

func (s *Server) listModels(w http.ResponseWriter, r *http.Request) {
	s.records.begin(r, s.config.Now()).end("complete")
	all := s.modelNames()
	data := make([]object, len(all))
	for i, id := range all {
		data[i] = modelObject(id)
	}
	s.write(w, http.StatusOK, object{"object", "list", "data", data, "has_more", false, "first_id", all[0], "last_id", all[len(all)-1]})
}

func (s *Server) getModel(w http.ResponseWriter, r *http.Request) {
	rec := s.records.begin(r, s.config.Now())
	id := r.PathValue("id")
	if len(s.script.models) > 0 && !slices.Contains(s.script.models, id) {
		rec.end(s.fail(w, dialectOf(r), &fault{status: http.StatusNotFound, message: "model: " + id}))
		return
	}
	s.write(w, http.StatusOK, modelObject(id))
	rec.end("complete")
}

// dialectOf guesses from a request which API its client speaks, for errors on a path that both vendors use.
func dialectOf(r *http.Request) dialect {
	if r.Header.Get("anthropic-version") != "" || strings.HasPrefix(r.URL.Path, "/v1/messages") {
		return anthropic{}
	}
	return chat{}
}
