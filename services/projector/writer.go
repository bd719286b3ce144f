package projector

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/spoolhq/spool/services/projector/internal/store"
)

const (
	// sharedCommitInterval is the shortest time between the beginnings of two shared commits of a sharedWriter under
	// load.
	sharedCommitInterval = 15 * time.Millisecond
	// sharedCommitBurst is the number of shared commits that may begin without a pause after a time without commits.
	// The first events of a turn come one after the other, and its client waits for each.
	sharedCommitBurst = 4
	// sharedCommitWait is the maximum time, from the beginning of a shared commit, that its transaction waits for
	// groups that are still folding.
	sharedCommitWait = 5 * time.Millisecond
)

// errLockLost is returned if the connection to Postgres that held a group's lock broke.
var errLockLost = errors.New("the connection that holds the group's lock is lost")

// sharedWriter holds the connection to Postgres that has the locks of all groups that this process projects, and writes
// the rows of these groups in shared commits. When a shared commit begins, each waiting group folds the commits in its
// queue; then one transaction writes the rows of all these groups. On average a shared commit begins every
// sharedCommitInterval, and up to sharedCommitBurst begin at once after a time without commits.
type sharedWriter struct {
	open   storeOpener
	commit func(context.Context, []*submittedWrite) // commitAll, except in tests
	// conn has the connection while nobody uses it; nil if it is not open.
	conn chan *lockConnection
	wake chan struct{} // has a token if the fields below have changed

	mu      sync.Mutex
	round   int               // number of the present shared commit
	began   time.Time         // when the present shared commit began
	due     time.Time         // time from which the next shared commit may begin
	folding int               // number of groups that fold in the present shared commit
	waiting []chan int        // receive the number of the next shared commit when it begins
	pending []*submittedWrite // to be committed
}

// lockConnection is a connection to Postgres that holds the advisory locks of groups.
type lockConnection struct {
	store *store.Store
	lost  chan struct{} // closed when the connection is closed
}

// submittedWrite holds the rows of one group that wait to be written in a transaction of the sharedWriter.
type submittedWrite struct {
	conn  *lockConnection // connection that holds the group's lock
	write store.GroupWrite
	done  chan error // receives the result
}

// newSharedWriter returns a sharedWriter that opens its connection with open when it is first used.
func newSharedWriter(open storeOpener) *sharedWriter {
	w := &sharedWriter{open: open, conn: make(chan *lockConnection, 1), wake: make(chan struct{}, 1)}
	w.commit = w.commitAll
	w.conn <- nil
	return w
}

// runCommits executes the transactions that write the submitted rows of the groups, until ctx ends.
func (w *sharedWriter) runCommits(ctx context.Context) {
	timer := time.NewTimer(math.MaxInt64)
	defer timer.Stop()
	for {
		list, wait := w.nextSharedCommit(time.Now())
		if len(list) > 0 {
			w.commit(ctx, list)
			continue
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-timer.C:
		}
	}
}

// nextSharedCommit begins a shared commit if one is due. It returns the writes that must be committed now or, if there
// are none, the time after which it must be called again.
func (w *sharedWriter) nextSharedCommit(now time.Time) (list []*submittedWrite, wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	age := now.Sub(w.began)
	ended := w.folding == 0 && len(w.pending) == 0 || age >= sharedCommitInterval
	if len(w.waiting) > 0 && ended && !now.Before(w.due) {
		w.round, w.began, w.folding, age = w.round+1, now, len(w.waiting), 0
		if earliest := now.Add(-(sharedCommitBurst - 1) * sharedCommitInterval); w.due.Before(earliest) {
			w.due = earliest
		}
		w.due = w.due.Add(sharedCommitInterval)
		for _, begin := range w.waiting {
			begin <- w.round
		}
		w.waiting = nil
	}
	if len(w.pending) > 0 && (w.folding == 0 || age >= sharedCommitWait) {
		list, w.pending = w.pending, nil
		return list, 0
	}
	wait = math.MaxInt64
	if len(w.waiting) > 0 {
		wait = w.due.Sub(now)
		if !ended {
			wait = max(wait, sharedCommitInterval-age)
		}
	}
	if len(w.pending) > 0 {
		wait = min(wait, sharedCommitWait-age)
	}
	return nil, wait
}

// sharedCommitMember is a group's membership in a shared commit of the sharedWriter. The transaction waits for the
// group until the group calls submitWrite or leaveCommit.
type sharedCommitMember struct {
	w     *sharedWriter
	round int // 0 for none: the group does not take part in a shared commit
}

// joinNextCommit blocks until the next shared commit begins, and returns the caller's membership in it.
func (w *sharedWriter) joinNextCommit(ctx context.Context) (sharedCommitMember, error) {
	begin := make(chan int, 1)
	w.mu.Lock()
	w.waiting = append(w.waiting, begin)
	w.mu.Unlock()
	trySignal(w.wake)
	select {
	case round := <-begin:
		return sharedCommitMember{w, round}, nil
	case <-ctx.Done():
		return sharedCommitMember{}, ctx.Err()
	}
}

