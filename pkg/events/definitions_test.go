package events_test

import (
	"math"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

func TestBackoff_DoublesWithEachDeath(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ms, died uint32
		want     time.Duration
	}{
		{0, 1, 0}, {0, 9, 0}, {500, 0, 500 * time.Millisecond}, {500, 1, 500 * time.Millisecond}, {500, 2, time.Second}, {500, 3, 2 * time.Second},
		{200_000, 2, 5 * time.Minute}, {300_000, 1, 5 * time.Minute}, {1, math.MaxUint32, 5 * time.Minute}, {math.MaxUint32, math.MaxUint32, 5 * time.Minute},
	} {
		if got := (events.Retries{BackoffMs: c.ms}).Backoff(c.died); got != c.want {
			t.Errorf("%d ms after %d deaths: %s, want %s", c.ms, c.died, got, c.want)
		}
	}
}
