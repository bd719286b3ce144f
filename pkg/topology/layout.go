package topology

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
)

// DefaultPartitions is the number of partitions of a new log, unless the operator chooses another one.
const DefaultPartitions = 8

// Metadata keys under which each stream records the layout of the log. A log with recorded partitions does not have
// shardsMetadataKey: builds that do not know partitionsMetadataKey need it, and so do not run on a log whose subjects they would get
// wrong.
const (
	shardsMetadataKey            = "spool-shards"
	partitionsMetadataKey        = "spool-partitions"
	partitionedShardsMetadataKey = "spool-partitioned-shards"
)

// Layout is the distribution of a log over streams and partitions. It is fixed when the log is installed.
type Layout struct {
	Shards     int
	Partitions events.Partitioning
}

// NewLayout returns the layout of a new log: with a number of partitions, or with 0 the layout of a log that does not
// record one.
func NewLayout(shards, partitions int) (Layout, error) {
	if shards < 1 || shards > MaxShards || MaxShards%shards != 0 {
		return Layout{}, fmt.Errorf("shards: %d must be 1, 2, 4 or 8", shards)
	}
	if partitions == 0 {
		return Layout{Shards: shards}, nil
	}
	if err := events.CheckPartitions(partitions); err != nil {
		return Layout{}, fmt.Errorf("partitions: %w", err)
	}
	if partitions < shards {
		return Layout{}, fmt.Errorf("partitions: %d is less than the %d shards", partitions, shards)
	}
	return Layout{Shards: shards, Partitions: events.Partitioning(partitions)}, nil //nolint:gosec // at most 64
}

// LayoutError is returned for streams whose metadata is not that of a log of Spool. No process works on such a log,
// because its writers and readers would use different subjects.
type LayoutError struct {
	Stream, Field string
	Reason        string
}

func (e *LayoutError) Error() string {
	return fmt.Sprintf("stream %s: metadata %s %s", e.Stream, e.Field, e.Reason)
}

// ReadLayout returns the layout of the installed log, or ErrNotInstalled while streams are missing. It returns
// *LayoutError if the metadata of the log's streams is invalid, or does not agree with the streams.
func ReadLayout(ctx context.Context, js jetstream.JetStream) (Layout, error) {
	l, first, err := readLayout(ctx, js)
	if err != nil {
		return l, err
	}
	for shard := range l.Shards {
		have := first
		if shard > 0 {
			if have, err = streamConfig(ctx, js, EventsStreamName(shard)); err != nil {
				return Layout{}, err
			}
		}
		if err := l.checkStream(shard, have); err != nil {
			return Layout{}, err
		}
	}
	return l, nil
}

// IsInstalled reports whether the stream of the log's first shard exists. Other streams may still be missing.
func IsInstalled(ctx context.Context, js jetstream.JetStream) (bool, error) {
	_, err := streamConfig(ctx, js, EventsStreamName(0))
	if errors.Is(err, ErrNotInstalled) {
		return false, nil
	}
	return err == nil, err
}

// ReadPartitions returns the partitions of the installed log from the metadata of COMMANDS and DEAD, for users that
// may not access the streams of the log. Its errors are those of ReadLayout.
func ReadPartitions(ctx context.Context, js jetstream.JetStream) (events.Partitioning, error) {
	commands, err := streamConfig(ctx, js, StreamCommands)
	if err != nil {
		return 0, err
	}
	l, err := parseLayout(commands)
	if err != nil {
		return 0, err
	}
	dead, err := streamConfig(ctx, js, StreamDead)
	if err != nil {
		return 0, err
	}
	return l.Partitions, l.checkMetadata(dead)
}

// readLayout returns the layout that EVENTS-0 records, and its configuration.
func readLayout(ctx context.Context, js jetstream.JetStream) (Layout, jetstream.StreamConfig, error) {
	have, err := streamConfig(ctx, js, EventsStreamName(0))
	if err != nil {
		return Layout{}, have, err
	}
	l, err := parseLayout(have)
	return l, have, err
}

// streamConfig returns the configuration of a stream, or ErrNotInstalled.
func streamConfig(ctx context.Context, js jetstream.JetStream, name string) (jetstream.StreamConfig, error) {
	s, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return jetstream.StreamConfig{}, ErrNotInstalled
	}
	if err != nil {
		return jetstream.StreamConfig{}, fmt.Errorf("look for %s: %w", name, err)
	}
	return s.CachedInfo().Config, nil
}

