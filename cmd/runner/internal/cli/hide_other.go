//go:build !linux

package cli

import "log/slog"

// hideEnvironment has nothing to do: there is no /proc to read variables from.
func hideEnvironment(*slog.Logger) {}
