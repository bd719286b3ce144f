package journal

import (
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// linePace determines how long a journal line has to wait so that the journal keeps to a runner.OutputRate. The zero value
// has no limit.
type linePace struct {
	events, bytes    tokenBucket
	slowed, reported bool
}

// newLinePace returns a linePace that allows a full burst, runner.OutputBurst, at first.
func newLinePace(p runner.OutputRate, now time.Time) linePace {
	return linePace{events: newTokenBucket(p.EventsPerSecond, now), bytes: newTokenBucket(p.BytesPerSecond, now)}
}

// waitTime returns how long the next line has to wait.
func (p *linePace) waitTime(now time.Time) time.Duration {
	wait := max(p.events.refillAndWaitTime(now), p.bytes.refillAndWaitTime(now))
	p.slowed = p.slowed || wait > 0
	return wait
}

// countLine counts a line of type t against the pace. A text delta counts only with its bytes, because text in flight
// is not an event.
func (p *linePace) countLine(t events.Type, bytes int) {
	p.bytes.left -= float64(bytes)
	if t != events.TextDelta {
		p.events.left--
	}
}

// tokenBucket limits a rate. The field left may become negative: the next line then has to wait.
type tokenBucket struct {
	rate float64 // per second; 0 for no limit
	left float64
	at   time.Time // when left was computed
}

// newTokenBucket returns a full tokenBucket for a rate in tokens per second.
func newTokenBucket(rate uint32, now time.Time) tokenBucket {
	b := tokenBucket{rate: float64(rate), at: now}
	b.left = b.capacity()
	return b
}

// capacity returns the number of tokens in a full bucket.
func (b *tokenBucket) capacity() float64 { return b.rate * runner.OutputBurst.Seconds() }

// refillAndWaitTime adds the tokens for the time that has passed, and returns how long the next line has to wait.
func (b *tokenBucket) refillAndWaitTime(now time.Time) time.Duration {
	if b.rate == 0 {
		return 0
	}
	b.left = min(b.capacity(), b.left+now.Sub(b.at).Seconds()*b.rate)
	b.at = now
	if b.left > 0 {
		return 0
	}
	return time.Duration((1 - b.left) / b.rate * float64(time.Second))
}
