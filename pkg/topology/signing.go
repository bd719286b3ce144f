package topology

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Metadata of the log's streams.
const (
	signedAfterKey = "spool-signed-after"
	signingKeysKey = "spool-signing-keys"
)

// Signing says which commits of the log have to be signed, and by which keys.
type Signing struct {
	// After holds, for each shard, the sequence after which commits are signed.
	After []uint64
	// Keys are the names of the keys that have been used, role/id. None means that the log is not signed.
	Keys []string
}

// Required reports whether a commit has to be signed.
func (s Signing) Required(shard int, seq uint64) bool {
	return len(s.Keys) > 0 && shard < len(s.After) && seq > s.After[shard]
}

// ReadSigning asks what Provision recorded of an installation with a number of shards.
func ReadSigning(ctx context.Context, js jetstream.JetStream, shards int) (Signing, error) {
	var s Signing
	for shard := range shards {
		stream, err := js.Stream(ctx, EventsStream(shard))
		if err != nil {
			return Signing{}, fmt.Errorf("look for %s: %w", EventsStream(shard), err)
		}
		metadata := stream.CachedInfo().Config.Metadata
		keys := strings.Fields(metadata[signingKeysKey])
		if len(keys) == 0 {
			return Signing{}, nil // Provision has not come to the last shard, so nobody signs yet
		}
		after, err := strconv.ParseUint(metadata[signedAfterKey], 10, 64)
		if err != nil {
			return Signing{}, fmt.Errorf("stream %s: metadata %s: %w", EventsStream(shard), signedAfterKey, err)
		}
		s.After = append(s.After, after)
		for _, key := range keys {
			if !slices.Contains(s.Keys, key) {
				s.Keys = append(s.Keys, key)
			}
		}
	}
	return s, nil
}

// signingMetadata is what a stream of the log is to record of the keys that are given, beside what it has recorded.
func signingMetadata(have jetstream.StreamInfo, cfg Config) map[string]string {
	if len(cfg.KeyIDs) == 0 {
		return nil
	}
	after, recorded := have.Config.Metadata[signedAfterKey]
	all := strings.Fields(have.Config.Metadata[signingKeysKey])
	if !recorded || cfg.KeysLost {
		after, all = strconv.FormatUint(have.State.LastSeq, 10), nil
	}
	all = append(all, cfg.KeyIDs...)
	slices.Sort(all)
	return map[string]string{signedAfterKey: after, signingKeysKey: strings.Join(slices.Compact(all), " ")}
}
