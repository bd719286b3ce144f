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

// apiDialect parses the requests and writes the answers of one API, in the API's wire format.
type apiDialect interface {
	// parseRequest decodes the body of a request.
	parseRequest(body []byte) (*Conversation, error)
	// newStream returns a sink that streams an answer to w.
	newStream(w http.ResponseWriter, h answerHeader) answerSink
	// encodeAnswer returns the body of an answer that is not streamed.
	encodeAnswer(h answerHeader, blocks []contentBlock, e answerEnd) any
	// errorBody returns the body of an error response.
	errorBody(f *apiError) any
}

// answerHandler returns the HTTP handler that answers the model requests of one API.
func (s *Server) answerHandler(d apiDialect) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec := s.records.addRequest(r, s.config.Now())
		outcome := "complete"
		defer func() { rec.setOutcome(outcome) }()
		c, f := s.readRequest(w, r, d, rec)
		if f != nil {
			outcome = s.sendError(w, d, f)
			return
		}
		p, err := s.planAnswer(c)
		if err != nil {
			outcome = s.sendError(w, d, &apiError{status: http.StatusBadRequest, message: "mockllm: " + err.Error()})
			return
		}
		rec.setRule(p.rule)
		p, ok := s.waitLeadingDelays(r.Context(), p)
		switch {
		case !ok:
			outcome = "interrupted"
		case len(p.parts) > 0 && p.parts[0].kind == stepError:
			outcome = s.sendError(w, d, p.parts[0].fault)
		default:
			outcome = s.sendAnswer(w, r, d, c, p)
		}
		if outcome == "broken" {
			// This is the only way to make the client see a cut connection. The HTTP server does not log it.
			panic(http.ErrAbortHandler)
		}
	}
}

// readRequest reads and parses a model request. It returns the conversation in it, or the error to answer with.
func (s *Server) readRequest(w http.ResponseWriter, r *http.Request, d apiDialect, rec *requestRecord) (*Conversation, *apiError) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.config.MaxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, &apiError{status: http.StatusRequestEntityTooLarge, message: fmt.Sprintf("the request is larger than %d bytes", tooLarge.Limit)}
	case err != nil:
		return nil, &apiError{status: http.StatusBadRequest, message: "read the request: " + err.Error()}
	}
	rec.setBody(body)
	c, err := d.parseRequest(body)
	if err == nil {
		rec.setConversation(c)
		err = c.validate()
	}
	if err != nil {
		return nil, &apiError{status: http.StatusBadRequest, message: err.Error()}
	}
	if len(s.script.models) > 0 && !slices.Contains(s.script.models, c.Model) {
		return nil, &apiError{status: http.StatusNotFound, message: "model: " + c.Model}
	}
	return c, nil
}

// waitLeadingDelays waits for the delays at the start of a plan, before the server sends anything, so that an error
// after them can still be the HTTP status. It returns the plan without these delays, and false if the client has closed
// the connection.
func (s *Server) waitLeadingDelays(ctx context.Context, p answerPlan) (answerPlan, bool) {
	for len(p.parts) > 0 && p.parts[0].kind == stepDelay {
		if sleep(ctx, p.parts[0].delay) != nil {
			return p, false
		}
		p.parts = p.parts[1:]
	}
	return p, true
}

// sendAnswer sends the answer that a plan describes and returns the outcome to record: complete, broken, interrupted,
// or "error" with the status.
func (s *Server) sendAnswer(w http.ResponseWriter, r *http.Request, d apiDialect, c *Conversation, p answerPlan) string {
	content := c.contentHash()
	h := answerHeader{id: answerID(content, s.counts.countKey("request\x00"+content)), model: c.Model, created: s.config.Now().Unix(),
		input: estimateTokens(c.inputBytes), usage: c.Usage}
	w.Header().Set("Request-Id", "req_"+h.id)
	w.Header().Set("X-Request-Id", "req_"+h.id)
	var whole bufferedAnswer
	out := answerSink(&whole)
	if c.Stream {
		out = d.newStream(w, h)
	}
	err := sendPlan(r.Context(), p, h.id, out)
	switch {
	case errors.Is(err, errScriptedBreak):
		return "broken"
	case err != nil:
		return "interrupted" // the client is gone
	case c.Stream:
		return p.plannedOutcome()
	case whole.ending.fault != nil:
		return s.sendError(w, d, whole.ending.fault)
	}
	s.writeJSON(w, http.StatusOK, d.encodeAnswer(h, whole.blocks, whole.ending))
	return "complete"
}

