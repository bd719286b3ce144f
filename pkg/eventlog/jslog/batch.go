package jslog

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Headers of an atomic batch, for which nats.go has no names.
const (
	headerBatchID       = "Nats-Batch-Id"
	headerBatchSequence = "Nats-Batch-Sequence" // 1, 2, 3, …
	headerBatchCommit   = "Nats-Batch-Commit"   // "1" on the last message
)

// Error codes with which the server refuses a batch before it stores any of it.
const (
	codeBatchDisabled      jetstream.ErrorCode = 10174
	codeBatchIncomplete    jetstream.ErrorCode = 10176
	codeBatchTooLarge      jetstream.ErrorCode = 10199
	codeBatchDuplicate     jetstream.ErrorCode = 10201
	codeTooManyOpenBatches jetstream.ErrorCode = 10210
)

// errBatchesUnsupported is returned if the server acknowledged the last message of a batch as a single message. A
// server without atomic batches stores each message separately.
var errBatchesUnsupported = errors.New("the server does not support atomic batches")

// batcherFor returns the batcher of an append that may share a batch, or nil. Only run commits share batches: their writers
// hold the epoch and rarely meet a stale guard, which would have the whole batch refused. Two writers of life commits
// meet more often.
func (l *Log) batcherFor(a *appendAttempt) *batcher {
	s := a.head.Subject
	if s.Aspect != events.Run && !l.batchAll || len(a.data) > min(maxBatchedCommitBytes, l.maxPayload()/2) {
		return nil
	}
	return l.batchers[topology.ShardOf(s.Partition(), l.shards)]
}

// maxPayload returns the size in bytes of the largest message that the server accepts, headers included.
func (l *Log) maxPayload() int { return int(l.js.Conn().MaxPayload()) }

// publishBatch publishes the commits of members as one atomic batch, and returns the stream sequence of the last
// commit. The commits of a batch have consecutive sequences. Unless the error is an error of the server, the outcome is
// unknown. If the connection breaks, publishBatch returns at once.
func (l *Log) publishBatch(members []*waitingAppend) (last uint64, err error) {
	nc := l.js.Conn()
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	broken := nc.StatusChanged(nats.RECONNECTING, nats.CLOSED)
	defer nc.RemoveStatusListener(broken)
	go func() {
		if _, open := <-broken; open {
			cancel(nats.ErrDisconnected)
		}
	}()
	ctx, stop := context.WithTimeoutCause(ctx, l.ackTimeout, nats.ErrTimeout)
	defer stop()

	id, n := rand.Text(), len(members)
	for i, m := range members {
		msg := m.msg
		msg.Header[headerBatchID] = []string{id}
		msg.Header[headerBatchSequence] = []string{strconv.Itoa(i + 1)}
		if i < n-1 {
			// Without a reply subject, the server answers only the last message, which reports what was wrong before.
			if err := nc.PublishMsg(msg); err != nil {
				return 0, err
			}
			continue
		}
		msg.Header[headerBatchCommit] = []string{"1"}
		reply, err := nc.RequestMsgWithContext(ctx, msg)
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if err != nil {
			return 0, err
		}
		return decodeBatchAck(reply.Data, id, n)
	}
	return 0, nil
}

// decodeBatchAck decodes the acknowledgement of a batch of n messages. It returns the stream sequence of the last
// message.
func decodeBatchAck(data []byte, id string, n int) (last uint64, err error) {
	var ack struct {
		Error    *jetstream.APIError `json:"error"`
		Sequence uint64              `json:"seq"`
		Batch    string              `json:"batch"`
		Count    int                 `json:"count"`
	}
	switch err := json.Unmarshal(data, &ack); {
	case err != nil:
		return 0, fmt.Errorf("%w: decode the acknowledgement: %w", errBatchesUnsupported, err)
	case ack.Error != nil:
		return 0, ack.Error
	case ack.Batch != id || ack.Count != n || ack.Sequence < uint64(n):
		return 0, errBatchesUnsupported
	}
	return ack.Sequence, nil
}

// isBatchRefused reports whether the server refused a batch. After some errors it may have stored a part of the batch:
// then maybeStored is true.
func isBatchRefused(err error) (refused, maybeStored bool) {
	var api *jetstream.APIError
	if !errors.As(err, &api) || isTransient(err) {
		return false, false
	}
	switch api.ErrorCode {
	case codeBatchDisabled, codeBatchIncomplete, codeBatchTooLarge, codeBatchDuplicate, codeTooManyOpenBatches:
		return true, false
	}
	return true, !isWrongSequence(err)
}

// isBatchUnsupported reports whether an error shows that the stream or the server does not support atomic batches.
func isBatchUnsupported(err error) bool {
	var api *jetstream.APIError
	return errors.Is(err, errBatchesUnsupported) || errors.As(err, &api) && api.ErrorCode == codeBatchDisabled
}
