package executor

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// output is what an agent may say in one execution.
func (c Config) output() events.Output {
	return events.Output{Events: uint64(c.OutputEvents), Bytes: uint64(c.OutputBytes)} //nolint:gosec // not negative
}

// sessionOutput is what agents may say in all executions of a session.
func (c Config) sessionOutput() events.Output {
	return events.Output{Events: uint64(c.SessionEvents), Bytes: uint64(c.SessionBytes)} //nolint:gosec // not negative
}

// pace is how fast an agent may say it.
func (c Config) pace() runner.Pace {
	return runner.Pace{EventsPerSecond: uint32(c.OutputEventsPerSecond), BytesPerSecond: uint32(c.OutputBytesPerSecond)} //nolint:gosec // in range
}
