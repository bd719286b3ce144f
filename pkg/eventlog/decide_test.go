package eventlog_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
)

func TestRetryOnConflict_RepeatsOnlyAfterConflicts(t *testing.T) {
	t.Parallel()
	conflict, other := fmt.Errorf("append: %w", &eventlog.ConflictError{}), errors.New("other")
	for name, c := range map[string]struct {
		errs []error
		want error
	}{
		"at once":          {[]error{nil}, nil},
		"after conflicts":  {[]error{conflict, conflict, nil}, nil},
		"another error":    {[]error{conflict, other, nil}, other},
		"unavailable log":  {[]error{eventlog.ErrUnavailable, nil}, eventlog.ErrUnavailable},
		"missing position": {[]error{eventlog.ErrNotFound}, eventlog.ErrNotFound},
	} {
		n := 0
		err := eventlog.RetryOnConflict(func() error { n++; return c.errs[n-1] })
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	n := 0
	err := eventlog.RetryOnConflict(func() error { n++; return conflict })
	var again *eventlog.ConflictError
	if n != eventlog.MaxConflictAttempts || err == nil || errors.As(err, &again) {
		t.Errorf("%d attempts, then %v", n, err)
	}
}
