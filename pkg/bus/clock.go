package bus

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	// clockEvery is how often a Clock asks for the time.
	clockEvery = 30 * time.Second
	// clockRetry is the pause after a question that had no answer, at the start.
	clockRetry = 200 * time.Millisecond
	// clockWithin bounds one question.
	clockWithin = 5 * time.Second
	// clockDoubt is how old an answer may be that a message is dropped by.
	clockDoubt = time.Second
	// clockNotable is the difference to the host's clock that is worth a line in the log.
	clockNotable = time.Second
)

// ClockConfig configures a Clock. JetStream and Stream are required.
type ClockConfig struct {
	JetStream jetstream.JetStream
	// Stream is the stream whose server is asked; its user needs the right to its STREAM.INFO.
	Stream string
	// Host is the clock of this host, which counts the time between two answers; nil means time.Now.
	Host func() time.Time
	// Logger may be nil.
	Logger *slog.Logger
}

// Clock tells the time of the server that stores a stream: the time that messages are stamped with and schedules fire
// by. Hosts whose own clocks differ, or jump, agree on it. It is safe for concurrent use.
type Clock struct {
	cfg ClockConfig

	mu       sync.Mutex
	stream   jetstream.Stream
	measured bool
	store    time.Time     // the server's time …
	host     time.Time     // … at this time of the host, which has a monotonic reading
	doubt    time.Duration // half of the round trip
}

// NewClock returns a Clock. Until its first answer it tells the host's time.
func NewClock(cfg ClockConfig) *Clock {
	if cfg.Host == nil {
		cfg.Host = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Clock{cfg: cfg}
}

// Now returns the server's time, as far as it is known. It does not block on NATS.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now()
}

func (c *Clock) now() time.Time {
	if !c.measured {
		return c.cfg.Host()
	}
	return c.store.Add(c.cfg.Host().Sub(c.host))
}

// Start blocks until the first answer, or until ctx ends: the stream may not be installed yet. A connection that is
// closed is an error.
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
			c.cfg.Logger.Warn("NATS was not asked for its time yet; trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(clockRetry):
		}
	}
}

// Run asks for the time again and again until ctx ends. The server's clock may jump, and another server may lead the stream.
func (c *Clock) Run(ctx context.Context) error {
	tick := time.NewTicker(clockEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := c.Measure(ctx); err != nil && ctx.Err() == nil {
			c.cfg.Logger.Warn("NATS was not asked for its time; the last answer counts on", "error", err)
		}
	}
}

// Measure asks the server for its time. An answer within the uncertainty of the last one changes nothing, so that the
// time told does not jitter.
func (c *Clock) Measure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, clockWithin)
	defer cancel()
	stream, err := c.open(ctx)
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
	off := store.Sub(c.now())
	if off.Abs() > max(clockNotable, doubt) {
		c.cfg.Logger.Warn("this host's clock, or that of NATS, is off; the time of NATS counts", "by", off)
	}
	if c.measured && off.Abs() <= doubt+c.doubt {
		store = c.now()
	}
	c.measured, c.store, c.host, c.doubt = true, store, after, doubt
	return nil
}

// open returns the stream; the handle is kept.
func (c *Clock) open(ctx context.Context) (jetstream.Stream, error) {
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

// past reports whether a time of the server has passed. Before it says so it asks, unless it did so just now: the
// server's clock may have been set back since.
func (c *Clock) past(ctx context.Context, until time.Time) (bool, error) {
	c.mu.Lock()
	past, known := c.now().After(until), c.measured && c.cfg.Host().Sub(c.host) < clockDoubt
	c.mu.Unlock()
	if !past || known {
		return past, nil
	}
	if err := c.Measure(ctx); err != nil {
		return false, err
	}
	return c.Now().After(until), nil
}
