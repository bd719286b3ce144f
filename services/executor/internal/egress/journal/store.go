package journal

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Config configures a Store. The zero value has every default.
type Config struct {
	Batch    time.Duration // time for which a line waits for others, so that they are synced together; 0 means 10 ms
	MaxBytes int64         // limit of the unacknowledged bytes of each journal; 0 means 64 MiB
	Logger   *slog.Logger  // nil logs nothing
	Failed   func(error)   // called after each write: with the error, when lines are kept to be written again, or with nil
	Denied   func(Denial)  // called for each line of a denial; it must not block
}

// Store writes the lines of all journals to disk, in batches, while Run runs.
type Store struct {
	batch    time.Duration
	maxBytes int64
	log      *slog.Logger
	failed   func(error)
	denied   func(Denial)

	wake chan struct{}

	mu       sync.Mutex        // locked after a journal's mutex
	dirty    map[*Journal]bool // with pending lines
	counting map[*Journal]bool // with counted denials that have no line yet
}

// writeRetryPause is the pause after a failed write to disk.
const writeRetryPause = time.Second

// NewStore returns a Store, which writes nothing before Run is called.
func NewStore(cfg Config) *Store {
	s := &Store{
		batch: cfg.Batch, maxBytes: cfg.MaxBytes, log: cfg.Logger, failed: cfg.Failed, denied: cfg.Denied,
		wake: make(chan struct{}, 1), dirty: map[*Journal]bool{}, counting: map[*Journal]bool{},
	}
	if s.batch == 0 {
		s.batch = 10 * time.Millisecond
	}
	if s.maxBytes == 0 {
		s.maxBytes = 64 << 20
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.failed == nil {
		s.failed = func(error) {}
	}
	if s.denied == nil {
		s.denied = func(Denial) {}
	}
	return s
}

// Open opens the journal in a folder, or creates one.
func (s *Store) Open(dir string) (*Journal, error) { return openJournal(dir, s) }

// Forget removes a journal from the store. It must be called before the journal's folder is deleted.
func (s *Store) Forget(j *Journal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.dirty, j)
	delete(s.counting, j)
}

// markDirty records that a journal has pending lines, so that Run writes them to disk.
func (s *Store) markDirty(j *Journal) {
	s.mu.Lock()
	s.dirty[j] = true
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default: // a wake-up is pending already
	}
}

// markCounting records that a journal has counted denials, so that Run adds lines about them.
func (s *Store) markCounting(j *Journal) {
	s.mu.Lock()
	s.counting[j] = true
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// unmarkCounting records that a journal has no counted denials any more.
func (s *Store) unmarkCounting(j *Journal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.counting, j)
}

// Run writes lines of journals to disk until ctx ends. Before it returns, it writes all pending lines, and
// lines about all counted denials.
func (s *Store) Run(ctx context.Context) error {
	for {
		s.mu.Lock()
		counting, dirty := len(s.counting) > 0, len(s.dirty) > 0
		s.mu.Unlock()
		var tick <-chan time.Time
		switch {
		case dirty: // only after a failed write: otherwise all lines are flushed below
			tick = time.After(writeRetryPause)
		case counting:
			tick = time.After(denialCountTime / 4)
		}
		select {
		case <-ctx.Done():
			s.addCountedDenials(true)
			return s.flushJournals()
		case <-tick:
		case <-s.wake:
			select {
			case <-ctx.Done():
			case <-time.After(s.batch):
			}
		}
		s.addCountedDenials(false)
		if err := s.flushJournals(); err != nil {
			s.log.Error("journal lines are not written yet", "error", err)
		}
	}
}

// addCountedDenials adds lines to all journals about the denials whose time window has ended, or about all
// counted denials if all is true.
func (s *Store) addCountedDenials(all bool) {
	s.mu.Lock()
	list := make([]*Journal, 0, len(s.counting))
	for j := range s.counting {
		list = append(list, j)
	}
	s.mu.Unlock()
	for _, j := range list {
		j.addCountedDenials(time.Now(), all)
	}
}

// flushJournals writes the pending lines of all journals to disk, and returns the first error.
func (s *Store) flushJournals() error {
	s.mu.Lock()
	dirty := s.dirty
	s.dirty = map[*Journal]bool{}
	s.mu.Unlock()
	var first error
	for j := range dirty {
		if err := j.flushLines(); err != nil {
			s.mu.Lock()
			s.dirty[j] = true
			s.mu.Unlock()
			if first == nil {
				first = err
			}
		}
	}
	if len(dirty) > 0 {
		s.failed(first)
	}
	return first
}
