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
	// roundInterval is the shortest time between the beginnings of two rounds of a writer under load.
	roundInterval = 15 * time.Millisecond
	// roundBurst is the number of rounds that may begin without a pause after a time without rounds. The first events
	// of a turn come one after the other, and its client waits for each.
	roundBurst = 4
	// roundLimit is how long after the beginning of a round its transaction waits for groups that fold in the round.
	roundLimit = 5 * time.Millisecond
)

// errLockLost is returned if the connection that held a group's lock broke.
var errLockLost = errors.New("the connection that holds the group's lock is lost")

// writer holds the connection that has the locks of all groups that this process leads, and commits the changes of
// these groups together, in rounds. On average a round begins every roundInterval, and up to roundBurst begin at once
// after a time without rounds. When a round begins, each waiting group folds what its queue has, and one transaction
// commits the result of all of them.
type writer struct {
	open   openStore
	commit func(context.Context, []*submission) // writer.commitAll, except in tests
	// conn has the connection while nobody uses it; nil if it is not open.
	conn chan *lockConnection
	wake chan struct{} // has a token if the fields below have changed

	mu      sync.Mutex
	round   int           // number of the present round
	began   time.Time     // when the present round began
	due     time.Time     // from which the next round may begin
	folding int           // number of groups that fold in the present round
	waiting []chan int    // receive the number of the next round when it begins
	pending []*submission // to be committed
}

// lockConnection is a connection to Postgres that holds the advisory locks of groups.
type lockConnection struct {
	store *store.Store
	lost  chan struct{} // closed when the connection is closed
}

// submission is a group's write that waits to be committed in a transaction of the writer.
type submission struct {
	conn  *lockConnection // connection that holds the group's lock
	write store.Write
	done  chan error // receives the result
}

func newWriter(open openStore) *writer {
	w := &writer{open: open, conn: make(chan *lockConnection, 1), wake: make(chan struct{}, 1)}
	w.commit = w.commitAll
	w.conn <- nil
	return w
}

// run commits what groups submit, until ctx ends.
func (w *writer) run(ctx context.Context) {
	timer := time.NewTimer(math.MaxInt64)
	defer timer.Stop()
	for {
		list, wait := w.nextCommit(time.Now())
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

// nextCommit begins a round if one is due, and returns what is to be committed now, or else the time until it must be called
// again.
func (w *writer) nextCommit(now time.Time) (list []*submission, wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	age := now.Sub(w.began)
	ended := w.folding == 0 && len(w.pending) == 0 || age >= roundInterval
	if len(w.waiting) > 0 && ended && !now.Before(w.due) {
		w.round, w.began, w.folding, age = w.round+1, now, len(w.waiting), 0
		if earliest := now.Add(-(roundBurst - 1) * roundInterval); w.due.Before(earliest) {
			w.due = earliest
		}
		w.due = w.due.Add(roundInterval)
		for _, begin := range w.waiting {
			begin <- w.round
		}
		w.waiting = nil
	}
	if len(w.pending) > 0 && (w.folding == 0 || age >= roundLimit) {
		list, w.pending = w.pending, nil
		return list, 0
	}
	wait = math.MaxInt64
	if len(w.waiting) > 0 {
		wait = w.due.Sub(now)
		if !ended {
			wait = max(wait, roundInterval-age)
		}
	}
	if len(w.pending) > 0 {
		wait = min(wait, roundLimit-age)
	}
	return nil, wait
}

// roundMember is a group that takes part in a round of the writer. It takes part until it submits a write or leaves.
type roundMember struct {
	w     *writer
	round int // 0 for none: the group did not wait for a round
}

// begin waits until the next round begins.
func (w *writer) begin(ctx context.Context) (roundMember, error) {
	begin := make(chan int, 1)
	w.mu.Lock()
	w.waiting = append(w.waiting, begin)
	w.mu.Unlock()
	signal(w.wake)
	select {
	case round := <-begin:
		return roundMember{w, round}, nil
	case <-ctx.Done():
		return roundMember{}, ctx.Err()
	}
}

// leave ends the membership, so that the transaction does not wait for the group. It has no effect after submit or leave.
func (t *roundMember) leave() {
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	t.leaveLocked()
	signal(t.w.wake)
}

// leaveLocked is leave for a caller that holds the lock of the writer.
func (t *roundMember) leaveLocked() {
	if t.round > 0 && t.round == t.w.round {
		t.w.folding--
	}
	t.round = 0
}

// submit commits a write in the transaction of the round, or in the next one if it comes too late. conn is the
// connection that holds the group's lock.
func (t *roundMember) submit(ctx context.Context, conn *lockConnection, write store.Write) error {
	s := &submission{conn, write, make(chan error, 1)}
	t.w.mu.Lock()
	t.w.pending = append(t.w.pending, s)
	t.leaveLocked()
	t.w.mu.Unlock()
	signal(t.w.wake)
	select {
	case err := <-s.done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// commitAll commits submissions and answers them.
func (w *writer) commitAll(ctx context.Context, list []*submission) {
	slices.SortFunc(list, func(a, b *submission) int { return a.write.Group - b.write.Group })
	for len(list) > 0 {
		conn := list[0].conn
		var same, others []*submission
		for _, s := range list {
			if s.conn == conn {
				same = append(same, s)
			} else {
				others = append(others, s) // one of the two connections is lost
			}
		}
		err := w.use(ctx, conn, func(c *lockConnection) error {
			commitTogether(ctx, c.store, same)
			return nil
		})
		if err != nil {
			sendResult(same, err)
		}
		list = others
	}
}

// commitTogether commits submissions in one transaction and answers them. If the transaction fails because of one of
// them, that one is answered with the error, and the others are committed without it.
func commitTogether(ctx context.Context, s *store.Store, list []*submission) {
	for len(list) > 0 {
		writes := make([]store.Write, len(list))
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

// sendResult reports the result of a transaction to the groups that submitted to it.
func sendResult(list []*submission, err error) {
	for _, s := range list {
		s.done <- err
	}
}

// use calls f with the connection, which nobody else uses meanwhile. It returns errLockLost if that is not want any more.
// If want is nil, it opens the connection if necessary.
func (w *writer) use(ctx context.Context, want *lockConnection, f func(*lockConnection) error) error {
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

// tryLock tries to take a group's lock, and returns the connection that holds it, or nil if another process does.
func (w *writer) tryLock(ctx context.Context, group int) (conn *lockConnection, err error) {
	err = w.use(ctx, nil, func(c *lockConnection) error {
		locked, err := c.store.TryLock(ctx, group)
		if locked {
			conn = c
		}
		return err
	})
	return conn, err
}

// unlock releases a group's lock, unless the connection that held it is lost.
func (w *writer) unlock(ctx context.Context, conn *lockConnection, group int) error {
	err := w.use(ctx, conn, func(c *lockConnection) error { return c.store.Unlock(ctx, group) })
	if errors.Is(err, errLockLost) || ctx.Err() != nil {
		return nil // closing the connection releases the lock
	}
	return err
}

// close closes the connection. No other method may be called at the same time or later.
func (w *writer) close() error {
	if c := <-w.conn; c != nil {
		return c.store.Close()
	}
	return nil
}
