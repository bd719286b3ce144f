package topology

import (
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
)

// Names of the durables that exist once.
const (
	// SessionCommandsDurable is the name of the session service's durable on COMMANDS.
	SessionCommandsDurable = "session"
	// SkillsCommandsDurable is the name of the skills service's durable on COMMANDS.
	SkillsCommandsDurable = "skills"
	// TimersDurable is the name of the session service's durable on TIMERS.
	TimersDurable = "due"
	// DeadJobsDurable is the name of the session service's durable on DEAD.
	DeadJobsDurable = "jobs"
)

// ReactorDurable returns the name of the session service's durable on a shard of the log.
func ReactorDurable(shard int) string { return "reactor-" + strconv.Itoa(shard) }

// ProviderJobsDurable returns the name of the durable on JOBS that all executors of a provider share.
func ProviderJobsDurable(provider string) string { return provider + "-any" }

// EngineJobsDurable returns the name of the durable on JOBS that the executors of one engine share.
func EngineJobsDurable(provider, engine string) string { return provider + "-on-" + engine }

// Settings of the durables. No durable has an inactive threshold, which would delete it, or a back-off, which would
// override the ack wait.
const (
	// SessionAckWait is the ack wait of the session service's handlers. JetStream redelivers a message that a handler
	// neither acknowledges nor reports as in progress for this time.
	SessionAckWait = 5 * time.Second
	// JobAckWait is the ack wait of a job of an executor. Executors report a job as in progress every second.
	JobAckWait = 5 * time.Second
	// SkillsMaxAckPending is the maximum number of commands that all replicas of the skills service have received and
	// not acknowledged.
	SkillsMaxAckPending = 64
	// ReactorMaxAckPending is the maximum number of commits of a shard that all replicas of the session service's
	// reactor have received and not acknowledged.
	ReactorMaxAckPending = 4096
)

// Durable is a durable consumer: its stream and its configuration.
type Durable struct {
	Stream string
	Config jetstream.ConsumerConfig
}

// SessionCommandsConsumer returns the durable with which the session service reads its commands.
func SessionCommandsConsumer() Durable {
	return Durable{StreamCommands, jetstream.ConsumerConfig{
		Durable: SessionCommandsDurable, Description: "The session service's commands.",
		FilterSubject: CommandFilter(ServiceSession), AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: SessionAckWait, MaxDeliver: -1, MaxAckPending: ReactorMaxAckPending,
	}}
}

// SkillsCommandsConsumer returns the durable with which the skills service reads its commands. Its handlers read whole
// ZIPs and report the command as in progress meanwhile.
func SkillsCommandsConsumer() Durable {
	return Durable{StreamCommands, jetstream.ConsumerConfig{
		Durable: SkillsCommandsDurable, Description: "The skills service's commands.",
		FilterSubject: CommandFilter(ServiceSkills), AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: JobAckWait, MaxDeliver: -1, MaxAckPending: SkillsMaxAckPending,
	}}
}

// ReactorConsumer returns the durable with which the session service reads the commits of a shard that can make work
// due. In a log with recorded partitions it has one filter, because the server searches far longer for the next message
// of two filters; its handler ignores the commits of the catalogue.
func ReactorConsumer(shard int, partitions events.Partitioning) Durable {
	filter, filters := LogFilter, []string(nil)
	if partitions == 0 {
		filter, filters = "", []string{LifeFilter, RunFilter}
	}
	return Durable{EventsStreamName(shard), jetstream.ConsumerConfig{
		Durable: ReactorDurable(shard), Description: "Commits that can make work due.",
		FilterSubject: filter, FilterSubjects: filters, DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: SessionAckWait, MaxDeliver: -1, MaxAckPending: ReactorMaxAckPending,
	}}
}

// TimersConsumer returns the durable with which the session service reads fired timers.
func TimersConsumer() Durable {
	return Durable{StreamTimers, jetstream.ConsumerConfig{
		Durable: TimersDurable, Description: "Timers that fired.",
		FilterSubject: TimerDueFilter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: SessionAckWait, MaxDeliver: -1, MaxAckPending: ReactorMaxAckPending,
	}}
}

// DeadJobsConsumer returns the durable with which the session service reads the dead letters of jobs. Its handler fails
// their executions.
func DeadJobsConsumer() Durable {
	return Durable{StreamDead, jetstream.ConsumerConfig{
		Durable: DeadJobsDurable, Description: "Jobs whose processing was given up.",
		FilterSubject: DeadJobFilter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: SessionAckWait, MaxDeliver: -1, MaxAckPending: ReactorMaxAckPending,
	}}
}

// ProviderJobsConsumer returns the durable with which all executors of a provider read jobs.
func ProviderJobsConsumer(provider string) Durable {
	return jobsConsumer(ProviderJobsDurable(provider), ProviderJobSubject(provider))
}

// EngineJobsConsumer returns the durable with which the executors of one engine read jobs.
func EngineJobsConsumer(provider, engine string) Durable {
	return jobsConsumer(EngineJobsDurable(provider, engine), EngineJobSubject(provider, engine))
}

// jobsConsumer returns a durable on JOBS. A job stays unacknowledged while its execution runs, on any number of
// executors: the durable limits neither deliveries nor pending messages.
func jobsConsumer(name, filter string) Durable {
	return Durable{StreamJobs, jetstream.ConsumerConfig{
		Durable: name, Description: "Jobs of executors.",
		FilterSubject: filter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: JobAckWait, MaxDeliver: -1, MaxAckPending: -1,
	}}
}
