package executor

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// outputLimits returns the limits of an agent's output in one execution.
func (c Config) outputLimits() events.OutputSize {
	return events.OutputSize{Events: uint64(c.OutputEvents), Bytes: uint64(c.OutputBytes)} //nolint:gosec // not negative
}

// sessionOutputLimits returns the limits of agents' output in all executions of a session together.
func (c Config) sessionOutputLimits() events.OutputSize {
	return events.OutputSize{Events: uint64(c.SessionEvents), Bytes: uint64(c.SessionBytes)} //nolint:gosec // not negative
}

// outputPace returns the limit of an agent's output per second.
func (c Config) outputPace() runner.OutputRate {
	return runner.OutputRate{EventsPerSecond: uint32(c.OutputEventsPerSecond), BytesPerSecond: uint32(c.OutputBytesPerSecond)} //nolint:gosec // in range
}
