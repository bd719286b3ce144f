package janitor_test

import (
	"context"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/session/janitor"
)

// TestSettingSessions: a pass removes the content of as many sessions as the setting says.
func TestSettingSessions(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	for range 3 {
		b.deleted(newID(events.KindSession))
	}
	j := b.janitor(janitor.Config{Sessions: 2})
	b.found(j, false) // retires all
	b.now = b.now.Add(time.Hour)
	b.passed()
	for i, want := range []int{2, 1, 0} {
		if found := b.found(j, false); len(found) != want {
			t.Errorf("pass %d found %q, want %d sessions", i+1, found, want)
		}
		b.markRemoved()
	}
}

// TestSettingInterval: passes are made at the interval of the setting: a short one makes
// several, and one of an hour none meanwhile.
func TestSettingInterval(t *testing.T) {
	t.Parallel()
	b := newBed(t)
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

// passes runs a janitor until the test ends; the function returns how many passes it has made.
func (b *bed) passes(cfg janitor.Config) func() float64 {
	b.t.Helper()
	j, registry := b.counted(b.url, cfg)
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
