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

// Error is what a gateway refuses, from problem+json or from a WebSocket's error message.
type Error struct {
	Status         int           `json:"-"` // of HTTP; 0 on a WebSocket
	Code           string        `json:"code"`
	Field          string        `json:"field"`
	Detail         string        `json:"detail"`
	Tip            *uint32       `json:"tip"` // of the session, where a cursor cannot be served
	IdempotencyKey string        `json:"idempotencyKey"`
	RetryAfter     time.Duration `json:"-"`
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

// temporary tells whether the same request may succeed later.
func (e *Error) temporary() bool {
	if e.Code == "" {
		return slices.Contains([]int{502, 503, 504}, e.Status)
	}
	return slices.Contains([]string{"UNAVAILABLE", "READ_MODEL_BEHIND", "SLOW_CLIENT", "INTERNAL", "QUEUE_FULL", "TOO_MANY_FILES"}, e.Code)
}

// IsCode tells whether err is a gateway's refusal with one of the codes.
func IsCode(err error, codes ...string) bool {
	var e *Error
	return errors.As(err, &e) && slices.Contains(codes, e.Code)
}

// UnreachableError is a gateway that does not answer.
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

// isUntrusted reports whether err is a certificate that was refused.
func isUntrusted(err error) bool {
	var untrusted *tls.CertificateVerificationError
	return errors.As(err, &untrusted)
}

// Unwrap returns the cause.
func (e *UnreachableError) Unwrap() error { return e.Err }

// IsRefused tells whether err is a gateway that could not be connected to, so that nothing was sent.
func IsRefused(err error) bool {
	var e *UnreachableError
	var op *net.OpError
	return errors.As(err, &e) && errors.As(e.Err, &op) && op.Op == "dial"
}

// reason is the cause in few words: the address stands beside it already.
func reason(err error) string {
	var dns *net.DNSError
	var sys syscall.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "it did not answer in time"
	case errors.As(err, &dns):
		return "there is no host " + dns.Name
	case errors.As(err, &sys):
		return sys.Error()
	}
	return err.Error()
}

// IsFinal reports whether err is a gateway's refusal that the same request meets again.
func IsFinal(err error) bool {
	var e *Error
	return errors.As(err, &e) && !e.temporary()
}
