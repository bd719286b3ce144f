package journal

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Config of a Store; the zero value takes every default.
type Config struct {
	Batch    time.Duration // how long lines wait for others before they are synced together; 0 means 10 ms
	MaxBytes int64         // what may wait to be acknowledged, of each journal; 0 means 64 MiB
	Logger   *slog.Logger  // nil logs nothing
	Failed   func(error)   // called when lines could not be written (they are kept, and tried again), and with nil when they are
	Denied   func(Denial)  // called for each line of a denial that is added
}

// Store writes journals. Run has to run for lines to reach the disk.
type Store struct {
	batch    time.Duration
	maxBytes int64
	log      *slog.Logger
	failed   func(error)
	denied   func(Denial)

	wake chan struct{}

	mu      sync.Mutex // taken after a journal's
	todo    map[*Journal]bool
	folding map[*Journal]bool
}

// retryAfter is the pause after a failed write.
const retryAfter = time.Second

// NewStore makes a Store.
func NewStore(cfg Config) *Store {
	s := &Store{
		batch: cfg.Batch, maxBytes: cfg.MaxBytes, log: cfg.Logger, failed: cfg.Failed, denied: cfg.Denied,
		wake: make(chan struct{}, 1), todo: map[*Journal]bool{}, folding: map[*Journal]bool{},
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

// Open reads the journal in a folder, or begins one.
func (s *Store) Open(dir string) (*Journal, error) { return open(dir, s) }

// Forget says that a journal's folder is going.
func (s *Store) Forget(j *Journal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.todo, j)
	delete(s.folding, j)
}

func (s *Store) dirty(j *Journal) {
	s.mu.Lock()
	s.todo[j] = true
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default: // it is awake already
	}
}

func (s *Store) folds(j *Journal) {
	s.mu.Lock()
	s.folding[j] = true
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *Store) folded(j *Journal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.folding, j)
}

// Run writes lines until ctx ends, and what is pending then before it returns.
func (s *Store) Run(ctx context.Context) error {
	for {
		s.mu.Lock()
		folding, todo := len(s.folding) > 0, len(s.todo) > 0
		s.mu.Unlock()
		var tick <-chan time.Time
		switch {
		case todo: // only after a failure: everything else is flushed below
			tick = time.After(retryAfter)
		case folding:
			tick = time.After(foldFor / 4)
		}
		select {
		case <-ctx.Done():
			s.fold(true)
			return s.flush()
		case <-tick:
		case <-s.wake:
			select {
			case <-ctx.Done():
			case <-time.After(s.batch):
			}
		}
		s.fold(false)
		if err := s.flush(); err != nil {
			s.log.Error("journal lines are not written yet", "error", err)
		}
	}
}

// fold adds the lines of denials whose second is over.
func (s *Store) fold(all bool) {
	s.mu.Lock()
	list := make([]*Journal, 0, len(s.folding))
	for j := range s.folding {
		list = append(list, j)
	}
	s.mu.Unlock()
	for _, j := range list {
		j.fold(time.Now(), all)
	}
}

// flush writes all journals that have something to write; the error is the first one.
func (s *Store) flush() error {
	s.mu.Lock()
	todo := s.todo
	s.todo = map[*Journal]bool{}
	s.mu.Unlock()
	var first error
	for j := range todo {
		if err := j.flush(); err != nil {
			s.mu.Lock()
			s.todo[j] = true
			s.mu.Unlock()
			if first == nil {
				first = err
			}
		}
	}
	if len(todo) > 0 {
		s.failed(first)
	}
	return first
}