// plannedOutcome returns the outcome to record for a plan that was sent to its end: complete, or "error" with the
// status if the plan has an error.
func (p answerPlan) plannedOutcome() string {
	for _, part := range p.parts {
		if part.fault != nil {
			return fmt.Sprintf("error %d", part.fault.status)
		}
	}
	return "complete"
}

// answerID returns the id of an answer, a hash of the request's content and of the number of equal requests before it.
func answerID(content string, before int) string {
	sum := sha256.Sum256([]byte(content + strconv.Itoa(before)))
	return hex.EncodeToString(sum[:12])
}

// blockID returns the id of the content block at an index of an answer.
func blockID(answer string, index int) string {
	sum := sha256.Sum256([]byte(answer + "/" + strconv.Itoa(index)))
	return hex.EncodeToString(sum[:12])
}

// sendError answers a request with an error in the format of the dialect, and returns the outcome to record.
func (s *Server) sendError(w http.ResponseWriter, d apiDialect, f *apiError) string {
	if f.retryAfter > 0 {
		seconds := math.Ceil(f.retryAfter.Seconds())
		w.Header().Set("Retry-After", strconv.Itoa(int(seconds)))
		w.Header().Set("Retry-After-Ms", strconv.FormatInt(f.retryAfter.Milliseconds(), 10))
	}
	s.writeJSON(w, f.status, d.errorBody(f))
	return fmt.Sprintf("error %d", f.status)
}

// writeJSON answers a request with a status and a value that is encoded as JSON.
func (s *Server) writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := marshalUnescaped(v)
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

// handleCountTokens serves Anthropic's endpoint that counts the tokens of a request.
func (s *Server) handleCountTokens(w http.ResponseWriter, r *http.Request) {
	d := anthropicDialect{counting: true}
	rec := s.records.addRequest(r, s.config.Now())
	c, f := s.readRequest(w, r, d, rec)
	if f != nil {
		rec.setOutcome(s.sendError(w, d, f))
		return
	}
	s.writeJSON(w, http.StatusOK, orderedObject{"input_tokens", estimateTokens(c.inputBytes)})
	rec.setOutcome("complete")
}

// defaultModels are the models that the server lists if the script names none. The server then accepts every model.
var defaultModels = []string{"mock-model", "claude-sonnet-4-5", "gpt-5"}

// modelNames returns the models of the script, or defaultModels if the script names none.
func (s *Server) modelNames() []string {
	if len(s.script.models) > 0 {
		return s.script.models
	}
	return defaultModels
}

// newModelObject returns the description of a model in a format that clients of both Anthropic and OpenAI can read.
func newModelObject(id string) orderedObject {
	return orderedObject{"id", id, "type", "model", "object", "model", "display_name", id,
		"created_at", time.Unix(0, 0).UTC().Format(time.RFC3339), "created", 0, "owned_by", "mockllm"}
}

func (s *Server) handleListModels(w http.ResponseWriter, r *http.Request) {
	s.records.addRequest(r, s.config.Now()).setOutcome("complete")
	all := s.modelNames()
	data := make([]orderedObject, len(all))
	for i, id := range all {
		data[i] = newModelObject(id)
	}
	s.writeJSON(w, http.StatusOK, orderedObject{"object", "list", "data", data, "has_more", false, "first_id", all[0], "last_id", all[len(all)-1]})
}

func (s *Server) handleGetModel(w http.ResponseWriter, r *http.Request) {
	rec := s.records.addRequest(r, s.config.Now())
	id := r.PathValue("id")
	if len(s.script.models) > 0 && !slices.Contains(s.script.models, id) {
		rec.setOutcome(s.sendError(w, guessDialect(r), &apiError{status: http.StatusNotFound, message: "model: " + id}))
		return
	}
	s.writeJSON(w, http.StatusOK, newModelObject(id))
	rec.setOutcome("complete")
}

// guessDialect guesses from a request which API its client uses. It is needed for errors on paths that both APIs have.
func guessDialect(r *http.Request) apiDialect {
	if r.Header.Get("anthropic-version") != "" || strings.HasPrefix(r.URL.Path, "/v1/messages") {
		return anthropicDialect{}
	}
	return chatDialect{}
}
