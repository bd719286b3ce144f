package guest

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// TranslateError returns an error of a provider's API in the form that sandbox.Provider requires. It returns, in this order: nil for nil;
// an error that wraps the cause when ctx, the caller's context, has ended; err itself when it is a *sandbox.Error; the
// *sandbox.Error that classify returns; err with what, the operation that failed, before it. classify returns nil for an error that has no code.
func TranslateError(ctx context.Context, what string, err error, classify func(error) *sandbox.Error) error {
	var typed *sandbox.Error
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.As(err, &typed):
		return err
	}
	if typed = classify(err); typed != nil {
		return typed
	}
	return fmt.Errorf("%s: %w", what, err)
}

// WithCode returns the error of a sandbox that was not created: a *sandbox.Error with code, and err after message. An err that is a
// *sandbox.Error already, or the end of a context, is returned as it is. err may be nil.
func WithCode(code, message string, err error) error {
	var typed *sandbox.Error
	if errors.As(err, &typed) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if err != nil {
		message += ": " + err.Error()
	}
	return &sandbox.Error{Code: code, Message: message, Err: err}
}

// IsUnavailable reports whether err has sandbox.CodeEngineUnavailable.
func IsUnavailable(err error) bool {
	var typed *sandbox.Error
	return errors.As(err, &typed) && typed.Code == sandbox.CodeEngineUnavailable
}

const (
	// signalBase is added to the number of the signal that ended a process.
	signalBase = 128
	maxSignal  = 64
)

// ExitCode returns a process's exit code as sandbox.Process.Wait returns it: -1 for a code from 129 to 192, which stands for a signal.
func ExitCode(code int) int {
	if code > signalBase && code <= signalBase+maxSignal {
		return -1
	}
	return code
}
