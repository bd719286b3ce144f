// Package pace computes when the events of a recorded session are due in a replay: at their recorded distances
// divided by a speed, with idle gaps shortened. It is pure: the time of the replay is an argument.
package pace

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/truncate"
)

// MaxGap is the maximum wait between two events of a replay, at any speed. A longer wait is shortened to it.
const MaxGap = 2 * time.Second

// maxCatchUp is the maximum delay that a replay makes up for by sending events faster. A replay with a greater delay,
// because its client reads slowly, continues without making up for it.
const maxCatchUp = 250 * time.Millisecond

// Speed is the factor by which a replay is faster than the recording.
type Speed float64

// MaxSpeed is the speed of a replay that never waits between events.
const MaxSpeed Speed = math.MaxFloat64

// ErrInvalidSpeed is returned by ParseSpeed for an invalid speed.
var ErrInvalidSpeed = errors.New("must be a positive number, or max")

// ParseSpeed parses a positive number or "max". Its error wraps ErrInvalidSpeed.
func ParseSpeed(s string) (Speed, error) {
	if s == "max" {
		return MaxSpeed, nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f > 0) || math.IsInf(f, 0) { //nolint:staticcheck // NaN is not positive either
		return 0, fmt.Errorf("%w, not %s", ErrInvalidSpeed, truncate.Quote(s, 40))
	}
	return Speed(f), nil
}

// String returns the speed in the form of ParseSpeed.
func (s Speed) String() string {
	if s == MaxSpeed {
		return "max"
	}
	return strconv.FormatFloat(float64(s), 'g', -1, 64)
}

// Gap is the time between two events of a replay, and the part of it that the replay skips.
type Gap struct {
	Original time.Duration // as recorded
	LeftOut  time.Duration // the skipped part of Original; 0 if the gap was not shortened
}

// Pacer computes when each event of one replay is due. Only Speed must be set. A Pacer is not safe for concurrent
// use.
type Pacer struct {
	Speed Speed

	at  time.Time // recorded time of the last event
	due time.Time // when the last event was due
}

// NextDue returns when the next event is due, and the gap before it. at is the recorded time of the event, now the
// current time. The first event is due at once. So is an event that was recorded before its predecessor, by another
// clock or by a clock that was set back; if the difference exceeds MaxGap, the Pacer continues from the new clock.
func (p *Pacer) NextDue(at, now time.Time) (due time.Time, gap Gap) {
	if p.at.IsZero() {
		p.ContinueFrom(at, now)
		return now, Gap{}
	}
	if now.Sub(p.due) > maxCatchUp {
		p.due = now
	}
	gap.Original = max(0, at.Sub(p.at))
	wait := MaxGap
	if f := float64(gap.Original) / float64(p.Speed); f <= float64(MaxGap) {
		wait = time.Duration(f)
	} else {
		gap.LeftOut = gap.Original - time.Duration(float64(MaxGap)*float64(p.Speed))
	}
	if at.After(p.at) || p.at.Sub(at) > MaxGap {
		p.at = at
	}
	p.due = p.due.Add(wait)
	return p.due, gap
}

// ContinueFrom makes the Pacer continue from an event with the recorded time at that is due now: NextDue measures the
// next gap from at, and the next due time from now.
func (p *Pacer) ContinueFrom(at, now time.Time) { p.at, p.due = at, now }

// Delay delays all following events by the length of a pause.
func (p *Pacer) Delay(pause time.Duration) { p.due = p.due.Add(pause) }
