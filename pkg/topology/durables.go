package topology

import (
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
)

// Names of the durables that exist once.
const (
	// CommandsSession is the session service's durable on COMMANDS.
	CommandsSession = "session"
	// CommandsSkills is the skills service's durable on COMMANDS.
	CommandsSkills = "skills"
	// TimersDue is the session service's durable on TIMERS.
	TimersDue = "due"
	// DeadJobs is the session service's durable on DEAD.
	DeadJobs = "jobs"
)

// ReactorDurable returns the session service's durable on a shard of the log.
func ReactorDurable(shard int) string { return "reactor-" + strconv.Itoa(shard) }

// JobsAny returns the durable on JOBS that all executors of a provider share.
func JobsAny(provider string) string { return provider + "-any" }

// JobsOn returns the durable on JOBS that the executors of one engine share.
func JobsOn(provider, engine string) string { return provider + "-on-" + engine }

// Settings of the durables. No durable has an inactive threshold, which would delete it, or a back-off, which would
// override the ack wait.
const (
	// WorkWait is the ack wait of the session service's handlers. JetStream redelivers a message that a handler
	// neither acknowledges nor reports as in progress for this time.
	WorkWait = 5 * time.Second
	// JobWait is the ack wait of an executor's job. Executors send InProgress every second.
	JobWait = 5 * time.Second
	// SkillsPending is the maximum number of unacknowledged skill commands of all replicas of the skills service.
	SkillsPending = 64
	// ReactorPending is the maximum number of unacknowledged commits of a shard of all reactor replicas.
	ReactorPending = 4096
)

// Durable is a durable consumer: its stream and its configuration.
type Durable struct {
	Stream string
	Config jetstream.ConsumerConfig
}

// CommandsConsumer returns the consumer of the session service's commands.
func CommandsConsumer() Durable {
	return Durable{StreamCommands, jetstream.ConsumerConfig{
		Durable: CommandsSession, Description: "The session service's commands.",
		FilterSubject: CommandFilter(ServiceSession), AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// SkillsConsumer returns the consumer of the skills service's commands. Its handlers read whole ZIPs and send
// InProgress meanwhile.
func SkillsConsumer() Durable {
	return Durable{StreamCommands, jetstream.ConsumerConfig{
		Durable: CommandsSkills, Description: "The skills service's commands.",
		FilterSubject: CommandFilter(ServiceSkills), AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: JobWait, MaxDeliver: -1, MaxAckPending: SkillsPending,
	}}
}

// ReactorConsumer returns the consumer of the commits of a shard that can make work due. In a log with recorded
// partitions it has one filter, because the server searches far longer for the next message of two; its handler ignores
// the commits of the catalogue.
func ReactorConsumer(shard int, partitions events.Partitioning) Durable {
	filter, filters := LogFilter, []string(nil)
	if partitions == 0 {
		filter, filters = "", []string{LifeFilter, RunFilter}
	}
	return Durable{EventsStream(shard), jetstream.ConsumerConfig{
		Durable: ReactorDurable(shard), Description: "Commits that can make work due.",
		FilterSubject: filter, FilterSubjects: filters, DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// TimersConsumer returns the consumer of fired timers.
func TimersConsumer() Durable {
	return Durable{StreamTimers, jetstream.ConsumerConfig{
		Durable: TimersDue, Description: "Timers that fired.",
		FilterSubject: TimerDueFilter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// DeadJobsConsumer returns the consumer of dead jobs. Its handler fails their executions.
func DeadJobsConsumer() Durable {
	return Durable{StreamDead, jetstream.ConsumerConfig{
		Durable: DeadJobs, Description: "Jobs whose processing was given up.",
		FilterSubject: DeadJobFilter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// JobsAnyConsumer returns the consumer of jobs for any executor of a provider.
func JobsAnyConsumer(provider string) Durable {
	return jobsConsumer(JobsAny(provider), JobAny(provider))
}

// JobsOnConsumer returns the consumer of jobs for one engine.
func JobsOnConsumer(provider, engine string) Durable {
	return jobsConsumer(JobsOn(provider, engine), JobOn(provider, engine))
}

// jobsConsumer returns a consumer of jobs. A job stays unacknowledged while its execution runs, on any number of executors:
// the consumer limits neither deliveries nor pending messages.
func jobsConsumer(name, filter string) Durable {
	return Durable{StreamJobs, jetstream.ConsumerConfig{
		Durable: name, Description: "Jobs of executors.",
		FilterSubject: filter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: JobWait, MaxDeliver: -1, MaxAckPending: -1,
	}}
}
