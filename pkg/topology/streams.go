package topology

import (
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Ages and limits of the streams and buckets.
const (
	// DefaultDeltasMaxAge is the default age at which the stream DELTAS drops text in flight.
	DefaultDeltasMaxAge = 24 * time.Hour
	// MinDeltasMaxAge is the lowest age that an operator may set for the stream DELTAS.
	MinDeltasMaxAge = time.Minute

	DeadMaxAge     = 30 * 24 * time.Hour
	LeaseTTL       = 3 * time.Second
	IdempotencyTTL = 24 * time.Hour
	// SignInCodeTTL is the lifetime of a code, and SignInSessionTTL that of a session: of a session
	// credential in all, and of a session cookie without a request.
	SignInCodeTTL    = time.Minute
	SignInSessionTTL = 8 * time.Hour
	// WaitTTL is the time after which the reason of a wait expires that no executor has written again. It is twice
	// WaitRefreshInterval, at which an executor writes the reasons of its present waits again.
	WaitTTL             = 2 * WaitRefreshInterval
	WaitRefreshInterval = 15 * time.Second

	// CommandsMaxMsgs and CommandsMaxBytes limit the waiting commands. Above the limits a new command is refused,
	// which its sender notices; no older command is dropped.
	CommandsMaxMsgs  = 1_000_000
	CommandsMaxBytes = 512 << 20
	// CommandsMaxAge is the maximum age of a command that no service has processed. The deadline of a command is at most
	// minutes, so it has passed by then.
	CommandsMaxAge = 24 * time.Hour
	// JobsMaxMsgs limits the waiting jobs. A job is small, because it carries no instruction.
	JobsMaxMsgs = 1_000_000
)

// Stream is a stream's configuration and the users that access it.
type Stream struct {
	Config jetstream.StreamConfig
	Kind   string // one phrase for the docs
	Writes string // which users write
	Reads  string // which users read
}

// Streams returns all streams of an installation, the log first.
func Streams(l Layout) []Stream {
	var list []Stream
	for i := range l.Shards {
		list = append(list, eventsStream(i, l))
	}
	return append(list, deltasStream(), commandsStream(), jobsStream(), timersStream(), deadStream(), headsStream())
}

// eventsStream returns a stream of the log, which keeps everything and refuses new messages when it is full. Its
// configuration allows deletes and purges, since denying them cannot be undone; the users' permissions deny them.
func eventsStream(shard int, l Layout) Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        EventsStreamName(shard),
			Description: "The log: commits of sessions and of the catalogue.",
			Subjects:    l.shardSubjects(shard),
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardNew,
			Storage:     jetstream.FileStorage,
			AllowDirect: true,
			// Writers store many waiting commits in one atomic batch.
			AllowAtomicPublish: true,
		},
		Kind:   "source of truth; kept forever, refuses new messages when full",
		Writes: "session (life, key, agent, instance, environment, budget, limits, run), executor (run), janitor (run: the end of a deleted session), skills (skill)",
		Reads:  "session, executor, projector, skills, janitor",
	}
}

// deltasStream returns the stream of deltas. It is written asynchronously, which allows only one replica:
// block_complete has the complete text as well.
func deltasStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamDeltas,
			Description: "Text in flight: text of blocks that are not complete.",
			Subjects:    []string{"dl.>"},
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardOld,
			Storage:     jetstream.FileStorage,
			MaxAge:      DefaultDeltasMaxAge,
			Replicas:    1,
			PersistMode: jetstream.AsyncPersistMode,
			AllowDirect: true,
		},
		Kind:   "24 hours or SPOOL_TEXT_AGE, written asynchronously, one replica",
		Writes: "executor",
		Reads:  "gateway, executor (for blocks whose sandbox was lost)",
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
			MaxAge:      CommandsMaxAge,
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
			Description: "Sessions that need an executor; a job carries no instruction.",
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

// timersStream returns the stream of timers, which is separate because a stream with schedules cannot discard new
// messages.
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

func deadStream() Stream {
	return Stream{
		Config: jetstream.StreamConfig{
			Name:        StreamDead,
			Description: "Messages whose processing was given up, with the reason, and the server's advisories on them.",
			Subjects:    []string{"dead.>", AdvisoryMaxDeliveries, AdvisoryTerminated},
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardOld,
			Storage:     jetstream.FileStorage,
			MaxAge:      DeadMaxAge,
			AllowDirect: true,
		},
		Kind:   "30 days",
		Writes: "session, executor, projector, skills, the server (advisories)",
		Reads:  "session (jobs), gateway (for operators)",
	}
}

