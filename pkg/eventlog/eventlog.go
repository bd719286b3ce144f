// Package eventlog defines how Spool's services append to and read the log of commits. Its implementations are
// jslog (JetStream) and memlog (memory). Both pass the conformance suite in eventlogtest.
package eventlog

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Position is the position of a commit in the log: its shard and its sequence in the shard's stream. The zero
// Position precedes the first commit.
type Position struct {
	Shard int
	Seq   uint64
}

// String returns the opaque form that clients see: <shard>-<stream sequence>.
func (p Position) String() string {
	return strconv.Itoa(p.Shard) + "-" + strconv.FormatUint(p.Seq, 10)
}

// ParsePosition parses the form that String returns.
func ParsePosition(s string) (Position, error) {
	shard, seq, ok := strings.Cut(s, "-")
	n, err1 := strconv.ParseUint(shard, 10, 8)
	q, err2 := strconv.ParseUint(seq, 10, 64)
	if !ok || err1 != nil || err2 != nil {
		return Position{}, fmt.Errorf("position: %.64q is not <shard>-<sequence>", s)
	}
	return Position{int(n), q}, nil
}

// Head is the last commit of a subject. Seq 0 means that the subject has none.
type Head struct {
	Subject events.Subject
	Seq     uint64 // stream sequence
	Hash    string // the next commit's Prev
	Commit  events.Commit
	// Guard is the stream sequence of the subject's last message if that message is not the commit but a message
	// that is not part of the log. 0 means Seq.
	Guard uint64
}

// ExpectedSequence returns the last stream sequence of the subject that the next append states as its guard.
func (h Head) ExpectedSequence() uint64 { return max(h.Guard, h.Seq) }

// Record is a stored commit. Its events are decoded, and data from the object store has been fetched and verified.
// Commit has the stored bytes.
type Record struct {
	Subject  events.Subject
	Position Position
	Time     time.Time // when the log stored the commit
	Commit   events.Commit
	Events   []events.Event
	Bytes    int64 // size of the events in the log, and of their large data in the object store
}

// ConflictError is returned if another commit was appended first. The caller must load the new head and decide
// again before it retries.
type ConflictError struct {
	Subject  events.Subject
	Expected uint64
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("append to %s: another commit came after sequence %d", e.Subject, e.Expected)
}

// Errors that a caller may test for.
var (
	// ErrTooLarge is returned for a commit that exceeds events.MaxCommitBytes although its large data was moved to the
	// object store. The caller must split it.
	ErrTooLarge = errors.New("commit is too large")
	// ErrFull is returned if the log has reached its limit. Nothing was written or dropped.
	ErrFull = errors.New("the log is full")
	// ErrUnavailable is returned if the log cannot be reached. It is unknown whether an append was stored.
	ErrUnavailable = errors.New("the log is unavailable")
	// ErrNotFound is returned for a position or payload that the log does not have.
	ErrNotFound = errors.New("not in the log")
)

// Appender appends commits to the log.
type Appender interface {
	// Append seals the draft onto the head and stores it. It returns the new head. It returns *ConflictError if
	// head is no longer the subject's last commit. Append handles lost acknowledgements: if it returns nil, the
	// commit is stored exactly once.
	Append(ctx context.Context, head Head, draft events.Draft) (Head, error)
}

// Freshness selects which replica of a stream may answer a read.
type Freshness int

const (
	// AnyReplica accepts a replica that lags. An append that follows such a read fails with a conflict if the replica
	// missed a commit.
	AnyReplica Freshness = iota
	// LeaderOnly reads from the leader of the stream, which has every acknowledged commit.
	LeaderOnly
)

// Reader reads commits from the log.
type Reader interface {
	// Last returns the head of a subject.
	Last(ctx context.Context, s events.Subject, f Freshness) (Head, error)
	// CommitAt returns the commit at a position with its events, or ErrNotFound.
	CommitAt(ctx context.Context, p Position) (Record, error)
	// Read yields the commits of one shard after a position, in order, up to the end that the shard has now. f
	// restricts the commits.
	Read(ctx context.Context, after Position, f Filter) iter.Seq2[Record, error]
	// Tail yields the same commits as Read and then waits for new ones until ctx is done, which is not an error. It
	// survives reconnects without loss or repetition.
	Tail(ctx context.Context, after Position, f Filter) iter.Seq2[Record, error]
}

