package journal

import (
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// pace determines how long a line has to wait so that the journal keeps to a runner.OutputRate. The zero value has no limit.
type pace struct {
	events, bytes    bucket
	slowed, reported bool
}

// newPace returns a pace that allows a full burst, runner.OutputBurst, at first.
func newPace(p runner.OutputRate, now time.Time) pace {
	return pace{events: newBucket(p.EventsPerSecond, now), bytes: newBucket(p.BytesPerSecond, now)}
}

// wait returns how long the next line has to wait.
func (p *pace) wait(now time.Time) time.Duration {
	wait := max(p.events.wait(now), p.bytes.wait(now))
	p.slowed = p.slowed || wait > 0
	return wait
}

// take counts a line of type t. A text delta counts only with its bytes, because text in flight is not an event.
func (p *pace) take(t events.Type, bytes int) {
	p.bytes.left -= float64(bytes)
	if t != events.TextDelta {
		p.events.left--
	}
}

// bucket is a token bucket. left may become negative: the next line then has to wait.
type bucket struct {
	rate float64 // per second; 0 for no limit
	left float64
	at   time.Time // when left was computed
}

// newBucket returns a token bucket that is full.
func newBucket(rate uint32, now time.Time) bucket {
	b := bucket{rate: float64(rate), at: now}
	b.left = b.burst()
	return b
}

// burst returns the number of tokens of a full bucket.
func (b *bucket) burst() float64 { return b.rate * runner.OutputBurst.Seconds() }

// wait refills the bucket for the time that has passed, and returns how long the next line has to wait.
func (b *bucket) wait(now time.Time) time.Duration {
	if b.rate == 0 {
		return 0
	}
	b.left = min(b.burst(), b.left+now.Sub(b.at).Seconds()*b.rate)
	b.at = now
	if b.left > 0 {
		return 0
	}
	return time.Duration((1 - b.left) / b.rate * float64(time.Second))
}
