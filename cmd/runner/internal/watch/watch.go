// Package watch reports changes of the workspace's files: with inotify, or by polling where inotify is not available.
package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/ignore"
)

// The defaults.
const (
	// DefaultQuietTime is the default of the time that a file must not change before its change is reported.
	DefaultQuietTime = 100 * time.Millisecond
	// DefaultMaxDelay is the default of the time after which a change of a file is reported even though the file keeps changing.
	DefaultMaxDelay = time.Second
	// DefaultPollInterval is the default of the minimum time between two passes over a polled workspace.
	DefaultPollInterval = 2 * time.Second
	// DefaultEventsPerSecond is the default of the maximum number of file events that are reported within a second.
	DefaultEventsPerSecond = 500
	// DefaultEventsPerTurn is the default of the maximum number of file events that are reported for one execution, and between two executions.
	DefaultEventsPerTurn = 5000
	// pollPauseFactor limits polling to 1/pollPauseFactor of the time: the pause after a pass is that many times as long as the pass.
	pollPauseFactor = 20
	// queueReadPause is the pause between two reads of the kernel's queue of changes.
	queueReadPause = 5 * time.Millisecond
	// flushTimeout is the maximum time that Flush waits for changes to be reported.
	flushTimeout = 2 * time.Second
)

// EventSink receives the file events that a Watcher reports.
type EventSink interface {
	// JournalEvents journals payloads, with the id of the running execution if there is one, and returns that id. It
	// blocks while the journal is full, until ctx ends. Without payloads it does not block.
	JournalEvents(ctx context.Context, payloads ...events.Payload) (execution string)
}

// Config configures a Watcher. Zero values mean the defaults.
type Config struct {
	Dir       string // the workspace, absolute
	Sink      EventSink
	Log       *slog.Logger // nil for none
	Quiet     time.Duration
	Latest    time.Duration
	Poll      time.Duration
	PerSecond int
	PerTurn   int
	Polling   bool // do not use inotify
	// Touched is called soon after a file begins to change, with the number of bytes that it had on disk before. It may
	// be nil. It must not block.
	Touched func(path string, before int64)

	open func() (changeSource, error) // nil for inotify
}

// changeSource reports changes of watched folders; inotifyReader implements it.
type changeSource interface {
	addWatch(dir string) (int, error)               // returns the same number for the same folder
	removeWatch(wd int)                             // ends the watch of a folder, if it has not ended by itself
	addMark() (int, error)                          // queues a change of kind ended after all earlier changes, and returns its watch number
	readChanges(buf []byte) ([]kernelChange, error) // blocks; fails when the kernel was closed
	close() error
}

// validate returns an error if a field of the configuration is missing or wrong, and sets defaults.
func (c *Config) validate() error {
	if !filepath.IsAbs(c.Dir) {
		return fmt.Errorf("watch: %q is not an absolute path", c.Dir)
	}
	if c.Sink == nil {
		return errors.New("watch: sink is missing")
	}
	if c.Quiet < 0 || c.Latest < 0 || c.Poll < 0 || c.PerSecond < 0 || c.PerTurn < 0 {
		return errors.New("watch: a time or a number is negative")
	}
	c.Quiet, c.Latest, c.Poll = cmp.Or(c.Quiet, DefaultQuietTime), cmp.Or(c.Latest, DefaultMaxDelay), cmp.Or(c.Poll, DefaultPollInterval)
	c.PerSecond, c.PerTurn = cmp.Or(c.PerSecond, DefaultEventsPerSecond), cmp.Or(c.PerTurn, DefaultEventsPerTurn)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.open == nil {
		c.open = func() (changeSource, error) { return newInotifyReader() }
	}
	if c.Touched == nil {
		c.Touched = func(string, int64) {}
	}
	return nil
}

// Watcher watches the files of one workspace: it reports their changes as events and tracks changed folders for snapshots.
type Watcher struct {
	cfg     Config
	tracker *changeTracker
	syncs   chan chan struct{} // requests that all earlier changes are tracked; the channel is closed when they are
	flushes chan chan struct{} // requests a report of all earlier changes; the channel is closed when they were reported
	hurry   chan struct{}      // ends the pause between two reads of the kernel's queue

	// The fields below are owned by Run.
	rules    ignore.Rules
	root     *watchedFolder
	learning bool                   // recordExistingFiles runs: files are recorded without an event
	watched  map[int]*watchedFolder // by watch number
	ignored  map[int]string         // paths of watched folders that are ignored, by watch number
	notifier changeSource           // nil while the workspace is polled
	dirty    map[string]*suspectFile
	order    uint64                // number of the last suspect
	marks    map[int]chan struct{} // flushes that wait for their mark in the queue
	barriers map[int]chan struct{} // syncs that wait for their mark in the queue
	answers  []chan struct{}       // flushes whose mark has arrived
	flood    rateLimiter
}

// New returns a Watcher, which watches the workspace once Run is called.
func New(cfg Config) (*Watcher, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Watcher{tracker: newChangeTracker(), syncs: make(chan chan struct{}), barriers: map[int]chan struct{}{}, ignored: map[int]string{}, cfg: cfg, flushes: make(chan chan struct{}), hurry: make(chan struct{}, 1), dirty: map[string]*suspectFile{}, watched: map[int]*watchedFolder{}, marks: map[int]chan struct{}{}}, nil
}

