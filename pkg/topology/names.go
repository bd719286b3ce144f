// Package topology is everything of Spool that lies in NATS: each stream,
// subject, bucket and durable as a documented constant or function, the rights
// of each service's user, and Provision, the one place that creates them.
// docs/subjects.md is generated from it.
package topology

import (
	"fmt"
	"strconv"

	"github.com/spoolhq/spool/pkg/events"
)

//go:generate go run ./gen ../../docs/subjects.md

// Names of the streams. The log itself is EventsStream(0), EventsStream(1), ….
const (
	StreamDeltas   = "DELTAS"
	StreamCommands = "COMMANDS"
	StreamJobs     = "JOBS"
	StreamTimers   = "TIMERS"
	StreamLive     = "LIVE"
	StreamDead     = "DEAD"
	StreamHeads    = "HEADS"
)

// MaxShards is the largest number of streams that the log can be spread over.
const MaxShards = 8

// EventsStream is the stream of a shard of the log.
func EventsStream(shard int) string { return "EVENTS-" + strconv.Itoa(shard) }

// ShardOf is the shard that a partition lies in.
func ShardOf(partition, shards int) int { return partition % shards }

// ProjectorGroups is the number of partition groups, each of which one projector reads.
// The number of shards divides it, so that a group lies in one shard.
const ProjectorGroups = 8

// GroupOf is the projector group of a partition.
func GroupOf(partition int) int { return partition % ProjectorGroups }

// GroupPartitions lists the partitions of a projector group, ascending.
func GroupPartitions(group int) []int {
	var list []int
	for p := group; p < events.Partitions; p += ProjectorGroups {
		list = append(list, p)
	}
	return list
}

// GroupShard is the shard that all partitions of a projector group lie in.
func GroupShard(group, shards int) int { return group % shards }

// Services that take commands; the second token of a command's subject.
const (
	ServiceSession = "session"
	ServiceSkills  = "skills"
)

// CommandSubject is where a command waits for its service. The id is what the
// command is about: it decides the partition. Its tokens must have been checked.
func CommandSubject(service, tenant, id string) string {
	return "cmd." + service + "." + events.PartitionToken(events.Partition(id)) + "." + tenant + "." + id
}

// CommandFilter matches every command of a service.
func CommandFilter(service string) string { return "cmd." + service + ".>" }

// JobAny is where a job waits that any executor of the provider may take.
func JobAny(provider string) string { return "job." + provider + ".any" }

// JobOn is where a job waits for the executors of one engine, which holds the session's sandbox.
func JobOn(provider, engine string) string { return "job." + provider + ".on." + engine }

// TimerAt is where a session's schedule lies; publishing again replaces it.
func TimerAt(session string) string { return "timer.at." + session }

// TimerDue is where a session's schedule fires. One message is kept for each session.
func TimerDue(session string) string { return "timer.due." + session }

// TimerDueFilter matches every timer that fired.
const TimerDueFilter = "timer.due.*"

// Subjects of the session log by aspect, which readers filter by and users are held to.
const (
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

// PartitionFilter matches every subject of the log in a partition.
func PartitionFilter(partition int) string {
	return "ev." + events.PartitionToken(partition) + ".*.*.*"
}

// HeadSubject is where the signed heads of a shard of the log are stored.
func HeadSubject(shard int) string { return "head." + strconv.Itoa(shard) }

// HeadFilter matches the signed heads of all shards.
const HeadFilter = "head.*"

// TenantLifeFilter matches what was asked of a tenant's sessions in a partition.
func TenantLifeFilter(partition int, tenant string) string {
	return "ev." + events.PartitionToken(partition) + "." + tenant + ".*." + string(events.Life)
}

// TenantKeyFilter matches the API keys of a tenant in all partitions.
func TenantKeyFilter(tenant string) string { return "ev.*." + tenant + ".*." + string(events.Key) }

// DeltaFilter matches the text in flight of a partition.
func DeltaFilter(partition int) string { return "dl." + events.PartitionToken(partition) + ".>" }

// Ctl is the core subject on which an executor takes hints and questions; nothing depends on them.
func Ctl(executor string) string { return "ctl." + executor }

// CtlProjector is the core subject on which a projector announces its start, so that gateways look for holes.
const CtlProjector = "ctl.projector"

// FilesOn is the core subject on which executors of an engine are asked for files of its running sandboxes.
func FilesOn(provider, engine string) string { return "files.on." + provider + "." + engine }

// FilesTo is the core subject of the executor's answer: the head and the chunks. It is
// not an inbox, so that an executor cannot forge the answers to a gateway's other requests.
func FilesTo(transfer string) string { return "files.to." + transfer }

// FilesAck is the core subject on which the gateway acknowledges the chunks that it read.
func FilesAck(transfer string) string { return "files.ack." + transfer }

// Dead is where a message that was given up is kept, by the subject or part it came from.
// The headers of headers.go say the rest.
func Dead(origin string) string { return "dead." + origin }

// DeadFilter matches every dead letter, and none of the server's advisories beside them.
const DeadFilter = "dead.>"

// DeadJobFilter matches the dead letters of jobs.
const DeadJobFilter = "dead.job.>"

// Advisories that the server itself publishes into DEAD.
const (
	AdvisoryMaxDeliveries = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"
	AdvisoryTerminated    = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>"
)

// Buckets.
const (
	// BucketLeases is the key-value bucket of living executors: their engine, capacity and address.
	BucketLeases = "leases"
	// BucketIdempotency is the key-value bucket of requests that came with an Idempotency-Key.
	BucketIdempotency = "idempotency"
	// BucketPayloads is the object bucket of event data over events.MaxInline, by SHA-256 in hex.
	BucketPayloads = "payloads"
	// BucketWorkspaces is the object bucket of snapshots and of files on their way into a workspace.
	BucketWorkspaces = "workspaces"
	// BucketSkills is the object bucket of skills' ZIPs, by SHA-256 in hex, and of those on their way in.
	BucketSkills = "skills"
	// BucketSecrets is the key-value bucket of secrets' values, encrypted.
	BucketSecrets = "secrets"
	// BucketBudgets is the key-value bucket of tenants' limits and budgets, and of what they have taken of them.
	BucketBudgets = "budgets"
)

// maxToken bounds what an operator may put into a subject, a key or a durable's name.
const maxToken = 64

// CheckToken reports an error unless s may stand in a subject, a key and a
// durable's name: 1 to 64 characters of A-Z, a-z, 0-9, - and _.
func CheckToken(field, s string) error {
	ok := len(s) > 0 && len(s) <= maxToken
	for i := 0; ok && i < len(s); i++ {
		c := s[i]
		ok = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
	}
	if !ok {
		return fmt.Errorf("%s: %.64q must be 1 to 64 characters of A-Z, a-z, 0-9, - and _", field, s)
	}
	return nil
}
