package jslog

import (
	"context"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// maxCountedSubjects is the maximum number of subjects whose messages are counted. The server returns up to 100,000
	// subjects in one response.
	maxCountedSubjects = 50_000
	// maxCountAge is the maximum number of messages that may follow a count that Changed still compares with. The last
	// messages of the subjects that changed since then are in the newest files of the stream, so the server does not
	// have to load old ones.
	maxCountAge = 1_000_000
	// maxCountTries is the maximum number of times that one Changed counts the messages. A count fails if other
	// messages are stored meanwhile.
	maxCountTries = 3
	// maxRereadSubjects is the maximum number of subjects whose last message is after the end of the examined range and
	// that are read again to find their last message in the range.
	maxRereadSubjects = 100
)

// isCountingCheaper reports whether counting the messages of every subject is cheaper than reading the headers of each
// new message. Client and server use about 4 µs of processor time for a subject and 8 µs for a message.
func isCountingCheaper(state jetstream.StreamState, after uint64) bool {
	return state.LastSeq > after && state.LastSeq-after >= state.NumSubjects && state.NumSubjects <= maxCountedSubjects
}

// subjectCounts is the number of messages of each subject of a stream, exactly as of one stream sequence.
type subjectCounts struct {
	stream   jetstream.StreamInfo // without Subjects
	at       uint64               // stream sequence
	subjects map[string]uint64
}

// Changed returns the subjects that changed; see eventlog.ChangeReader. The end is the last message that the leader
// has when the call starts.
//
// The server has no index by time, but it can count the messages of each subject. Changed keeps the last count. If
// the counts of two calls show which subjects changed, it reads only the last commits of these. Otherwise it reads
// the headers of all messages.
func (l *Log) Changed(ctx context.Context, after eventlog.Position, maxSubjects int) (eventlog.Changes, error) {
	if err := (eventlog.Filter{}).Check(l.partitions, after.Shard, l.shards); err != nil {
		return eventlog.Changes{Through: after, Last: map[string]uint64{}}, err
	}
	before, now := l.counts[after.Shard].Load(), l.countMessages(ctx, after)
	if now != nil {
		l.counts[after.Shard].Store(now)
	}
	if now != nil && before != nil && before.at <= after.Seq && after.Seq-before.at <= maxCountAge {
		changed, ok := now.changedSince(before)
		if ok && len(changed) <= maxSubjects {
			c, err := l.lastInRange(ctx, after, now.at, changed)
			if err == nil {
				return l.groupByChain(c), nil
			}
			l.logger.DebugContext(ctx, "read the headers of all changes", "stream", topology.EventsStreamName(after.Shard), "error", err)
		}
	}
	return l.scanHeaders(ctx, after, now, maxSubjects)
}

// scanHeaders finds the changed subjects by reading the headers of all messages after a position, up to the sequence of
// a count or, without one, up to the current end.
func (l *Log) scanHeaders(ctx context.Context, after eventlog.Position, upTo *subjectCounts, maxSubjects int) (eventlog.Changes, error) {
	c := eventlog.Changes{Through: after, Last: map[string]uint64{}}
	r, err := l.newReader(after, eventlog.Filter{})
	if err != nil {
		return c, err
	}
	r.bare = true
	take := func(m jetstream.Msg) error {
		if upTo != nil && r.seq > upTo.at || !c.Add(l.chainOf(m.Subject()), r.seq, maxSubjects) {
			return errStopReading
		}
		return nil
	}
	end, err := r.endSequence(ctx)
	if err != nil {
		return c, err
	}
	if upTo != nil {
		end = min(end, upTo.at)
	}
	if err := r.readThrough(ctx, end, take); err != nil {
		return c, err
	}
	if upTo != nil && r.seq >= upTo.at && !c.More {
		c.Through.Seq = upTo.at // the message there may have been removed meanwhile
	}
	return c, nil
}

// countMessages counts the messages of every subject of the shard's stream. It returns nil if reading the headers is
// cheaper, or if the count is not exact as of one sequence. Its requests are not repeated, because the headers can be
// read instead.
func (l *Log) countMessages(ctx context.Context, after eventlog.Position) *subjectCounts {
	ctx, cancel := context.WithTimeout(ctx, l.ackTimeout)
	defer cancel()
	stream, err := l.js.Stream(ctx, topology.EventsStreamName(after.Shard))
	if err != nil || !isCountingCheaper(stream.CachedInfo().State, after.Seq) {
		return nil
	}
	for range maxCountTries {
		first, err := stream.Info(ctx, jetstream.WithSubjectFilter(">"))
		if err != nil {
			return nil
		}
		second, err := stream.Info(ctx)
		if err != nil {
			return nil
		}
		c := &subjectCounts{stream: *first, at: first.State.LastSeq, subjects: first.State.Subjects}
		c.stream.State.Subjects = nil
		if c.isExact(second) && isCountingCheaper(first.State, after.Seq) {
			return c
		}
	}
	return nil
}

