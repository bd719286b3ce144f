package jslog

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Settings of the consumers that read. They are not deleted at the end, for
// which a service has no right, but go by themselves when nobody pulls.
const (
	pullMessages = 1000
	pullBytes    = 16 << 20
	pullExpiry   = 10 * time.Second
	heartbeat    = 500 * time.Millisecond
	inactive     = 10 * time.Second
	// quiet is how long nothing may come before it is asked whether something went missing.
	quiet = 2 * time.Second
)

// Read yields commits up to the present end; see eventlog.Reader. The end is what
// the leader knows when the reading begins.
func (l *Log) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		if err := l.readTo(ctx, after, f, yield); err != nil {
			yield(eventlog.Record{}, err)
		}
	}
}

// errStop ends a reading: the caller wants no more, or has been given an error.
var errStop = errors.New("stop")

func (l *Log) readTo(ctx context.Context, after eventlog.Position, f eventlog.Filter, yield func(eventlog.Record, error) bool) error {
	r, err := l.reader(after, f)
	if err != nil {
		return err
	}
	return r.toEnd(ctx, func(m jetstream.Msg) error { return r.yield(ctx, m, yield) })
}

// Changed returns which subjects changed; see eventlog.ChangeReader. The end is what the leader knows when the reading begins.
func (l *Log) Changed(ctx context.Context, after eventlog.Position, maxSubjects int) (eventlog.Changes, error) {
	c := eventlog.Changes{Through: after, Last: map[string]uint64{}}
	r, err := l.reader(after, eventlog.Filter{})
	if err != nil {
		return c, err
	}
	r.bare = true
	err = r.toEnd(ctx, func(m jetstream.Msg) error {
		if !c.Add(m.Subject(), r.seq, maxSubjects) {
			return errStop
		}
		return nil
	})
	return c, err
}

// toEnd passes on each message up to the present end, and then closes the reader.
func (r *reader) toEnd(ctx context.Context, take func(jetstream.Msg) error) error {
	defer r.close()
	end, err := r.end(ctx)
	for err == nil && r.seq < end {
		var m jetstream.Msg
		m, err = r.next(ctx)
		switch {
		case err == nil:
			err = take(m)
		case ctx.Err() != nil:
			return fmt.Errorf("read %s: %w: %w", r.stream, eventlog.ErrUnavailable, context.Cause(ctx))
		case errors.Is(err, errQuiet):
			// What lay at the end was lost on the way, or has been purged.
			r.close()
			end, err = r.end(ctx)
		}
	}
	if errors.Is(err, errStop) {
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
			case errors.Is(err, errQuiet):
				r.check(ctx)
				continue
			}
			if errors.Is(err, errStop) || ctx.Err() != nil {
				return
			}
			if err != nil {
				yield(eventlog.Record{}, err)
				return
			}
		}
	}
}

// reader reads a stream in order, by consumers that are made anew whenever one
// is lost, each from the sequence after the last one delivered.
//
// The client library's ordered consumer does the same, but cannot be ended while
// the server is away.
type reader struct {
	log     *Log
	shard   int
	stream  string
	filters []string
	bare    bool   // messages are delivered without what they hold
	foreign bool   // messages that are not part of the log are yielded as errors
	seq     uint64 // last stream sequence that was delivered, or the position asked for
	expect  uint64 // number of the last delivery of the present consumer
	source  jetstream.Consumer
	pull    jetstream.MessagesContext
	backoff *backoff

	within     context.Context // see patience; nil for none
	stopWithin context.CancelFunc
	renew      time.Time // when within is replaced
}

func (l *Log) reader(after eventlog.Position, f eventlog.Filter) (*reader, error) {
	if err := f.Check(after.Shard, l.shards); err != nil {
		return nil, err
	}
	return &reader{
		log: l, shard: after.Shard, stream: topology.EventsStream(after.Shard), filters: filters(f), foreign: f.Foreign, seq: after.Seq, backoff: l.reading(),
	}, nil
}

// filters are the subjects of a filter; none for the whole stream.
func filters(f eventlog.Filter) []string {
	if f.Subject == (events.Subject{}) {
		var list []string
		for _, p := range f.Partitions {
			list = append(list, topology.PartitionFilter(p))
		}
		return list
	}
	aspects := []events.Aspect{f.Subject.Aspect}
	if f.Subject.Aspect == "" {
		aspects = []events.Aspect{events.Life, events.Run}
	}
	var list []string
	for _, a := range aspects {
		s := f.Subject
		s.Aspect = a
		// A subject outside the partitions asked for matches nothing.
		if f.Match(s) {
			list = append(list, s.String())
		}
	}
	return list
}

