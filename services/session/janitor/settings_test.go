package janitor_test

import (
	"context"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session/janitor"
)

// TestSettingSessions tests that a pass removes the content of at most as many sessions as the setting allows.
func TestSettingSessions(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	for range 3 {
		b.createDeleted(newID(events.KindSession))
	}
	j := b.janitor(janitor.Config{Sessions: 2})
	b.pass(j, false) // this pass retires all sessions
	b.now = b.now.Add(time.Hour)
	b.catchUp()
	for i, want := range []int{2, 1, 0} {
		if found := b.pass(j, false); len(found) != want {
			t.Errorf("pass %d found %q, want %d sessions", i+1, found, want)
		}
		b.markRemoved()
	}
}

// TestSettingInterval tests that passes are made at the configured interval: several with a short one, and no second
// one with an interval of an hour.
func TestSettingInterval(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	short, long := b.passes(janitor.Config{Interval: 10 * time.Millisecond}), b.passes(janitor.Config{Interval: time.Hour})
	deadline := time.Now().Add(time.Minute)
	for short() < 3 {
		if time.Now().After(deadline) {
			t.Fatalf("%v passes within a minute", short())
		}
		time.Sleep(10 * time.Millisecond)
	}
	if n := long(); n != 0 {
		t.Errorf("%v passes at an interval of an hour", n)
	}
}

// passes runs a janitor until the test ends. The returned function returns the number of passes that it has made.
func (b *fixture) passes(cfg janitor.Config) func() float64 {
	b.t.Helper()
	j, registry := b.janitorWithMetrics(b.url, cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- j.Run(ctx) }()
	b.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Errorf("Run: %v", err)
		}
	})
	return func() float64 {
		list, err := registry.Gather()
		must(b.t, err)
		n := 0.0
		for _, f := range list {
			if f.GetName() == "spool_janitor_passes_total" {
				for _, m := range f.GetMetric() {
					n += m.GetCounter().GetValue()
				}
			}
		}
		return n
	}
}
