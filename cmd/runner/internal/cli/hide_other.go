//go:build !linux

package cli

import "log/slog"

// hideProcess does nothing: there is no /proc.
func hideProcess(*slog.Logger) {}
