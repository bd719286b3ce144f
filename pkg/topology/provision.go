package topology

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
)

// ProvisionConfig holds the number of shards, partitions and replicas of an installation's streams, and further
// settings of Provision.
type ProvisionConfig struct {
	// Shards is the number of streams of the log: 1, 2, 4 or 8. 0 means the installed number, or 1 for a new
	// installation. It cannot be changed later.
	Shards int
	// Partitions is the number of partitions of the log: 1, 2, 4, 8, 16, 32 or 64, and not less than Shards. 0 means
	// the installed number; a new installation then has 64 partitions in 8 groups and records no number, like those of
	// earlier builds. It cannot be changed later.
	Partitions int
	// Replicas is the number of replicas of each stream, 1 to 5. 0 means the installed number, or 1 for a new
	// installation. DELTAS always has one.
	Replicas int
	// DeltasAge is the time for which text in flight is stored, at least MinDeltasMaxAge. 0 means the default DefaultDeltasMaxAge.
	DeltasAge time.Duration
	// KeyIDs are the names, role/id, of the keys that sign commits. When the first keys are added, each stream of
	// the log records its last sequence, after which commits must be signed. The names are added to the recorded
	// ones.
	KeyIDs []string
	// KeysLost declares the recorded signing keys as lost: the present content of the log counts as unsigned, and
	// only KeyIDs are recorded.
	KeysLost bool
	// CommitVersion is the commit version that the log's writers use from their next start on. 0 means
	// events.CommitVersion, which older builds may not be able to read. A version below the recorded one is an
	// error.
	CommitVersion int
}

func (c ProvisionConfig) validate() error {
	if c.Shards != 0 && (c.Shards < 0 || c.Shards > MaxShards || MaxShards%c.Shards != 0) {
		return fmt.Errorf("shards: %d must be 1, 2, 4 or 8", c.Shards)
	}
	if c.Partitions != 0 {
		if err := events.CheckPartitions(c.Partitions); err != nil {
			return fmt.Errorf("partitions: %w", err)
		}
	}
	if c.Replicas < 0 || c.Replicas > 5 {
		return fmt.Errorf("replicas: %d must be 1 to 5", c.Replicas)
	}
	if c.DeltasAge != 0 && c.DeltasAge < MinDeltasMaxAge {
		return fmt.Errorf("text-age: %s is less than %s", c.DeltasAge, MinDeltasMaxAge)
	}
	if c.CommitVersion < 0 || c.CommitVersion > events.CommitVersion {
		return fmt.Errorf("commit-version: %d must be 1 to %d", c.CommitVersion, events.CommitVersion)
	}
	return nil
}

// ErrNotInstalled is returned if NATS does not have Spool's streams.
var ErrNotInstalled = errors.New("the streams of Spool are not installed on this NATS")

// placementPatience is the maximum time for which Provision waits for servers of the cluster.
const placementPatience = 30 * time.Second

// noPeers is the error code of NATS if the leader of the cluster does not know enough servers that can store a stream. A
// new leader, and one whose routes were just connected again, does not know them for a moment.
const noPeers = jetstream.ErrorCode(10005)

// Provision creates every stream and bucket, or updates the existing ones, and deletes the stream LIVE of earlier
// builds. It is idempotent, and several callers may run it concurrently. If the cluster has no servers for a stream,
// Provision tries again for half a minute. It returns an error that names the setting if the number of shards or an
// immutable setting differs from the installation.
func Provision(ctx context.Context, js jetstream.JetStream, cfg ProvisionConfig) error {
	if err := cfg.validate(); err != nil {
		return err
	}
	pauses := retry.NewDoubling(100*time.Millisecond, 2*time.Second)
	for began := time.Now(); ; {
		err := provisionOnce(ctx, js, cfg)
		var refused *jetstream.APIError
		if !errors.As(err, &refused) || refused.ErrorCode != noPeers || time.Since(began) > placementPatience {
			return err
		}
		if ended := retry.Pause(ctx, pauses.NextBackOff()); ended != nil {
			return fmt.Errorf("%w: %w", ended, err)
		}
	}
}

// provisionOnce makes one attempt of Provision.
func provisionOnce(ctx context.Context, js jetstream.JetStream, cfg ProvisionConfig) error {
	layout, err := installedLayout(ctx, js)
	if errors.Is(err, ErrNotInstalled) {
		layout, err = NewLayout(max(cfg.Shards, 1), cfg.Partitions)
	}
	if err != nil {
		return err
	}
	// EVENTS-0 is created first and records the layout. If two callers disagree, one of them fails before the second
	// stream is created.
	if err := cfg.checkLayout(layout); err != nil {
		return err
	}
	for _, s := range Streams(layout) {
		s.Config.Metadata = layout.metadata()
		if s.Config.Name == StreamDeltas {
			s.Config.MaxAge = cmp.Or(cfg.DeltasAge, DefaultDeltasMaxAge)
		}
		if err := ensureStream(ctx, js, s.Config, layout, cfg); err != nil {
			return fmt.Errorf("provision stream %s: %w", s.Config.Name, err)
		}
	}
	if err := deleteLiveStream(ctx, js); err != nil {
		return fmt.Errorf("delete stream %s of an earlier build: %w", retiredLiveStream, err)
	}
	return provisionBuckets(ctx, js, cfg.Replicas)
}