// Flush blocks until all changes that happened before the call were reported, or ctx ends, or two seconds have passed. Run must be running.
func (w *Watcher) Flush(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, flushTimeout)
	defer cancel()
	done := make(chan struct{})
	select {
	case w.flushes <- done:
	case <-ctx.Done():
		w.cfg.Log.Debug("the watcher is busy: its reports come later")
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// kernelChange is one change in a watched folder, as the kernel reports it.
type kernelChange struct {
	wd     int
	kind   changeKind
	name   string
	folder bool
}

// changeKind is the kind of a change that the kernel reports.
type changeKind int

const (
	changeAppeared   changeKind = iota // an entry was created, or moved here
	changeVanished                     // an entry was removed, or moved away
	changeWritten                      // a file's content changed
	changeClosed                       // a file that was open for writing was closed
	changeWatchEnded                   // a watch ended
	changeAttributes                   // properties of an entry, or of the folder itself, changed
	changeOverflow                     // the queue overflowed: changes were lost
)

// Run watches the workspace until ctx ends. It does not report files that exist at the beginning.
func (w *Watcher) Run(ctx context.Context) error {
	changes, stop := w.beginWatching(ctx)
	defer func() { stop() }()
	tick := time.NewTimer(0)
	defer tick.Stop()
	<-tick.C
	armed := false
	poll := time.NewTimer(w.cfg.Poll)
	defer poll.Stop()
	for {
		if !armed && w.hasPendingReports() {
			armed = true
			tick.Reset(min(w.cfg.Quiet, w.cfg.Latest))
		}
		select {
		case <-ctx.Done():
			return nil
		case batch := <-changes:
			w.handleChanges(batch)
		case <-tick.C:
			armed = false
			w.reportDueChanges(ctx, time.Now(), false)
		case <-poll.C:
			if w.notifier == nil {
				began := time.Now()
				w.compareWorkspace()
				poll.Reset(max(w.cfg.Poll, pollPauseFactor*time.Since(began)))
			}
		case done := <-w.flushes:
			w.startFlush(ctx, done)
		case done := <-w.syncs:
			w.startSync(done)
		}
		if w.notifier == nil && changes != nil { // the kernel's watches have run out
			stop()
			changes, stop = nil, func() {}
			w.compareWorkspace()
			poll.Reset(w.cfg.Poll)
		}
		w.answerFlushes(ctx)
	}
}

// beginWatching records the present files and starts to read the kernel's changes, or falls back to polling. The channel changes receives the
// changes in batches; it is nil when the workspace is polled. The caller must call stop.
func (w *Watcher) beginWatching(ctx context.Context) (changes chan []kernelChange, stop func()) {
	w.root = &watchedFolder{wd: -1}
	if !w.cfg.Polling {
		n, err := w.cfg.open()
		if err != nil {
			w.fallBackToPolling(err)
		} else {
			w.notifier = n
		}
	}
	if w.cfg.Polling {
		w.tracker.stopTracking("the workspace is polled")
	}
	n := w.notifier
	w.readIgnoreRules()
	w.recordExistingFiles()
	if n == nil {
		return nil, func() {}
	}
	changes = make(chan []kernelChange)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, 64<<10)
		rest := time.NewTimer(queueReadPause)
		defer rest.Stop()
		for {
			batch, err := n.readChanges(buf)
			if err != nil {
				return // closed
			}
			select {
			case changes <- batch:
			case <-ctx.Done():
				return
			}
			// The kernel merges equal changes: a pause reduces the changes of a process that writes all the time.
			rest.Reset(queueReadPause)
			select {
			case <-rest.C:
			case <-w.hurry:
			case <-ctx.Done():
				return
			}
		}
	}()
	return changes, func() {
		cancel()
		if err := n.close(); err != nil {
			w.cfg.Log.Error("close inotify", "err", err)
		}
		<-ended
	}
}

// fallBackToPolling replaces the kernel's watches by polling, and queues a warning with the reason why.
func (w *Watcher) fallBackToPolling(why error) {
	w.notifier = nil
	w.tracker.stopTracking("the kernel does not watch the workspace")
	for wd, f := range w.watched {
		f.wd = -1
		delete(w.watched, wd)
	}
	clear(w.ignored)
	w.flood.queueNote(warningEvent(fmt.Sprintf(
		"the files of the workspace are looked at every %s, as the kernel does not watch them (%v): changes come later, and what comes and goes in between is not seen", w.cfg.Poll, why)))
	w.cfg.Log.Warn("the workspace is polled", "every", w.cfg.Poll, "err", why)
}

