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

// stream is the name of the one stream that the log of `spool up` has.
const stream = "EVENTS-0"

// ReadLog returns every message of EVENTS-0 in order. It does not use Spool's own reader.
func ReadLog(ctx context.Context, nc *nats.Conn) ([]Commit, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	var log []Commit
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
		sum := sha256.Sum256(m.Data)
		log = append(log, Commit{Seq: seq, Subject: m.Subject, ID: c.ID, Hash: c.Hash, SHA256: hex.EncodeToString(sum[:])})
	}
	return log, nil
}

// Sequence returns the sequence in EVENTS-0 of a position.
func Sequence(position string) (uint64, error) {
	seq, ok := strings.CutPrefix(position, "0-")
	if !ok {
		return 0, fmt.Errorf("position %q is not in shard 0", position)
	}
	return strconv.ParseUint(seq, 10, 64)
}
