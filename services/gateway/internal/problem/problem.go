// Package problem defines the errors of a gateway: one table of codes, and one error type that is encoded as
// problem+json over HTTP, as a message on a WebSocket, and as a status over gRPC. docs/errors.md is generated from
// the table.
package problem

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// ErrorDomain is the domain of the ErrorInfo in gRPC statuses.
const ErrorDomain = "spool"

// defaultRetryAfter is the Retry-After of errors that a retry may resolve.
const defaultRetryAfter = 2 * time.Second

// Error is the reason why a request was refused or failed, with a code of docs/errors.md.
type Error struct {
	Code           Code
	Field          string        // the invalid field, by its name in the request; "" for none
	Detail         string        // one sentence for the user
	RetryAfter     time.Duration // 0 for none
	Tip            *uint32       // seq of the session's last event, if a cursor is not valid
	IdempotencyKey string        // makes a retry safe, if the outcome is unknown
	cause          error
}

// New returns an error with a code. An empty field and the Retry-After are set to the defaults of the code.
func New(code Code, field, detail string) *Error {
	e := &Error{Code: code, Field: field, Detail: detail}
	if entry := entriesByCode[code]; e.Field == "" {
		e.Field = entry.Field
	}
	switch code {
	case Unavailable, ReadModelBehind, QueueFull, TooManyFiles, TooManyStreams, TooMuchInFlight, Overloaded, StorageFull:
		e.RetryAfter = defaultRetryAfter
	}
	return e
}

// StorageIsFull returns the error for a request that stores data while only the reserve of the NATS store is left.
func StorageIsFull() *Error {
	return New(StorageFull, "", "only the reserve of the NATS store is left: delete sessions, or ask the operator to raise the limit, and try again")
}

// Invalid returns the error for a request with an invalid field.
func Invalid(field, format string, args ...any) *Error {
	return New(InvalidRequest, field, fmt.Sprintf(format, args...))
}

// NoSuchSession returns the error for a session that does not exist, was deleted, or belongs to another tenant. Clients cannot
// distinguish these cases.
func NoSuchSession() *Error { return New(SessionNotFound, "", "there is no such session") }

// WithCause sets the cause, which is logged and not sent to the client, and returns the error.
func (e *Error) WithCause(err error) *Error {
	e.cause = err
	return e
}

func (e *Error) Error() string {
	s := string(e.Code)
	if e.Field != "" {
		s += " (" + e.Field + ")"
	}
	s += ": " + e.Detail
	if e.cause != nil {
		s += ": " + e.cause.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.cause }

// Is reports whether target is an *Error with the same code.
func (e *Error) Is(target error) bool {
	var t *Error
	return errors.As(target, &t) && t.Code == e.Code
}

// From converts any error to an *Error. Unknown errors become INTERNAL; their text is not sent to the client.
func From(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return New(Unavailable, "", "the request was ended before it was answered").WithCause(err)
	}
	if s, ok := status.FromError(err); ok && s.Code() == codes.InvalidArgument {
		return New(InvalidRequest, "", s.Message())
	}
	return New(Internal, "", "an error occurred in the server; its log has the details").WithCause(err)
}

// Status returns the HTTP status.
func (e *Error) Status() int {
	if s := entriesByCode[e.Code].Status; s != 0 {
		return s
	}
	return http.StatusInternalServerError
}

// problemBody is the JSON form of an Error, with the content type application/problem+json (RFC 9457).
type problemBody struct {
	Type           string  `json:"type"`
	Title          string  `json:"title"`
	Status         int     `json:"status"`
	Detail         string  `json:"detail"`
	Code           Code    `json:"code"`
	Field          string  `json:"field,omitempty"`
	Tip            *uint32 `json:"tip,omitempty"`
	IdempotencyKey string  `json:"idempotencyKey,omitempty"`
}

// JSON returns the problem+json body.
func (e *Error) JSON() []byte {
	b, err := json.Marshal(problemBody{
		Type: "urn:spool:error:" + string(e.Code), Title: entriesByCode[e.Code].Title, Status: e.Status(),
		Detail: e.Detail, Code: e.Code, Field: e.Field, Tip: e.Tip, IdempotencyKey: e.IdempotencyKey,
	})
	if err != nil { // strings and numbers always encode
		panic(err)
	}
	return b
}

// Write writes the error as problem+json, as the response to an HTTP request.
func (e *Error) Write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("X-Content-Type-Options", "nosniff") // the detail may repeat a part of the request
	h.Set("Cache-Control", "no-store")
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	if e.Code == Unauthenticated {
		h.Set("WWW-Authenticate", `Bearer realm="spool"`)
	}
	w.WriteHeader(e.Status())
	_, _ = w.Write(append(e.JSON(), '\n')) // the client may be gone, so the error is ignored
}

// GRPCStatus returns the gRPC status. Its ErrorInfo has the code as reason and the field, tip and key as metadata.
func (e *Error) GRPCStatus() *status.Status {
	info := &errdetails.ErrorInfo{Reason: string(e.Code), Domain: ErrorDomain, Metadata: map[string]string{}}
	if e.Field != "" {
		info.Metadata["field"] = e.Field
	}
	if e.Tip != nil {
		info.Metadata["tip"] = strconv.FormatUint(uint64(*e.Tip), 10)
	}
	if e.IdempotencyKey != "" {
		info.Metadata["idempotencyKey"] = e.IdempotencyKey
	}
	s := status.New(entriesByCode[e.Code].GRPC, e.Detail)
	with, err := s.WithDetails(info)
	if err == nil && e.RetryAfter > 0 {
		with, err = with.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryAfter)})
	}
	if err != nil {
		return s
	}
	return with
}
