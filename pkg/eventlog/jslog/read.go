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
	maxPullMessages           = 1000
	maxPullBytes              = 16 << 20
	pullExpiry                = 10 * time.Second
	pullHeartbeat             = 500 * time.Millisecond
	consumerInactiveThreshold = 10 * time.Second
	// noMessageTimeout is the time that a reader waits for a message before it asks the server whether a message was
	// lost.
	noMessageTimeout = 2 * time.Second
)

// Read yields commits up to the current end; see eventlog.Reader. The end is the last commit that the leader has
// when the read starts.
func (l *Log) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.readRecords(ctx, after, f, false)
}

// ReadUndecoded is like Read, but yields records without events. ResolveEvents decodes the events, so that other goroutines
// than the reader can do it.
func (l *Log) ReadUndecoded(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return l.readRecords(ctx, after, f, true)
}

// readRecords implements Read, or with undecoded ReadUndecoded.
func (l *Log) readRecords(ctx context.Context, after eventlog.Position, f eventlog.Filter, undecoded bool) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		if err := l.yieldToEnd(ctx, after, f, undecoded, yield); err != nil {
			yield(eventlog.Record{}, err)
		}
	}
}

// errStopReading ends a read without an error for the caller: the caller stopped the iteration, or has received an
// error.
var errStopReading = errors.New("stop")

// yieldToEnd yields the commits up to the current end. It returns errStopReading after it has yielded an error, or when
// yield returns false.
func (l *Log) yieldToEnd(ctx context.Context, after eventlog.Position, f eventlog.Filter, undecoded bool, yield func(eventlog.Record, error) bool) error {
	r, err := l.newReader(after, f)
	if err != nil {
		return err
	}
	r.undecoded = undecoded
	return r.readToEnd(ctx, func(m jetstream.Msg) error { return r.yieldRecord(ctx, m, yield) })
}

// readToEnd calls take for each message up to the current end, and then closes the reader.
func (r *streamReader) readToEnd(ctx context.Context, take func(jetstream.Msg) error) error {
	end, err := r.endSequence(ctx)
	if err != nil {
		return err
	}
	return r.readThrough(ctx, end, take)
}

