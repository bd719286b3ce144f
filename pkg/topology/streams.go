package topology

import (
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
)

// Times and limits of the streams and buckets.
const (
	DeltasAge      = 7 * 24 * time.Hour
	LiveAge        = time.Minute
	DeadAge        = 30 * 24 * time.Hour
	LeaseTTL       = 3 * time.Second
	IdempotencyTTL = 24 * time.Hour

	// CommandsMaxMsgs and CommandsMaxBytes bound what waits in COMMANDS. Past them a
	// command is refused, which its sender sees, instead of an older one being dropped.
	CommandsMaxMsgs  = 1_000_000
	CommandsMaxBytes = 512 << 20
	// CommandsAge bounds how long a command stays that no service takes. Its deadline, minutes at most, has passed long before.
	CommandsAge = 24 * time.Hour
	// JobsMaxMsgs bounds what waits in JOBS; a job carries no instruction and is small.
	JobsMaxMsgs = 1_000_000
)

// Stream is a stream with who uses it.
type Stream struct {
	Config jetstream.StreamConfig
	Kind   string // one phrase for the docs
	Writes string // which users write
	Reads  string // which users read
}

// shardsKey is the metadata in which EVENTS-0 keeps the number of shards.
const shardsKey = "spool-shards"

// Streams lists every stream of an installation with that many shards, the log first.
func Streams(shards int) []Stream {
	var list []Stream
	for i := range shards {
		list = append(list, eventsStream(i, shards))
	}
	return append(list, deltasStream(), commandsStream(), jobsStream(), timersStream(), liveStream(), deadStream(), headsStream())
}

// eventsStream keeps everything and refuses rather than drops. Deletes and
// purges are not denied by the stream, which could never be undone, but withheld from users.
func eventsStream(shard, shards int) Stream {
	var subjects []string
	for p := shard; p < events.Partitions; p += shards {
		subjects = append(subjects, PartitionFilter(p))
	}
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        EventsStream(shard),
			Description: "The log: commits of sessions and of the catalogue.",
			Subjects:    subjects,
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardNew,
			Storage:     jetstream.FileStorage,
			AllowDirect: true,
		},
		Kind:   "the truth; kept for ever, refuses when full",
		Writes: "session (life, key, agent, instance, environment, budget, limits, run), executor (run), janitor (run: the end of a deleted session), skills (skill)",
		Reads:  "session, executor, projector, skills, janitor",
	}
}

// deltasStream opts out of sync: text in flight is in block_complete as well. Only one replica may do so.
func deltasStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamDeltas,
			Description: "Text in flight.",
			Subjects:    []string{"dl.>"},
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardOld,
			Storage:     jetstream.FileStorage,
			MaxAge:      DeltasAge,
			Replicas:    1,
			PersistMode: jetstream.AsyncPersistMode,
			AllowDirect: true,
		},
		Kind:   "7 days, written asynchronously, one replica",
		Writes: "executor",
		Reads:  "projector, executor (of blocks whose sandbox was lost), gateway (of what is replayed)",
	}
}

func commandsStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamCommands,
			Description: "Commands that wait for their service.",
			Subjects:    []string{"cmd.>"},
			Retention:   jetstream.WorkQueuePolicy,
			Discard:     jetstream.DiscardNew,
			Storage:     jetstream.FileStorage,
			MaxMsgs:     CommandsMaxMsgs,
			MaxBytes:    CommandsMaxBytes,
			MaxAge:      CommandsAge,
		},
		Kind:   "work queue, 24 hours, refuses when full",
		Writes: "gateway",
		Reads:  "session, skills",
	}
}

func jobsStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamJobs,
			Description: "Sessions that want an executor; a job carries no instruction.",
			Subjects:    []string{"job.>"},
			Retention:   jetstream.WorkQueuePolicy,
			Discard:     jetstream.DiscardNew,
			Storage:     jetstream.FileStorage,
			MaxMsgs:     JobsMaxMsgs,
		},
		Kind:   "work queue, refuses when full",
		Writes: "session",
		Reads:  "executor",
	}
}

// timersStream is apart from the others since a stream with schedules cannot discard new.
func timersStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:              StreamTimers,
			Description:       "One schedule for each session, and its last firing.",
			Subjects:          []string{"timer.>"},
			Retention:         jetstream.LimitsPolicy,
			Discard:           jetstream.DiscardOld,
			Storage:           jetstream.FileStorage,
			MaxMsgsPerSubject: 1,
			AllowRollup:       true,
			AllowMsgTTL:       true,
			AllowMsgSchedules: true,
		},
		Kind:   "schedules, one message kept for each subject",
		Writes: "session (at), the server (due)",
		Reads:  "session",
	}
}

func liveStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamLive,
			Description: "What changed in the read models, for clients that are connected.",
			Subjects:    []string{"live.>"},
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardOld,
			Storage:     jetstream.MemoryStorage,
			MaxAge:      LiveAge,
		},
		Kind:   "memory, 60 s",
		Writes: "projector",
		Reads:  "gateway (core subscriptions)",
	}
}

func deadStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamDead,
			Description: "Messages that were given up, with the reason, and the server's advisories about such.",
			Subjects:    []string{"dead.>", AdvisoryMaxDeliveries, AdvisoryTerminated},
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardOld,
			Storage:     jetstream.FileStorage,
			MaxAge:      DeadAge,
			AllowDirect: true,
		},
		Kind:   "30 days",
		Writes: "session, executor, projector, skills, the server (advisories)",
		Reads:  "session (jobs), gateway (for people)",
	}
}

// headsStream keeps the signed heads of the log. Nobody but admin may delete or purge its messages.
func headsStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamHeads,
			Description: "Signed heads of the log: a chain for each shard.",
			Subjects:    []string{HeadFilter},
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardNew,
			Storage:     jetstream.FileStorage,
			AllowDirect: true,
		},
		Kind:   "kept for ever, refuses when full",
		Writes: "session",
		Reads:  "session, admin (spool verify)",
	}
}

// KeyValue is a key-value bucket with who uses it.
type KeyValue struct {
	Config jetstream.KeyValueConfig
	Keys   string
	Writes string
	Reads  string
}

// KeyValues lists the key-value buckets.
func KeyValues() []KeyValue {
	return []KeyValue{
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketLeases, Description: "Executors that live: engine, capacity, address.",
				// In memory it would be gone with the server's next start, and with it every lease.
				TTL: LeaseTTL, Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<executor>", Writes: "executor, every second", Reads: "session, executor",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketIdempotency, Description: "Requests that came with an Idempotency-Key: body hash and the ids they were given.",
				TTL: IdempotencyTTL, Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<tenant>.<hash of the key>", Writes: "gateway", Reads: "gateway",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketSecrets, Description: "Values of secrets, encrypted to the executors' key.", Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<tenant>.e.<SHA-256>, or <tenant>.x.<execution>.<SHA-256> for one execution", Writes: "gateway, session (removes those of an execution)", Reads: "executor",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketBudgets, Description: "Limits and budgets of tenants, and what was taken of them.", Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<tenant>, and _positions: how far the log is counted", Writes: "session", Reads: "session, executor, gateway, janitor",
		},
	}
}

// Objects is an object bucket with who uses it.
type Objects struct {
	Config jetstream.ObjectStoreConfig
	Names  string
	Writes string
	Reads  string
}

// ObjectBuckets lists the object buckets.
func ObjectBuckets() []Objects {
	return []Objects{
		{
			Config: jetstream.ObjectStoreConfig{
				Bucket: BucketPayloads, Description: "Event data too large for the log.", Storage: jetstream.FileStorage,
			},
			Names: "<tenant>/<session or catalogue id>/<SHA-256 in hex>; of former versions <SHA-256 in hex>", Writes: "session, executor, skills", Reads: "session, executor, projector, skills",
		},
		{
			Config: jetstream.ObjectStoreConfig{
				Bucket: BucketWorkspaces, Description: "Snapshots of workspaces, and files on their way into one.", Storage: jetstream.FileStorage,
			},
			Names: "<tenant>/<session>/…", Writes: "gateway (files), executor (snapshots)", Reads: "gateway, executor",
		},
		{
			Config: jetstream.ObjectStoreConfig{
				Bucket: BucketSkills, Description: "ZIPs of skills.", Storage: jetstream.FileStorage,
			},
			Names: "<SHA-256 in hex>, and upload/<tenant>/<command> on the way in", Writes: "gateway (uploads), skills", Reads: "gateway, skills, executor",
		},
	}
}

// subjectsBrief shortens the subjects of a stream for docs and errors.
func subjectsBrief(list []string) string {
	if len(list) > 4 {
		return list[0] + " … " + list[len(list)-1]
	}
	return strings.Join(list, ", ")
}

// sameSubjects compares without regard to order.
func sameSubjects(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}
