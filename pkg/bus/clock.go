package bus

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/retry"
)

const (
	// clockMeasureInterval is the interval between two measurements of a Clock.
	clockMeasureInterval = 30 * time.Second
	// clockRetryPause is the pause after a failed measurement during the start.
	clockRetryPause = 200 * time.Millisecond
	// clockMeasureTimeout is the time limit of one measurement of the NATS server's clock.
	clockMeasureTimeout = 5 * time.Second
	// maxMeasurementAge is the age above which a measurement is repeated before a message is dropped because of it.
	maxMeasurementAge = time.Second
	// clockWarnDifference is the difference to the host's clock above which a Clock logs a warning.
	clockWarnDifference = time.Second
)

// ClockConfig configures a Clock. JetStream and Stream are required.
type ClockConfig struct {
	JetStream jetstream.JetStream
	// Stream is the stream whose server is asked. The NATS user needs the permission for its STREAM.INFO.
	Stream string
	// Host returns the time of this host, which counts the time between two measurements; nil means time.Now.
	Host func() time.Time
	// Logger may be nil.
	Logger *slog.Logger
}

// Clock returns the time of the server that stores a stream: the time with which messages are stamped and by which
// schedules fire. Hosts agree on it even if their own clocks differ or jump. It is safe for concurrent use.
type Clock struct {
	cfg ClockConfig

	mu       sync.Mutex
	stream   jetstream.Stream
	measured bool
	store    time.Time     // the server's time …
	host     time.Time     // … at this time of the host, which has a monotonic reading
	doubt    time.Duration // half of the round trip
}

// NewClock returns a Clock. Until its first measurement it returns the host's time.
func NewClock(cfg ClockConfig) *Clock {
	if cfg.Host == nil {
		cfg.Host = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Clock{cfg: cfg}
}

// Now returns the server's time according to the last measurement. It does not block on NATS.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nowLocked()
}

// nowLocked returns what Now returns. The caller must hold c.mu.
func (c *Clock) nowLocked() time.Time {
	if !c.measured {
		return c.cfg.Host()
	}
	return c.store.Add(c.cfg.Host().Sub(c.host))
}

// Start blocks until the first successful measurement or until ctx ends: the stream may not be installed yet. It
// returns an error if the connection is closed.
func (c *Clock) Start(ctx context.Context) error {
	for said := false; ; said = true {
		err := c.Measure(ctx)
		if err == nil || ctx.Err() != nil {
			return nil
		}
		if c.cfg.JetStream.Conn().IsClosed() {
			return err
		}
		if !said {
			c.cfg.Logger.Warn("measure the time of NATS; retrying", "error", err)
		}
		if retry.Pause(ctx, clockRetryPause) != nil {
			return nil
		}
	}
}

// Run repeats the measurement until ctx ends, because the server's clock may jump and another server may become
// leader of the stream.
func (c *Clock) Run(ctx context.Context) error {
	tick := time.NewTicker(clockMeasureInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := c.Measure(ctx); err != nil && ctx.Err() == nil {
			c.cfg.Logger.Warn("measure the time of NATS; the last measurement stays in use", "error", err)
		}
	}
}

// Measure asks the server for its time. A result within the uncertainty of the last one changes nothing, so that
// Now does not jitter.
func (c *Clock) Measure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, clockMeasureTimeout)
	defer cancel()
	stream, err := c.openStream(ctx)
	if err != nil {
		return err
	}
	before := c.cfg.Host()
	info, err := stream.Info(ctx)
	if err != nil {
		return fmt.Errorf("ask for the time of %s: %w", c.cfg.Stream, err)
	}
	after := c.cfg.Host()
	doubt := after.Sub(before) / 2
	c.mu.Lock()
	defer c.mu.Unlock()
	store := info.TimeStamp.Add(doubt)
	off := store.Sub(c.nowLocked())
	if off.Abs() > max(clockWarnDifference, doubt) {
		c.cfg.Logger.Warn("the clocks of this host and of NATS differ; the time of NATS is used", "by", off)
	}
	if c.measured && off.Abs() <= doubt+c.doubt {
		store = c.nowLocked()
	}
	c.measured, c.store, c.host, c.doubt = true, store, after, doubt
	return nil
}

// openStream returns the handle of the stream that stores the time. It caches the handle after the first success.
func (c *Clock) openStream(ctx context.Context) (jetstream.Stream, error) {
	c.mu.Lock()
	stream := c.stream
	c.mu.Unlock()
	if stream != nil {
		return stream, nil
	}
	stream, err := c.cfg.JetStream.Stream(ctx, c.cfg.Stream)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", c.cfg.Stream, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stream = stream
	return stream, nil
}

// hasPassed reports whether a time of the server has passed. Before it returns true it measures again, unless the last
// measurement is recent: the server's clock may have been set back since.
func (c *Clock) hasPassed(ctx context.Context, until time.Time) (bool, error) {
	c.mu.Lock()
	past, known := c.nowLocked().After(until), c.measured && c.cfg.Host().Sub(c.host) < maxMeasurementAge
	c.mu.Unlock()
	if !past || known {
		return past, nil
	}
	if err := c.Measure(ctx); err != nil {
		return false, err
	}
	return c.Now().After(until), nil
}
