//go:build !linux

package cli

import "log/slog"

// hideProcess does nothing on this system, which has no /proc.
func hideProcess(*slog.Logger) {}
