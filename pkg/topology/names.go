// Package topology defines everything that Spool has in NATS: each stream, subject, bucket and durable as a
// documented constant or function, the permissions of each service's user, and Provision, the only code that
// creates them. docs/subjects.md is generated from it.
package topology

import (
	"fmt"
	"strconv"

	"github.com/spoolhq/spool/pkg/events"
)

//go:generate go run ./gen ../../docs/subjects.md

// Names of the streams. The log itself is in EventsStreamName(0), EventsStreamName(1), ….
const (
	StreamDeltas   = "DELTAS"
	StreamCommands = "COMMANDS"
	StreamJobs     = "JOBS"
	StreamTimers   = "TIMERS"
	StreamDead     = "DEAD"
	StreamHeads    = "HEADS"
)

// MaxShards is the maximum number of streams over which the log can be distributed.
const MaxShards = 8

// EventsStreamName returns the name of the stream of a shard of the log.
func EventsStreamName(shard int) string { return "EVENTS-" + strconv.Itoa(shard) }

// ShardOf returns the shard of a partition.
func ShardOf(partition, shards int) int { return partition % shards }

// ShardOfGroup returns the shard of all partitions of a projector group. The number of shards divides that of groups.
func ShardOfGroup(group, shards int) int { return group % shards }

// The services that process commands. The name is the second token of a command's subject.
const (
	ServiceSession = "session"
	ServiceSkills  = "skills"
)

// CommandSubject returns the subject on which a command waits for its service. id is the id of the command's target
// and determines the partition, one of 64 in every installation. The caller must have validated the tokens.
func CommandSubject(service, tenant, id string) string {
	return "cmd." + service + "." + events.PartitionToken(events.Partition(id)) + "." + tenant + "." + id
}

// CommandFilter returns the filter that matches every command of a service.
func CommandFilter(service string) string { return "cmd." + service + ".>" }

// ProviderJobSubject returns the subject of jobs that any executor of a provider may take.
func ProviderJobSubject(provider string) string { return "job." + provider + ".any" }

// EngineJobSubject returns the subject of jobs for the executors of the engine that has the session's sandbox.
func EngineJobSubject(provider, engine string) string { return "job." + provider + ".on." + engine }

// TimerScheduleSubject returns the subject on which the schedule of a session is stored: a message that makes the
// server publish to TimerDueSubject at a given time. Publishing again replaces the schedule.
func TimerScheduleSubject(session string) string { return "timer.at." + session }

// TimerDueSubject returns the subject to which the server publishes when a session's schedule fires, and on which the session service receives
// the timer. One message is kept per session.
func TimerDueSubject(session string) string { return "timer.due." + session }

// TimerDueFilter matches every fired timer.
const TimerDueFilter = "timer.due.*"

// Subjects of the log by aspect, for the filters of readers and the permissions of users.
const (
	LogFilter  = "ev.>" // all aspects
	LifeFilter = "ev.*.*.*.life"
	RunFilter  = "ev.*.*.*.run"
	KeyFilter  = "ev.*.*.*.key"

	AgentFilter       = "ev.*.*.*.agent"
	InstanceFilter    = "ev.*.*.*.instance"
	EnvironmentFilter = "ev.*.*.*.environment"
	BudgetFilter      = "ev.*.*.*.budget"
	LimitsFilter      = "ev.*.*.*.limits"
	SkillFilter       = "ev.*.*.*.skill"
)

// PartitionFilter returns the filter for every subject of the log in a partition.
func PartitionFilter(partition int) string {
	return "ev." + events.PartitionToken(partition) + ".*.*.*"
}

// HeadSubject returns the subject of the signed heads of a shard of the log.
func HeadSubject(shard int) string { return "head." + strconv.Itoa(shard) }

// HeadFilter matches the signed heads of all shards.
const HeadFilter = "head.*"

// TenantLifeFilter returns the filter for the life subjects of a tenant's sessions in a partition.
func TenantLifeFilter(partition int, tenant string) string {
	return "ev." + events.PartitionToken(partition) + "." + tenant + ".*." + string(events.Life)
}

// TenantKeyFilter returns the filter for the API keys of a tenant in all partitions.
func TenantKeyFilter(tenant string) string { return "ev.*." + tenant + ".*." + string(events.Key) }

