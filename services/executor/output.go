package executor

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// output returns the limits of an agent's output in one execution.
func (c Config) output() events.Output {
	return events.Output{Events: uint64(c.OutputEvents), Bytes: uint64(c.OutputBytes)} //nolint:gosec // not negative
}

// sessionOutput returns the limits of the agents' output in all executions of a session.
func (c Config) sessionOutput() events.Output {
	return events.Output{Events: uint64(c.SessionEvents), Bytes: uint64(c.SessionBytes)} //nolint:gosec // not negative
}

// pace returns the limit of an agent's output rate.
func (c Config) pace() runner.OutputRate {
	return runner.OutputRate{EventsPerSecond: uint32(c.OutputEventsPerSecond), BytesPerSecond: uint32(c.OutputBytesPerSecond)} //nolint:gosec // in range
}
