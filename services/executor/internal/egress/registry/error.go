package registry

import "fmt"

// Codes of an Error.
const (
	CodeInvalid    = "INVALID_REQUEST"
	CodeNotFound   = "SANDBOX_NOT_FOUND"
	CodeFenced     = "FENCED"
	CodeTokenTaken = "TOKEN_TAKEN"
)

// Error is a refusal.
type Error struct {
	Code   string `json:"code"`
	Detail string `json:"detail"`
	Field  string `json:"field,omitempty"`
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }

func invalid(field, format string, args ...any) error {
	return &Error{Code: CodeInvalid, Field: field, Detail: fmt.Sprintf(format, args...)}
}
