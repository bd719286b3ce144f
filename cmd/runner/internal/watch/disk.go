package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// The intervals and thresholds of the disk watch.
const (
	// DefaultEstimateInterval is the default of the time between two estimates of the disk usage while something may write.
	DefaultEstimateInterval = 250 * time.Millisecond
	// DefaultMeasureInterval is the default of the minimum time between two measurements of the disk usage, unless an estimate makes one necessary
	// earlier.
	DefaultMeasureInterval = 30 * time.Second
	// maxMeasureShare limits the time that is spent on measuring the disk usage to 1/maxMeasureShare of all time.
	maxMeasureShare = 5
	// restingIntervalFactor is the factor by which the interval between measurements is longer while no turn runs.
	restingIntervalFactor = 4
	// negligibleChange is the change of a file system's free space in bytes up to which no measurement is made because of the change.
	negligibleChange = 64 << 10
	// maxTouchedFiles is the maximum number of files whose growth is estimated one by one.
	maxTouchedFiles = 4096
)

// Activity states whether nothing, only processes, or a turn runs in the sandbox. The disk usage is measured more often while more is likely to be
// written.
type Activity int

// The activities.
const (
	ActivityIdle    Activity = iota // nothing runs
	ActivityResting                 // processes run, no turn does
	ActivityWorking                 // a turn runs
)

// DiskConfig configures a DiskWatch. Zero values mean the defaults.
type DiskConfig struct {
	Dirs     []string // absolute; everything below them counts, once
	Limit    int64    // bytes; 0 for none
	Log      *slog.Logger
	Estimate time.Duration
	Measure  time.Duration
	Activity func() Activity // nil for ActivityWorking
	// Exceeded is called with a message each time that a measurement finds that the limit is reached. It must not block.
	Exceeded func(message string)
	// Processes returns the processes whose open files count even if they have no name any more. nil means none.
	Processes func() []int
}

// validate returns an error if a field of the configuration is missing or wrong, and sets defaults.
func (c *DiskConfig) validate() error {
	if len(c.Dirs) == 0 {
		return errors.New("disk watch: no folder is given")
	}
	for _, d := range c.Dirs {
		if !filepath.IsAbs(d) {
			return fmt.Errorf("disk watch: %q is not an absolute path", d)
		}
	}
	c.Dirs = slices.DeleteFunc(slices.Clone(c.Dirs), func(dir string) bool { return isBelowAny(c.Dirs, dir) })
	if c.Limit < 0 {
		return fmt.Errorf("disk limit: %d bytes, want a positive number, or 0 for none", c.Limit)
	}
	if c.Estimate < 0 || c.Measure < 0 {
		return errors.New("disk watch: a time is negative")
	}
	c.Estimate, c.Measure = cmp.Or(c.Estimate, DefaultEstimateInterval), cmp.Or(c.Measure, DefaultMeasureInterval)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Activity == nil {
		c.Activity = func() Activity { return ActivityWorking }
	}
	if c.Exceeded == nil {
		c.Exceeded = func(string) {}
	}
	if c.Processes == nil {
		c.Processes = func() []int { return nil }
	}
	return nil
}

// DiskWatch measures how much disk space the workspace and the state folder take. A measurement is exact. Between two measurements DiskWatch
// estimates the usage by the growth of files that the watcher has seen change, and by the free space of the file system, which also covers changes
// that the watcher does not see: those of ignored files, and of files without a name.
type DiskWatch struct {
	cfg  DiskConfig
	wake chan struct{}

	measuring sync.Mutex // one measurement at a time; locked before mu

	mu       sync.Mutex
	measured int64            // bytes, at the last measurement
	used     int64            // bytes, as last estimated
	at       time.Time        // of the last measurement
	took     time.Duration    // duration of the last measurement
	free     map[uint64]int64 // bytes, by file system, just before the last measurement
	touched  map[string]int64 // growing files, absolute, with their bytes at the last measurement
	dirty    bool             // something may have changed since the last measurement
}

// NewDiskWatch returns a DiskWatch. The caller must call Run.
func NewDiskWatch(cfg DiskConfig) (*DiskWatch, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &DiskWatch{cfg: cfg, wake: make(chan struct{}, 1), touched: map[string]int64{}}, nil
}

// CheckNow makes Run check the disk usage now. It must be called when the Activity rises, because Run sleeps while nothing runs.
func (d *DiskWatch) CheckNow() {
	select {
	case d.wake <- struct{}{}:
	default: // a wake-up is pending already
	}
}

// RecordTouched records that the file path changes; DiskWatch adds the growth of the file to its estimates. before is the number of bytes that the
// file had on disk.
func (d *DiskWatch) RecordTouched(path string, before int64) {
	d.mu.Lock()
	first := !d.dirty
	d.dirty = true
	if _, known := d.touched[path]; !known && len(d.touched) < maxTouchedFiles {
		d.touched[path] = before
	}
	d.mu.Unlock()
	if first {
		d.CheckNow()
	}
}

