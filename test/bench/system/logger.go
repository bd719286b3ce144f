package system

import (
	"context"
	"log/slog"
	"os"
	"sync/atomic"
)

// loud is how many warnings are printed: an overloaded system has thousands.
const loud = 20

// quiet passes the first warnings on and counts the rest.
type quiet struct {
	slog.Handler
	count *atomic.Int64
}

func newQuiet() quiet {
	return quiet{slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}), &atomic.Int64{}}
}

// Handle implements slog.Handler.
func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	if q.count.Add(1) > loud {
		return nil
	}
	return q.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (q quiet) WithAttrs(list []slog.Attr) slog.Handler {
	return quiet{q.Handler.WithAttrs(list), q.count}
}

// WithGroup implements slog.Handler.
func (q quiet) WithGroup(name string) slog.Handler {
	return quiet{q.Handler.WithGroup(name), q.count}
}

// Warnings is how many warnings and errors the services have logged.
func (s *System) Warnings() int64 { return s.quiet.count.Load() }
