package jslog

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Settings of the temporary consumers of readers. Services may not delete consumers, so the server removes a consumer
// that is inactive.
const (
	pullMessages      = 1000
	pullBytes         = 16 << 20
	pullExpiry        = 10 * time.Second
	heartbeat         = 500 * time.Millisecond
	inactiveThreshold = 10 * time.Second
	// quietTimeout is the time that a reader waits for a message before it asks the server whether one was lost.
	quietTimeout = 2 * time.Second
)

// Read yields commits up to the current end; see eventlog.Reader. The end is the last commit that the leader has
// when the read starts.
func (l *Log) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.read(ctx, after, f, false)
}

// ReadUndecoded is like Read, but yields records without events. Resolve decodes the events, so that other goroutines
// than the reader can do it.
func (l *Log) ReadUndecoded(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.read(ctx, after, f, true)
}

// read is Read, or with undecoded ReadUndecoded.
func (l *Log) read(ctx context.Context, after eventlog.Position, f eventlog.Filter, undecoded bool) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		if err := l.readTo(ctx, after, f, undecoded, yield); err != nil {
			yield(eventlog.Record{}, err)
		}
	}
}

// errStopReading stops a read: the caller stopped, or has received an error.
var errStopReading = errors.New("stop")

// readTo yields the commits up to the current end. It returns errStop after it has yielded an error, or when yield returns false.
func (l *Log) readTo(ctx context.Context, after eventlog.Position, f eventlog.Filter, undecoded bool, yield func(eventlog.Record, error) bool) error {
	r, err := l.reader(after, f)
	if err != nil {
		return err
	}
	r.undecoded = undecoded
	return r.readToEnd(ctx, func(m jetstream.Msg) error { return r.yield(ctx, m, yield) })
}

// readToEnd calls take for each message up to the current end, and then closes the reader.
func (r *reader) readToEnd(ctx context.Context, take func(jetstream.Msg) error) error {
	end, err := r.end(ctx)
	if err != nil {
		return err
	}
	return r.readThrough(ctx, end, take)
}

// readThrough calls take for each message up to the first one at or after a sequence, and then closes the reader.
func (r *reader) readThrough(ctx context.Context, end uint64, take func(jetstream.Msg) error) (err error) {
	defer r.close()
	for err == nil && r.seq < end {
		var m jetstream.Msg
		m, err = r.next(ctx)
		switch {
		case err == nil:
			err = take(m)
		case ctx.Err() != nil:
			return fmt.Errorf("read %s: %w: %w", r.stream, eventlog.ErrUnavailable, context.Cause(ctx))
		case errors.Is(err, errNoMessage):
			// The messages at the end were lost in transit or have been purged.
			r.close()
			end, err = r.end(ctx)
		}
	}
	if errors.Is(err, errStopReading) {
		return nil
	}
	return err
}

// Tail yields commits until ctx ends; see eventlog.Reader.
func (l *Log) Tail(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		r, err := l.reader(after, f)
		if err != nil {
			yield(eventlog.Record{}, err)
			return
		}
		defer r.close()
		for {
			m, err := r.next(ctx)
			switch {
			case err == nil:
				err = r.yield(ctx, m, yield)
			case errors.Is(err, errNoMessage):
				r.closeIfBehind(ctx)
				continue
			}
			if errors.Is(err, errStopReading) || ctx.Err() != nil {
				return
			}
			if err != nil {
				yield(eventlog.Record{}, err)
				return
			}
		}
	}
}

// reader reads a stream in order. If its consumer is lost, it creates a new one after the last delivered sequence.
// The client library's ordered consumer does the same, but cannot be stopped while the server is unavailable.
type reader struct {
	log       *Log
	shard     int
	stream    string
	filters   []string
	aspects   []string // last tokens of the subjects that the filter matches, if the consumer's filter is wider; nil for all
	bare      bool     // messages are delivered without their content (headers only)
	undecoded bool     // records are yielded without events
	foreign   bool     // messages that are not part of the log are yielded as errors
	seq       uint64   // stream sequence of the last delivery; before it, the requested position
	expect    uint64   // number of the last delivery of the current consumer
	source    jetstream.Consumer
	pull      jetstream.MessagesContext
	backoff   *backoff

	within     context.Context // see quietContext; nil for none
	stopWithin context.CancelFunc
	renew      time.Time // time after which within is replaced
}

