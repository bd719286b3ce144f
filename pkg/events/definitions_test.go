package events_test

import (
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

func TestBackoff_DoublesWithEachDeath(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ms, died uint32
		want     time.Duration
	}{
		{0, 1, 0}, {0, 9, 0}, {500, 0, 500 * time.Millisecond}, {500, 1, 500 * time.Millisecond}, {500, 2, time.Second}, {500, 3, 2 * time.Second},
		{200_000, 2, 5 * time.Minute}, {300_000, 1, 5 * time.Minute}, {1, math.MaxUint32, 5 * time.Minute}, {math.MaxUint32, math.MaxUint32, 5 * time.Minute},
	} {
		if got := (events.Retries{BackoffMs: c.ms}).Backoff(c.died); got != c.want {
			t.Errorf("%d ms after %d deaths: %s, want %s", c.ms, c.died, got, c.want)
		}
	}
}

func TestLoops_WithDefaults(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ set, want events.Loops }{
		{events.Loops{}, events.Loops{Action: "stop", Warn: 3, Stop: 5, Window: 10}},
		{events.Loops{Stop: 2}, events.Loops{Action: "stop", Warn: 2, Stop: 2, Window: 10}},
		{events.Loops{Stop: 20}, events.Loops{Action: "stop", Warn: 3, Stop: 20, Window: 20}},
		{events.Loops{Warn: 8}, events.Loops{Action: "stop", Warn: 8, Stop: 8, Window: 10}},
		{events.Loops{Warn: 2, Window: 6}, events.Loops{Action: "stop", Warn: 2, Stop: 5, Window: 6}},
		{events.Loops{Action: "stop", Warn: 4, Stop: 6, Window: 7}, events.Loops{Action: "stop", Warn: 4, Stop: 6, Window: 7}},
		{events.Loops{Action: "warn"}, events.Loops{Action: "warn", Warn: 3, Window: 10}},
		{events.Loops{Action: "warn", Warn: 12}, events.Loops{Action: "warn", Warn: 12, Window: 12}},
		{events.Loops{Action: "none"}, events.Loops{Action: "none"}},
	} {
		if got := c.set.WithDefaults(); got != c.want {
			t.Errorf("%+v: %+v, want %+v", c.set, got, c.want)
		}
		if got := c.want.WithDefaults(); got != c.want {
			t.Errorf("%+v is not final: %+v", c.want, got)
		}
	}
}

// TestDefaults_AreThoseOfTheDocumentation tests that the comments of the fields, which are the documentation, have the values of the constants.
func TestDefaults_AreThoseOfTheDocumentation(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/agents.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf("a loop_detected event; default %d,", events.DefaultLoopWarnCalls),
		fmt.Sprintf("the execution fails; default %d,", events.DefaultLoopStopCalls),
		fmt.Sprintf("that are compared; default %d,", events.DefaultLoopWindowCalls),
		fmt.Sprintf("levels of sub-agents below the agent, default %d,", events.DefaultSubagentDepth),
		fmt.Sprintf("loops: {warn: %d, stop: %d, window: %d}", events.DefaultLoopWarnCalls, events.DefaultLoopStopCalls, events.DefaultLoopWindowCalls),
		fmt.Sprintf("limits: {subagentDepth: %d}", events.DefaultSubagentDepth),
	} {
		if !strings.Contains(string(page), want) {
			t.Errorf("docs/agents.md lacks %q", want)
		}
	}
}
