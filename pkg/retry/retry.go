// Package retry computes the pauses between repeated attempts. The caller has the loop, because only the caller knows
// when an attempt has succeeded, failed permanently or made progress.
package retry

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// Pauses is the sequence of the pauses between the attempts of a retried call: NextBackOff returns the next pause,
// Reset starts again with the first. A sequence must not be used concurrently.
type Pauses = backoff.ExponentialBackOff

// NewDoubling returns Pauses of first, 2·first, 4·first and so on up to longest, without jitter.
func NewDoubling(first, longest time.Duration) *Pauses {
	return &Pauses{InitialInterval: first, Multiplier: 2, MaxInterval: longest}
}

// Pause blocks for the duration d. If ctx ends first, or has ended, Pause returns the cause.
func Pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
	}
	// ctx may have ended at the same time.
	return context.Cause(ctx)
}
