package guest

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// TranslateError converts an error of a provider's API to the form that sandbox.Provider requires, and returns nil for nil. If ctx, the
// caller's context, has ended, it returns an error that wraps the cause. Otherwise it returns err itself if that is a *sandbox.Error, or
// else the *sandbox.Error that classify returns, or else err with what, the failed operation, in front. classify returns nil for an error
// without a code.
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

// WithCode returns a *sandbox.Error with a code for a sandbox that could not be created: its text is message followed by err, which may be
// nil. If err is already a *sandbox.Error or the end of a context, WithCode returns err unchanged.
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

// ExitCode converts a process's exit code to that of sandbox.Process.Wait: -1 for a code from 129 to 192, which stands for a signal, and
// the code itself otherwise.
func ExitCode(code int) int {
	if code > signalBase && code <= signalBase+maxSignal {
		return -1
	}
	return code
}
