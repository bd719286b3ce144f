// Package watch tells what happens to the files of the workspace: by inotify,
// and where there is none by looking again and again.
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
	// DefaultQuiet is for how long a file must not change before it is reported.
	DefaultQuiet = 100 * time.Millisecond
	// DefaultLatest is when a file that goes on changing is reported all the same.
	DefaultLatest = time.Second
	// DefaultPoll is the least time between two looks at a workspace that is polled.
	DefaultPoll = 2 * time.Second
	// DefaultPerSecond is how many events are told within a second.
	DefaultPerSecond = 500
	// DefaultPerTurn is how many events are told of one execution, and between two.
	DefaultPerTurn = 5000
	// pollShare bounds the time that polling takes: one part in so many.
	pollShare = 20
	// breath is the rest between two reads of the kernel's queue.
	breath = 5 * time.Millisecond
	// flushWithin bounds how long Flush waits.
	flushWithin = 2 * time.Second
)

// Sink takes what the watcher has to tell.
type Sink interface {
	// Tell journals payloads, with the execution that runs if one does, and gives
	// its id. It waits while the journal is full, until ctx ends; without payloads it does not.
	Tell(ctx context.Context, payloads ...events.Payload) (execution string)
}

// Config is what a watcher is made from. Zero values mean the defaults.
type Config struct {
	Dir       string // the workspace, absolute
	Sink      Sink
	Log       *slog.Logger // nil for none
	Quiet     time.Duration
	Latest    time.Duration
	Poll      time.Duration
	PerSecond int
	PerTurn   int
	Polling   bool // do without inotify
	// Touched is told, soon after it began, that a file changes, with the bytes
	// that it had on disk before. nil for nobody. It must not wait.
	Touched func(path string, before int64)

	open func() (kernel, error) // nil for inotify
}

// kernel reports changes of folders.
type kernel interface {
	add(dir string) (int, error)       // the same folder again gives the same number
	remove(wd int)                     // one that has ended by itself is no error
	mark() (int, error)                // puts a change of kind ended behind all that happened before
	read(buf []byte) ([]change, error) // waits; its error is that of a closed one
	close() error
}

func (c *Config) validate() error {
	if !filepath.IsAbs(c.Dir) {
		return fmt.Errorf("watch: %q is not an absolute path", c.Dir)
	}
	if c.Sink == nil {
		return errors.New("watch: nobody is to be told")
	}
	if c.Quiet < 0 || c.Latest < 0 || c.Poll < 0 || c.PerSecond < 0 || c.PerTurn < 0 {
		return errors.New("watch: a time or a number is negative")
	}
	c.Quiet, c.Latest, c.Poll = cmp.Or(c.Quiet, DefaultQuiet), cmp.Or(c.Latest, DefaultLatest), cmp.Or(c.Poll, DefaultPoll)
	c.PerSecond, c.PerTurn = cmp.Or(c.PerSecond, DefaultPerSecond), cmp.Or(c.PerTurn, DefaultPerTurn)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.open == nil {
		c.open = func() (kernel, error) { return newNotifier() }
	}
	if c.Touched == nil {
		c.Touched = func(string, int64) {}
	}
	return nil
}

// Watcher watches one workspace.
type Watcher struct {
	cfg     Config
	flushes chan chan struct{} // asks for all that is known; closed when it was told
	hurry   chan struct{}      // wakes the reader of the kernel's queue

	// What follows is owned by Run.
	rules    ignore.Rules
	root     *folder
	learning bool            // what is found is nothing new
	watched  map[int]*folder // by watch
	notifier kernel          // nil while the workspace is polled
	dirty    map[string]*suspect
	order    uint64                // of suspects
	marks    map[int]chan struct{} // flushes that wait for their mark in the queue
	answers  []chan struct{}       // flushes whose mark has come
	flood    flood
}

// New checks the configuration; Run does the work.
func New(cfg Config) (*Watcher, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Watcher{cfg: cfg, flushes: make(chan chan struct{}), hurry: make(chan struct{}, 1), dirty: map[string]*suspect{}, watched: map[int]*folder{}, marks: map[int]chan struct{}{}}, nil
}

