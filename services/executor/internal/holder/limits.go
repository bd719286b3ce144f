package holder

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
)

var (
	errFull    = errors.New("no slot is free")
	errCrowded = errors.New("no slot is free, and enough jobs wait for one here")
)

// limit bounds how much of a kind of work is done at once.
type limit struct {
	permits chan struct{}
	waiters chan struct{} // shared by all limits of an executor
}

func newLimit(n int, waiters chan struct{}) *limit {
	return &limit{make(chan struct{}, n), waiters}
}

// acquire takes a permit, which the caller gives back with release. For a short time it waits for one, so that jobs do
// not come again and again at once. Only a few may wait: a waiting job has one of the deliveries that the executor asks
// for, and the others are for jobs that need no permit. errFull and errCrowded say that there is none.
func (l *limit) acquire(ctx context.Context) (release func(), err error) {
	if release, ok := l.try(); ok {
		return release, nil
	}
	select {
	case l.waiters <- struct{}{}:
		defer func() { <-l.waiters }()
	default:
		return nil, errCrowded
	}
	patience := time.NewTimer(slotPatience)
	defer patience.Stop()
	select {
	case l.permits <- struct{}{}:
		return l.release, nil
	case <-patience.C:
		return nil, errFull
	case <-bus.Draining(ctx):
		return nil, errHandover
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// try takes a permit if there is one.
func (l *limit) try() (release func(), ok bool) {
	select {
	case l.permits <- struct{}{}:
		return l.release, true
	default:
		return nil, false
	}
}

// wait takes a permit however long that lasts. Callers hold no delivery that others need.
func (l *limit) wait(ctx context.Context) (release func(), err error) {
	select {
	case l.permits <- struct{}{}:
		return l.release, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *limit) release() { <-l.permits }

// size returns the number of permits that there are.
func (l *limit) size() int { return cap(l.permits) }
