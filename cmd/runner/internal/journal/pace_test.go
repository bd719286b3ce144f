package journal_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A line that is ahead of the pace by more than its burst waits, by events and by bytes. Text in flight does not count
// as an event. Without a pace, and after the end of the context, no line waits.
func TestPace(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		pace  runner.OutputRate
		typ   events.Type
		lines int
		data  int // bytes of a line
		want  time.Duration
	}{
		"within the burst":     {runner.OutputRate{EventsPerSecond: 10}, "log", 100, 10, 0},
		"events over it":       {runner.OutputRate{EventsPerSecond: 10}, "log", 151, 10, 5 * time.Second},
		"bytes over it":        {runner.OutputRate{BytesPerSecond: 1000}, "log", 31, 500, 5 * time.Second},
		"text is no event":     {runner.OutputRate{EventsPerSecond: 10}, events.TextDelta, 1000, 10, 0},
		"text has its bytes":   {runner.OutputRate{EventsPerSecond: 10, BytesPerSecond: 1000}, events.TextDelta, 31, 500, 5 * time.Second},
		"no pace":              {runner.OutputRate{}, "log", 10_000, 500, 0},
		"the slower one holds": {runner.OutputRate{EventsPerSecond: 10, BytesPerSecond: 1 << 20}, "log", 151, 10, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				j, err := journal.New(time.Now(), rand.Reader, 0)
				if err != nil {
					t.Fatal(err)
				}
				j.SetPace(c.pace)
				began := time.Now()
				for range c.lines {
					j.Append(t.Context(), runner.JournalLine{Type: c.typ, Data: bytes.Repeat([]byte("1"), c.data)})
				}
				if took := time.Since(began); took < c.want-time.Second || took > c.want+time.Second {
					t.Errorf("it took %s, want %s", took, c.want)
				}
				if slowed := j.TakeSlowed(); slowed != (c.want > 0) || j.TakeSlowed() {
					t.Errorf("slowed is %v, and once more %v", slowed, j.TakeSlowed())
				}
				over, cancel := context.WithCancel(t.Context())
				cancel()
				began = time.Now()
				for range 1000 {
					j.Append(over, runner.JournalLine{Type: c.typ, Data: bytes.Repeat([]byte("1"), c.data)})
				}
				if took := time.Since(began); took != 0 {
					t.Errorf("after the end of the context it took %s", took)
				}
			})
		})
	}
}
