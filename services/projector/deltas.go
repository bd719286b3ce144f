package projector

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// delta is text in flight with the time at which the stream stored it.
type delta struct {
	fold.Delta
	at time.Time
}

// Settings of the consumer of DELTAS. JetStream removes it when nobody pulls.
const (
	pullMessages      = 1000
	pullBytes         = 4 << 20
	pullExpiry        = 10 * time.Second
	heartbeat         = time.Second
	inactiveThreshold = 10 * time.Second
	openTimeout       = 5 * time.Second
)

// deltaReader reads the group's text in flight in order. It creates a new consumer when one is lost.
type deltaReader struct {
	g             *group
	since         *time.Time // nil reads all stored text
	seq           uint64     // stream sequence of the last delivered message; 0 for none
	announceStart uint64
	pull          jetstream.MessagesContext
}

// feedDeltas reads text in flight until ctx ends.
func (g *group) feedDeltas(ctx context.Context, checkpoint *time.Time) {
	r := deltaReader{g: g}
	if checkpoint != nil {
		since := checkpoint.Add(-deltasOverlap)
		r.since = &since
	}
	defer r.close()
	pauses := newBackoff(g.logger, "read text in flight")
	for ctx.Err() == nil {
		err := r.next(ctx)
		if err == nil {
			pauses.reset()
			continue
		}
		r.close()
		if ctx.Err() == nil {
			pauses.wait(ctx, err)
		}
	}
}

var errGap = errors.New("the consumer skipped a delivery")

// next reads the next text in flight and queues it.
func (r *deltaReader) next(ctx context.Context) error {
	if r.pull == nil {
		if err := r.open(ctx); err != nil {
			return err
		}
	}
	m, err := r.pull.Next(jetstream.NextContext(ctx))
	if err != nil {
		return err
	}
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	r.announceStart++
	if meta.Sequence.Consumer != r.announceStart {
		return errGap
	}
	r.seq = meta.Sequence.Stream
	d, err := decodeDelta(r.g.p.deps.Log.Partitioning(), m.Subject(), m.Data())
	if err != nil {
		// The text is a copy of what block_complete will contain, so nothing is lost.
		r.g.logger.Warn("drop text in flight", "subject", m.Subject(), "sequence", r.seq, "error", err)
		return nil
	}
	return r.g.deltas.push(ctx, delta{d, meta.Timestamp}, len(m.Data()))
}

// decodeDelta decodes a message of DELTAS and checks that its subject is valid.
func decodeDelta(partitions events.Partitioning, subject string, data []byte) (fold.Delta, error) {
	t := strings.Split(subject, ".")
	if len(t) != 4 {
		return fold.Delta{}, fmt.Errorf("subject %q is not dl.<partition>.<tenant>.<session>", subject)
	}
	d := fold.Delta{Tenant: t[2], Session: t[3]}
	if err := errors.Join(events.CheckTenant("tenant", d.Tenant), events.CheckID("sessionId", events.KindSession, d.Session)); err != nil {
		return d, err
	}
	if t[1] != events.PartitionToken(partitions.Of(d.Session)) {
		return d, fmt.Errorf("subject %q: partition is not the session's", subject)
	}
	var err error
	d.Delta, err = events.DecodeDelta(data)
	return d, err
}

// open creates a consumer that continues after the last delivered message.
func (r *deltaReader) open(ctx context.Context) error {
	cfg := jetstream.ConsumerConfig{
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: inactiveThreshold, DeliverPolicy: jetstream.DeliverAllPolicy,
	}
	switch {
	case r.seq > 0:
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, r.seq+1
	case r.since != nil:
		cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, r.since
	}
	for _, p := range r.g.p.deps.Log.Partitioning().InGroup(r.g.n) {
		cfg.FilterSubjects = append(cfg.FilterSubjects, topology.DeltaFilter(p))
	}
	if len(cfg.FilterSubjects) == 1 {
		cfg.FilterSubject, cfg.FilterSubjects = cfg.FilterSubjects[0], nil
	}
	try, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	c, err := r.g.p.js.CreateConsumer(try, topology.StreamDeltas, cfg)
	if err != nil {
		return fmt.Errorf("read %s: %w", topology.StreamDeltas, err)
	}
	pull, err := c.Messages(jetstream.PullMaxMessagesWithBytesLimit(pullMessages, pullBytes), jetstream.PullExpiry(pullExpiry),
		jetstream.PullHeartbeat(heartbeat), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return fmt.Errorf("read %s: %w", topology.StreamDeltas, err)
	}
	r.pull, r.announceStart = pull, 0
	return nil
}

func (r *deltaReader) close() {
	if r.pull != nil {
		r.pull.Stop()
		r.pull = nil
	}
}