// DeltaFilter returns the filter for the deltas of a partition: frames, and messages of earlier builds for one session.
func DeltaFilter(partition int) string { return "dl." + events.PartitionToken(partition) + ".>" }

// FrameFilter matches the subjects of frames (events.FrameSubject). Gateways receive them by core subscriptions.
const FrameFilter = "dl.*.*"

// ExecutorCtlSubject returns the core subject on which an executor receives hints and requests about sessions. No
// durable state depends on it.
func ExecutorCtlSubject(executor string) string { return "ctl." + executor }

// LiveFilter matches the core subjects on which projectors announce committed changes to gateways
// (events.LiveSubject; readmodel.ChangesToken in place of a session). No stream stores these messages: a gateway that misses one reads the change from Postgres.
const LiveFilter = "live.*.*"

// ProjectorStartSubject is the core subject on which a projector announces its start, so that gateways look for events that
// they missed.
const ProjectorStartSubject = "ctl.projector"

// FilesRequestSubject returns the core subject for requests for files of running sandboxes. The executors of one engine
// subscribe to it.
func FilesRequestSubject(provider, engine string) string {
	return "files.on." + provider + "." + engine
}

// FilesResponseSubject returns the core subject on which an executor sends a requested file: a header and chunks. It is
// not an inbox, so that an executor cannot forge responses to other requests of a gateway.
func FilesResponseSubject(transfer string) string { return "files.to." + transfer }

// FilesAckSubject returns the core subject on which the gateway acknowledges the chunks of a file that it has read.
func FilesAckSubject(transfer string) string { return "files.ack." + transfer }

// DeadSubject returns the subject of a dead letter. origin is the subject of the message, or the component that it
// comes from. See headers.go for the headers of dead letters.
func DeadSubject(origin string) string { return "dead." + origin }

// DeadFilter matches every dead letter, but not the advisories of the server in the same stream.
const DeadFilter = "dead.>"

// DeadJobFilter matches the dead letters of jobs.
const DeadJobFilter = "dead.job.>"

// The advisories that the server itself publishes into DEAD.
const (
	AdvisoryMaxDeliveries = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"
	AdvisoryTerminated    = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>"
)

// Buckets.
const (
	// BucketLeases is the key-value bucket of live executors: their engine, capacity and address.
	BucketLeases = "leases"
	// BucketIdempotency is the key-value bucket of requests with an Idempotency-Key.
	BucketIdempotency = "idempotency"
	// BucketPayloads is the object bucket of event data over events.MaxInlineBytes, by SHA-256 in hex.
	BucketPayloads = "payloads"
	// BucketWorkspaces is the object bucket of snapshots and of uploaded files.
	BucketWorkspaces = "workspaces"
	// BucketSkills is the object bucket of skills' ZIPs, by SHA-256 in hex, and of uploads that are not checked
	// yet.
	BucketSkills = "skills"
	// BucketSecrets is the key-value bucket of the encrypted values of secrets.
	BucketSecrets = "secrets"
	// BucketSignInCodes is the key-value bucket of codes that can be exchanged for a session credential.
	BucketSignInCodes = "signin-codes"
	// BucketSignInSessions is the key-value bucket of session credentials.
	BucketSignInSessions = "signin-sessions"
	// BucketBudgets is the key-value bucket of tenants' limits, budgets and usage.
	BucketBudgets = "budgets"
	// BucketWaits is the key-value bucket of the reasons for which executions wait, as executors report them.
	BucketWaits = "waits"
)

// maxTokenLength is the maximum length of a name that an operator uses in a subject, a key or a durable's name.
const maxTokenLength = 64

// CheckToken returns an error if s is not allowed in a subject, a key and a durable's name: it must have 1 to 64
// characters of A-Z, a-z, 0-9, - and _.
func CheckToken(field, s string) error {
	ok := len(s) > 0 && len(s) <= maxTokenLength
	for i := 0; ok && i < len(s); i++ {
		c := s[i]
		ok = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
	}
	if !ok {
		return fmt.Errorf("%s: %.64q must be 1 to 64 characters of A-Z, a-z, 0-9, - and _", field, s)
	}
	return nil
}
