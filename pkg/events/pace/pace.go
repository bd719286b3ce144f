// Package pace computes when the events of a recorded session are due in a replay: as far apart as they happened, divided
// by a speed, and idle gaps shortened. It is pure: the time of the replay is an argument.
package pace

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
)

// MaxGap is the longest wait between two events of a replay, at any speed. A longer wait is shortened to it.
const MaxGap = 2 * time.Second

// maxLate is how much a replay that is late catches up. A replay that is later, because its client read slowly, goes on
// from where it is.
const maxLate = 250 * time.Millisecond

// Speed is how many times faster than recorded a replay is.
type Speed float64

// Max is a speed at which nothing waits.
const Max Speed = math.MaxFloat64

// ErrSpeed is the error of a speed that is none.
var ErrSpeed = errors.New("must be a positive number, or max")

// ParseSpeed reads a positive number, or "max". Its error wraps ErrSpeed.
func ParseSpeed(s string) (Speed, error) {
	if s == "max" {
		return Max, nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f > 0) || math.IsInf(f, 0) { //nolint:staticcheck // NaN is not positive either
		if len(s) > 40 {
			s = s[:40] + "…"
		}
		return 0, fmt.Errorf("%w, not %s", ErrSpeed, strconv.QuoteToASCII(s))
	}
	return Speed(f), nil
}

// String returns the speed as ParseSpeed reads it.
func (s Speed) String() string {
	if s == Max {
		return "max"
	}
	return strconv.FormatFloat(float64(s), 'g', -1, 64)
}

// Gap is a time between two events.
type Gap struct {
	Original time.Duration // as recorded
	LeftOut  time.Duration // the part of Original that the replay leaves out; 0 for a gap that was not shortened
}

// Pacer says when each event of one replay is due. A Pacer with a Speed is ready to use. It is not safe for concurrent use.
type Pacer struct {
	Speed Speed

	at  time.Time // recorded time of the last event
	due time.Time // when the last event was due
}

// Step returns when the next event is due, which was recorded at a time, and the gap before it. now is the time of the replay.
// The first event is due at once, as is one that was recorded before the event that precedes it: by another clock, or by one
// that was set back. After more than MaxGap the Pacer goes on by that clock.
func (p *Pacer) Step(at, now time.Time) (due time.Time, gap Gap) {
	if p.at.IsZero() {
		p.Jump(at, now)
		return now, Gap{}
	}
	if now.Sub(p.due) > maxLate {
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

// Jump makes the next event follow what was recorded at a time, and now.
func (p *Pacer) Jump(at, now time.Time) { p.at, p.due = at, now }

// Shift makes all that follows later, by the length of a pause.
func (p *Pacer) Shift(pause time.Duration) { p.due = p.due.Add(pause) }
