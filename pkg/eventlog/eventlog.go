// Package eventlog is how Spool's parts write to and read from the log of
// commits. Adapters are jslog (JetStream) and memlog (memory); both pass the
// suite in eventlogtest.
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

// Position is a commit's place in the log: the shard and the sequence in its stream.
// The zero Position stands before the first commit.
type Position struct {
	Shard int
	Seq   uint64
}

// String is the opaque form that clients see: <shard>-<stream sequence>.
func (p Position) String() string {
	return strconv.Itoa(p.Shard) + "-" + strconv.FormatUint(p.Seq, 10)
}

// ParsePosition reads String back.
func ParsePosition(s string) (Position, error) {
	shard, seq, ok := strings.Cut(s, "-")
	n, err1 := strconv.ParseUint(shard, 10, 8)
	q, err2 := strconv.ParseUint(seq, 10, 64)
	if !ok || err1 != nil || err2 != nil {
		return Position{}, fmt.Errorf("position: %.64q is not <shard>-<sequence>", s)
	}
	return Position{int(n), q}, nil
}

// Head is the last commit of a subject; Seq 0 means that there is none yet.
type Head struct {
	Subject events.Subject
	Seq     uint64 // stream sequence
	Hash    string // which the next commit chains to
	Commit  events.Commit
	// Guard is the stream sequence of the last message on the subject where that is not the commit: messages that are not part of the
	// log follow it. 0 means Seq.
	Guard uint64
}

// Expected is the stream sequence that the next append is guarded by.
func (h Head) Expected() uint64 { return max(h.Guard, h.Seq) }

// Record is a stored commit. Events are decoded, and data that lies in the
// object store has been fetched and checked; Commit holds the stored bytes.
type Record struct {
	Subject  events.Subject
	Position Position
	Time     time.Time // when the log stored it
	Commit   events.Commit
	Events   []events.Event
	Bytes    int64 // that the events take in the log, and their large data in Payloads
}

// ConflictError is a refused guard: another commit came first. It is never retried blindly.
type ConflictError struct {
	Subject  events.Subject
	Expected uint64
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("append to %s: another commit came after sequence %d", e.Subject, e.Expected)
}

// Errors that a caller may branch on.
var (
	// ErrTooLarge is a commit over events.MaxCommit after claim checks: split it.
	ErrTooLarge = errors.New("commit is too large")
	// ErrFull is a log at its limit: the write was refused, nothing was dropped.
	ErrFull = errors.New("the log is full")
	// ErrUnavailable is a log that cannot be reached; whether an append was stored is unknown.
	ErrUnavailable = errors.New("the log is unavailable")
	// ErrNotFound is a position or payload that the log does not hold.
	ErrNotFound = errors.New("not in the log")
)

// Appender writes commits.
type Appender interface {
	// Append seals the draft onto the head and stores it, guarded: it fails with
	// *ConflictError if the subject's last commit is no longer the head. A lost
	// acknowledgement is settled inside: when Append returns nil the commit is
	// stored exactly once. It returns the new head.
	Append(ctx context.Context, head Head, draft events.Draft) (Head, error)
}

// Freshness says which copy of a stream may answer.
type Freshness int

// Any may be a replica that lags (a guard catches it); Leader is the newest.
const (
	Any Freshness = iota
	Leader
)

// Reader reads commits.
type Reader interface {
	// Last is the head of a subject.
	Last(ctx context.Context, s events.Subject, f Freshness) (Head, error)
	// At reads one commit, with its events resolved; ErrNotFound if there is none.
	At(ctx context.Context, p Position) (Record, error)
	// Read yields the commits of one shard after a position up to the shard's
	// present end, in order; f narrows it.
	Read(ctx context.Context, after Position, f Filter) iter.Seq2[Record, error]
	// Tail yields what Read does and then waits for more until ctx ends; then it
	// yields no error. It survives reconnects without loss or repetition.
	Tail(ctx context.Context, after Position, f Filter) iter.Seq2[Record, error]
}

// Changes is what came into one shard of the log.
type Changes struct {
	Through Position          // the last message that was looked at
	Last    map[string]uint64 // by subject: the stream sequence of its last message up to Through, whether it is part of the log or not
	More    bool              // the shard has changes after Through
	looked  int               // messages
}

// maxLooked is how many messages one Changes looks at, so that a caller who remembers Through gets on in a log of any length.
const maxLooked = 1_000_000

// Add notes a message. It reports false, and sets More, if the message or its subject is one too many.
func (c *Changes) Add(subject string, seq uint64, maxSubjects int) bool {
	if _, known := c.Last[subject]; c.looked == maxLooked || !known && len(c.Last) == maxSubjects {
		c.More = true
		return false
	}
	c.looked++
	c.Last[subject], c.Through.Seq = seq, seq
	return true
}

// ChangeReader finds out which subjects changed, without reading the commits.
type ChangeReader interface {
	// Changed returns the changes after a position up to the shard's present end, or, with More, a part of them: of maxSubjects subjects
	// and a million messages at most.
	Changed(ctx context.Context, after Position, maxSubjects int) (Changes, error)
}

// Filter narrows a read; the zero Filter is everything.
type Filter struct {
	Partitions []int          // nil for all of the shard
	Subject    events.Subject // zero for all; with Aspect "" both aspects of a session
	// Foreign asks for the messages that are not part of the log as well, each as a *ForeignError with its Record's Position. Without it
	// they are left out.
	Foreign bool
}

// Log is all of them.
type Log interface {
	Appender
	Reader
	ChangeReader
	// Shards is the number of streams the log is spread over; a partition lies in
	// the shard partition mod Shards.
	Shards() int
}

// Numbered is an event with its place in its session.
type Numbered struct {
	Seq      uint32 // 1, 2, 3, … in stream order over both subjects
	Position Position
	Aspect   events.Aspect
	Event    events.Event
}

// Session yields a session's events numbered from 1, over both its subjects in
// stream order, up to the present end. Every reader counts the same numbers.
func Session(ctx context.Context, l Log, tenant, session string) iter.Seq2[Numbered, error] {
	return SessionAfter(ctx, l, tenant, session, Numbered{})
}

// SessionAfter yields what Session does after the last event of a commit; the zero Numbered stands before the first.
func SessionAfter(ctx context.Context, l Log, tenant, session string, last Numbered) iter.Seq2[Numbered, error] {
	after := Position{Shard: events.Partition(session) % l.Shards(), Seq: last.Position.Seq}
	return func(yield func(Numbered, error) bool) {
		seq := last.Seq
		for rec, err := range l.Read(ctx, after, Filter{Subject: events.Subject{Tenant: tenant, ID: session}}) {
			if err != nil {
				yield(Numbered{}, err)
				return
			}
			for _, e := range rec.Events {
				seq++
				if !yield(Numbered{seq, rec.Position, rec.Subject.Aspect, e}, nil) {
					return
				}
			}
		}
	}
}
