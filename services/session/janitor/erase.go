package janitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// eraser removes messages of a NATS stream so that the server overwrites their bytes on its disk. After a purge or an
// ordinary delete the bytes stay in the server's block files.
type eraser struct{ stream jetstream.Stream }

// openEraser returns the eraser of a stream.
func openEraser(ctx context.Context, js jetstream.JetStream, name string) (eraser, error) {
	s, err := js.Stream(ctx, name)
	if err != nil {
		return eraser{}, fmt.Errorf("open stream %s: %w", name, err)
	}
	return eraser{s}, nil
}

// streamName returns the name of the NATS stream.
func (e eraser) streamName() string { return e.stream.CachedInfo().Config.Name }

// eraseSubject erases every message on an exact subject with a lower sequence than below; if below is 0, all of them.
// It returns how many messages it erased. When it returns nil, the stream's leader holds none of them.
func (e eraser) eraseSubject(ctx context.Context, subject string, below uint64) (n uint32, err error) {
	for seq := uint64(1); ; {
		m, err := e.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) || err == nil && below > 0 && m.Sequence >= below {
			break
		}
		if err != nil {
			return n, fmt.Errorf("read %s of stream %s: %w", subject, e.streamName(), err)
		}
		if err := e.eraseMessage(ctx, m.Sequence); err != nil {
			return n, err
		}
		n++
		seq = m.Sequence + 1
	}
	return n, e.checkErased(ctx, subject, below)
}

// eraseMessage erases the message with the stream sequence seq. A message that does not exist any more is not an error.
func (e eraser) eraseMessage(ctx context.Context, seq uint64) error {
	err := e.stream.SecureDeleteMsg(ctx, seq)
	if err == nil {
		return nil
	}
	if _, again := e.stream.GetMsg(ctx, seq); errors.Is(again, jetstream.ErrMsgNotFound) {
		return nil
	}
	return fmt.Errorf("erase message %d of stream %s: %w", seq, e.streamName(), err)
}

// checkErased returns an error if messages of a subject with a lower sequence than below remain. It asks the stream's
// leader, because a replica that lags may answer reads.
func (e eraser) checkErased(ctx context.Context, subject string, below uint64) error {
	info, err := e.stream.Info(ctx, jetstream.WithSubjectFilter(subject))
	if err != nil {
		return fmt.Errorf("count the remaining messages of %s in stream %s: %w", subject, e.streamName(), err)
	}
	left := info.State.Subjects[subject]
	if below > 0 {
		kept, err := e.countFrom(ctx, subject, below)
		if err != nil {
			return err
		}
		left -= min(left, kept)
	}
	if left > 0 {
		return fmt.Errorf("%d messages of %s are left in stream %s", left, subject, e.streamName())
	}
	return nil
}

// countFrom returns the number of messages on a subject whose sequence is seq or higher.
func (e eraser) countFrom(ctx context.Context, subject string, seq uint64) (n uint64, err error) {
	for {
		m, err := e.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return n, nil
		}
		if err != nil {
			return n, fmt.Errorf("read %s of stream %s: %w", subject, e.streamName(), err)
		}
		n, seq = n+1, m.Sequence+1
	}
}

// purge removes every message of a key-value bucket whose subject matches a filter. NATS creates key-value buckets so
// that their messages cannot be deleted. The bytes of purged messages may therefore stay in the server's files for a
// while: hashes and ids, and encrypted values of secrets.
func (e eraser) purge(ctx context.Context, filter string) error {
	if err := e.stream.Purge(ctx, jetstream.WithPurgeSubject(filter)); err != nil {
		return fmt.Errorf("purge %s of stream %s: %w", filter, e.streamName(), err)
	}
	return nil
}

// lastPerSubjectConsumer returns the configuration of a JetStream consumer of the last message of each subject that
// matches the filter.
func lastPerSubjectConsumer(filter string) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy}
}

// allMessagesConsumer returns the configuration of a JetStream consumer of every message whose subject matches the
// filter.
func allMessagesConsumer(filter string) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{FilterSubjects: []string{filter}}
}

// messagesSinceConsumer returns the configuration of a JetStream consumer of every message that was stored at t or
// later and whose subject matches the filter.
func messagesSinceConsumer(filter string, t time.Time) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &t}
}

// streamMessage is a message of a NATS stream.
type streamMessage struct {
	subject string
	data    []byte
	at      time.Time
	seq     uint64
}

// eachMessage calls handle with each message that the stream has now, in order. The fields FilterSubjects,
// DeliverPolicy and OptStartTime of the consumer's configuration select the messages.
func (e eraser) eachMessage(ctx context.Context, which jetstream.ConsumerConfig, handle func(streamMessage)) error {
	failed := func(err error) error { return fmt.Errorf("read stream %s: %w", e.streamName(), err) }
	// The consumer is removed after its inactivity: with the right to delete a consumer of the log, the janitor could
	// also delete a durable.
	which.AckPolicy, which.MemoryStorage, which.Replicas, which.InactiveThreshold = jetstream.AckNonePolicy, true, 1, nextMessageTimeout
	c, err := e.stream.CreateConsumer(ctx, which)
	if err != nil {
		return failed(err)
	}
	left := c.CachedInfo().NumPending
	if left == 0 {
		return nil
	}
	pull, err := c.Messages(jetstream.PullMaxMessagesWithBytesLimit(500, 8<<20))
	if err != nil {
		return failed(err)
	}
	defer pull.Stop()
	for delivered := uint64(0); left > 0; delivered++ {
		within, cancel := context.WithTimeout(ctx, nextMessageTimeout)
		m, err := pull.Next(jetstream.NextContext(within))
		cancel()
		if err != nil {
			return failed(err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return failed(err)
		}
		if meta.Sequence.Consumer != delivered+1 {
			return failed(errors.New("a delivery is missing"))
		}
		left = meta.NumPending
		handle(streamMessage{m.Subject(), m.Data(), meta.Timestamp, meta.Sequence.Stream})
	}
	return nil
}

// nextMessageTimeout is the maximum time that the server may take to send the next message of a consumer.
const nextMessageTimeout = 10 * time.Second