// isExact reports whether the subjects were counted as of the sequence of the same response. The server determines
// the sequence first and counts afterwards. A message that was stored in between makes the sum too large. A message
// that was removed in between could hide this, so later has to show that none was removed. Both responses have to
// come from one leader: another one may not have applied a removal yet.
func (c *subjectCounts) isExact(later *jetstream.StreamInfo) bool {
	var sum uint64
	for _, n := range c.subjects {
		sum += n
	}
	first, second := c.stream.State, later.State
	return sum == first.Msgs && leaderName(&c.stream) == leaderName(later) && c.stream.Created.Equal(later.Created) &&
		second.LastSeq >= first.LastSeq && second.Msgs == first.Msgs+(second.LastSeq-first.LastSeq)
}

// leaderName returns the name of the server that leads the stream, or "" without a cluster.
func leaderName(info *jetstream.StreamInfo) string {
	if info.Cluster == nil {
		return ""
	}
	return info.Cluster.Leader
}

// changedSince returns the subjects that have messages after an earlier count. ok is false if the counts do not show
// this. A subject grows by the number of its new messages, or by less if messages of it were also removed. So if the
// growth of all subjects adds up to the number of new sequences, every subject with a new message has grown.
func (c *subjectCounts) changedSince(earlier *subjectCounts) (subjects []string, ok bool) {
	if c.at < earlier.at || !c.stream.Created.Equal(earlier.stream.Created) {
		return nil, false
	}
	var growth uint64
	for subject, n := range c.subjects {
		if before := earlier.subjects[subject]; n > before {
			growth += n - before
			subjects = append(subjects, subject)
		}
	}
	return subjects, growth == c.at-earlier.at
}

// chainOf returns the name of the chain of commits on a NATS subject, or the subject itself if it is not a subject of
// the log.
func (l *Log) chainOf(subject string) string {
	s, err := l.partitions.ParseSubject(subject)
	if err != nil {
		return subject
	}
	return s.String()
}

// groupByChain converts changes by NATS subject to changes by chain.
func (l *Log) groupByChain(c eventlog.Changes) eventlog.Changes {
	last, hash := make(map[string]uint64, len(c.Last)), make(map[string]string, len(c.Hash))
	for subject, seq := range c.Last {
		last[l.chainOf(subject)] = seq
	}
	for subject, h := range c.Hash {
		hash[l.chainOf(subject)] = h
	}
	c.Last, c.Hash = last, hash
	return c
}

// lastInRange reads the last message of each NATS subject in the range of sequences that ends at end. The subjects must
// be the changed ones of a count as of end.
func (l *Log) lastInRange(ctx context.Context, after eventlog.Position, end uint64, subjects []string) (eventlog.Changes, error) {
	// The headers can be read instead, so they need most of the caller's time.
	ctx, cancel := context.WithTimeout(ctx, l.ackTimeout)
	defer cancel()
	c := eventlog.Changes{
		Through: eventlog.Position{Shard: after.Shard, Seq: end}, Last: make(map[string]uint64, len(subjects)), Hash: make(map[string]string, len(subjects)),
	}
	later, wanted := map[string]uint64{}, make(map[string]bool, len(subjects))
	for _, subject := range subjects {
		wanted[subject] = true
	}
	for batch := range slices.Chunk(subjects, lastRequestSubjects) {
		_, err := l.readLastMessages(ctx, after, end, batch, func(m message) {
			// After a response that ended early, the next one may contain a newer message of a subject.
			if _, found := c.Last[m.Subject]; found || !wanted[m.Subject] {
				return
			}
			if m.Seq > end {
				later[m.Subject] = m.Seq
				return
			}
			c.Last[m.Subject] = m.Seq
			// A message that cannot be decoded, or that is not part of the log, has no hash. The caller reads it.
			if s, err := l.partitions.ParseSubject(m.Subject); err == nil {
				if commit, err := l.decodeCommit(ctx, s, m); err == nil {
					c.Hash[m.Subject] = commit.Hash
				}
			}
		})
		if err != nil {
			return c, err
		}
	}
	return c, l.addLastBeforeEnd(ctx, &c, after, later)
}

// addLastBeforeEnd adds the last messages up to c.Through of subjects that also have a message after c.Through. The
// server can look for such messages itself (up_to_seq), but during the search it may load every file of the stream and
// block writers.
func (l *Log) addLastBeforeEnd(ctx context.Context, c *eventlog.Changes, after eventlog.Position, later map[string]uint64) error {
	if len(later) == 0 {
		return nil
	}
	if len(later) > maxRereadSubjects {
		return fmt.Errorf("%d subjects changed meanwhile", len(later))
	}
	r, err := l.newReader(after, eventlog.Filter{})
	if err != nil {
		return err
	}
	r.bare = true
	var end uint64
	for subject, seq := range later {
		r.filters = append(r.filters, subject)
		end = max(end, seq)
	}
	return r.readThrough(ctx, end, func(m jetstream.Msg) error {
		if r.seq > c.Through.Seq {
			return errStopReading
		}
		c.Last[m.Subject()] = r.seq
		return nil
	})
}
