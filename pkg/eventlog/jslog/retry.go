package jslog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
)

// First and last pause between tries.
const (
	firstPause = 20 * time.Millisecond
	lastPause  = time.Second
)

// backoff spaces the tries of one request.
type backoff struct {
	try   int
	first time.Duration // timeout of the first try
}

func (l *Log) backoff() *backoff { return &backoff{first: l.ackTimeout} }

// reading is for what changes nothing, and so may be asked again soon.
func (l *Log) reading() *backoff { return &backoff{first: l.ackTimeout / 5} }

// timeout of the present try.
func (b *backoff) timeout() time.Duration {
	return min(b.first<<min(b.try, 3), 5*b.first)
}

// wait pauses before the next try; its error is ErrUnavailable when ctx ends, with why the last try failed.
func (b *backoff) wait(ctx context.Context, why error) error {
	pause := min(firstPause<<min(b.try, 6), lastPause)
	b.try++
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return fmt.Errorf("%w: %w (%w)", eventlog.ErrUnavailable, why, context.Cause(ctx))
	case <-t.C:
		return nil
	}
}

// level of what is logged about the present try: one that fails may be a blip.
func (b *backoff) level() slog.Level {
	if b.try > 3 {
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// Error codes of a cluster between two leaders.
const (
	codeClusterUnavailable jetstream.ErrorCode = 10008
	codeNotLeader          jetstream.ErrorCode = 10009
)

// transient tells whether an answer may still come to another try: it was lost,
// late, or nobody was there to give it.
func transient(err error) bool {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, eventlog.ErrUnavailable):
		return false // given up already
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, nats.ErrTimeout),
		errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrDisconnected),
		errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionReconnecting), errors.Is(err, nats.ErrStaleConnection):
		return true
	case errors.As(err, &api):
		return api.ErrorCode == codeClusterUnavailable || api.ErrorCode == codeNotLeader
	}
	return false
}