// reader returns a reader that starts after a position. It sends no request. The error names what is wrong with the filter.
func (l *Log) reader(after eventlog.Position, f eventlog.Filter) (*reader, error) {
	if err := f.Check(l.partitions, after.Shard, l.shards); err != nil {
		return nil, err
	}
	return &reader{
		log: l, shard: after.Shard, stream: topology.EventsStream(after.Shard), filters: l.filters(f), aspects: matchedAspects(f), foreign: f.Foreign, seq: after.Seq, backoff: l.readBackoff(),
	}, nil
}

// filters returns the filter subjects of a reader's consumer, or none for the whole stream. There is more than one
// only for a list of partitions: the server searches far longer for the next message of several filters.
func (l *Log) filters(f eventlog.Filter) []string {
	if f.Subject == (events.Subject{}) {
		var list []string
		for _, p := range f.Partitions {
			list = append(list, topology.PartitionFilter(p))
		}
		return list
	}
	s := f.Subject
	if s.Aspect == "" {
		s.Aspect = "*"
	}
	return []string{l.subject(s)}
}

// matchedAspects returns the aspects that a filter matches, or nil if all messages of its consumer match.
func matchedAspects(f eventlog.Filter) []string {
	if f.Subject == (events.Subject{}) || f.Subject.Aspect != "" {
		return nil
	}
	return []string{string(events.Life), string(events.Run)}
}

// end returns the sequence of the last message that matches the filter, or 0 if there is none.
func (r *reader) end(ctx context.Context) (uint64, error) {
	filters := r.filters
	if len(filters) == 0 {
		// The last message of the stream is a cheap lookup, but is not found if it was purged. Then the server
		// searches all subjects.
		end, err := r.last(ctx, ">")
		if end > 0 || err != nil {
			return end, err
		}
		filters = []string{"ev.>"}
	}
	var end uint64
	for _, f := range filters {
		last, err := r.last(ctx, f)
		if err != nil {
			return 0, err
		}
		end = max(end, last)
	}
	return end, nil
}

// last returns the sequence of the last message of a subject, or 0.
func (r *reader) last(ctx context.Context, subject string) (uint64, error) {
	m, err := r.log.fromLeader(ctx, r.stream, getRequest{LastFor: subject})
	if errors.Is(err, eventlog.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the end of %s: %w", r.stream, err)
	}
	return m.Seq, nil
}

// errNoMessage is returned if no message arrived within quiet.
var errNoMessage = errors.New("no message arrived")

// next returns the next message, across any number of reconnects. Its error is errQuiet, the error of ctx, or an
// error that a retry cannot resolve.
func (r *reader) next(ctx context.Context) (jetstream.Msg, error) {
	for {
		m, err := r.nextDelivery(ctx)
		if err == nil {
			r.backoff.reset()
			return m, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if errors.Is(err, errNoMessage) {
			return nil, err
		}
		r.close()
		if errors.Is(err, jetstream.ErrConnectionClosed) || errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, fmt.Errorf("read %s: %w: %w", r.stream, eventlog.ErrUnavailable, err)
		}
		r.log.logger.Log(ctx, r.backoff.level(), "resume a read", "stream", r.stream, "after", r.seq, "error", err)
		if err := r.backoff.wait(ctx, err); err != nil {
			return nil, err
		}
	}
}

// errGap is returned if a consumer skipped a message.
var errGap = errors.New("a delivery is missing")

