package compat

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// logStream is the name of the log's only stream in an installation with one shard, such as `spool up`.
const logStream = "EVENTS-0"

// ReadLog returns a description of every message in the stream EVENTS-0, in order, and calls each with every message. It
// does not use Spool's own code to read the log.
func ReadLog(ctx context.Context, nc *nats.Conn, each func(seq uint64, message []byte)) ([]RecordedCommit, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	s, err := js.Stream(ctx, logStream)
	if err != nil {
		return nil, err
	}
	var log []RecordedCommit
	info := s.CachedInfo().State
	for seq := info.FirstSeq; seq <= info.LastSeq; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue // the content of a deleted session may be purged
		}
		if err != nil {
			return nil, err
		}
		var c struct {
			ID   string `json:"id"`
			Hash string `json:"hash"`
		}
		if err := json.Unmarshal(m.Data, &c); err != nil {
			return nil, fmt.Errorf("message %d: %w", seq, err)
		}
		each(seq, m.Data)
		sum := sha256.Sum256(m.Data)
		log = append(log, RecordedCommit{Seq: seq, Subject: m.Subject, ID: c.ID, Hash: c.Hash, SHA256: hex.EncodeToString(sum[:])})
	}
	return log, nil
}

// StreamSequence returns the stream sequence in EVENTS-0 that a position names.
func StreamSequence(position string) (uint64, error) {
	seq, ok := strings.CutPrefix(position, "0-")
	if !ok {
		return 0, fmt.Errorf("position %q is not in shard 0", position)
	}
	return strconv.ParseUint(seq, 10, 64)
}
