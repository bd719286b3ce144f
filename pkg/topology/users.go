package topology

// Names of the NATS users: one for each service, one that may delete messages, one for installation and operators,
// and one that creates consumers for the services (package consumergate).
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

// User is a NATS user and its permissions. Everything that is not listed is denied.
type User struct {
	Name      string
	Doc       string
	Publish   []string
	Subscribe []string
}

// InboxPrefix returns the prefix of a user's inboxes (nats.CustomInboxPrefix). Separate prefixes keep users from
// reading each other's responses.
func InboxPrefix(user string) string { return "_INBOX_" + user }

// Users returns the users with exactly the permissions that Streams and the buckets describe. Only the janitor may
// delete messages, except that the session service removes single dead letters. Only two key-value buckets can be
// purged. A service creates its own durables; admin creates streams and buckets.
func Users() []User {
	services := []User{gatewayUser(), sessionUser(), executorUser(), projectorUser(), skillsUser(), janitorUser()}
	for i := range services {
		services[i].Publish = append(services[i].Publish, HealthSubject)
	}
	return append(services, adminUser(), gateUser())
}

func gatewayUser() User {
	return User{
		Name: UserGateway, Doc: "serves clients: writes commands, reads LIVE and Postgres, and reads from the log what Postgres does not have yet",
		Publish: concatLists(
			[]string{accountInfoPermission, "cmd.*.*.*.*", FilesRequestSubject("*", "*"), FilesAckSubject("*")},
			keyValuePermissions(BucketIdempotency), []string{"$KV." + BucketIdempotency + ".>"},
			keyValuePermissions(BucketSignInCodes), []string{"$KV." + BucketSignInCodes + ".>"},
			keyValuePermissions(BucketSignInSessions), []string{"$KV." + BucketSignInSessions + ".>"},
			infoPermission(StreamCommands), writeObjectsPermissions(BucketWorkspaces),
			// Uploads, and secrets that a client or the gateway encrypted: the gateway cannot decrypt them.
			writeObjectsPermissions(BucketSkills), keyValuePermissions(BucketSecrets), []string{"$KV." + BucketSecrets + ".>"},
			// The limits of tenants, and whether the services know a new budget.
			keyValuePermissions(BucketBudgets),
			// Why an execution waits, and whether an executor for it is alive.
			getPermissions("KV_"+BucketWaits), getPermissions("KV_"+BucketLeases),
			// Operators read dead letters; commands retry or drop them.
			getPermissions(StreamDead),
			// Events that are in the log and not yet in the read models.
			getLogPermissions(),
			// Text in flight: of a replay, and what a subscription missed.
			[]string{"$JS.API.DIRECT.GET." + StreamDeltas},
		),
		Subscribe: []string{inboxFilter(UserGateway), LiveFilter, FrameFilter, ProjectorStartSubject, FilesResponseSubject("*")},
	}
}

func sessionUser() User {
	return User{
		Name: UserSession, Doc: "decides what sessions do; writes life, keys, jobs and timers",
		Publish: concatLists(
			[]string{accountInfoPermission, LifeFilter, RunFilter, KeyFilter, AgentFilter, InstanceFilter, EnvironmentFilter, BudgetFilter, LimitsFilter, "job.*.any", "job.*.on.*", "timer.at.*", "dead.>", "ctl.*", HeadFilter},
			// Responses to commands go to the gateway that sent them.
			[]string{inboxFilter(UserGateway)},
			readLogPermissions(), writePayloadsPermissions(), keyValuePermissions(BucketLeases),
			// The limits of tenants, and the usage that the session service counts.
			keyValuePermissions(BucketBudgets), []string{"$KV." + BucketBudgets + ".*"},
			// A fork is refused if its snapshots no longer exist.
			readObjectsPermissions(BucketWorkspaces),
			// The secrets of an execution are removed after its end. The session service reads only their encrypted
			// form.
			keyValuePermissions(BucketSecrets), []string{"$KV." + BucketSecrets + ".*.x.>"},
			durablePermissions(StreamCommands, SessionCommandsDurable, CommandFilter(ServiceSession)),
			durablePermissions(StreamTimers, TimersDurable, TimerDueFilter), getPermissions(StreamTimers),
			reactorPermissions(), infoPermission(StreamJobs), getPermissions(StreamHeads),
			// The session service fails executions whose job is dead, and removes dead letters that operators have
			// handled.
			durablePermissions(StreamDead, DeadJobsDurable, DeadJobFilter), getPermissions(StreamDead), []string{"$JS.API.STREAM.MSG.DELETE." + StreamDead},
		),
		Subscribe: []string{inboxFilter(UserSession)},
	}
}