// Changes describes which subjects of one shard have new commits after a position.
type Changes struct {
	Through  Position          // the end of the examined range
	Last     map[string]uint64 // by subject: the stream sequence of its last message up to Through, whether or not it is part of the log
	Hash     map[string]string // by subject: the hash of the commit at this sequence, for those commits that were read
	More     bool              // there are changes after Through
	examined int               // number of examined messages
}

// maxExaminedMessages is the maximum number of messages that one Changes covers. A caller that stores Changes.Through
// makes progress in a log of any length.
const maxExaminedMessages = 1_000_000

// Add records a message. It returns false and sets More if the number of messages or of subjects would exceed its
// limit.
func (c *Changes) Add(subject string, seq uint64, maxSubjects int) bool {
	if _, known := c.Last[subject]; c.examined == maxExaminedMessages || !known && len(c.Last) == maxSubjects {
		c.More = true
		return false
	}
	c.examined++
	c.Last[subject], c.Through.Seq = seq, seq
	return true
}

// ChangeReader finds the subjects that changed, without reading their commits.
type ChangeReader interface {
	// Changed returns the changes after a position up to the end that the shard has now. It returns at most
	// maxSubjects subjects, and may return fewer. It sets More if there are more.
	Changed(ctx context.Context, after Position, maxSubjects int) (Changes, error)
	// ChangedAmong returns those of the given subjects, which belong to the shard of the position, whose last message is
	// after the position. A replica that lags may answer: Through is the end that this replica has, or the given position
	// if that is later. So a caller that passes Through to the next call for the same subjects misses no change.
	ChangedAmong(ctx context.Context, after Position, subjects []events.Subject) (Changes, error)
}

// Filter selects the commits that a read yields. The zero Filter selects all.
type Filter struct {
	Partitions []int          // numbers of Log.Partitioning; nil for all of the shard
	Subject    events.Subject // zero for all; with Aspect "" both aspects of a session
	// Foreign also yields messages that are not part of the log, each as a *ForeignError with the Position of its
	// Record. Without Foreign they are skipped.
	Foreign bool
}

// Log reads and appends the commits of the event log.
type Log interface {
	Appender
	Reader
	ChangeReader
	// Shards returns the number of streams over which the log is distributed. Partition p is in shard p mod Shards.
	Shards() int
	// Partitioning returns how the log distributes ids over partitions.
	Partitioning() events.Partitioning
}

// NumberedEvent is an event of a session with its seq in the session.
type NumberedEvent struct {
	Seq      uint32 // 1, 2, 3, … in stream order over both subjects of the session
	Position Position
	Aspect   events.Aspect
	Event    events.Event
}

// SessionEvents yields a session's events in stream order over both of its subjects, numbered from 1, up to the current
// end of the log. All readers number the events equally.
func SessionEvents(ctx context.Context, l Log, tenant, session string) iter.Seq2[NumberedEvent, error] {
	return SessionEventsAfter(ctx, l, tenant, session, NumberedEvent{})
}

// SessionEventsAfter yields the same events as SessionEvents, starting after last, which must be the last event of a
// commit. The zero NumberedEvent precedes the first event.
func SessionEventsAfter(ctx context.Context, l Log, tenant, session string, last NumberedEvent) iter.Seq2[NumberedEvent, error] {
	after := Position{Shard: events.Partition(session) % l.Shards(), Seq: last.Position.Seq}
	return func(yield func(NumberedEvent, error) bool) {
		seq := last.Seq
		for rec, err := range l.Read(ctx, after, Filter{Subject: events.Subject{Tenant: tenant, ID: session}}) {
			if err != nil {
				yield(NumberedEvent{}, err)
				return
			}
			for _, e := range rec.Events {
				seq++
				if !yield(NumberedEvent{seq, rec.Position, rec.Subject.Aspect, e}, nil) {
					return
				}
			}
		}
	}
}
