package system

import (
	"context"
	"log/slog"
	"os"
	"sync/atomic"
)

// maxPrintedWarnings is the number of logged warnings that are printed. An overloaded system logs thousands.
const maxPrintedWarnings = 20

// warningHandler is a slog.Handler that prints the first warnings and errors of the services and counts all of them.
type warningHandler struct {
	slog.Handler
	count *atomic.Int64
}

// newWarningHandler returns a handler that prints to standard error.
func newWarningHandler() warningHandler {
	return warningHandler{slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}), &atomic.Int64{}}
}

// Handle counts the record and prints it, unless maxPrintedWarnings were printed before. It implements slog.Handler.
func (h warningHandler) Handle(ctx context.Context, r slog.Record) error {
	if h.count.Add(1) > maxPrintedWarnings {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h warningHandler) WithAttrs(list []slog.Attr) slog.Handler {
	return warningHandler{h.Handler.WithAttrs(list), h.count}
}

// WithGroup implements slog.Handler.
func (h warningHandler) WithGroup(name string) slog.Handler {
	return warningHandler{h.Handler.WithGroup(name), h.count}
}

// WarningCount returns the number of warnings and errors that the services of the system have logged.
func (s *System) WarningCount() int64 { return s.warnings.count.Load() }
