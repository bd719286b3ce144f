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

// Error is an error that a gateway returned: a problem+json over HTTP, or an error message over WebSocket.
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

// temporary reports whether the same request may succeed later.
func (e *Error) temporary() bool {
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

// UnreachableError is returned if a gateway does not respond.
type UnreachableError struct {
	URL string
	Err error
}

func (e *UnreachableError) Error() string {
	remedy := "start it with `spool up` or pass --url"
	if isUntrusted(e.Err) {
		remedy = "name the file of its authority with --ca-file, or renew its certificate"
	}
	return fmt.Sprintf("cannot reach %s: %s; %s", e.URL, reason(e.Err), remedy)
}

// isUntrusted reports whether err means that the server's certificate is not trusted.
func isUntrusted(err error) bool {
	var untrusted *tls.CertificateVerificationError
	return errors.As(err, &untrusted)
}

// Unwrap returns the cause.
func (e *UnreachableError) Unwrap() error { return e.Err }

// IsRefused reports whether err means that no connection could be made, so that nothing was sent.
func IsRefused(err error) bool {
	var e *UnreachableError
	var op *net.OpError
	return errors.As(err, &e) && errors.As(e.Err, &op) && op.Op == "dial"
}

// reason returns a short form of the cause of an *UnreachableError, whose message already has the address.
func reason(err error) string {
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

// IsFinal reports whether err is an *Error that the same request would receive again.
func IsFinal(err error) bool {
	var e *Error
	return errors.As(err, &e) && !e.temporary()
}
