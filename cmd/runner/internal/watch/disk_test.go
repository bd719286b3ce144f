package watch

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const kilobyte = 1 << 10

// measured returns a disk watch after its first measurement.
func measured(t *testing.T, cfg DiskConfig) *DiskWatch {
	t.Helper()
	d, err := NewDiskWatch(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.measureUsage()
	return d
}

func fill(t *testing.T, path string, bytes int) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, bytes), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestMeasure_CountsFoldersOnce(t *testing.T) {
	t.Parallel()
	one, two := t.TempDir(), t.TempDir()
	empty := measured(t, DiskConfig{Dirs: []string{one, two}}).UsedBytes()
	fill(t, filepath.Join(one, "a/b/f"), 400*kilobyte)
	fill(t, filepath.Join(two, "g"), 100*kilobyte)
	fill(t, filepath.Join(one, ".git/ignored"), 50*kilobyte)
	for _, f := range []func(string, string) error{os.Link, os.Symlink} {
		if err := f(filepath.Join(one, "a/b/f"), filepath.Join(two, fmt.Sprintf("%p", f))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/usr", filepath.Join(one, "usr")); err != nil {
		t.Fatal(err)
	}
	sparse, err := os.Create(filepath.Join(one, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	if err := sparse.Truncate(10 << 30); err != nil {
		t.Fatal(err)
	}
	if err := sparse.Close(); err != nil {
		t.Fatal(err)
	}
	// A folder inside another counts once.
	got := measured(t, DiskConfig{Dirs: []string{one, two, filepath.Join(one, "a")}}).UsedBytes() - empty
	if want := int64(550 * kilobyte); got < want || got > want+64*kilobyte {
		t.Errorf("%d bytes more, want %d and a little for folders", got, want)
	}
}

func TestFilesWithoutANameCount(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 300*kilobyte)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	without := measured(t, DiskConfig{Dirs: []string{dir}}).UsedBytes()
	with := measured(t, DiskConfig{Dirs: []string{dir}, Processes: func() []int { return []int{os.Getpid()} }}).UsedBytes()
	if with-without != 300*kilobyte {
		t.Errorf("%d without it, %d with it", without, with)
	}
}

// Between measurements the growth of touched files is added.
func TestEstimate_AddsTheGrowthOfTouchedFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	old, fresh := filepath.Join(dir, "old"), filepath.Join(dir, "fresh")
	fill(t, old, 100*kilobyte)
	d := measured(t, DiskConfig{Dirs: []string{dir}})
	before := d.UsedBytes()
	d.RecordTouched(old, 100*kilobyte)
	fill(t, old, 150*kilobyte)
	d.RecordTouched(fresh, 0)
	fill(t, fresh, 20*kilobyte)
	d.estimateUsage()
	if got := d.UsedBytes() - before; got != 72*kilobyte && got != 70*kilobyte { // whole blocks
		t.Errorf("%d bytes more, want 70 KiB", got)
	}
	d.measureUsage()
	all := d.UsedBytes()
	fill(t, fresh, 120*kilobyte) // it is still examined, because it has grown
	d.estimateUsage()
	if got := d.UsedBytes() - all; got != 100*kilobyte {
		t.Errorf("%d bytes more after a measurement, want 100 KiB", got)
	}
	if err := os.Remove(fresh); err != nil {
		t.Fatal(err)
	}
	d.estimateUsage()
	if got := d.UsedBytes() - all; got >= 0 {
		t.Errorf("%d bytes more after a removal", got)
	}
}

func TestOver_ReportsTheLimitUntilThereIsRoom(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	big := filepath.Join(dir, "big")
	said := make(chan string, 100)
	d, err := NewDiskWatch(DiskConfig{Dirs: []string{dir}, Limit: 1 << 20, Estimate: 5 * time.Millisecond, Exceeded: func(m string) { said <- m }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	if m, over := d.CheckLimit(); over {
		t.Errorf("at the beginning: %s", m)
	}
	fill(t, big, 2<<20)
	if m := <-said; !strings.Contains(m, "the limit is 1048576") {
		t.Errorf("said %q", m)
	}
	if m, over := d.CheckLimit(); !over || m == "" {
		t.Errorf("over: %q, %v", m, over)
	}
	if err := os.Remove(big); err != nil {
		t.Fatal(err)
	}
	if m, over := d.CheckLimit(); over {
		t.Errorf("with room again: %s", m)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// While nothing runs and nothing changes, the watch sleeps.
func TestIdleDiskSleeps(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		activity Activity
		limit    int64
		touch    bool
		want     time.Duration // 0: until something happens
	}{
		"idle":                  {ActivityIdle, 1, false, 0},
		"idle, changed":         {ActivityIdle, 1, true, DefaultMeasureInterval},
		"resting":               {ActivityResting, 1, false, restingIntervalFactor * DefaultEstimateInterval},
		"resting, changed":      {ActivityResting, 1, true, DefaultEstimateInterval},
		"working":               {ActivityWorking, 1, false, DefaultEstimateInterval},
		"working without limit": {ActivityWorking, 0, true, DefaultMeasureInterval},
		"idle without limit":    {ActivityIdle, 0, false, 0},
	} {
		d := measured(t, DiskConfig{Dirs: []string{t.TempDir()}, Limit: tc.limit, Activity: func() Activity { return tc.activity }})
		if tc.touch {
			d.RecordTouched("/x", 0)
		}
		if got := d.untilNextCheck(); got > tc.want || got < tc.want-time.Second {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
}

func TestWakesForWhatIsTouched(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var activity atomic.Int32 // Idle
	d, err := NewDiskWatch(DiskConfig{Dirs: []string{dir}, Estimate: time.Millisecond, Measure: time.Millisecond, Activity: func() Activity { return Activity(activity.Load()) }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	fill(t, filepath.Join(dir, "f"), 100*kilobyte)
	d.RecordTouched(filepath.Join(dir, "f"), 0)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); d.UsedBytes() < 100*kilobyte; <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes used", d.UsedBytes())
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestNewDisk_RefusesInvalidConfig(t *testing.T) {
	t.Parallel()
	for says, cfg := range map[string]DiskConfig{
		"folder":   {},
		"absolute": {Dirs: []string{"x"}},
		"limit":    {Dirs: []string{"/x"}, Limit: -1},
		"time":     {Dirs: []string{"/x"}, Estimate: -1},
	} {
		if _, err := NewDiskWatch(cfg); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}