func executorUser() User {
	return User{
		Name: UserExecutor, Doc: "runs agents; writes run and deltas",
		Publish: concatLists(
			// A job that reaches an executor of the wrong engine is moved to the right engine.
			[]string{accountInfoPermission, RunFilter, FrameFilter, "job.*.on.*", "dead.>", "ctl.*"},
			// An executor asks another one on ctl whether it still holds a run.
			[]string{inboxFilter(UserExecutor), FilesResponseSubject("*")},
			readLogPermissions(), writePayloadsPermissions(), writeObjectsPermissions(BucketWorkspaces), keyValuePermissions(BucketLeases), []string{"$KV." + BucketLeases + ".>"},
			readObjectsPermissions(BucketSkills), keyValuePermissions(BucketSecrets), keyValuePermissions(BucketBudgets),
			// The reasons of waits.
			getPermissions("KV_"+BucketWaits), []string{"$KV." + BucketWaits + ".*"},
			// A durable for an engine has the engine's name, which is not known here.
			durablePermissions(StreamJobs, "*", "job.*.any"), durablePermissions(StreamJobs, "*", "job.*.on.*"),
			// The deltas of blocks whose sandbox was lost.
			[]string{"$JS.API.DIRECT.GET." + StreamDeltas}, infoPermission(StreamDead),
		),
		Subscribe: []string{inboxFilter(UserExecutor), "ctl.*", FilesRequestSubject("*", "*"), FilesAckSubject("*")},
	}
}

func projectorUser() User {
	return User{
		Name: UserProjector, Doc: "folds the log into Postgres; announces changes on LIVE",
		Publish: concatLists(
			[]string{LiveFilter, "dead.>", ProjectorStartSubject},
			readLogPermissions(), readPayloadsPermissions(), infoPermission(StreamDead),
		),
		Subscribe: []string{inboxFilter(UserProjector)},
	}
}

func skillsUser() User {
	return User{
		Name: UserSkills, Doc: "validates and stores skills; writes skill",
		Publish: concatLists(
			[]string{SkillFilter, "dead.>"},
			// Responses to commands go to the gateway that sent them.
			[]string{inboxFilter(UserGateway)},
			readLogPermissions(), writePayloadsPermissions(), writeObjectsPermissions(BucketSkills),
			durablePermissions(StreamCommands, SkillsCommandsDurable, CommandFilter(ServiceSkills)), infoPermission(StreamDead),
		),
		Subscribe: []string{inboxFilter(UserSkills)},
	}
}

// janitorUser deletes single messages, which erases their bytes. It cannot purge any stream or bucket with content.
// It appends run_retired, content_removed and workspace_trimmed to the log.
func janitorUser() User {
	erase := func(stream string) []string { return []string{"$JS.API.STREAM.MSG.DELETE." + stream} }
	var log []string
	for i := range MaxShards {
		log = append(log, erase(EventsStreamName(i))...)
	}
	return User{
		Name: UserJanitor, Doc: "erases the content of deleted sessions and unreferenced objects",
		Publish: concatLists(
			[]string{RunFilter}, readLogPermissions(), log,
			readPayloadsPermissions(), erase("OBJ_"+BucketPayloads),
			readObjectsPermissions(BucketWorkspaces), erase("OBJ_"+BucketWorkspaces),
			readObjectsPermissions(BucketSkills), erase("OBJ_"+BucketSkills),
			// NATS creates the streams of key-value buckets with deletion denied, so the janitor purges keys.
			keyValuePermissions(BucketSecrets), []string{"$JS.API.STREAM.PURGE.KV_" + BucketSecrets},
			keyValuePermissions(BucketIdempotency), []string{"$JS.API.STREAM.PURGE.KV_" + BucketIdempotency},
			// How far the usage of tenants is counted.
			getPermissions("KV_"+BucketBudgets),
		),
		Subscribe: []string{inboxFilter(UserJanitor)},
	}
}

func adminUser() User {
	return User{
		Name: UserAdmin, Doc: "creates streams and buckets; used by operators on the command line",
		Publish: []string{">"}, Subscribe: []string{">"},
	}
}