// nextDelivery returns the next message of the current consumer, and creates a consumer if there is none. The error is errQuiet, errGap, that of
// ctx, or an error of the consumer.
func (r *reader) nextDelivery(ctx context.Context) (jetstream.Msg, error) {
	if r.pull == nil {
		if err := r.open(ctx); err != nil {
			return nil, err
		}
	}
	within := r.quietContext(ctx)
	m, err := r.pull.Next(jetstream.NextContext(within))
	if err != nil && within.Err() != nil {
		r.resetQuietContext()
		return nil, context.Cause(within)
	}
	if err != nil {
		return nil, err
	}
	meta, err := m.Metadata()
	if err != nil {
		return nil, err
	}
	r.expect++
	if meta.Sequence.Consumer != r.expect {
		return nil, errGap
	}
	r.seq = meta.Sequence.Stream
	return m, nil
}

// quietContext returns a context that ends if no message arrives within quiet, or up to half of quiet earlier. The
// context is shared by several messages, because a timer per message would add a tenth to the cost of reading.
func (r *reader) quietContext(ctx context.Context) context.Context {
	if r.within == nil || time.Now().After(r.renew) {
		r.resetQuietContext()
		r.within, r.stopWithin = context.WithTimeoutCause(ctx, quietTimeout, errNoMessage)
		r.renew = time.Now().Add(quietTimeout / 2)
	}
	return r.within
}

// resetQuietContext ends the context that quietContext returned, so that the next call creates a new one.
func (r *reader) resetQuietContext() {
	if r.within != nil {
		r.stopWithin()
		r.within = nil
	}
}

// open creates a consumer that starts after the last delivered message.
func (r *reader) open(ctx context.Context) error {
	cfg := jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: r.seq + 1,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: inactiveThreshold, HeadersOnly: r.bare,
	}
	if len(r.filters) == 1 {
		cfg.FilterSubject = r.filters[0]
	} else {
		cfg.FilterSubjects = r.filters
	}
	try, cancel := context.WithTimeout(ctx, r.backoff.timeout())
	defer cancel()
	c, err := r.log.js.CreateConsumer(try, r.stream, cfg)
	if err != nil {
		return err
	}
	pull, err := c.Messages(jetstream.PullMaxMessagesWithBytesLimit(pullMessages, pullBytes), jetstream.PullExpiry(pullExpiry),
		jetstream.PullHeartbeat(heartbeat), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return err
	}
	r.source, r.pull, r.expect = c, pull, 0
	return nil
}

// closeIfBehind closes the consumer if it has sent more than has arrived: its last messages were in transit when the
// connection broke, and no later delivery would reveal the gap.
func (r *reader) closeIfBehind(ctx context.Context) {
	try, cancel := context.WithTimeout(ctx, r.backoff.timeout())
	defer cancel()
	info, err := r.source.Info(try)
	if err == nil && info.Delivered.Consumer == r.expect {
		return
	}
	if ctx.Err() == nil {
		r.log.logger.Debug("resume a read", "stream", r.stream, "after", r.seq, "error", errors.Join(err, errGap))
	}
	r.close()
}

// close stops the consumer.
func (r *reader) close() {
	r.resetQuietContext()
	if r.pull != nil {
		r.pull.Stop()
		r.pull = nil
	}
}

// yield decodes a message and yields its record, unless the filter does not match it or it is not part of the log. It returns errStop
// when the read must end.
func (r *reader) yield(ctx context.Context, m jetstream.Msg, yield func(eventlog.Record, error) bool) error {
	if r.aspects != nil && !slices.Contains(r.aspects, m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]) {
		return nil
	}
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	open := r.log.open
	if r.undecoded {
		open = r.log.openUndecoded
	}
	rec, err := open(ctx, eventlog.Position{Shard: r.shard, Seq: meta.Sequence.Stream},
		message{Subject: m.Subject(), Seq: meta.Sequence.Stream, Data: m.Data(), Time: meta.Timestamp, header: m.Headers()})
	var foreign *eventlog.ForeignError
	if !r.foreign && errors.As(err, &foreign) {
		r.log.logForeign(ctx, foreign)
		return nil
	}
	if err != nil && ctx.Err() != nil {
		return err // ctx ended while a payload was fetched
	}
	if !yield(rec, err) || err != nil {
		return errStopReading
	}
	return nil
}
