package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// failure is an error that an endpoint reports, by its HTTP status or within a stream.
type failure struct {
	status  int    // HTTP status, 0 if it is not known
	code    string // the endpoint's name of the error
	message string
}

func (f *failure) Error() string { return strings.TrimSpace(f.code + " " + f.message) }

// wireFailure is an error in JSON. Endpoints nest it in a field error, or send its fields alone.
type wireFailure struct {
	Error   json.RawMessage `json:"error"` // an object or a string
	Object  string          `json:"object"`
	Type    string          `json:"type"`
	Code    any             `json:"code"` // a string or a number
	Status  any             `json:"status"`
	Message string          `json:"message"`
	Detail  string          `json:"detail"`
	Choices json.RawMessage `json:"choices"`
}

// statusOfCode maps the names that endpoints use for errors to the HTTP status of the error.
var statusOfCode = map[string]int{
	"rate_limit_exceeded": http.StatusTooManyRequests, "rate_limit_error": http.StatusTooManyRequests, "rate_limited": http.StatusTooManyRequests,
	"too_many_requests": http.StatusTooManyRequests, "insufficient_quota": http.StatusTooManyRequests, "resource_exhausted": http.StatusTooManyRequests,
	"overloaded": http.StatusServiceUnavailable, "overloaded_error": http.StatusServiceUnavailable, "service_unavailable": http.StatusServiceUnavailable, "unavailable": http.StatusServiceUnavailable,
	"server_error": http.StatusInternalServerError, "internal_server_error": http.StatusInternalServerError, "internal_error": http.StatusInternalServerError, "api_error": http.StatusInternalServerError,
	"timeout": http.StatusRequestTimeout, "timeout_error": http.StatusRequestTimeout,
	"invalid_api_key": http.StatusUnauthorized, "authentication_error": http.StatusUnauthorized, "unauthorized": http.StatusUnauthorized, "permission_error": http.StatusForbidden,
	"model_not_found": http.StatusNotFound, "not_found_error": http.StatusNotFound,
	"invalid_request_error": http.StatusBadRequest, "context_length_exceeded": http.StatusBadRequest,
}

// reportedFailure returns the error that an event of a stream reports, or nil. kind is the event's field event.
func reportedFailure(kind string, data []byte) *failure {
	var w wireFailure
	err := json.Unmarshal(data, &w)
	var mismatch *json.UnmarshalTypeError
	if err != nil && !errors.As(err, &mismatch) {
		if kind == "error" {
			return &failure{message: strings.ToValidUTF8(string(data), "\uFFFD")}
		}
		return nil
	}
	has := len(w.Error) > 0 && string(w.Error) != "null"
	bare := len(w.Choices) == 0 && w.Message != "" && (w.Object == "error" || w.Type == "error" || w.Code != nil)
	if !has && !bare && kind != "error" {
		return nil
	}
	return parseFailure(data, 0)
}

// parseFailure parses the body of an error. status is the HTTP status of the answer, or 0 if the error itself has to name it.
func parseFailure(data []byte, status int) *failure {
	var outer, w wireFailure
	_ = json.Unmarshal(data, &outer) //nolint:errcheck // a field of another type counts as absent
	w = outer
	if bytes.HasPrefix(outer.Error, []byte("{")) {
		w = wireFailure{}
		_ = json.Unmarshal(outer.Error, &w) //nolint:errcheck // likewise
	}
	f := &failure{status: status, message: w.Message}
	for _, text := range []string{stringOf(outer.Error), outer.Message, w.Detail} {
		if f.message == "" {
			f.message = text
		}
	}
	if f.message == "" && !bytes.HasPrefix(bytes.TrimSpace(data), []byte("<")) {
		f.message = strings.ToValidUTF8(string(data[:min(len(data), 500)]), "")
	}
	for _, v := range []any{w.Code, w.Status, w.Type, outer.Code, outer.Type} {
		name, number := codeOf(v)
		if f.code == "" {
			f.code = name
		}
		if f.status == 0 {
			f.status = number
		}
	}
	return f
}

// codeOf returns the name of an error and its HTTP status, 0 if the status is not known. v is a string or a number.
func codeOf(v any) (name string, status int) {
	switch v := v.(type) {
	case string:
		name = v
		status = statusOfCode[strings.ToLower(v)]
		if n, err := strconv.Atoi(v); err == nil {
			status = n
		}
	case float64:
		name, status = strconv.FormatFloat(v, 'f', -1, 64), int(max(min(v, 1000), 0))
	}
	if status < 400 || status > 599 {
		status = 0
	}
	return name, status
}

// contextExceededHelp follows the endpoint's own words in the message of MODEL_CONTEXT_EXCEEDED.
const contextExceededHelp = "the conversation is longer than the model's context window: fork the session before its large messages, or choose a model with a larger window"

// modelError converts the failure to an Error. model is the model that was requested.
func (f *failure) modelError(model string) *Error {
	said := strings.TrimSpace(f.message)
	if said != "" {
		said = ": " + said
	}
	e := &Error{Code: agent.ModelErrorCode(f.status, f.code+" "+f.message), Err: f}
	if f.code == "model_not_found" {
		e.Code = "MODEL_NOT_FOUND" // also of a bad request
	}
	switch {
	case e.Code == agent.CodeContextExceeded:
		e.Message = contextExceededHelp + said
	case e.Code == "MODEL_UNAUTHORIZED":
		e.Message = fmt.Sprintf("the model's endpoint refused the key (%d)%s", f.status, said)
	case e.Code == "MODEL_NOT_FOUND":
		e.Message = fmt.Sprintf("the endpoint does not know the model %q%s", model, said)
	case e.Code == "MODEL_RATE_LIMITED":
		e.Message = "the model's endpoint is rate limited" + said
	case f.status == 0:
		e.Message = "the model's endpoint reported an error" + said
	default:
		e.Message = fmt.Sprintf("the model's endpoint answered %d%s", f.status, said)
	}
	return e
}
