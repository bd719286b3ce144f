package topology

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
)

// Metadata keys of the log's streams.
const (
	signedAfterMetadataKey   = "spool-signed-after"
	signingKeysMetadataKey   = "spool-signing-keys"
	commitVersionMetadataKey = "spool-commit-version"
)

// SigningSettings describes which commits of the log must be signed, with which keys, and which commit version writers use.
type SigningSettings struct {
	// After has, for each shard, the sequence after which commits are signed.
	After []uint64
	// Keys are the names, role/id, of all keys that have been used. An empty list means that the log is not signed.
	Keys []string
	// CommitVersion is the version of the commits that writers write. 0 means 1, which every build can read.
	CommitVersion int
}

// MustBeSigned reports whether the commit at a stream sequence of a shard must be signed.
func (s SigningSettings) MustBeSigned(shard int, seq uint64) bool {
	return len(s.Keys) > 0 && shard < len(s.After) && seq > s.After[shard]
}

// ReadSigning returns the signing settings that Provision recorded for an installation with the given number of
// shards. It returns *LayoutError if the metadata of a stream is invalid.
func ReadSigning(ctx context.Context, js jetstream.JetStream, shards int) (SigningSettings, error) {
	var s SigningSettings
	signed := true
	for shard := range shards {
		stream, err := js.Stream(ctx, EventsStreamName(shard))
		if err != nil {
			return SigningSettings{}, fmt.Errorf("look for %s: %w", EventsStreamName(shard), err)
		}
		metadata := stream.CachedInfo().Config.Metadata
		version, err := parseCommitVersion(stream.CachedInfo().Config)
		if err != nil {
			return SigningSettings{}, err
		}
		if shard == 0 || version < s.CommitVersion {
			s.CommitVersion = version
		}
		keys := strings.Fields(metadata[signingKeysMetadataKey])
		if signed = signed && len(keys) > 0; !signed {
			continue
		}
		after, err := strconv.ParseUint(metadata[signedAfterMetadataKey], 10, 64)
		if err != nil {
			return SigningSettings{}, &LayoutError{EventsStreamName(shard), signedAfterMetadataKey, fmt.Sprintf("is %q, not a sequence", metadata[signedAfterMetadataKey])}
		}
		s.After = append(s.After, after)
		for _, key := range keys {
			if !slices.Contains(s.Keys, key) {
				s.Keys = append(s.Keys, key)
			}
		}
	}
	if !signed { // Provision has not updated the last shard yet, so no service signs
		s.After, s.Keys = nil, nil
	}
	return s, nil
}

// parseCommitVersion returns the commit version that a stream of the log records, or 1 if it records none. Its error is
// a *LayoutError.
func parseCommitVersion(have jetstream.StreamConfig) (int, error) {
	text, recorded := have.Metadata[commitVersionMetadataKey]
	if !recorded {
		return 1, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, &LayoutError{have.Name, commitVersionMetadataKey, fmt.Sprintf("is %q, not a version of commits", text)}
	}
	return n, nil
}

// commitVersionMetadata returns the metadata for the commit version of a stream of the log. The version never decreases,
// because the log may already have commits of the newer version.
func commitVersionMetadata(have jetstream.StreamInfo, cfg ProvisionConfig) (map[string]string, error) {
	installed, err := parseCommitVersion(have.Config)
	if err != nil {
		return nil, err
	}
	want := cmp.Or(cfg.CommitVersion, events.CommitVersion)
	if cfg.CommitVersion != 0 && cfg.CommitVersion < installed {
		return nil, fmt.Errorf("commit-version: the log may hold commits of version %d already, and cannot go back to %d", installed, cfg.CommitVersion)
	}
	return map[string]string{commitVersionMetadataKey: strconv.Itoa(max(want, installed))}, nil
}

// signingMetadata returns the metadata for the signing keys of a stream of the log: the given keys, added to the
// recorded ones.
func signingMetadata(have jetstream.StreamInfo, cfg ProvisionConfig) map[string]string {
	if len(cfg.KeyIDs) == 0 {
		return nil
	}
	after, recorded := have.Config.Metadata[signedAfterMetadataKey]
	all := strings.Fields(have.Config.Metadata[signingKeysMetadataKey])
	if !recorded || cfg.KeysLost {
		after, all = strconv.FormatUint(have.State.LastSeq, 10), nil
	}
	all = append(all, cfg.KeyIDs...)
	slices.Sort(all)
	return map[string]string{signedAfterMetadataKey: after, signingKeysMetadataKey: strings.Join(slices.Compact(all), " ")}
}
