package system

import (
	"context"
	"log/slog"
	"os"
	"sync/atomic"
)

// maxPrinted is the number of warnings that are printed. An overloaded system logs thousands.
const maxPrinted = 20

// warnings is a handler that prints the first warnings and counts all.
type warnings struct {
	slog.Handler
	count *atomic.Int64
}

func newWarnings() warnings {
	return warnings{slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}), &atomic.Int64{}}
}

// Handle implements slog.Handler.
func (h warnings) Handle(ctx context.Context, r slog.Record) error {
	if h.count.Add(1) > maxPrinted {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h warnings) WithAttrs(list []slog.Attr) slog.Handler {
	return warnings{h.Handler.WithAttrs(list), h.count}
}

// WithGroup implements slog.Handler.
func (h warnings) WithGroup(name string) slog.Handler {
	return warnings{h.Handler.WithGroup(name), h.count}
}

// Warnings returns the number of warnings and errors that the services have logged.
func (s *System) Warnings() int64 { return s.warnings.count.Load() }
