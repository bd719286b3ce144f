package pace_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/events/pace"
)

var recorded = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// play waits as the Pacer demands. It returns the time of each event since the first one, and the total time that was
// skipped.
func play(speed pace.Speed, offsets ...time.Duration) (came []time.Duration, leftOut time.Duration) {
	p := pace.Pacer{Speed: speed}
	begin := time.Now()
	for _, o := range offsets {
		due, gap := p.NextDue(recorded.Add(o), time.Now())
		time.Sleep(time.Until(due))
		came = append(came, time.Since(begin))
		leftOut += gap.LeftOut
	}
	return came, leftOut
}

func TestPacer_WaitsAtTheRecordedPace(t *testing.T) {
	t.Parallel()
	const ms, s = time.Millisecond, time.Second
	for _, c := range []struct {
		name    string
		speed   pace.Speed
		offsets []time.Duration
		want    []time.Duration
		leftOut time.Duration
	}{
		{"as recorded", 1, []time.Duration{0, 20 * ms, 40 * ms, s}, []time.Duration{0, 20 * ms, 40 * ms, s}, 0},
		{"ten times faster", 10, []time.Duration{0, 20 * ms, s}, []time.Duration{0, 2 * ms, 100 * ms}, 0},
		{"slower", 0.5, []time.Duration{0, s}, []time.Duration{0, 2 * s}, 0},
		{"a gap of just the bound", 1, []time.Duration{0, 2 * s}, []time.Duration{0, 2 * s}, 0},
		{"a gap over the bound", 1, []time.Duration{0, 60 * s, 61 * s}, []time.Duration{0, 2 * s, 3 * s}, 58 * s},
		{"the bound is of the replay, not of the record", 10, []time.Duration{0, 20 * s, 60 * s}, []time.Duration{0, 2 * s, 4 * s}, 20 * s},
		{"max does not wait and leaves nothing out", pace.MaxSpeed, []time.Duration{0, time.Hour, 1000 * time.Hour}, []time.Duration{0, 0, 0}, 0},
		{"the slowest speed there is", 5e-324, []time.Duration{0, 1, 1}, []time.Duration{0, 2 * s, 2 * s}, 1},
		{"another clock is a little behind", 1, []time.Duration{0, s, 0, s + 10*ms}, []time.Duration{0, s, s, s + 10*ms}, 0},
		{"a clock that was set back", 1, []time.Duration{0, time.Hour, s, 2 * s}, []time.Duration{0, 2 * s, 2 * s, 3 * s}, time.Hour - 2*s},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				came, leftOut := play(c.speed, c.offsets...)
				for i := range came {
					if came[i] != c.want[i] {
						t.Errorf("event %d came after %v, want %v", i, came[i], c.want[i])
					}
				}
				if leftOut != c.leftOut {
					t.Errorf("skipped %v, want %v", leftOut, c.leftOut)
				}
			})
		})
	}
}

// TestPacer_AfterASlowClient tests that a replay that is a little late catches up, and that a replay whose client
// stalled continues from the present.
func TestPacer_AfterASlowClient(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		stall, want time.Duration
	}{
		{"catches up", 200 * time.Millisecond, time.Second},
		{"goes on from where it is", 10 * time.Second, 11 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p := pace.Pacer{Speed: 1}
				begin := time.Now()
				p.NextDue(recorded, begin)
				time.Sleep(c.stall)
				due, _ := p.NextDue(recorded.Add(time.Second), time.Now())
				if got := due.Sub(begin); got != c.want {
					t.Errorf("the second event is due after %v, want %v", got, c.want)
				}
			})
		})
	}
}

func TestPacer_JumpAndShiftMoveTheSchedule(t *testing.T) {
	t.Parallel()
	p := pace.Pacer{Speed: 1}
	now := recorded.Add(time.Hour)
	p.NextDue(recorded, now)
	p.ContinueFrom(recorded.Add(time.Minute), now)
	due, gap := p.NextDue(recorded.Add(time.Minute+time.Second), now)
	if want := now.Add(time.Second); !due.Equal(want) || gap.LeftOut != 0 {
		t.Errorf("after a jump: due %v, want %v; gap %v", due, want, gap)
	}
	p.Delay(time.Minute)
	due, _ = p.NextDue(recorded.Add(time.Minute+2*time.Second), now)
	if want := now.Add(time.Minute + 2*time.Second); !due.Equal(want) {
		t.Errorf("after a pause: due %v, want %v", due, want)
	}
}

func TestParseSpeed_RoundTripsAndRefuses(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]pace.Speed{"1": 1, "10": 10, "0.25": 0.25, "1e3": 1000, "max": pace.MaxSpeed} {
		got, err := pace.ParseSpeed(text)
		if err != nil || got != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
		if again, err := pace.ParseSpeed(got.String()); err != nil || again != got {
			t.Errorf("%s is written as %s, which is read as %v, %v", text, got, again, err)
		}
	}
	for _, text := range []string{"", "0", "-1", "-0", "NaN", "Inf", "+Inf", "-Inf", "1e400", "fast", "1x", " 1", "MAX"} {
		if got, err := pace.ParseSpeed(text); !errors.Is(err, pace.ErrInvalidSpeed) {
			t.Errorf("%q: %v, %v; want ErrInvalidSpeed", text, got, err)
		}
	}
}
