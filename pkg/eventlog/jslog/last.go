package jslog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// lastRequestSubjects is the maximum number of subjects of one lastMessagesRequest. The server allows 1,024.
	lastRequestSubjects = 500
	// lastResponseBytes is the size after which the server ends the response to a lastMessagesRequest.
	lastResponseBytes = 8 << 20
	// maxLastRequestTries is the maximum number of tries of a lastMessagesRequest. A try fails, for example, if the
	// replica that answers lags.
	maxLastRequestTries = 5
)

// lastMessagesRequest requests the last message of each subject whose last message has the sequence Seq or a later one.
type lastMessagesRequest struct {
	Subjects []string `json:"multi_last"`
	Seq      uint64   `json:"seq"`
	MaxBytes int      `json:"max_bytes"`
}

// errReplicaLags is returned if a replica did not prove that it has all messages.
var errReplicaLags = errors.New("the replica lags")

// readLastMessages calls take with the last message of each subject whose last message is after a position. A replica
// answers that has all messages up to the sequence reached, or more. readLastMessages returns the last sequence that
// the replica has, or 0 if reached is 0 and the replica has no message of any subject.
func (l *Log) readLastMessages(ctx context.Context, after eventlog.Position, reached uint64, subjects []string, take func(message)) (end uint64, err error) {
	req := lastMessagesRequest{Subjects: subjects, Seq: after.Seq + 1, MaxBytes: lastResponseBytes}
	for b := l.readBackoff(); ; {
		try, cancel := context.WithTimeout(ctx, b.timeout())
		list, has, more, err := l.requestLastMessages(try, topology.EventsStreamName(after.Shard), req, reached)
		cancel()
		switch {
		case err == nil:
			b.reset()
		case b.try+1 < maxLastRequestTries && (errors.Is(err, errReplicaLags) || isTransient(err)):
			if err := b.wait(ctx, err); err != nil {
				return 0, err
			}
			continue
		default:
			return 0, fmt.Errorf("read the last commits: %w", err)
		}
		for _, m := range list {
			take(m)
		}
		if !more {
			return has, nil
		}
		req.Seq = list[len(list)-1].Seq + 1
	}
}

// requestLastMessages sends one lastMessagesRequest. has is the last sequence that the replica has; more reports
// whether the server ended the response because of its size. Messages are returned only if the whole response has
// arrived, and only its end proves that the replica does not lag.
func (l *Log) requestLastMessages(ctx context.Context, stream string, r lastMessagesRequest, reached uint64) (list []message, has uint64, more bool, err error) {
	req, err := json.Marshal(r)
	if err != nil {
		return nil, 0, false, err
	}
	inbox := l.nc.NewInbox()
	replies := make(chan *nats.Msg, len(r.Subjects)+2) // SubscribeSync would allocate 512 KB
	sub, err := l.nc.ChanSubscribe(inbox, replies)
	if err != nil {
		return nil, 0, false, err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only if the connection is closed
	if err := l.nc.PublishRequest(l.prefix+"DIRECT.GET."+stream, inbox, req); err != nil {
		return nil, 0, false, err
	}
	var last uint64 // sequence of the last message of this response
	for {
		var reply *nats.Msg
		select {
		case reply = <-replies:
		case <-ctx.Done():
			return nil, 0, false, ctx.Err()
		}
		previous := takeServerHeader(reply, jetstream.LastSequenceHeader)
		// The server adds a sequence to stored messages, which may have any other header.
		if reply.Header.Get(jetstream.SequenceHeader) == "" {
			has, more, err = checkEndOfBatch(reply, previous, last, reached)
			return list, has, more, err
		}
		if previous != strconv.FormatUint(last, 10) {
			return nil, 0, false, errReplicaLags // a message of the response was lost
		}
		takeServerHeader(reply, headerNumPending)
		m, err := parseStoredMessage(reply)
		if err != nil {
			return nil, 0, false, err
		}
		last, list = m.Seq, append(list, m)
	}
}

// checkEndOfBatch checks the response that ends the messages of a lastMessagesRequest. last is the sequence of the last
// of these messages. It returns errReplicaLags if the replica does not have the sequence reached, or if a message was
// lost.
func checkEndOfBatch(reply *nats.Msg, previous string, last, reached uint64) (has uint64, more bool, err error) {
	switch status := reply.Header.Get("Status"); status {
	case "204":
	case "404":
		if reached == 0 && last == 0 {
			return 0, false, nil
		}
		return 0, false, errReplicaLags // a replica that does not know any of the subjects
	case "503":
		return 0, false, nats.ErrNoResponders
	default:
		return 0, false, fmt.Errorf("%w: the server responds %s %s", eventlog.ErrUnavailable, status, reply.Header.Get("Description"))
	}
	// Without a limit in the request, this is the last sequence that the replica has.
	if has, err = strconv.ParseUint(reply.Header.Get(headerUpToSequence), 10, 64); err != nil {
		return 0, false, fmt.Errorf("the server's answer has no end: %w", err)
	}
	if has < reached || previous != strconv.FormatUint(last, 10) {
		return 0, false, errReplicaLags
	}
	pending := reply.Header.Get(headerNumPending)
	return has, pending != "0" && last > 0, nil
}

// Headers of responses to requests for last messages.
const (
	headerNumPending   = "Nats-Num-Pending"   // subjects that the response does not contain yet
	headerUpToSequence = "Nats-UpTo-Sequence" // the sequence as of which the server answers
)