// end is the sequence of the last message that the filter lets through, 0 for none.
func (r *reader) end(ctx context.Context) (uint64, error) {
	filters := r.filters
	if len(filters) == 0 {
		// The last message of all is a lookup, but is not found when it was purged;
		// then the server looks through all subjects.
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

// last is the sequence of the last message of a subject, 0 for none.
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

// errQuiet is that nothing came for a while.
var errQuiet = errors.New("nothing came")

// next is the next message, however often the server goes away in between. Its
// errors are errQuiet, that ctx ended, and what another try cannot change.
func (r *reader) next(ctx context.Context) (jetstream.Msg, error) {
	for {
		m, err := r.take(ctx)
		if err == nil {
			r.backoff.try = 0
			return m, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if errors.Is(err, errQuiet) {
			return nil, err
		}
		r.close()
		if errors.Is(err, jetstream.ErrConnectionClosed) || errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, fmt.Errorf("read %s: %w: %w", r.stream, eventlog.ErrUnavailable, err)
		}
		r.log.logger.Log(ctx, r.backoff.level(), "read on", "stream", r.stream, "after", r.seq, "error", err)
		if err := r.backoff.wait(ctx, err); err != nil {
			return nil, err
		}
	}
}

// errGap is a consumer that left a message out.
var errGap = errors.New("a delivery is missing")

func (r *reader) take(ctx context.Context) (jetstream.Msg, error) {
	if r.pull == nil {
		if err := r.open(ctx); err != nil {
			return nil, err
		}
	}
	within := r.patience(ctx)
	m, err := r.pull.Next(jetstream.NextContext(within))
	if err != nil && within.Err() != nil {
		r.impatient()
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

// patience returns a context that ends when nothing came for a while: for quiet, or up to half of it less. One timer for each message would
// be a tenth of what reading it costs.
func (r *reader) patience(ctx context.Context) context.Context {
	if r.within == nil || time.Now().After(r.renew) {
		r.impatient()
		r.within, r.stopWithin = context.WithTimeoutCause(ctx, quiet, errQuiet)
		r.renew = time.Now().Add(quiet / 2)
	}
	return r.within
}

// impatient ends that context, so that the next one is new.
func (r *reader) impatient() {
	if r.within != nil {
		r.stopWithin()
		r.within = nil
	}
}

// open makes a consumer that begins after the last message delivered.
func (r *reader) open(ctx context.Context) error {
	cfg := jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: r.seq + 1,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: inactive, HeadersOnly: r.bare,
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

// check gives up a consumer that has sent more than came: the last of it was on
// the way when the connection broke, and no delivery after it would tell.
func (r *reader) check(ctx context.Context) {
	try, cancel := context.WithTimeout(ctx, r.backoff.timeout())
	defer cancel()
	info, err := r.source.Info(try)
	if err == nil && info.Delivered.Consumer == r.expect {
		return
	}
	if ctx.Err() == nil {
		r.log.logger.Debug("read on", "stream", r.stream, "after", r.seq, "error", errors.Join(err, errGap))
	}
	r.close()
}

// close gives the consumer up.
func (r *reader) close() {
	r.impatient()
	if r.pull != nil {
		r.pull.Stop()
		r.pull = nil
	}
}

func (r *reader) yield(ctx context.Context, m jetstream.Msg, yield func(eventlog.Record, error) bool) error {
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	rec, err := r.log.open(ctx, eventlog.Position{Shard: r.shard, Seq: meta.Sequence.Stream},
		message{Subject: m.Subject(), Seq: meta.Sequence.Stream, Data: m.Data(), Time: meta.Timestamp, header: m.Headers()})
	var foreign *eventlog.ForeignError
	if !r.foreign && errors.As(err, &foreign) {
		r.log.report(ctx, foreign)
		return nil
	}
	if err != nil && ctx.Err() != nil {
		return err // the reading was ended while a payload was fetched
	}
	if !yield(rec, err) || err != nil {
		return errStop
	}
	return nil
}
