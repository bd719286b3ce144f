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

// The times of the disk watch.
const (
	// DefaultGlance is how often it is estimated, while something may write, how much is used.
	DefaultGlance = 250 * time.Millisecond
	// DefaultMeasure is the least time between two measurements that nothing but the time asks for.
	DefaultMeasure = 30 * time.Second
	// measureShare bounds the time that measuring takes: one part in so many.
	measureShare = 5
	// restful is how many times rarer it is estimated between turns.
	restful = 4
	// negligible is by how many bytes a file system's space changes without reason to look.
	negligible = 64 << 10
	// maxTouched is how many growing files are looked at one by one.
	maxTouched = 4096
)

// Activity is how likely it is that something writes.
type Activity int

// The activities.
const (
	Idle    Activity = iota // nothing runs
	Resting                 // processes run, no turn does
	Working                 // a turn runs
)

// DiskConfig is what a disk watch is made from. Zero values mean the defaults.
type DiskConfig struct {
	Dirs     []string // absolute; what is below them counts, once
	Limit    int64    // bytes; 0 for none
	Log      *slog.Logger
	Glance   time.Duration
	Measure  time.Duration
	Activity func() Activity // nil for Working
	// Exceeded is called when it was measured that the limit is reached. It must not wait.
	Exceeded func(message string)
	// Processes are those whose open files count though they have no name any more. nil for none.
	Processes func() []int
}

func (c *DiskConfig) validate() error {
	if len(c.Dirs) == 0 {
		return errors.New("disk watch: no folder is given")
	}
	for _, d := range c.Dirs {
		if !filepath.IsAbs(d) {
			return fmt.Errorf("disk watch: %q is not an absolute path", d)
		}
	}
	c.Dirs = slices.DeleteFunc(slices.Clone(c.Dirs), func(dir string) bool { return below(c.Dirs, dir) })
	if c.Limit < 0 {
		return fmt.Errorf("disk limit: %d bytes, want a positive number, or 0 for none", c.Limit)
	}
	if c.Glance < 0 || c.Measure < 0 {
		return errors.New("disk watch: a time is negative")
	}
	c.Glance, c.Measure = cmp.Or(c.Glance, DefaultGlance), cmp.Or(c.Measure, DefaultMeasure)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Activity == nil {
		c.Activity = func() Activity { return Working }
	}
	if c.Exceeded == nil {
		c.Exceeded = func(string) {}
	}
	if c.Processes == nil {
		c.Processes = func() []int { return nil }
	}
	return nil
}

// Disk knows how much the workspace and the agent's records take on disk. A full
// measurement is exact; between two it estimates, by the growth of files that the
// watcher has seen change, and by the space that has gone from the file system,
// which sees what the watcher does not: ignored files, and those without a name.
type Disk struct {
	cfg  DiskConfig
	wake chan struct{}

	measuring sync.Mutex // one measurement at a time; before mu

	mu       sync.Mutex
	measured int64            // bytes, at the last measurement
	used     int64            // bytes, as last estimated
	at       time.Time        // of the last measurement
	took     time.Duration    // by it
	free     map[uint64]int64 // bytes, by file system, just before it
	touched  map[string]int64 // growing files, absolute, with their bytes at that time
	dirty    bool             // something may have changed since
}

// NewDisk checks the configuration; Run does the work.
func NewDisk(cfg DiskConfig) (*Disk, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Disk{cfg: cfg, wake: make(chan struct{}, 1), touched: map[string]int64{}}, nil
}

// Wake says that something may write from now on.
func (d *Disk) Wake() {
	select {
	case d.wake <- struct{}{}:
	default: // it wakes already
	}
}

// Touched says that a file changes which had so many bytes before.
func (d *Disk) Touched(path string, before int64) {
	d.mu.Lock()
	first := !d.dirty
	d.dirty = true
	if _, known := d.touched[path]; !known && len(d.touched) < maxTouched {
		d.touched[path] = before
	}
	d.mu.Unlock()
	if first {
		d.Wake()
	}
}

// Used is how many bytes are used, as last seen.
func (d *Disk) Used() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.used
}

// Over tells whether the limit is reached, and says so in a sentence. If it was
// when last looked at, it is measured anew.
func (d *Disk) Over() (message string, over bool) {
	if d.cfg.Limit == 0 || d.Used() < d.cfg.Limit {
		return "", false
	}
	d.measure()
	return d.verdict()
}

func (d *Disk) verdict() (string, bool) {
	used := d.Used()
	if d.cfg.Limit == 0 || used < d.cfg.Limit {
		return "", false
	}
	return fmt.Sprintf("the workspace and the agent's records take %d bytes on disk, the limit is %d", used, d.cfg.Limit), true
}

// Run measures once and then watches until ctx ends. While nothing runs and
// nothing changes it sleeps.
func (d *Disk) Run(ctx context.Context) error {
	d.measure()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.wake:
		case <-timer.C:
		}
		d.glance(time.Now())
		if wait := d.pause(); wait > 0 {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
	}
}

// pause is how long until the next glance, 0 for until something happens.
func (d *Disk) pause() time.Duration {
	activity := d.cfg.Activity()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case activity == Idle && !d.dirty:
		return 0
	case activity == Idle, d.cfg.Limit == 0: // nobody has to be stopped soon
		return max(d.cfg.Glance, d.cfg.Measure-time.Since(d.at))
	case activity == Resting && len(d.touched) == 0:
		return restful * d.cfg.Glance
	}
	return d.cfg.Glance
}

// glance estimates, and measures if the limit may be reached or the last time is long ago.
func (d *Disk) glance(now time.Time) {
	atMost := d.estimate()
	d.mu.Lock()
	age, took, dirty := now.Sub(d.at), d.took, d.dirty
	d.mu.Unlock()
	near := d.cfg.Limit > 0 && atMost >= d.cfg.Limit
	if (!near || age < measureShare*took) && (!dirty || age < d.cfg.Measure) {
		return
	}
	d.measure()
	if message, over := d.verdict(); over {
		d.cfg.Exceeded(message)
	}
}

// estimate gives the most that may be used now.
func (d *Disk) estimate() int64 {
	free, idle := freeSpace(d.cfg.Dirs), d.cfg.Activity() == Idle
	d.mu.Lock()
	defer d.mu.Unlock()
	var grown, gone int64
	for path, before := range d.touched {
		if st, ok := look(path); ok {
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
	// Others may use the file system too: while nothing of ours runs it was them.
	d.dirty = d.dirty || !idle && max(gone, -gone) > negligible
	d.used = max(0, d.measured+grown)
	return max(d.used, d.measured+gone)
}

// measure looks at everything.
func (d *Disk) measure() {
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
	m := meter{log: d.cfg.Log, seen: map[inode]bool{}, named: before}
	for _, dir := range d.cfg.Dirs {
		m.walk(dir)
	}
	m.unnamed(d.cfg.Dirs, d.cfg.Processes())
	d.mu.Lock()
	defer d.mu.Unlock()
	for path, was := range before {
		// What has not grown since it was last looked at does so no more.
		if now, ok := m.found[path]; !ok || now == was {
			delete(d.touched, path)
		} else {
			d.touched[path] = now
		}
	}
	d.measured, d.used, d.free, d.at, d.took = m.bytes, m.bytes, free, time.Now(), time.Since(began)
}

// below tells whether a path lies in one of the folders.
func below(dirs []string, path string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return strings.HasPrefix(path, dir+"/") })
}