// retiredLiveStream is the stream in which earlier builds stored the messages that projectors publish on LiveFilter for
// a minute. No build reads or needs it: projectors of earlier builds publish with core NATS too.
const retiredLiveStream = "LIVE"

// deleteLiveStream deletes the stream LIVE of an earlier build. A stream of that name that Spool did not create is kept.
func deleteLiveStream(ctx context.Context, js jetstream.JetStream) error {
	s, err := js.Stream(ctx, retiredLiveStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if have := s.CachedInfo().Config; !hasLayoutMetadata(have) || !haveSameSubjects(have.Subjects, []string{"live.>"}) {
		return nil
	}
	err = js.DeleteStream(ctx, retiredLiveStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil // another caller deleted it meanwhile
	}
	return err
}

// installedLayout returns the layout of the installed streams, of which some may be missing, or ErrNotInstalled. It
// returns *LayoutError if they disagree, so that nothing is written then.
func installedLayout(ctx context.Context, js jetstream.JetStream) (Layout, error) {
	layout, _, err := readLayout(ctx, js)
	if err != nil {
		return layout, err
	}
	for i, s := range Streams(layout) {
		have, err := streamConfig(ctx, js, s.Config.Name)
		switch {
		case errors.Is(err, ErrNotInstalled):
			continue
		case err != nil:
			return layout, err
		case i < layout.Shards:
			err = layout.checkStream(i, have)
		case hasLayoutMetadata(have):
			err = layout.checkMetadata(have)
		}
		if err != nil {
			return layout, err
		}
	}
	return layout, nil
}

// checkLayout returns an error that names the setting if the installed layout is not the requested one.
func (c ProvisionConfig) checkLayout(have Layout) error {
	switch {
	case c.Shards != 0 && c.Shards != have.Shards:
		return fmt.Errorf("shards: the log is installed with %d, not %d, and the number cannot be changed; use %d, or export into a new installation", have.Shards, c.Shards, have.Shards)
	case c.Partitions != 0 && have.Partitions == 0:
		return fmt.Errorf("partitions: the log was installed by an earlier build and keeps its 64 partitions in 8 groups; leave the setting empty, or export into a new installation")
	case c.Partitions != 0 && c.Partitions != have.Partitions.PartitionCount():
		return fmt.Errorf("partitions: the log is installed with %d, not %d, and the number cannot be changed; use %d, or export into a new installation", have.Partitions.PartitionCount(), c.Partitions, have.Partitions.PartitionCount())
	}
	return nil
}

// ensureStream creates a stream, or updates the settings that Spool owns if the stream exists.
func ensureStream(ctx context.Context, js jetstream.JetStream, want jetstream.StreamConfig, layout Layout, cfg ProvisionConfig) error {
	if want.Replicas == 0 {
		want.Replicas = max(cfg.Replicas, 1)
	}
	s, err := js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if err := addLogMetadata(want, jetstream.StreamInfo{}, cfg); err != nil {
			return err
		}
		_, err = js.CreateStream(ctx, want)
		if !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			return err
		}
		// Another caller created the stream meanwhile, perhaps with other settings: compare them.
		s, err = js.Stream(ctx, want.Name)
	}
	if err != nil {
		return err
	}
	have := s.CachedInfo().Config
	if hasLayoutMetadata(have) {
		// Another caller may have installed another layout meanwhile.
		if other, err := parseLayout(have); err != nil {
			return err
		} else if err := cfg.checkLayout(other); err != nil {
			return err
		}
		if err := layout.checkMetadata(have); err != nil {
			return err
		}
	}
	if err := checkImmutable(have, want); err != nil {
		return err
	}
	if cfg.Replicas == 0 {
		want.Replicas = have.Replicas
	}
	if err := addLogMetadata(want, *s.CachedInfo(), cfg); err != nil {
		return err
	}
	next := mergeSettings(have, want)
	if hasSameSettings(have, next) {
		return nil
	}
	_, err = js.UpdateStream(ctx, next)
	return err
}

// addLogMetadata adds the signing keys and the commit version to the metadata of a stream of the log.
func addLogMetadata(want jetstream.StreamConfig, have jetstream.StreamInfo, cfg ProvisionConfig) error {
	if !isLogStream(want.Name) {
		return nil
	}
	version, err := commitVersionMetadata(have, cfg)
	if err != nil {
		return err
	}
	maps.Copy(want.Metadata, version)
	maps.Copy(want.Metadata, signingMetadata(have, cfg))
	return nil
}