// leaveCommit ends the membership, so that the transaction of the shared commit does not wait for the group. It has no effect
// after submitWrite or leaveCommit.
func (t *sharedCommitMember) leaveCommit() {
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	t.leaveCommitLocked()
	trySignal(t.w.wake)
}

// leaveCommitLocked is like leaveCommit, but the caller must hold the mutex of the sharedWriter.
func (t *sharedCommitMember) leaveCommitLocked() {
	if t.round > 0 && t.round == t.w.round {
		t.w.folding--
	}
	t.round = 0
}

// submitWrite writes rows in the transaction of the shared commit, or of the next one if that has begun, and returns the
// result. conn is the connection that holds the group's lock.
func (t *sharedCommitMember) submitWrite(ctx context.Context, conn *lockConnection, write store.GroupWrite) error {
	s := &submittedWrite{conn, write, make(chan error, 1)}
	t.w.mu.Lock()
	t.w.pending = append(t.w.pending, s)
	t.leaveCommitLocked()
	t.w.mu.Unlock()
	trySignal(t.w.wake)
	select {
	case err := <-s.done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// commitAll writes the rows of all groups in list, in one transaction for each connection, and sends each group its
// result.
func (w *sharedWriter) commitAll(ctx context.Context, list []*submittedWrite) {
	slices.SortFunc(list, func(a, b *submittedWrite) int { return a.write.Group - b.write.Group })
	for len(list) > 0 {
		conn := list[0].conn
		var same, others []*submittedWrite
		for _, s := range list {
			if s.conn == conn {
				same = append(same, s)
			} else {
				others = append(others, s) // one of the two connections is lost
			}
		}
		err := w.withConnection(ctx, conn, func(c *lockConnection) error {
			commitTogether(ctx, c.store, same)
			return nil
		})
		if err != nil {
			sendResult(same, err)
		}
		list = others
	}
}

// commitTogether writes the rows of all groups in list in one transaction, and sends each group its result. If the rows
// of one group make the transaction fail, that group gets the error, and the others are written without it.
func commitTogether(ctx context.Context, s *store.Store, list []*submittedWrite) {
	for len(list) > 0 {
		writes := make([]store.GroupWrite, len(list))
		for i, s := range list {
			writes[i] = s.write
		}
		failed, err := s.ApplyTogether(ctx, writes)
		if failed < 0 {
			sendResult(list, err)
			return
		}
		sendResult(list[failed:failed+1], err)
		list = slices.Delete(list, failed, failed+1)
	}
}

// sendResult sends the result of a transaction to each group in list, whose rows the transaction wrote.
func sendResult(list []*submittedWrite, err error) {
	for _, s := range list {
		s.done <- err
	}
}

// withConnection calls f with the connection that holds the locks, which no other caller uses meanwhile. It returns
// errLockLost if this is not the connection want. If want is nil, it opens the connection unless it is open.
func (w *sharedWriter) withConnection(ctx context.Context, want *lockConnection, f func(*lockConnection) error) error {
	var c *lockConnection
	select {
	case <-ctx.Done():
		return ctx.Err()
	case c = <-w.conn:
	}
	defer func() {
		if c != nil && c.store.IsClosed() {
			close(c.lost)
			c = nil
		}
		w.conn <- c
	}()
	if want != nil && c != want {
		return errLockLost
	}
	if c == nil {
		s, err := w.open(ctx)
		if err != nil {
			return err
		}
		c = &lockConnection{s, make(chan struct{})}
	}
	return f(c)
}

// tryLockGroup tries to take a group's lock. It returns the connection that holds the lock, or nil if another process holds
// it.
func (w *sharedWriter) tryLockGroup(ctx context.Context, group int) (conn *lockConnection, err error) {
	err = w.withConnection(ctx, nil, func(c *lockConnection) error {
		locked, err := c.store.TryLockGroup(ctx, group)
		if locked {
			conn = c
		}
		return err
	})
	return conn, err
}

// unlockGroup releases a group's lock, unless the connection conn that held the lock is lost.
func (w *sharedWriter) unlockGroup(ctx context.Context, conn *lockConnection, group int) error {
	err := w.withConnection(ctx, conn, func(c *lockConnection) error { return c.store.UnlockGroup(ctx, group) })
	if errors.Is(err, errLockLost) || ctx.Err() != nil {
		return nil // closing the connection releases the lock
	}
	return err
}

// close closes the connection that holds the locks. The caller must not call another method at the same time or later.
func (w *sharedWriter) close() error {
	if c := <-w.conn; c != nil {
		return c.store.Close()
	}
	return nil
}
