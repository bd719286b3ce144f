// Package projector folds the log into the read models in Postgres and announces committed changes to gateways (topology.LiveFilter). Any
// number of replicas may run: each partition group is projected by one replica at a time.
package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// Config configures the service. Only DatabaseURL is required; zero values of other fields mean the defaults.
type Config struct {
	DatabaseURL  string        `env:"SPOOL_DATABASE_URL" required:"" help:"URL of the Postgres database that holds the read models."`
	BatchCommits int           `default:"1000" env:"SPOOL_BATCH_COMMITS" help:"Largest number of commits that are folded in one transaction."`
	BufferBytes  int           `default:"8388608" env:"SPOOL_BUFFER_BYTES" help:"Bytes of commits that each group reads ahead while Postgres is busy."`
	PresentRows  int           `default:"50000" env:"SPOOL_PRESENT_ROWS" help:"Number of rows that each group keeps in memory to avoid looking them up again."`
	LockRetry    time.Duration `default:"500ms" env:"SPOOL_LOCK_RETRY" help:"Interval at which a replica that waits for a group tries to take over the group's lock."`
}

// withDefaults returns the config with its defaults set, or an error that begins with the name of the invalid
// setting.
func (c Config) withDefaults() (Config, error) {
	settings.SetDefaults(&c)
	if c.DatabaseURL == "" {
		return c, errors.New("database-url: value is empty: set SPOOL_DATABASE_URL to the Postgres database of the read models")
	}
	if _, err := pgx.ParseConfig(c.DatabaseURL); err != nil {
		return c, fmt.Errorf("database-url: %w", err)
	}
	for _, n := range []struct {
		name            string
		value, min, max int
	}{
		{"batch-commits", c.BatchCommits, 1, 100_000},
		{"buffer-bytes", c.BufferBytes, 1 << 10, 1 << 30},
		{"present-rows", c.PresentRows, 1, 10_000_000},
	} {
		if n.value < n.min || n.value > n.max {
			return c, fmt.Errorf("%s: %d is not between %d and %d", n.name, n.value, n.min, n.max)
		}
	}
	if c.LockRetry < time.Millisecond {
		return c, fmt.Errorf("lock-retry: %s is less than 1ms", c.LockRetry)
	}
	return c, nil
}

// Deps are the dependencies of the projector.
type Deps struct {
	NATS   *nats.Conn
	Log    eventlog.Log
	Logger *slog.Logger     // nil discards
	Now    func() time.Time // nil means time.Now
	// Metrics registers the metrics; nil for none.
	Metrics prometheus.Registerer
	// Tip returns the stream sequence of a shard's last commit on any subject; nil asks JetStream.
	Tip func(ctx context.Context, shard int) (uint64, error)
}

// Projector is one replica of the service that folds the log into the read models.
type Projector struct {
	cfg    Config
	deps   Deps
	js     jetstream.JetStream
	counts *metrics

	backlogReaders []*backlogReader // one for each shard
	writer         *sharedWriter
	connections    *storeConnections
}

// New validates the config and returns a Projector. The Projector sends nothing before Run.
func New(cfg Config, deps Deps) (*Projector, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if deps.NATS == nil || deps.Log == nil {
		return nil, errors.New("projector: Deps.NATS and Deps.Log are required")
	}
	js, err := jetstream.New(deps.NATS)
	if err != nil {
		return nil, fmt.Errorf("projector: %w", err)
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	if deps.Tip == nil {
		deps.Tip = func(ctx context.Context, shard int) (uint64, error) { return lastStreamSequence(ctx, js, shard) }
	}
	p := &Projector{cfg: cfg, deps: deps, js: js, counts: newMetrics(deps.Metrics, deps.Now, deps.Log.Partitioning().GroupCount())}
	open := func(ctx context.Context) (*store.Store, error) {
		return store.Open(ctx, cfg.DatabaseURL, readmodel.Schema)
	}
	p.writer, p.connections = newSharedWriter(open), newStoreConnections(open, deps.Log.Partitioning().GroupCount())
	for shard := range deps.Log.Shards() {
		p.backlogReaders = append(p.backlogReaders, &backlogReader{log: deps.Log, shard: shard})
	}
	return p, nil
}

// lastStreamSequence returns the stream sequence of the last message in a shard's stream.
func lastStreamSequence(ctx context.Context, js jetstream.JetStream, shard int) (uint64, error) {
	s, err := js.Stream(ctx, topology.EventsStreamName(shard))
	if err != nil {
		return 0, fmt.Errorf("read the state of stream %s: %w", topology.EventsStreamName(shard), err)
	}
	return s.CachedInfo().State.LastSeq, nil
}

// Run migrates the Postgres schema and folds the log into the read models until ctx ends, which is not an error. While
// Postgres or NATS is not available, Run tries again.
func (p *Projector) Run(ctx context.Context) error {
	pauses := newBackoff(p.deps.Logger, "migrate the read models")
	for {
		err := readmodel.Migrate(ctx, p.cfg.DatabaseURL)
		if err == nil {
			err = store.PrepareGroups(ctx, p.cfg.DatabaseURL, readmodel.Schema, p.deps.Log.Partitioning().GroupCount())
		}
		if err == nil {
			break
		}
		if !pauses.logAndPause(ctx, err) {
			return nil
		}
	}
	defer func() {
		if err := errors.Join(p.writer.close(), p.connections.close()); err != nil {
			p.deps.Logger.Warn("close connections to postgres", "error", err)
		}
	}()
	var all errgroup.Group
	all.Go(func() error {
		p.writer.runCommits(ctx)
		return nil
	})
	for n := range p.deps.Log.Partitioning().GroupCount() {
		all.Go(func() error {
			p.projectGroup(ctx, n)
			return nil
		})
	}
	return all.Wait()
}

// projectGroup folds the commits of the group n while this replica has the group's lock, and otherwise waits for the
// lock, until ctx ends.
func (p *Projector) projectGroup(ctx context.Context, n int) {
	logger := p.deps.Logger.With("group", n)
	pauses := newBackoff(logger, "project")
	for ctx.Err() == nil {
		g := newGroupProjection(p, n, logger)
		err := g.lockAndProject(ctx)
		if g.progressed {
			pauses.reset()
		}
		if !pauses.logAndPause(ctx, err) {
			return
		}
	}
}

// Pauses between retries. The first is short, because most errors are transient.
const (
	// minRetryPause is the pause after the first failure of an operation.
	minRetryPause = 20 * time.Millisecond
	// maxRetryPause is the maximum pause after several failures of an operation in a row.
	maxRetryPause = 2 * time.Second
)

// backoff logs each failure of an operation that is repeated, and pauses before the next attempt.
type backoff struct {
	logger    *slog.Logger
	operation string
	pauses    *retry.Pauses
}

// newBackoff returns a backoff for an operation. Log messages name the operation.
func newBackoff(logger *slog.Logger, operation string) backoff {
	return backoff{logger: logger, operation: operation, pauses: retry.NewDoubling(minRetryPause, maxRetryPause)}
}

// reset must be called after a success. It makes the pause after the next failure a short one.
func (b *backoff) reset() { b.pauses.Reset() }

// logAndPause logs the error why and pauses, longer after each failure in a row. It returns false if ctx ended.
func (b *backoff) logAndPause(ctx context.Context, why error) bool {
	if ctx.Err() != nil {
		return false
	}
	pause := b.pauses.NextBackOff()
	b.logger.Warn(b.operation+": will retry", "wait", pause, "error", why)
	return retry.Pause(ctx, pause) == nil
}