// handleChanges handles a batch of changes from the kernel: it updates the changeTracker and makes changed files suspects.
func (w *Watcher) handleChanges(batch []kernelChange) {
	for _, c := range batch {
		f := w.watched[c.wd]
		switch {
		case c.kind == changeOverflow:
			w.cfg.Log.Info("the kernel's queue of changes overflowed: comparing all files")
			w.tracker.markAll("the kernel's queue of changes overflowed")
			w.compareWorkspace()
		case c.kind == changeWatchEnded:
			if done, ok := w.marks[c.wd]; ok {
				w.queueFlushAnswer(c.wd, done)
			} else if done, ok := w.barriers[c.wd]; ok {
				delete(w.barriers, c.wd)
				close(done)
			} else if f != nil {
				delete(w.watched, c.wd)
				f.wd = -1
				w.tracker.setWatched(f.path, false)
			} else if rel, ok := w.ignored[c.wd]; ok {
				w.handleIgnoredChange(rel, c)
			}
		case w.ignored[c.wd] != "":
			w.handleIgnoredChange(w.ignored[c.wd], c)
		case f != nil && c.kind == changeAttributes:
			w.tracker.markFolder(f.path, false)
			if c.folder && c.name != "" {
				w.tracker.markFolder(joinRelative(f.path, c.name), false)
			}
		case f == nil || c.name == "":
			// Its folder is gone or was moved, and is compared again.
		case c.folder:
			w.handleFolderChange(f, c)
		default:
			w.handleFileChange(f, c)
		}
	}
}

// compareWorkspace compares the whole workspace with its last known state, because it is polled or changes of the kernel were lost. Lost changes may
// include marks, so compareWorkspace also answers all flushes and syncs.
func (w *Watcher) compareWorkspace() {
	w.compareFolder(w.root)
	for wd, done := range w.marks {
		w.queueFlushAnswer(wd, done)
	}
	for wd, done := range w.barriers {
		delete(w.barriers, wd)
		close(done)
	}
}

// handleFolderChange handles a change of a folder within the watched folder f.
func (w *Watcher) handleFolderChange(f *watchedFolder, c kernelChange) {
	rel := joinRelative(f.path, c.name)
	w.tracker.markFolder(f.path, false)
	w.tracker.markRemoved(rel)
	w.unwatchIgnoredBelow(rel)
	if c.kind == changeAppeared {
		w.tracker.markFolder(rel, true)
	}
	if w.rules.Ignores(rel, true) {
		if c.kind == changeAppeared {
			w.watchIgnoredFolder(rel)
		}
		return
	}
	if old := f.folders[c.name]; old != nil {
		w.unwatchFolder(old)
		delete(f.folders, c.name)
	}
	if c.kind == changeAppeared {
		w.addFolder(f, c.name)
	}
}

// handleFileChange handles a change of a file in the watched folder f.
func (w *Watcher) handleFileChange(f *watchedFolder, c kernelChange) {
	rel := joinRelative(f.path, c.name)
	w.tracker.markFolder(f.path, false)
	if w.rules.Ignores(rel, false) {
		return
	}
	if old := f.folders[c.name]; old != nil && c.kind == changeAppeared { // its removal was not reported
		w.unwatchIgnoredBelow(old.path)
		w.unwatchFolder(old)
		delete(f.folders, c.name)
	}
	w.addSuspect(f, c.name, c.kind == changeWritten)
}

// startFlush queues a mark behind all earlier changes of the kernel for a call of Flush. When the mark arrives, answerFlushes reports these changes
// and closes done. If there is no kernel to take a mark, startFlush reports all changes and closes done itself.
func (w *Watcher) startFlush(ctx context.Context, done chan struct{}) {
	if w.notifier != nil {
		wd, err := w.notifier.addMark()
		if err == nil {
			w.marks[wd] = done
			select {
			case w.hurry <- struct{}{}:
			default: // a wake-up is pending already
			}
			return
		}
		w.cfg.Log.Warn("the watcher cannot flush its reports", "err", err)
	} else {
		w.compareFolder(w.root)
	}
	w.reportDueChanges(ctx, time.Now(), true)
	close(done)
}

// startSync queues a mark behind all earlier changes of the kernel for a call of awaitTracked. When the mark arrives, the changeTracker has all
// earlier changes, and done is closed.
func (w *Watcher) startSync(done chan struct{}) {
	if w.notifier == nil {
		close(done) // the tracker is blind
		return
	}
	wd, err := w.notifier.addMark()
	if err != nil {
		w.tracker.markAll("the kernel's queue takes no mark")
		w.cfg.Log.Warn("the watcher does not know whether it has all changes", "err", err)
		close(done)
		return
	}
	w.barriers[wd] = done
	select {
	case w.hurry <- struct{}{}:
	default: // a wake-up is pending already
	}
}

// queueFlushAnswer makes answerFlushes answer a flush whose mark has arrived, after the batch that is being handled. wd is the number of the mark.
func (w *Watcher) queueFlushAnswer(wd int, done chan struct{}) {
	delete(w.marks, wd)
	w.answers = append(w.answers, done)
}

// answerFlushes reports all changes if marks of flushes have arrived, and ends these flushes.
func (w *Watcher) answerFlushes(ctx context.Context) {
	if len(w.answers) == 0 {
		return
	}
	w.reportDueChanges(ctx, time.Now(), true)
	for _, done := range w.answers {
		close(done)
	}
	w.answers = nil
}
