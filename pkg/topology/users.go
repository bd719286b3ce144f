package topology

// Names of the NATS users: one for each service, one that may delete messages, one for installation and people, and one that
// makes consumers for the services (package consumergate).
const (
	UserGateway   = "gateway"
	UserSession   = "session"
	UserExecutor  = "executor"
	UserProjector = "projector"
	UserSkills    = "skills"
	UserJanitor   = "janitor"
	UserAdmin     = "admin"
	UserGate      = "gate"
)

// User is a NATS user and what it may do; what is not listed it may not.
type User struct {
	Name      string
	Doc       string
	Publish   []string
	Subscribe []string
}

// InboxPrefix is the prefix of a user's inboxes (nats.CustomInboxPrefix), so that
// no user can read the answers to another's requests.
func InboxPrefix(user string) string { return "_INBOX_" + user }

// Users lists the users with exactly the rights that their rows in Streams and
// the buckets say. Deleting messages is the janitor's alone, but for dead letters, which the session service removes one by one.
// None but two key-value buckets can be purged. A
// service makes its own durables; streams and buckets are made by admin.
func Users() []User {
	return []User{gatewayUser(), sessionUser(), executorUser(), projectorUser(), skillsUser(), janitorUser(), adminUser(), gateUser()}
}

func gatewayUser() User {
	return User{
		Name: UserGateway, Doc: "takes clients in; writes commands, reads LIVE and Postgres, and finds in the log what Postgres does not hold yet",
		Publish: join(
			[]string{accountInfo, "cmd.*.*.*.*", FilesOn("*", "*"), FilesAck("*")},
			useKV(BucketIdempotency), []string{"$KV." + BucketIdempotency + ".>"},
			info(StreamCommands), info(StreamLive), writeObjects(BucketWorkspaces),
			// What is pushed, and what a client encrypted or the gateway did: it cannot read a secret back without the key.
			writeObjects(BucketSkills), useKV(BucketSecrets), []string{"$KV." + BucketSecrets + ".>"},
			// Tenants' limits, and whether services know of a budget that was set.
			useKV(BucketBudgets),
			// People read dead letters; to retry or drop one is a command.
			get(StreamDead),
			// What the log holds and the read models do not hold yet.
			findInLog(),
			// The text in flight of what is replayed.
			[]string{"$JS.API.DIRECT.GET." + StreamDeltas},
		),
		Subscribe: []string{inbox(UserGateway), "live.*.*", CtlProjector, FilesTo("*")},
	}
}

func sessionUser() User {
	return User{
		Name: UserSession, Doc: "decides what sessions do; writes life, keys, jobs and timers",
		Publish: join(
			[]string{accountInfo, LifeFilter, RunFilter, KeyFilter, AgentFilter, InstanceFilter, EnvironmentFilter, BudgetFilter, LimitsFilter, "job.*.any", "job.*.on.*", "timer.at.*", "dead.>", "ctl.*", HeadFilter},
			// Answers to commands go to the gateway that asked.
			[]string{inbox(UserGateway)},
			readLog(), writePayloads(), useKV(BucketLeases),
			// What tenants may take, and what it has counted of it.
			useKV(BucketBudgets), []string{"$KV." + BucketBudgets + ".*"},
			// A fork is refused whose snapshots are not there any more.
			readObjects(BucketWorkspaces),
			// Secrets of an execution go when it has ended. What it reads of them it cannot open.
			useKV(BucketSecrets), []string{"$KV." + BucketSecrets + ".*.x.>"},
			durable(StreamCommands, CommandsSession, CommandFilter(ServiceSession)),
			durable(StreamTimers, TimersDue, TimerDueFilter), get(StreamTimers),
			reactors(), info(StreamJobs), get(StreamHeads),
			// It fails executions whose job is dead, and removes dead letters that people have dealt with.
			durable(StreamDead, DeadJobs, DeadJobFilter), get(StreamDead), []string{"$JS.API.STREAM.MSG.DELETE." + StreamDead},
		),
		Subscribe: []string{inbox(UserSession)},
	}
}

func executorUser() User {
	return User{
		Name: UserExecutor, Doc: "runs agents; writes run and text in flight",
		Publish: join(
			// A job that reaches an executor of the wrong engine is moved to the right one.
			[]string{accountInfo, RunFilter, "dl.*.*.*", "job.*.on.*", "dead.>", "ctl.*"},
			// One executor asks another, on ctl, whether it still holds a run.
			[]string{inbox(UserExecutor), FilesTo("*")},
			readLog(), writePayloads(), writeObjects(BucketWorkspaces), useKV(BucketLeases), []string{"$KV." + BucketLeases + ".>"},
			readObjects(BucketSkills), useKV(BucketSecrets), useKV(BucketBudgets),
			// An engine's durable has the engine's name, which is no token to list here.
			durable(StreamJobs, "*", "job.*.any"), durable(StreamJobs, "*", "job.*.on.*"),
			// The text of blocks whose sandbox was lost.
			ordered(StreamDeltas), info(StreamDead),
		),
		Subscribe: []string{inbox(UserExecutor), "ctl.*", FilesOn("*", "*"), FilesAck("*")},
	}
}

func projectorUser() User {
	return User{
		Name: UserProjector, Doc: "folds the log into Postgres; announces changes on LIVE",
		Publish: join(
			[]string{"live.*.*", "dead.>", CtlProjector},
			readLog(), readPayloads(), ordered(StreamDeltas), info(StreamLive), info(StreamDead),
		),
		Subscribe: []string{inbox(UserProjector)},
	}
}