// Flush returns when everything that happened before the call has been told,
// or when ctx ends, or after two seconds at most. It needs Run to run.
func (w *Watcher) Flush(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, flushWithin)
	defer cancel()
	done := make(chan struct{})
	select {
	case w.flushes <- done:
	case <-ctx.Done():
		w.cfg.Log.Debug("the watcher is busy: what it has to tell comes later")
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// change is what the kernel reports.
type change struct {
	wd     int
	kind   kind
	name   string
	folder bool
}

type kind int

const (
	appeared   kind = iota // an entry, by its making or a move
	vanished               // an entry, by its removal or a move
	written                // a file's content
	closed                 // a file that was open for writing
	ended                  // a watch
	overflowed             // the queue: what happened is not known
)

// Run watches until ctx ends. What is there at the beginning gives no events.
func (w *Watcher) Run(ctx context.Context) error {
	changes, stop := w.begin(ctx)
	defer func() { stop() }()
	tick := time.NewTimer(0)
	defer tick.Stop()
	<-tick.C
	armed := false
	poll := time.NewTimer(w.cfg.Poll)
	defer poll.Stop()
	for {
		if !armed && w.pending() {
			armed = true
			tick.Reset(min(w.cfg.Quiet, w.cfg.Latest))
		}
		select {
		case <-ctx.Done():
			return nil
		case batch := <-changes:
			w.take(batch)
		case <-tick.C:
			armed = false
			w.settle(ctx, time.Now(), false)
		case <-poll.C:
			if w.notifier == nil {
				began := time.Now()
				w.look()
				poll.Reset(max(w.cfg.Poll, pollShare*time.Since(began)))
			}
		case done := <-w.flushes:
			w.flush(ctx, done)
		}
		if w.notifier == nil && changes != nil { // the kernel's watches have run out
			stop()
			changes, stop = nil, func() {}
			w.look()
			poll.Reset(w.cfg.Poll)
		}
		w.answerFlushes(ctx)
	}
}

// begin looks at what is there and starts to listen.
func (w *Watcher) begin(ctx context.Context) (changes chan []change, stop func()) {
	w.root = &folder{wd: -1}
	if !w.cfg.Polling {
		n, err := w.cfg.open()
		if err != nil {
			w.fallBack(err)
		} else {
			w.notifier = n
		}
	}
	n := w.notifier
	w.readRules()
	w.learn()
	if n == nil {
		return nil, func() {}
	}
	changes = make(chan []change)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, 64<<10)
		rest := time.NewTimer(breath)
		defer rest.Stop()
		for {
			batch, err := n.read(buf)
			if err != nil {
				return // closed
			}
			select {
			case changes <- batch:
			case <-ctx.Done():
				return
			}
			// The kernel joins what is alike: a rest makes less of a process that writes on and on.
			rest.Reset(breath)
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

// fallBack goes over to polling and says why.
func (w *Watcher) fallBack(why error) {
	w.notifier = nil
	for wd, f := range w.watched {
		f.wd = -1
		delete(w.watched, wd)
	}
	w.flood.note(warning(fmt.Sprintf(
		"the files of the workspace are looked at every %s, as the kernel does not watch them (%v): changes come later, and what comes and goes in between is not seen", w.cfg.Poll, why)))
	w.cfg.Log.Warn("the workspace is polled", "every", w.cfg.Poll, "err", why)
}

// take sorts out what the kernel reports.
func (w *Watcher) take(batch []change) {
	for _, c := range batch {
		f := w.watched[c.wd]
		switch {
		case c.kind == overflowed:
			w.cfg.Log.Info("more changes of files than the kernel keeps: looking at all of them")
			w.look()
		case c.kind == ended:
			if done, ok := w.marks[c.wd]; ok {
				w.release(c.wd, done)
			} else if f != nil {
				delete(w.watched, c.wd)
				f.wd = -1
			}
		case f == nil || c.name == "":
			// Of a folder that is gone, or was moved: it is looked at anew.
		case c.folder:
			w.folderChanged(f, c)
		default:
			w.fileChanged(f, c)
		}
	}
}

// look compares everything, as the kernel's reports are lost, flushes' marks among them.
func (w *Watcher) look() {
	w.resync(w.root)
	for wd, done := range w.marks {
		w.release(wd, done)
	}
}

func (w *Watcher) folderChanged(f *folder, c change) {
	rel := join(f.path, c.name)
	if w.rules.Ignores(rel, true) {
		return
	}
	if old := f.folders[c.name]; old != nil {
		w.forget(old)
		delete(f.folders, c.name)
	}
	if c.kind == appeared {
		w.adopt(f, c.name)
	}
}

func (w *Watcher) fileChanged(f *folder, c change) {
	rel := join(f.path, c.name)
	if w.rules.Ignores(rel, false) {
		return
	}
	if old := f.folders[c.name]; old != nil && c.kind == appeared { // its going was not told
		w.forget(old)
		delete(f.folders, c.name)
	}
	w.suspect(f, c.name, c.kind == written)
}

// flush asks for a mark in the kernel's queue: once it comes, everything before it has.
func (w *Watcher) flush(ctx context.Context, done chan struct{}) {
	if w.notifier != nil {
		wd, err := w.notifier.mark()
		if err == nil {
			w.marks[wd] = done
			select {
			case w.hurry <- struct{}{}:
			default: // it hurries already
			}
			return
		}
		w.cfg.Log.Warn("the watcher cannot tell what has happened so far", "err", err)
	} else {
		w.resync(w.root)
	}
	w.settle(ctx, time.Now(), true)
	close(done)
}

// release has a flush answered once the present batch is through.
func (w *Watcher) release(wd int, done chan struct{}) {
	delete(w.marks, wd)
	w.answers = append(w.answers, done)
}

func (w *Watcher) answerFlushes(ctx context.Context) {
	if len(w.answers) == 0 {
		return
	}
	w.settle(ctx, time.Now(), true)
	for _, done := range w.answers {
		close(done)
	}
	w.answers = nil
}
