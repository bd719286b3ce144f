package topology

import (
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Names of durables that are one of a kind.
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

// ReactorDurable is the session service's durable on a shard of the log.
func ReactorDurable(shard int) string { return "reactor-" + strconv.Itoa(shard) }

// JobsAny is the durable on JOBS that all executors of a provider share.
func JobsAny(provider string) string { return provider + "-any" }

// JobsOn is the durable on JOBS that the executors of one engine share.
func JobsOn(provider, engine string) string { return provider + "-on-" + engine }

// Settings of the durables. None has an inactive threshold, which would delete it, and
// none a back-off, which would override the wait.
const (
	// WorkWait is how long a handler of the session service may be silent before its message is given to another.
	WorkWait = 5 * time.Second
	// JobWait is the same for an executor's job: the InProgress beat is one second.
	JobWait = 5 * time.Second
	// SkillsPending is how many skills the copies of the skills service may hold together.
	SkillsPending = 64
	// ReactorPending is how many commits of a shard the copies of the reactor may hold together.
	ReactorPending = 4096
)

// Durable is a durable consumer: where it lies and how it is made.
type Durable struct {
	Stream string
	Config jetstream.ConsumerConfig
}

// CommandsConsumer takes the commands of the session service.
func CommandsConsumer() Durable {
	return Durable{StreamCommands, jetstream.ConsumerConfig{
		Durable: CommandsSession, Description: "The session service's commands.",
		FilterSubject: CommandFilter(ServiceSession), AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// SkillsConsumer takes the commands of the skills service. Its handlers read whole ZIPs, which are kept alive meanwhile.
func SkillsConsumer() Durable {
	return Durable{StreamCommands, jetstream.ConsumerConfig{
		Durable: CommandsSkills, Description: "The skills service's commands.",
		FilterSubject: CommandFilter(ServiceSkills), AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: JobWait, MaxDeliver: -1, MaxAckPending: SkillsPending,
	}}
}

// ReactorConsumer follows the commits of a shard that can make something due.
func ReactorConsumer(shard int) Durable {
	return Durable{EventsStream(shard), jetstream.ConsumerConfig{
		Durable: ReactorDurable(shard), Description: "What the log makes due.",
		FilterSubjects: []string{LifeFilter, RunFilter}, DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// TimersConsumer takes the timers that fired.
func TimersConsumer() Durable {
	return Durable{StreamTimers, jetstream.ConsumerConfig{
		Durable: TimersDue, Description: "Timers that fired.",
		FilterSubject: TimerDueFilter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// DeadJobsConsumer takes the dead letters of jobs, whose executions are failed.
func DeadJobsConsumer() Durable {
	return Durable{StreamDead, jetstream.ConsumerConfig{
		Durable: DeadJobs, Description: "Jobs that were given up.",
		FilterSubject: DeadJobFilter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: WorkWait, MaxDeliver: -1, MaxAckPending: ReactorPending,
	}}
}

// JobsAnyConsumer takes the jobs that any executor of a provider may do.
func JobsAnyConsumer(provider string) Durable {
	return jobs(JobsAny(provider), JobAny(provider))
}

// JobsOnConsumer takes the jobs of one engine.
func JobsOnConsumer(provider, engine string) Durable {
	return jobs(JobsOn(provider, engine), JobOn(provider, engine))
}

// jobs is held for as long as a run takes, by as many executors as there are: no limit on either.
func jobs(name, filter string) Durable {
	return Durable{StreamJobs, jetstream.ConsumerConfig{
		Durable: name, Description: "Jobs of executors.",
		FilterSubject: filter, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: JobWait, MaxDeliver: -1, MaxAckPending: -1,
	}}
}