// gateUser validates the services' requests for consumers and forwards them to JetStream.
func gateUser() User {
	return User{
		Name: UserGate, Doc: "validates requests for consumers and forwards them to JetStream",
		Publish:   []string{consumerCreatePrefix + ">", ReplyPrefix + ">"},
		Subscribe: []string{GatePrefix + ">", inboxFilter(UserGate)},
	}
}

// inboxFilter returns the filter that matches all inboxes of a user.
func inboxFilter(user string) string { return InboxPrefix(user) + ".>" }

func concatLists(lists ...[]string) []string {
	var out []string
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// infoPermission returns the permission to request the information of a stream, which a client needs before it uses the
// stream.
func infoPermission(stream string) []string { return []string{"$JS.API.STREAM.INFO." + stream} }

// getPermissions returns the permissions to read single messages: from any replica, and from the leader.
func getPermissions(stream string) []string {
	return append(infoPermission(stream), "$JS.API.DIRECT.GET."+stream, "$JS.API.DIRECT.GET."+stream+".>", "$JS.API.STREAM.MSG.GET."+stream)
}

// orderedReadPermissions returns the permissions to read a stream in order with temporary consumers. Their deletion is left to the
// inactivity threshold, because the permission to delete them would cover durables as well.
func orderedReadPermissions(stream string) []string {
	return append(getPermissions(stream),
		"$JS.API.CONSUMER.CREATE."+stream+".*", "$JS.API.CONSUMER.CREATE."+stream+".*.>",
		"$JS.API.CONSUMER.INFO."+stream+".*", "$JS.API.CONSUMER.MSG.NEXT."+stream+".*")
}

// readLogPermissions returns the permissions to read the streams of all shards that an installation can have.
func readLogPermissions() []string {
	var out []string
	for i := range MaxShards {
		out = append(out, orderedReadPermissions(EventsStreamName(i))...)
	}
	return out
}

// getLogPermissions returns the permissions to request single commits from the leader of every shard.
func getLogPermissions() []string {
	var out []string
	for i := range MaxShards {
		out = append(out, "$JS.API.STREAM.MSG.GET."+EventsStreamName(i))
	}
	return out
}

// durablePermissions returns the permissions to create and use one durable.
func durablePermissions(stream, name, filter string) []string {
	return append(infoPermission(stream),
		"$JS.API.CONSUMER.CREATE."+stream+"."+name+"."+filter,
		"$JS.API.CONSUMER.INFO."+stream+"."+name,
		"$JS.API.CONSUMER.MSG.NEXT."+stream+"."+name,
		"$JS.ACK."+stream+"."+name+".>")
}

// reactorPermissions returns the permissions for the reactor's durables, in addition to those of readLogPermissions, which include their
// creation with any filter.
func reactorPermissions() []string {
	var out []string
	for i := range MaxShards {
		stream, name := EventsStreamName(i), ReactorDurable(i)
		out = append(out, "$JS.ACK."+stream+"."+name+".>")
	}
	return out
}

// keyValuePermissions returns the permissions to read and watch a bucket. Writing also needs the bucket's subject.
func keyValuePermissions(bucket string) []string { return readStreamPermissions("KV_" + bucket) }

// readPayloadsPermissions returns the permissions to fetch objects, for which the client creates temporary consumers.
func readPayloadsPermissions() []string { return readObjectsPermissions(BucketPayloads) }

// writePayloadsPermissions returns the permissions to add objects, but not to delete or purge them.
func writePayloadsPermissions() []string { return writeObjectsPermissions(BucketPayloads) }

// readObjectsPermissions returns the permissions to fetch objects of a bucket.
func readObjectsPermissions(bucket string) []string { return readStreamPermissions("OBJ_" + bucket) }

// writeObjectsPermissions returns the permissions of readObjectsPermissions and those to put an object.
func writeObjectsPermissions(bucket string) []string {
	return append(readObjectsPermissions(bucket), "$O."+bucket+".>")
}

// readStreamPermissions returns the permissions to read a bucket's stream by get requests and by push consumers with flow
// control.
func readStreamPermissions(stream string) []string {
	return append(orderedReadPermissions(stream), "$JS.API.CONSUMER.DELETE."+stream+".*", "$JS.FC."+stream+".>", "$JS.ACK."+stream+".>")
}

// accountInfoPermission is the permission to read the account's storage limit and usage.
const accountInfoPermission = jetStreamAPIPrefix + "INFO"
