package sandboxes_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// provider records its calls, and fails the first of them.
type provider struct {
	sandbox.Provider
	fails int
	err   error
	calls []string
	token string
}

func (p *provider) call(name string) error {
	p.calls = append(p.calls, name)
	if p.fails > 0 {
		p.fails--
		return p.err
	}
	return nil
}

func (p *provider) Create(_ context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	p.token = spec.EgressToken
	return nil, p.call("create " + spec.ID)
}

func (p *provider) Terminate(_ context.Context, id string, _ bool) error {
	return p.call("terminate " + id)
}

// proxy records its calls in those of the provider.
type proxy struct{ *provider }

func (p proxy) RegisterNew(_ context.Context, spec sandbox.Spec, _ []string, _ *[]string) error {
	if spec.EgressToken == "" {
		return errors.New("no token")
	}
	p.calls = append(p.calls, "register "+spec.ID)
	return nil
}

func (p proxy) Release(_ context.Context, id string) error {
	p.calls = append(p.calls, "release "+id)
	return nil
}

func newManager(p *provider) *sandboxes.Manager {
	return &sandboxes.Manager{
		Provider: p, Egress: proxy{p}, Patience: time.Minute, Logger: slog.New(slog.DiscardHandler),
		Created: func(context.Context, time.Duration, error) {},
	}
}

var unavailable = &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Message: "away"}

// TestManager_Create: the sandbox is registered before it exists, and an unavailable engine is waited for.
func TestManager_Create(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &provider{fails: 2, err: unavailable}
		spec := sandbox.Spec{ID: "sbx"}
		if _, err := newManager(p).Create(t.Context(), &spec, nil, nil); err != nil {
			t.Fatal(err)
		}
		if want := []string{"register sbx", "create sbx", "create sbx", "create sbx"}; !slices.Equal(p.calls, want) {
			t.Errorf("calls %v, want %v", p.calls, want)
		}
		if p.token == "" || p.token != spec.EgressToken {
			t.Errorf("token %q, in the spec %q", p.token, spec.EgressToken)
		}
	})
}

// TestManager_Retry: it ends with the function's success, another error, its patience or the context.
func TestManager_Retry(t *testing.T) {
	t.Parallel()
	other := errors.New("refused")
	for name, c := range map[string]struct {
		fails  int
		err    error
		cancel time.Duration
		want   error
		after  time.Duration
	}{
		"success after a while": {fails: 3, err: unavailable, after: 3 * time.Second},
		"another error":         {fails: 1, err: other, want: other},
		"out of patience":       {fails: 1000, err: unavailable, want: unavailable, after: 61 * time.Second},
		"context ends":          {fails: 1000, err: unavailable, cancel: 1500 * time.Millisecond, want: context.DeadlineExceeded, after: 1500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := t.Context(), func() {}
				if c.cancel > 0 {
					ctx, cancel = context.WithTimeout(ctx, c.cancel)
				}
				defer cancel()
				p := &provider{fails: c.fails, err: c.err}
				began := time.Now()
				err := newManager(p).RetryWhileUnavailable(ctx, "sbx", func() error { return p.call("try") })
				if !errors.Is(err, c.want) || time.Since(began) != c.after {
					t.Errorf("%v after %s, want %v after %s", err, time.Since(began), c.want, c.after)
				}
			})
		})
	}
}

// TestManager_Terminate: the registration ends too, also when the provider fails.
func TestManager_Terminate(t *testing.T) {
	t.Parallel()
	p := &provider{fails: 1, err: unavailable}
	if err := newManager(p).Terminate(t.Context(), "sbx", false); !errors.Is(err, unavailable) {
		t.Errorf("error %v", err)
	}
	if want := []string{"terminate sbx", "release sbx"}; !slices.Equal(p.calls, want) {
		t.Errorf("calls %v, want %v", p.calls, want)
	}
}

// TestFinalCode: errors after which another try is useless have their code.
func TestFinalCode(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err   error
		code  string
		final bool
	}{
		{unavailable, sandbox.CodeEngineUnavailable, false},
		{&sandbox.Error{Code: "SNAPSHOT_TOO_LARGE"}, "SNAPSHOT_TOO_LARGE", true},
		{sandbox.ErrNotFound, "SNAPSHOT_FAILED", true},
		{errors.New("another"), "", false},
	} {
		if code, final := sandboxes.FinalCode(c.err); code != c.code || final != c.final {
			t.Errorf("%v: %q, %v; want %q, %v", c.err, code, final, c.code, c.final)
		}
	}
}
