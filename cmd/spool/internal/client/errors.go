package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"
	"time"
)

// Codes that a caller branches on; docs/errors.md lists them all.
const (
	CodeSessionNotFound = "SESSION_NOT_FOUND"
	CodeCursorAhead     = "CURSOR_AHEAD"
	CodeCursorExpired   = "CURSOR_EXPIRED"
	CodeUnauthenticated = "UNAUTHENTICATED"
)

// Error is an error response of a gateway: a problem+json over HTTP, or an error message over WebSocket.
type Error struct {
	Status         int           `json:"-"` // HTTP status; 0 over WebSocket
	Code           string        `json:"code"`
	Field          string        `json:"field"`
	Detail         string        `json:"detail"`
	Tip            *uint32       `json:"tip"` // seq of the session's last event, if the server cannot serve a cursor
	IdempotencyKey string        `json:"idempotencyKey"`
	RetryAfter     time.Duration `json:"-"` // 0 if the server did not send it
}

func (e *Error) Error() string {
	s := e.Detail
	if e.Field != "" {
		s = e.Field + ": " + s
	}
	if e.Code != "" {
		s += " (" + e.Code + ")"
	}
	if e.Code == CodeUnauthenticated {
		s += "; pass a valid key with --key or SPOOL_API_KEY"
	}
	return s
}

// isTemporary reports whether the same request may succeed later.
func (e *Error) isTemporary() bool {
	if e.Code == "" {
		return slices.Contains([]int{502, 503, 504}, e.Status)
	}
	return slices.Contains([]string{"UNAVAILABLE", "READ_MODEL_BEHIND", "SLOW_CLIENT", "INTERNAL", "QUEUE_FULL", "TOO_MANY_FILES"}, e.Code)
}

// IsCode reports whether err is an *Error with one of the codes.
func IsCode(err error, codes ...string) bool {
	var e *Error
	return errors.As(err, &e) && slices.Contains(codes, e.Code)
}

// UnreachableError is returned when a request gets no response from the gateway.
type UnreachableError struct {
	URL string
	Err error
}

func (e *UnreachableError) Error() string {
	remedy := "start it with `spool up` or pass --url"
	if isCertificateError(e.Err) {
		remedy = "name the file of its authority with --ca-file, or renew its certificate"
	}
	return fmt.Sprintf("cannot reach %s: %s; %s", e.URL, shortCause(e.Err), remedy)
}

// isCertificateError reports whether err means that the client does not trust the server's certificate.
func isCertificateError(err error) bool {
	var untrusted *tls.CertificateVerificationError
	return errors.As(err, &untrusted)
}

// Unwrap returns the cause.
func (e *UnreachableError) Unwrap() error { return e.Err }

// IsDialError reports whether err means that no connection to the gateway could be made, so that no request was sent.
func IsDialError(err error) bool {
	var e *UnreachableError
	var op *net.OpError
	return errors.As(err, &e) && errors.As(e.Err, &op) && op.Op == "dial"
}

// shortCause returns a short text for the cause of an *UnreachableError. It leaves out the address, which the message
// of the error already has.
func shortCause(err error) string {
	var dns *net.DNSError
	var sys syscall.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "no response in time"
	case errors.As(err, &dns):
		return "unknown host " + dns.Name
	case errors.As(err, &sys):
		return sys.Error()
	}
	return err.Error()
}

// IsPermanent reports whether err is an *Error that the gateway would return again for the same request.
func IsPermanent(err error) bool {
	var e *Error
	return errors.As(err, &e) && !e.isTemporary()
}