func skillsUser() User {
	return User{
		Name: UserSkills, Doc: "checks and keeps skills; writes skill",
		Publish: join(
			[]string{SkillFilter, "dead.>"},
			// Answers to commands go to the gateway that asked.
			[]string{inbox(UserGateway)},
			readLog(), writePayloads(), writeObjects(BucketSkills),
			durable(StreamCommands, CommandsSkills, CommandFilter(ServiceSkills)), info(StreamDead),
		),
		Subscribe: []string{inbox(UserSkills)},
	}
}

// janitorUser deletes single messages, which is how their bytes are erased; of
// what holds content it cannot purge anything. Of the log it writes run_retired, content_removed and workspace_trimmed.
func janitorUser() User {
	erase := func(stream string) []string { return []string{"$JS.API.STREAM.MSG.DELETE." + stream} }
	var log []string
	for i := range MaxShards {
		log = append(log, erase(EventsStream(i))...)
	}
	return User{
		Name: UserJanitor, Doc: "erases the content of deleted sessions, and what no session needs",
		Publish: join(
			[]string{RunFilter}, readLog(), log,
			ordered(StreamDeltas), erase(StreamDeltas),
			readPayloads(), erase("OBJ_"+BucketPayloads),
			readObjects(BucketWorkspaces), erase("OBJ_"+BucketWorkspaces),
			readObjects(BucketSkills), erase("OBJ_"+BucketSkills),
			// NATS makes key-value buckets without the right to delete for anybody.
			useKV(BucketSecrets), []string{"$JS.API.STREAM.PURGE.KV_" + BucketSecrets},
			useKV(BucketIdempotency), []string{"$JS.API.STREAM.PURGE.KV_" + BucketIdempotency},
			// How far the usage of tenants is counted.
			get("KV_"+BucketBudgets),
		),
		Subscribe: []string{inbox(UserJanitor)},
	}
}

func adminUser() User {
	return User{
		Name: UserAdmin, Doc: "installs streams and buckets, and is what people use from the command line",
		Publish: []string{">"}, Subscribe: []string{">"},
	}
}

// gateUser asks JetStream for the consumers that services requested, after it has checked the requests.
func gateUser() User {
	return User{
		Name: UserGate, Doc: "checks requests for consumers and passes them on to JetStream",
		Publish:   []string{consumerCreate + ">", ReplyPrefix + ">"},
		Subscribe: []string{GatePrefix + ">", inbox(UserGate)},
	}
}

func inbox(user string) string { return InboxPrefix(user) + ".>" }

func join(lists ...[]string) []string {
	var out []string
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// info is what a client asks before it uses a stream.
func info(stream string) []string { return []string{"$JS.API.STREAM.INFO." + stream} }

// get is reading single messages: direct, and from the leader.
func get(stream string) []string {
	return append(info(stream), "$JS.API.DIRECT.GET."+stream, "$JS.API.DIRECT.GET."+stream+".>", "$JS.API.STREAM.MSG.GET."+stream)
}

// ordered is reading a stream in order, for which consumers with names of their
// own come and go. Deleting them is left to their inactivity, since the right to
// delete any of them would be the right to delete a durable.
func ordered(stream string) []string {
	return append(get(stream),
		"$JS.API.CONSUMER.CREATE."+stream+".*", "$JS.API.CONSUMER.CREATE."+stream+".*.>",
		"$JS.API.CONSUMER.INFO."+stream+".*", "$JS.API.CONSUMER.MSG.NEXT."+stream+".*")
}

// readLog is every shard, whatever the number installed.
func readLog() []string {
	var out []string
	for i := range MaxShards {
		out = append(out, ordered(EventsStream(i))...)
	}
	return out
}

// findInLog is asking every shard's leader for single commits.
func findInLog() []string {
	var out []string
	for i := range MaxShards {
		out = append(out, "$JS.API.STREAM.MSG.GET."+EventsStream(i))
	}
	return out
}

// durable is making and using one durable.
func durable(stream, name, filter string) []string {
	return append(info(stream),
		"$JS.API.CONSUMER.CREATE."+stream+"."+name+"."+filter,
		"$JS.API.CONSUMER.INFO."+stream+"."+name,
		"$JS.API.CONSUMER.MSG.NEXT."+stream+"."+name,
		"$JS.ACK."+stream+"."+name+".>")
}

// reactors are the reactor's durables, which have two filters and so none in the subject that makes them.
func reactors() []string {
	var out []string
	for i := range MaxShards {
		stream, name := EventsStream(i), ReactorDurable(i)
		out = append(out, "$JS.ACK."+stream+"."+name+".>")
	}
	return out
}

// useKV is reading and watching a bucket; writing it takes its subject as well.
func useKV(bucket string) []string { return watched("KV_" + bucket) }

// readPayloads is fetching objects, for which the client makes consumers of its own.
func readPayloads() []string { return readObjects(BucketPayloads) }

// writePayloads adds chunks and their description, but cannot delete or purge any.
func writePayloads() []string { return writeObjects(BucketPayloads) }

// readObjects is fetching objects of a bucket.
func readObjects(bucket string) []string { return watched("OBJ_" + bucket) }

// writeObjects adds to readObjects what putting one needs.
func writeObjects(bucket string) []string { return append(readObjects(bucket), "$O."+bucket+".>") }

// watched is reading a bucket's stream by get and by push consumers, with their flow control.
func watched(stream string) []string {
	return append(ordered(stream), "$JS.API.CONSUMER.DELETE."+stream+".*", "$JS.FC."+stream+".>", "$JS.ACK."+stream+".>")
}

// accountInfo is the limit of what the streams may take, and what they take.
const accountInfo = apiPrefix + "INFO"
