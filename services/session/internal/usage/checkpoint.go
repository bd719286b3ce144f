package usage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// checkpointKey is the key of the checkpoint in the bucket budgets, whose other keys are tenants. No tenant's name
// begins with an underscore.
const checkpointKey = "_positions"

// checkpoint holds the positions from which an Aggregator reads the log after a start. The entries of all tenants
// include every commit up to these positions. Each write of the checkpoint expects the revision of the write before, so
// that only one copy of the service folds at a time.
type checkpoint struct {
	Positions map[string]uint64 `json:"positions"` // by stream, as streamID returns it
}

// readCheckpoint returns the checkpoint and its revision in the bucket budgets. The revision is 0 if there is none yet.
func readCheckpoint(ctx context.Context, kv jetstream.KeyValue) (checkpoint, uint64, error) {
	var c checkpoint
	e, err := kv.Get(ctx, checkpointKey)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return c, 0, nil
	}
	if err != nil {
		return c, 0, fmt.Errorf("read the checkpoint of tenants' usage: %w", err)
	}
	if err := json.Unmarshal(e.Value(), &c); err != nil {
		return c, 0, fmt.Errorf("decode the checkpoint of tenants' usage: %w", err)
	}
	return c, e.Revision(), nil
}

// errKeyChanged is returned when another writer has changed a key of the bucket budgets first.
var errKeyChanged = errors.New("another writer changed the key first")

// putValue writes the JSON of a value to a key and returns the key's new revision. revision is the last known one, 0
// for a new key. It returns errKeyChanged if the key has another revision.
func putValue(ctx context.Context, kv jetstream.KeyValue, key string, value any, revision uint64) (uint64, error) {
	body, err := json.Marshal(value)
	if err != nil {
		return 0, err
	}
	if revision == 0 {
		revision, err = kv.Create(ctx, key, body)
	} else {
		revision, err = kv.Update(ctx, key, body, revision)
	}
	var refused *jetstream.APIError
	if errors.Is(err, jetstream.ErrKeyExists) || errors.As(err, &refused) && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
		return 0, errKeyChanged
	}
	if err != nil {
		return 0, fmt.Errorf("write key %s of bucket %s: %w", key, topology.BucketBudgets, err)
	}
	return revision, nil
}

// streamID returns an id of a shard's stream that differs if the stream is deleted and created again, because its
// sequences then start again.
func streamID(shard int, info *jetstream.StreamInfo) string {
	return strconv.Itoa(shard) + "-" + strconv.FormatInt(info.Created.UnixNano(), 36)
}

// streamState returns the id of a shard's stream and the sequence of its last message.
func streamState(ctx context.Context, js jetstream.JetStream, shard int) (id string, last uint64, err error) {
	s, err := js.Stream(ctx, topology.EventsStreamName(shard))
	if err != nil {
		return "", 0, fmt.Errorf("look up stream %s: %w", topology.EventsStreamName(shard), err)
	}
	info := s.CachedInfo()
	return streamID(shard, info), info.State.LastSeq, nil
}

// HasFolded reports whether the usage of tenants in the bucket budgets includes every commit of a shard up to a stream
// sequence.
func HasFolded(ctx context.Context, js jetstream.JetStream, shard int, seq uint64) (bool, error) {
	kv, err := js.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return false, fmt.Errorf("open bucket %s: %w", topology.BucketBudgets, err)
	}
	c, _, err := readCheckpoint(ctx, kv)
	if err != nil {
		return false, err
	}
	id, _, err := streamState(ctx, js, shard)
	return err == nil && c.Positions[id] >= seq, err
}