// isLogStream reports whether a stream is part of the log.
func isLogStream(stream string) bool { return strings.HasPrefix(stream, "EVENTS-") }

// checkImmutable returns an error for the first setting that differs and that the server cannot change.
func checkImmutable(have, want jetstream.StreamConfig) error {
	for _, s := range []struct {
		name       string
		have, want any
	}{
		{"storage", have.Storage, want.Storage},
		{"retention", have.Retention, want.Retention},
		{"persist mode", have.PersistMode, want.PersistMode},
		{"deny delete", have.DenyDelete, want.DenyDelete},
		{"deny purge", have.DenyPurge, want.DenyPurge},
	} {
		if s.have != s.want {
			return fmt.Errorf("%s is %v and must be %v, which cannot be changed on an existing stream: move its messages to a new one", s.name, s.have, s.want)
		}
	}
	return nil
}

// mergeSettings returns the installed configuration with the wanted values of the settings that Spool owns. It keeps
// the operator's other settings, such as placement.
func mergeSettings(have, want jetstream.StreamConfig) jetstream.StreamConfig {
	next := have
	next.Description, next.Subjects, next.Replicas = want.Description, want.Subjects, want.Replicas
	next.Discard, next.MaxAge = want.Discard, want.MaxAge
	next.MaxMsgs, next.MaxBytes = toServerLimit(want.MaxMsgs), toServerLimit(want.MaxBytes)
	next.MaxMsgsPerSubject = toServerLimit(want.MaxMsgsPerSubject)
	next.AllowDirect = want.AllowDirect
	next.AllowRollup = want.AllowRollup || have.AllowRollup
	next.AllowMsgTTL = want.AllowMsgTTL || have.AllowMsgTTL
	next.AllowMsgSchedules = want.AllowMsgSchedules || have.AllowMsgSchedules
	next.AllowAtomicPublish = want.AllowAtomicPublish || have.AllowAtomicPublish
	next.Metadata = maps.Clone(have.Metadata)
	if next.Metadata == nil {
		next.Metadata = map[string]string{}
	}
	maps.Copy(next.Metadata, want.Metadata)
	return next
}

// toServerLimit converts a limit to the form that the server reports, in which -1 means no limit.
func toServerLimit(n int64) int64 {
	if n == 0 {
		return -1
	}
	return n
}

// hasSameSettings reports whether two configurations agree in the settings that Spool owns and the server can change.
func hasSameSettings(a, b jetstream.StreamConfig) bool {
	return a.Description == b.Description && haveSameSubjects(a.Subjects, b.Subjects) && a.Replicas == b.Replicas &&
		a.Discard == b.Discard && a.MaxAge == b.MaxAge && a.MaxMsgs == b.MaxMsgs && a.MaxBytes == b.MaxBytes &&
		a.MaxMsgsPerSubject == b.MaxMsgsPerSubject && a.AllowDirect == b.AllowDirect && a.AllowRollup == b.AllowRollup &&
		a.AllowMsgTTL == b.AllowMsgTTL && a.AllowMsgSchedules == b.AllowMsgSchedules && a.AllowAtomicPublish == b.AllowAtomicPublish &&
		maps.Equal(a.Metadata, b.Metadata)
}

// provisionBuckets creates or updates the key-value and object buckets.
func provisionBuckets(ctx context.Context, js jetstream.JetStream, replicas int) error {
	for _, kv := range KeyValueBuckets() {
		c := kv.Config
		keep, err := bucketReplicas(ctx, js, "KV_"+c.Bucket, replicas)
		if err != nil {
			return fmt.Errorf("provision key-value bucket %s: %w", c.Bucket, err)
		}
		c.Replicas = keep
		if _, err := js.CreateOrUpdateKeyValue(ctx, c); err != nil {
			return fmt.Errorf("provision key-value bucket %s: %w", c.Bucket, err)
		}
	}
	for _, o := range ObjectBuckets() {
		c := o.Config
		keep, err := bucketReplicas(ctx, js, "OBJ_"+c.Bucket, replicas)
		if err != nil {
			return fmt.Errorf("provision object bucket %s: %w", c.Bucket, err)
		}
		c.Replicas = keep
		if _, err := js.CreateOrUpdateObjectStore(ctx, c); err != nil {
			return fmt.Errorf("provision object bucket %s: %w", c.Bucket, err)
		}
	}
	return nil
}

// bucketReplicas returns the number of replicas of the bucket with the given stream: requested if it is not 0, else the
// present number, or 1 for a new bucket.
func bucketReplicas(ctx context.Context, js jetstream.JetStream, stream string, requested int) (int, error) {
	if requested != 0 {
		return requested, nil
	}
	s, err := js.Stream(ctx, stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 1, nil
	}
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().Config.Replicas, nil
}
