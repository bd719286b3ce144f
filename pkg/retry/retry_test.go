package retry_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/retry"
)

func TestDoubling_StopsAtTheLongestPauseAndStartsAgain(t *testing.T) {
	t.Parallel()
	pauses := retry.NewDoubling(20*time.Millisecond, 100*time.Millisecond)
	take := func() (list []time.Duration) {
		for range 5 {
			list = append(list, pauses.NextBackOff())
		}
		return list
	}
	want := []time.Duration{20 * time.Millisecond, 40 * time.Millisecond, 80 * time.Millisecond, 100 * time.Millisecond, 100 * time.Millisecond}
	if got := take(); !slices.Equal(got, want) {
		t.Errorf("pauses %v, want %v", got, want)
	}
	pauses.Reset()
	if got := take(); !slices.Equal(got, want) {
		t.Errorf("pauses after Reset %v, want %v", got, want)
	}
}

func TestPause_BlocksForTheDuration(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if err := retry.Pause(t.Context(), time.Minute); err != nil || time.Since(began) != time.Minute {
			t.Errorf("Pause returned %v after %s", err, time.Since(began))
		}
	})
}

func TestPause_ReturnsTheCauseOfTheContextsEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("shutdown")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(cause) })
		began := time.Now()
		if err := retry.Pause(ctx, time.Minute); !errors.Is(err, cause) || time.Since(began) != time.Second {
			t.Errorf("Pause returned %v after %s", err, time.Since(began))
		}
		if err := retry.Pause(ctx, 0); !errors.Is(err, cause) {
			t.Errorf("Pause with an ended context returned %v", err)
		}
	})
}