// parseLayout returns the layout that the metadata of a stream of the log records.
func parseLayout(have jetstream.StreamConfig) (Layout, error) {
	number := func(field string, valid func(int) bool, want string) (int, error) {
		text := have.Metadata[field]
		n, err := strconv.Atoi(text)
		if err != nil || strconv.Itoa(n) != text || !valid(n) {
			return 0, &LayoutError{have.Name, field, fmt.Sprintf("is %q, not %s: the stream was not created by Spool, or its metadata was changed", text, want)}
		}
		return n, nil
	}
	_, recorded := have.Metadata[partitionsMetadataKey]
	_, partitionedShards := have.Metadata[partitionedShardsMetadataKey]
	isShards := func(n int) bool { return n >= 1 && n <= MaxShards && MaxShards%n == 0 }
	if !recorded && !partitionedShards {
		shards, err := number(shardsMetadataKey, isShards, "1, 2, 4 or 8")
		return Layout{Shards: shards}, err
	}
	shards, err := number(partitionedShardsMetadataKey, isShards, "1, 2, 4 or 8")
	if err != nil {
		return Layout{}, err
	}
	partitions, err := number(partitionsMetadataKey, func(n int) bool { return n >= shards && events.CheckPartitions(n) == nil }, fmt.Sprintf("a power of two from %d to %d", shards, events.MaxPartitions))
	return Layout{Shards: shards, Partitions: events.Partitioning(partitions)}, err //nolint:gosec // at most 64
}

// checkStream returns a *LayoutError unless the metadata and the subjects of a shard's stream agree with the layout.
func (l Layout) checkStream(shard int, have jetstream.StreamConfig) error {
	if err := l.checkMetadata(have); err != nil {
		return err
	}
	if haveSameSubjects(have.Subjects, l.shardSubjects(shard)) {
		return nil
	}
	for _, f := range l.shardSubjects(shard) {
		if l.Partitions != 0 || !slices.Contains(have.Subjects, f) {
			return &LayoutError{have.Name, l.metadataKey(), fmt.Sprintf("is %s, but the stream has the subjects %s: the metadata was changed after the log was installed; restore it",
				have.Metadata[l.metadataKey()], shortSubjects(have.Subjects))}
		}
	}
	return nil // a log without recorded partitions, to which an operator added subjects; Provision removes them
}

// checkMetadata returns a *LayoutError unless a stream's metadata records the layout.
func (l Layout) checkMetadata(have jetstream.StreamConfig) error {
	other, err := parseLayout(have)
	if err != nil {
		return err
	}
	if other != l {
		field := shardsMetadataKey
		if other.Partitions != 0 {
			field = partitionsMetadataKey
		}
		return &LayoutError{have.Name, field, fmt.Sprintf("records %s, but the other streams record %s: the metadata was changed, or the streams are of different installations", other, l)}
	}
	return nil
}

// metadataKey returns the key of the stream metadata that identifies the layout.
func (l Layout) metadataKey() string {
	if l.Partitions == 0 {
		return shardsMetadataKey
	}
	return partitionsMetadataKey
}

// metadata returns the stream metadata that records the layout.
func (l Layout) metadata() map[string]string {
	if l.Partitions == 0 {
		return map[string]string{shardsMetadataKey: strconv.Itoa(l.Shards)}
	}
	return map[string]string{partitionsMetadataKey: strconv.Itoa(l.Partitions.PartitionCount()), partitionedShardsMetadataKey: strconv.Itoa(l.Shards)}
}

// hasLayoutMetadata reports whether the metadata of a stream records a layout.
func hasLayoutMetadata(have jetstream.StreamConfig) bool {
	for key := range maps.Keys(have.Metadata) {
		if key == shardsMetadataKey || key == partitionsMetadataKey || key == partitionedShardsMetadataKey {
			return true
		}
	}
	return false
}

// shardSubjects returns the subjects of the log that a shard's stream stores.
func (l Layout) shardSubjects(shard int) []string {
	var list []string
	for p := shard; p < l.Partitions.PartitionCount(); p += l.Shards {
		list = append(list, PartitionFilter(p))
	}
	return list
}

// String describes the layout.
func (l Layout) String() string {
	if l.Partitions == 0 {
		return fmt.Sprintf("%d shards without a number of partitions", l.Shards)
	}
	return fmt.Sprintf("%d shards and %d partitions", l.Shards, l.Partitions.PartitionCount())
}