// UsedBytes returns the disk usage in bytes according to the last estimate or measurement.
func (d *DiskWatch) UsedBytes() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.used
}

// CheckLimit reports whether the disk limit is reached, with a message for the user. If the last estimate has reached the limit, CheckLimit
// measures again, which takes time, because files may have been removed.
func (d *DiskWatch) CheckLimit() (message string, over bool) {
	if d.cfg.Limit == 0 || d.UsedBytes() < d.cfg.Limit {
		return "", false
	}
	d.measureUsage()
	return d.isLimitReached()
}

// isLimitReached reports whether the last measurement or estimate has reached the limit, with a message for the user.
func (d *DiskWatch) isLimitReached() (string, bool) {
	used := d.UsedBytes()
	if d.cfg.Limit == 0 || used < d.cfg.Limit {
		return "", false
	}
	return fmt.Sprintf("the workspace and the agent's records take %d bytes on disk, the limit is %d", used, d.cfg.Limit), true
}

// Run measures the disk usage once and then checks it until ctx ends. It sleeps while nothing runs and nothing changes.
func (d *DiskWatch) Run(ctx context.Context) error {
	d.measureUsage()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.wake:
		case <-timer.C:
		}
		d.checkUsage(time.Now())
		if wait := d.untilNextCheck(); wait > 0 {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
	}
}

// untilNextCheck returns the time until the next check of the disk usage; 0 means that Run sleeps until CheckNow is called.
func (d *DiskWatch) untilNextCheck() time.Duration {
	activity := d.cfg.Activity()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case activity == ActivityIdle && !d.dirty:
		return 0
	case activity == ActivityIdle, d.cfg.Limit == 0: // nothing has to be stopped soon
		return max(d.cfg.Estimate, d.cfg.Measure-time.Since(d.at))
	case activity == ActivityResting && len(d.touched) == 0:
		return restingIntervalFactor * d.cfg.Estimate
	}
	return d.cfg.Estimate
}

// checkUsage estimates the disk usage, and measures it if the limit may be reached or the last measurement is old. It calls Exceeded if a
// measurement reaches the limit.
func (d *DiskWatch) checkUsage(now time.Time) {
	atMost := d.estimateUsage()
	d.mu.Lock()
	age, took, dirty := now.Sub(d.at), d.took, d.dirty
	d.mu.Unlock()
	near := d.cfg.Limit > 0 && atMost >= d.cfg.Limit
	if (!near || age < maxMeasureShare*took) && (!dirty || age < d.cfg.Measure) {
		return
	}
	d.measureUsage()
	if message, over := d.isLimitReached(); over {
		d.cfg.Exceeded(message)
	}
}

// estimateUsage updates d.used and returns an upper bound of the present disk usage in bytes: the last measurement, plus the growth of touched
// files or the decrease of free space, whichever is greater.
func (d *DiskWatch) estimateUsage() int64 {
	free, idle := freeSpace(d.cfg.Dirs), d.cfg.Activity() == ActivityIdle
	d.mu.Lock()
	defer d.mu.Unlock()
	var grown, gone int64
	for path, before := range d.touched {
		if st, ok := statFile(path); ok {
			grown += st.bytes - before
		} else {
			grown -= before
		}
	}
	for fs, before := range d.free {
		if now, ok := free[fs]; ok {
			gone += before - now
		}
	}
	// Other programs may use the file system too: while no process of the sandbox runs, the change is theirs.
	d.dirty = d.dirty || !idle && max(gone, -gone) > negligibleChange
	d.used = max(0, d.measured+grown)
	return max(d.used, d.measured+gone)
}

// measureUsage adds up the size on disk of every file, and sets d.measured and d.used to the sum.
func (d *DiskWatch) measureUsage() {
	d.measuring.Lock()
	defer d.measuring.Unlock()
	began := time.Now()
	free := freeSpace(d.cfg.Dirs)
	d.mu.Lock()
	d.dirty = false
	before := make(map[string]int64, len(d.touched))
	for path, bytes := range d.touched {
		before[path] = bytes
	}
	d.mu.Unlock()
	m := usageMeter{log: d.cfg.Log, seen: map[inodeID]bool{}, named: before}
	for _, dir := range d.cfg.Dirs {
		m.addTree(dir)
	}
	m.addUnnamed(d.cfg.Dirs, d.cfg.Processes())
	d.mu.Lock()
	defer d.mu.Unlock()
	for path, was := range before {
		// A file that has not grown since it was last examined is not growing any more.
		if now, ok := m.found[path]; !ok || now == was {
			delete(d.touched, path)
		} else {
			d.touched[path] = now
		}
	}
	d.measured, d.used, d.free, d.at, d.took = m.bytes, m.bytes, free, time.Now(), time.Since(began)
}

// isBelowAny reports whether a path lies below one of the folders dirs.
func isBelowAny(dirs []string, path string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return strings.HasPrefix(path, dir+"/") })
}