// readThrough calls take for each message up to the first one at or after a sequence, and then closes the reader.
func (r *streamReader) readThrough(ctx context.Context, end uint64, take func(jetstream.Msg) error) (err error) {
	defer r.closeConsumer()
	for err == nil && r.seq < end {
		var m jetstream.Msg
		m, err = r.nextMessage(ctx)
		switch {
		case err == nil:
			err = take(m)
		case ctx.Err() != nil:
			return fmt.Errorf("read %s: %w: %w", r.stream, eventlog.ErrUnavailable, context.Cause(ctx))
		case errors.Is(err, errNoMessage):
			// The messages at the end were lost in transit or have been purged.
			r.closeConsumer()
			end, err = r.endSequence(ctx)
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
		r, err := l.newReader(after, f)
		if err != nil {
			yield(eventlog.Record{}, err)
			return
		}
		defer r.closeConsumer()
		for {
			m, err := r.nextMessage(ctx)
			switch {
			case err == nil:
				err = r.yieldRecord(ctx, m, yield)
			case errors.Is(err, errNoMessage):
				r.closeIfMessagesLost(ctx)
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

// streamReader reads the messages of one stream in order. If its consumer is lost, it creates a new one after the last
// delivered sequence. The client library's ordered consumer does the same, but cannot be stopped while the server is
// unavailable.
type streamReader struct {
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

	within     context.Context // see noMessageContext; nil for none
	stopWithin context.CancelFunc
	renew      time.Time // time after which within is replaced
}

// newReader returns a streamReader that starts after a position. It sends no request. The error names the problem of
// the filter.
func (l *Log) newReader(after eventlog.Position, f eventlog.Filter) (*streamReader, error) {
	if err := f.Check(l.partitions, after.Shard, l.shards); err != nil {
		return nil, err
	}
	return &streamReader{
		log: l, shard: after.Shard, stream: topology.EventsStreamName(after.Shard), filters: l.filterSubjects(f), aspects: matchedAspects(f), foreign: f.Foreign, seq: after.Seq, backoff: l.readBackoff(),
	}, nil
}

// filterSubjects returns the filter subjects of a reader's consumer, or none for the whole stream. It returns more than
// one only for a list of partitions, because the server searches far longer for the next message of several filters.
func (l *Log) filterSubjects(f eventlog.Filter) []string {
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
	return []string{l.natsSubject(s)}
}

// matchedAspects returns the aspects that a filter matches, or nil if all messages of its consumer match.
func matchedAspects(f eventlog.Filter) []string {
	if f.Subject == (events.Subject{}) || f.Subject.Aspect != "" {
		return nil
	}
	return []string{string(events.Life), string(events.Run)}
}

// endSequence returns the sequence of the last message that matches the filter, or 0 if there is none.
func (r *streamReader) endSequence(ctx context.Context) (uint64, error) {
	filters := r.filters
	if len(filters) == 0 {
		// The last message of the stream is a cheap lookup, but is not found if it was purged. Then the server
		// searches all subjects.
		end, err := r.lastSequence(ctx, ">")
		if end > 0 || err != nil {
			return end, err
		}
		filters = []string{"ev.>"}
	}
	var end uint64
	for _, f := range filters {
		last, err := r.lastSequence(ctx, f)
		if err != nil {
			return 0, err
		}
		end = max(end, last)
	}
	return end, nil
}

// lastSequence returns the sequence of the last message of a subject, or 0.
func (r *streamReader) lastSequence(ctx context.Context, subject string) (uint64, error) {
	m, err := r.log.getFromLeader(ctx, r.stream, getRequest{LastFor: subject})
	if errors.Is(err, eventlog.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the end of %s: %w", r.stream, err)
	}
	return m.Seq, nil
}

// errNoMessage is returned if no message arrived within noMessageTimeout.
var errNoMessage = errors.New("no message arrived")

// nextMessage returns the next message, across any number of reconnects. Its error is errNoMessage, the error of ctx,
// or an error that a retry cannot resolve.
func (r *streamReader) nextMessage(ctx context.Context) (jetstream.Msg, error) {
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
		r.closeConsumer()
		if errors.Is(err, jetstream.ErrConnectionClosed) || errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, fmt.Errorf("read %s: %w: %w", r.stream, eventlog.ErrUnavailable, err)
		}
		r.log.logger.Log(ctx, r.backoff.logLevel(), "resume a read", "stream", r.stream, "after", r.seq, "error", err)
		if err := r.backoff.wait(ctx, err); err != nil {
			return nil, err
		}
	}
}

// errMissingDelivery is returned if a delivery of a consumer did not arrive.
var errMissingDelivery = errors.New("a delivery is missing")

// nextDelivery returns the next message of the current consumer, and creates a consumer if there is none. The error is
// errNoMessage, errMissingDelivery, the error of ctx, or an error of the consumer.
func (r *streamReader) nextDelivery(ctx context.Context) (jetstream.Msg, error) {
	if r.pull == nil {
		if err := r.createConsumer(ctx); err != nil {
			return nil, err
		}
	}
	within := r.noMessageContext(ctx)
	m, err := r.pull.Next(jetstream.NextContext(within))
	if err != nil && within.Err() != nil {
		r.resetNoMessageContext()
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
		return nil, errMissingDelivery
	}
	r.seq = meta.Sequence.Stream
	return m, nil
}

// noMessageContext returns a context that ends if no message arrives within noMessageTimeout, or up to half of that
// time earlier. The context is shared by several messages, because a timer per message would add a tenth to the cost of
// reading.
func (r *streamReader) noMessageContext(ctx context.Context) context.Context {
	if r.within == nil || time.Now().After(r.renew) {
		r.resetNoMessageContext()
		r.within, r.stopWithin = context.WithTimeoutCause(ctx, noMessageTimeout, errNoMessage)
		r.renew = time.Now().Add(noMessageTimeout / 2)
	}
	return r.within
}

// resetNoMessageContext ends the context that noMessageContext returned, so that the next call creates a new one.
func (r *streamReader) resetNoMessageContext() {
	if r.within != nil {
		r.stopWithin()
		r.within = nil
	}
}

// createConsumer creates a consumer that starts after the last delivered message.
func (r *streamReader) createConsumer(ctx context.Context) error {
	cfg := jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: r.seq + 1,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: consumerInactiveThreshold, HeadersOnly: r.bare,
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
	pull, err := c.Messages(jetstream.PullMaxMessagesWithBytesLimit(maxPullMessages, maxPullBytes), jetstream.PullExpiry(pullExpiry),
		jetstream.PullHeartbeat(pullHeartbeat), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return err
	}
	r.source, r.pull, r.expect = c, pull, 0
	return nil
}

// closeIfMessagesLost closes the consumer if the consumer has sent more messages than have arrived: its last messages
// were in transit when the connection broke, and no later delivery would reveal the gap.
func (r *streamReader) closeIfMessagesLost(ctx context.Context) {
	try, cancel := context.WithTimeout(ctx, r.backoff.timeout())
	defer cancel()
	info, err := r.source.Info(try)
	if err == nil && info.Delivered.Consumer == r.expect {
		return
	}
	if ctx.Err() == nil {
		r.log.logger.Debug("resume a read", "stream", r.stream, "after", r.seq, "error", errors.Join(err, errMissingDelivery))
	}
	r.closeConsumer()
}

// closeConsumer stops the consumer, so that the next read creates a new one.
func (r *streamReader) closeConsumer() {
	r.resetNoMessageContext()
	if r.pull != nil {
		r.pull.Stop()
		r.pull = nil
	}
}

// yieldRecord decodes a message and yields its record, unless the filter does not match the message or the message is
// not part of the log. It returns errStopReading when the read must end.
func (r *streamReader) yieldRecord(ctx context.Context, m jetstream.Msg, yield func(eventlog.Record, error) bool) error {
	if r.aspects != nil && !slices.Contains(r.aspects, m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]) {
		return nil
	}
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	open := r.log.openRecord
	if r.undecoded {
		open = r.log.openUndecodedRecord
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
