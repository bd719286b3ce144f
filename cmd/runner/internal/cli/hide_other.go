//go:build !linux

package cli

import "log/slog"

// hideProcess has nothing to do: there is no /proc to read variables from.
func hideProcess(*slog.Logger) {}
