package journal

import (
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// pace is how far the journal is filled ahead of runner.Pace. The zero value has no bound.
type pace struct {
	events, bytes bucket
	slowed, told  bool
}

func newPace(p runner.Pace, now time.Time) pace {
	return pace{events: newBucket(p.EventsPerSecond, now), bytes: newBucket(p.BytesPerSecond, now)}
}

// wait returns how long the next line has to wait.
func (p *pace) wait(now time.Time) time.Duration {
	wait := max(p.events.wait(now), p.bytes.wait(now))
	p.slowed = p.slowed || wait > 0
	return wait
}

// take counts a line. Text in flight is no event, and counts by its bytes alone.
func (p *pace) take(t events.Type, bytes int) {
	p.bytes.left -= float64(bytes)
	if t != events.TextDelta {
		p.events.left--
	}
}

// bucket is a bound of so much a second. What is taken may make left negative: then the next has to wait.
type bucket struct {
	rate float64 // a second; 0 for no bound
	left float64
	at   time.Time // when left was right
}

func newBucket(rate uint32, now time.Time) bucket {
	b := bucket{rate: float64(rate), at: now}
	b.left = b.burst()
	return b
}

func (b *bucket) burst() float64 { return b.rate * runner.PaceBurst.Seconds() }

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