// headsStream returns the stream of the signed heads of the log. Only admin may delete or purge its messages.
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
		Kind:   "kept forever, refuses new messages when full",
		Writes: "session",
		Reads:  "session, admin (spool verify)",
	}
}

// KeyValueBucket is the configuration of a key-value bucket and the users that access it.
type KeyValueBucket struct {
	Config jetstream.KeyValueConfig
	Keys   string
	Writes string
	Reads  string
}

// KeyValueBuckets returns all key-value buckets of an installation.
func KeyValueBuckets() []KeyValueBucket {
	return []KeyValueBucket{
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketLeases, Description: "Live executors: engine, capacity, address.",
				// A bucket in memory would lose every lease when the server restarts.
				TTL: LeaseTTL, Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<executor>", Writes: "executor, every second", Reads: "session, executor, gateway",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketIdempotency, Description: "Requests with an Idempotency-Key: hash of the body and the assigned ids.",
				TTL: IdempotencyTTL, Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<tenant>.<hash of the key>", Writes: "gateway", Reads: "gateway",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketSignInCodes, Description: "Codes that can be exchanged once for a session credential: their SHA-256, and the key that created each.",
				TTL: SignInCodeTTL, Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<first half of the SHA-256>", Writes: "gateway", Reads: "gateway",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketSignInSessions, Description: "Session credentials and cookies: their SHA-256, and the key whose rights each has.",
				TTL: SignInSessionTTL, Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<first half of the SHA-256>", Writes: "gateway", Reads: "gateway",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketSecrets, Description: "Values of secrets, encrypted to the executors' key.", Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<tenant>.e.<SHA-256>, or <tenant>.x.<execution>.<SHA-256> for one execution", Writes: "gateway, session (removes those of an execution)", Reads: "executor",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketBudgets, Description: "Limits and budgets of tenants, and their usage.", Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<tenant>, and _positions: how far the log is counted", Writes: "session", Reads: "session, executor, gateway, janitor",
		},
		{
			Config: jetstream.KeyValueConfig{
				Bucket: BucketWaits, Description: "Why executions wait: the reason, since when, and details.",
				// A bucket in memory would be gone after a restart of NATS, until the next run of the provisioner.
				TTL: WaitTTL, Storage: jetstream.FileStorage, History: 1,
			},
			Keys: "<execution>", Writes: "executor, about every 15 s while an execution waits", Reads: "executor, gateway",
		},
	}
}

// ObjectBucket is the configuration of an object bucket and the users that access it.
type ObjectBucket struct {
	Config jetstream.ObjectStoreConfig
	Names  string
	Writes string
	Reads  string
}

// ObjectBuckets returns all object buckets of an installation.
func ObjectBuckets() []ObjectBucket {
	return []ObjectBucket{
		{
			Config: jetstream.ObjectStoreConfig{
				Bucket: BucketPayloads, Description: "Event data that is too large for the log.", Storage: jetstream.FileStorage,
			},
			Names: "<tenant>/<session or catalogue id>/<SHA-256 in hex>; in earlier builds <SHA-256 in hex>", Writes: "session, executor, skills", Reads: "session, executor, projector, skills",
		},
		{
			Config: jetstream.ObjectStoreConfig{
				Bucket: BucketWorkspaces, Description: "Snapshots of workspaces, and uploaded files.", Storage: jetstream.FileStorage,
			},
			Names: "<tenant>/<session>/…", Writes: "gateway (files), executor (snapshots)", Reads: "gateway, executor",
		},
		{
			Config: jetstream.ObjectStoreConfig{
				Bucket: BucketSkills, Description: "ZIPs of skills.", Storage: jetstream.FileStorage,
			},
			Names: "<SHA-256 in hex>, and upload/<tenant>/<command> during the upload", Writes: "gateway (uploads), skills", Reads: "gateway, skills, executor",
		},
	}
}

// shortSubjects returns a short form of the subjects of a stream for docs and errors.
func shortSubjects(list []string) string {
	if len(list) > 4 {
		return list[0] + " … " + list[len(list)-1]
	}
	return strings.Join(list, ", ")
}

// haveSameSubjects reports whether two lists have the same subjects, in any order.
func haveSameSubjects(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}
