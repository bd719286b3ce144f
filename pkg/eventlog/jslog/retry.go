package jslog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/retry"
)

// The first and the longest pause between tries.
const (
	minRetryPause = 20 * time.Millisecond
	maxRetryPause = time.Second
)

// backoff computes the timeouts and pauses between the tries of one request.
type backoff struct {
	try    int
	first  time.Duration // timeout of the first try
	pauses *retry.Pauses
}

// newBackoff returns a backoff whose first try has the timeout first.
func newBackoff(first time.Duration) *backoff {
	return &backoff{first: first, pauses: retry.NewDoubling(minRetryPause, maxRetryPause)}
}

// appendBackoff returns the backoff for an append.
func (l *Log) appendBackoff() *backoff { return newBackoff(l.ackTimeout) }

// readBackoff returns the backoff for reads, which are idempotent and can be repeated soon.
func (l *Log) readBackoff() *backoff { return newBackoff(l.ackTimeout / 5) }

// reset makes the next try use the first timeout and pause again.
func (b *backoff) reset() {
	b.try = 0
	b.pauses.Reset()
}

// timeout returns the timeout of the current try.
func (b *backoff) timeout() time.Duration {
	return min(b.first<<min(b.try, 3), 5*b.first)
}

// wait pauses before the next try. If ctx ends first, wait returns ErrUnavailable with the error of the last try.
func (b *backoff) wait(ctx context.Context, why error) error {
	b.try++
	if cause := retry.Pause(ctx, b.pauses.NextBackOff()); cause != nil {
		return fmt.Errorf("%w: %w (%w)", eventlog.ErrUnavailable, why, cause)
	}
	return nil
}

// logLevel returns the log level for the current try. The first failures are often transient.
func (b *backoff) logLevel() slog.Level {
	if b.try > 3 {
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// Error codes of a cluster without a leader.
const (
	codeClusterUnavailable jetstream.ErrorCode = 10008
	codeNotLeader          jetstream.ErrorCode = 10009
)

// isConnectionError reports whether a write to the server's connection failed, as it does in the moment in which the
// connection breaks. The server may have received what was written.
func isConnectionError(err error) bool {
	var network *net.OpError
	return errors.As(err, &network) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// isTransient reports whether a retry may succeed: the request or its response was lost or late, or no server was
// available.
func isTransient(err error) bool {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, eventlog.ErrUnavailable):
		return false // the retries are already exhausted
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, nats.ErrTimeout),
		errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrDisconnected),
		errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionReconnecting), errors.Is(err, nats.ErrStaleConnection),
		errors.Is(err, errBatchesUnsupported), isConnectionError(err):
		return true
	case errors.As(err, &api):
		return api.ErrorCode == codeClusterUnavailable || api.ErrorCode == codeNotLeader
	}
	return false
}
