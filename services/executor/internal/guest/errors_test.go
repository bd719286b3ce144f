package guest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

func TestTranslate_ReturnsTheFirstMeaningThatHolds(t *testing.T) {
	t.Parallel()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	plain, away, full := errors.New("plain"), errors.New("away"), &sandbox.Error{Code: sandbox.CodeDiskFull, Message: "full"}
	classify := func(err error) *sandbox.Error {
		if errors.Is(err, away) {
			return &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Message: "no answer", Err: err}
		}
		return nil
	}
	for name, c := range map[string]struct {
		ctx   context.Context //nolint:containedctx // of a case
		err   error
		is    error
		says  string
		typed bool
	}{
		"no error":                         {t.Context(), nil, nil, "", false},
		"no error after the end of ctx":    {ended, nil, nil, "", false},
		"an error after the end of ctx":    {ended, away, context.Canceled, "look: context canceled", false},
		"an error that has a code":         {t.Context(), full, full, "full", true},
		"an error that classify knows":     {t.Context(), away, away, "no answer", true},
		"an error that classify knows not": {t.Context(), plain, plain, "look: plain", false},
		"a code after the end of ctx":      {ended, full, context.Canceled, "look: context canceled", false},
	} {
		got := guest.TranslateError(c.ctx, "look", c.err, classify)
		var typed *sandbox.Error
		if !errors.Is(got, c.is) || got != nil && got.Error() != c.says || errors.As(got, &typed) != c.typed {
			t.Errorf("%s: %v, want %q", name, got, c.says)
		}
		if guest.IsUnavailable(got) != (c.typed && errors.Is(c.err, away)) {
			t.Errorf("%s: IsUnavailable(%v) is %t", name, got, guest.IsUnavailable(got))
		}
	}
}

func TestWithCode_KeepsACodeAndTheEndOfAContext(t *testing.T) {
	t.Parallel()
	full := &sandbox.Error{Code: sandbox.CodeDiskFull, Message: "full"}
	for _, err := range []error{full, context.Canceled, context.DeadlineExceeded} {
		if got := guest.WithCode(sandbox.CodeSandboxFailed, "create", err); !errors.Is(got, err) || got.Error() != err.Error() {
			t.Errorf("%v became %v", err, got)
		}
	}
	for _, err := range []error{nil, errors.New("plain")} {
		var typed *sandbox.Error
		got := guest.WithCode(sandbox.CodeSandboxFailed, "create", err)
		if !errors.As(got, &typed) || typed.Code != sandbox.CodeSandboxFailed || err != nil && got.Error() != "create: plain" {
			t.Errorf("%v became %v", err, got)
		}
	}
}

func TestExitCode_IsMinusOneForSignals(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]int{0: 0, 1: 1, 128: 128, 129: -1, 137: -1, 192: -1, 193: 193, 255: 255} {
		if got := guest.ExitCode(code); got != want {
			t.Errorf("ExitCode(%d) is %d, want %d", code, got, want)
		}
	}
}
