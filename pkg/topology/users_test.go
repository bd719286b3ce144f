package topology_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/consumergate"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

const session = "ses_01JZZZZZZZZZZZZZZZZZZZZZZZ"

// runServerWithUsers runs a server with the accounts and the streams of this package.
func runServerWithUsers(t *testing.T) *server.Server {
	t.Helper()
	var accounts strings.Builder
	if err := topology.WriteAccounts(&accounts, "1GB", func(string) string { return "pw" }); err != nil {
		t.Fatal(err)
	}
	opts := &server.Options{}
	if err := opts.ProcessConfigString(accounts.String()); err != nil {
		t.Fatal(err)
	}
	opts.DontListen, opts.JetStream, opts.StoreDir, opts.NoSigs, opts.NoLog = true, true, t.TempDir(), true, true
	return runServer(t, opts)
}

// runServer runs a server with the gate for consumers until the test ends, and creates the streams.
func runServer(t *testing.T, opts *server.Options) *server.Server {
	t.Helper()
	ns, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	if !ns.ReadyForConnections(10 * time.Second) {
		t.Fatal("the server is not ready")
	}
	_, js := connectAs(t, ns, topology.UserAdmin)
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 1}); err != nil {
		t.Fatal(err)
	}
	gate, _ := connectAs(t, ns, topology.UserGate)
	if err := consumergate.Serve(gate, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	return ns
}

func connectAs(t *testing.T, ns *server.Server, user string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(ns), nats.UserInfo(user, "pw"),
		nats.CustomInboxPrefix(topology.InboxPrefix(user)), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

// isRefused runs do, which publishes or subscribes, and reports whether the server answered with a permissions
// violation.
func isRefused(t *testing.T, nc *nats.Conn, do func() error) bool {
	t.Helper()
	if err := do(); err != nil {
		t.Fatal(err)
	}
	// The server sends the permissions violation before it answers the flush.
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	err := nc.LastError()
	return err != nil && strings.Contains(strings.ToLower(err.Error()), "permissions violation")
}

func TestUsers_MayPublishTheirRowsOnly(t *testing.T) {
	t.Parallel()
	checkPublish(t, runServerWithUsers(t))
}

func checkPublish(t *testing.T, ns *server.Server) {
	t.Helper()
	life, run := events.LifeSubject("default", session).String(), events.RunSubject("default", session).String()
	key := events.Subject{Tenant: "default", ID: events.CatalogueID(events.Key, "default", "", "", "k"), Aspect: events.Key}.String()
	catalogued := func(kind events.Aspect) string {
		return events.Reference{Slug: "k"}.Subject(kind, "default").String()
	}
	subjects := map[string][]string{ // subject → users who may publish to it
		catalogued(events.Agent):       {topology.UserSession},
		catalogued(events.Instance):    {topology.UserSession},
		catalogued(events.Environment): {topology.UserSession},
		catalogued(events.Skill):       {topology.UserSkills},

		topology.CommandSubject(topology.ServiceSkills, "default", session):           {topology.UserGateway},
		"$JS.API.CONSUMER.CREATE.COMMANDS.skills." + topology.CommandFilter("skills"): {topology.UserGate, topology.UserSkills},
		"$JS.API.CONSUMER.MSG.NEXT.COMMANDS.skills":                                   {topology.UserSkills},
		"$O." + topology.BucketSkills + ".C.x":                                        {topology.UserGateway, topology.UserSkills},
		"$KV." + topology.BucketSecrets + ".default.e.x":                              {topology.UserGateway},
		"$KV." + topology.BucketSecrets + ".default.x.exe.x":                          {topology.UserGateway, topology.UserSession},

		life: {topology.UserSession},
		run:  {topology.UserSession, topology.UserExecutor, topology.UserJanitor},
		key:  {topology.UserSession},
		events.FrameSubject(3, "xtr_01JZZZZZZZZZZZZZZZZZZZZZZZ"):                        {topology.UserExecutor},
		"dl.03.default." + session:                                                      {},
		topology.CommandSubject(topology.ServiceSession, "default", session):            {topology.UserGateway},
		topology.ProviderJobSubject("local"):                                            {topology.UserSession},
		topology.EngineJobSubject("local", "host"):                                      {topology.UserSession, topology.UserExecutor},
		topology.TimerScheduleSubject(session):                                          {topology.UserSession},
		topology.TimerDueSubject(session):                                               {},
		events.LiveSubject("default", session):                                          {topology.UserProjector},
		topology.ProjectorStartSubject:                                                  {topology.UserProjector, topology.UserSession, topology.UserExecutor},
		topology.ExecutorCtlSubject("xtr_01JZZZZZZZZZZZZZZZZZZZZZZZ"):                   {topology.UserSession, topology.UserExecutor},
		topology.DeadSubject("session"):                                                 {topology.UserSession, topology.UserExecutor, topology.UserProjector, topology.UserSkills},
		"$KV." + topology.BucketLeases + ".x":                                           {topology.UserExecutor},
		"$KV." + topology.BucketIdempotency + ".default.x":                              {topology.UserGateway},
		"$KV." + topology.BucketWaits + ".exe":                                          {topology.UserExecutor},
		"$JS.API.DIRECT.GET.KV_" + topology.BucketWaits + ".$KV.waits.exe":              {topology.UserExecutor, topology.UserGateway},
		"$JS.API.CONSUMER.CREATE.KV_" + topology.BucketWaits + ".x":                     {topology.UserGate},
		"$JS.API.STREAM.MSG.GET.KV_" + topology.BucketLeases:                            {topology.UserSession, topology.UserExecutor, topology.UserGateway},
		"$O." + topology.BucketPayloads + ".C.x":                                        {topology.UserSession, topology.UserExecutor, topology.UserSkills},
		"$JS.API.STREAM.PURGE.EVENTS-0":                                                 {},
		"$JS.API.STREAM.MSG.DELETE.EVENTS-0":                                            {topology.UserJanitor},
		"$JS.API.STREAM.MSG.DELETE.COMMANDS":                                            {},
		"$JS.API.STREAM.MSG.DELETE.OBJ_" + topology.BucketWorkspaces:                    {topology.UserJanitor},
		"$JS.API.STREAM.MSG.DELETE." + topology.StreamDead:                              {topology.UserSession},
		"$JS.API.DIRECT.GET." + topology.StreamDead:                                     {topology.UserSession, topology.UserGateway},
		"$JS.API.DIRECT.GET." + topology.StreamDeltas:                                   {topology.UserGateway, topology.UserExecutor},
		"$JS.API.CONSUMER.CREATE." + topology.StreamDeltas + ".x":                       {topology.UserGate},
		"$JS.API.STREAM.MSG.DELETE." + topology.StreamDeltas:                            {},
		"$JS.API.STREAM.DELETE.EVENTS-0":                                                {},
		"$JS.API.STREAM.UPDATE.EVENTS-0":                                                {},
		"$JS.API.STREAM.PURGE.OBJ_" + topology.BucketPayloads:                           {},
		"$JS.API.CONSUMER.DELETE.EVENTS-0.reactor-0":                                    {},
		"$JS.API.CONSUMER.CREATE.COMMANDS.session." + topology.CommandFilter("session"): {topology.UserGate, topology.UserSession},
		"$JS.API.CONSUMER.MSG.NEXT.COMMANDS.session":                                    {topology.UserSession},
		"$JS.API.CONSUMER.CREATE.JOBS.local-any.job.local.any":                          {topology.UserGate, topology.UserExecutor},
		"$JS.API.CONSUMER.MSG.NEXT.JOBS.local-any":                                      {topology.UserExecutor},
		"$JS.API.DIRECT.GET.EVENTS-0." + run:                                            {topology.UserSession, topology.UserExecutor, topology.UserProjector, topology.UserSkills, topology.UserJanitor},
		topology.FilesRequestSubject("docker", "host"):                                  {topology.UserGateway},
		topology.FilesResponseSubject("x"):                                              {topology.UserExecutor},
		topology.FilesAckSubject("x"):                                                   {topology.UserGateway},
		"_INBOX_gateway.x":                                                              {topology.UserSession, topology.UserSkills},
		"_INBOX_session.x":                                                              {},
	}
	for _, u := range topology.Users() {
		if u.Name == topology.UserAdmin {
			continue
		}
		for subject, may := range subjects {
			nc, _ := connectAs(t, ns, u.Name)
			// The request is invalid, so it changes nothing if it is allowed.
			got := isRefused(t, nc, func() error { return nc.PublishRequest(subject, topology.InboxPrefix(u.Name)+".x", []byte("{")) })
			if want := !slices.Contains(may, u.Name); got != want {
				t.Errorf("%s publishes %s: refused is %v, want %v", u.Name, subject, got, want)
			}
			nc.Close()
		}
	}
}

func TestUsers_MaySubscribeTheirRowsOnly(t *testing.T) {
	t.Parallel()
	checkSubscribe(t, runServerWithUsers(t))
}

func checkSubscribe(t *testing.T, ns *server.Server) {
	t.Helper()
	for subject, may := range map[string][]string{
		"live.default.*":    {topology.UserGateway},
		"ctl.projector":     {topology.UserGateway, topology.UserExecutor},
		"ctl.xtr":           {topology.UserExecutor},
		"files.on.docker.x": {topology.UserExecutor},
		"files.to.*":        {topology.UserGateway},
		"files.ack.x":       {topology.UserExecutor},
		"ev.>":              {},
		"cmd.>":             {},
		"_INBOX_session.>":  {topology.UserSession},
		"_INBOX_skills.>":   {topology.UserSkills},
		"_INBOX.>":          {},
		"$KV.idempotency.>": {},
	} {
		for _, u := range topology.Users() {
			if u.Name == topology.UserAdmin {
				continue
			}
			nc, _ := connectAs(t, ns, u.Name)
			got := isRefused(t, nc, func() error { _, err := nc.SubscribeSync(subject); return err })
			if want := !slices.Contains(may, u.Name); got != want {
				t.Errorf("%s subscribes %s: refused is %v, want %v", u.Name, subject, got, want)
			}
			nc.Close()
		}
	}
}

// TestAccounts_PassOnCoreMessagesBetweenServices tests that core messages reach every copy of a service in another
// account, once.
func TestAccounts_PassOnCoreMessagesBetweenServices(t *testing.T) {
	t.Parallel()
	ns := runServerWithUsers(t)
	for _, c := range []struct{ from, to, filter, subject string }{
		{topology.UserProjector, topology.UserGateway, "live.*.*", "live.default." + session},
		{topology.UserProjector, topology.UserGateway, topology.ProjectorStartSubject, topology.ProjectorStartSubject},
		{topology.UserSession, topology.UserExecutor, topology.ExecutorCtlSubject("xtr"), topology.ExecutorCtlSubject("xtr")},
		{topology.UserExecutor, topology.UserExecutor, topology.ExecutorCtlSubject("other"), topology.ExecutorCtlSubject("other")},
		{topology.UserSession, topology.UserGateway, "_INBOX_gateway.a.*", "_INBOX_gateway.a.1"},
		{topology.UserSkills, topology.UserGateway, "_INBOX_gateway.b.*", "_INBOX_gateway.b.1"},
		{topology.UserGateway, topology.UserExecutor, topology.FilesRequestSubject("local", "host"), topology.FilesRequestSubject("local", "host")},
		{topology.UserGateway, topology.UserExecutor, topology.FilesAckSubject("x"), topology.FilesAckSubject("x")},
		{topology.UserExecutor, topology.UserGateway, topology.FilesResponseSubject("x"), topology.FilesResponseSubject("x")},
	} {
		var subs []*nats.Subscription
		for range 2 {
			to, _ := connectAs(t, ns, c.to)
			sub, err := to.SubscribeSync(c.filter)
			if err == nil {
				err = to.Flush()
			}
			if err != nil {
				t.Fatal(err)
			}
			subs = append(subs, sub)
		}
		from, _ := connectAs(t, ns, c.from)
		for _, text := range []string{"first", "second"} {
			if err := from.Publish(c.subject, []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		for i, sub := range subs {
			for _, want := range []string{"first", "second"} {
				if m, err := sub.NextMsg(patience); err != nil || string(m.Data) != want {
					t.Errorf("copy %d of %s received %v from %s on %s, %v; want %q", i, c.to, m, c.from, c.subject, err, want)
				}
			}
		}
	}
}

// TestUsers_CanDoTheirWork uses the client library as the services do. The library sends requests beyond those to the
// subject itself.
func TestUsers_CanDoTheirWork(t *testing.T) {
	t.Parallel()
	checkWork(t, runServerWithUsers(t))
}

func checkWork(t *testing.T, ns *server.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	_, gateway := connectAs(t, ns, topology.UserGateway)
	_, sess := connectAs(t, ns, topology.UserSession)
	_, exec := connectAs(t, ns, topology.UserExecutor)
	_, proj := connectAs(t, ns, topology.UserProjector)
	_, jan := connectAs(t, ns, topology.UserJanitor)

	_, err := gateway.Publish(ctx, topology.CommandSubject(topology.ServiceSession, "default", session), []byte("{}"))
	must("gateway sends a command", err)
	idem, err := gateway.KeyValue(ctx, topology.BucketIdempotency)
	must("gateway opens idempotency", err)
	_, err = idem.Create(ctx, "default.x", []byte("1"))
	must("gateway creates a key", err)

	take := func(who string, js jetstream.JetStream, d topology.Durable) {
		t.Helper()
		c, err := js.CreateOrUpdateConsumer(ctx, d.Stream, d.Config)
		must(who+" makes "+d.Config.Durable, err)
		msg, err := c.Next(jetstream.FetchMaxWait(5 * time.Second))
		must(who+" takes from "+d.Config.Durable, err)
		must(who+" acknowledges", msg.DoubleAck(ctx))
	}
	take("session", sess, topology.SessionCommandsConsumer())
	_, err = sess.Publish(ctx, events.LifeSubject("default", session).String(), []byte("{}"))
	must("session writes life", err)
	take("session", sess, topology.ReactorConsumer(0, topology.DefaultPartitions))
	_, err = sess.Publish(ctx, topology.ProviderJobSubject("local"), []byte("{}"))
	must("session publishes a job", err)
	timer := nats.NewMsg(topology.TimerScheduleSubject(session))
	timer.Header.Set("Nats-Schedule", "@at "+time.Now().Add(-time.Second).UTC().Format(time.RFC3339))
	timer.Header.Set("Nats-Schedule-Target", topology.TimerDueSubject(session))
	_, err = sess.PublishMsg(ctx, timer)
	must("session arms a timer", err)
	take("session", sess, topology.TimersConsumer())

	take("executor", exec, topology.ProviderJobsConsumer("local"))
	_, err = exec.Publish(ctx, topology.DeadSubject(topology.ProviderJobSubject("local")), []byte("{}"))
	must("executor gives a job up", err)
	take("session", sess, topology.DeadJobsConsumer())
	letters, err := gateway.Stream(ctx, topology.StreamDead)
	must("gateway opens DEAD", err)
	letter, err := letters.GetMsg(ctx, 1, jetstream.WithGetMsgSubject(topology.DeadFilter))
	must("gateway reads a dead letter", err)
	theirLetters, err := sess.Stream(ctx, topology.StreamDead)
	must("session opens DEAD", err)
	must("session removes a dead letter", theirLetters.DeleteMsg(ctx, letter.Sequence))
	leases, err := exec.KeyValue(ctx, topology.BucketLeases)
	must("executor opens leases", err)
	_, err = leases.Put(ctx, "xtr", []byte("1"))
	must("executor renews its lease", err)
	theirs, err := sess.KeyValue(ctx, topology.BucketLeases)
	must("session opens leases", err)
	keys, err := theirs.Keys(ctx)
	must("session lists leases", err)
	if !slices.Equal(keys, []string{"xtr"}) {
		t.Errorf("leases are %v", keys)
	}
	waits, err := exec.KeyValue(ctx, topology.BucketWaits)
	must("executor opens waits", err)
	_, err = waits.Put(ctx, "exe", []byte("1"))
	must("executor writes the reason of a wait", err)
	waits, err = gateway.KeyValue(ctx, topology.BucketWaits)
	must("gateway opens waits", err)
	_, err = waits.Get(ctx, "exe")
	must("gateway reads the reason of a wait", err)
	objects, err := exec.ObjectStore(ctx, topology.BucketPayloads)
	must("executor opens payloads", err)
	_, err = objects.PutBytes(ctx, "digest", bytes.Repeat([]byte("x"), 1<<18))
	must("executor stores a payload", err)

	read, err := proj.ObjectStore(ctx, topology.BucketPayloads)
	must("projector opens payloads", err)
	b, err := read.GetBytes(ctx, "digest")
	must("projector reads a payload", err)
	if len(b) != 1<<18 {
		t.Errorf("the payload has %d bytes", len(b))
	}
	c, err := proj.OrderedConsumer(ctx, topology.EventsStreamName(0), jetstream.OrderedConsumerConfig{FilterSubjects: []string{"ev.>"}})
	must("projector opens the log", err)
	_, err = c.Next(jetstream.FetchMaxWait(5 * time.Second))
	must("projector reads the log", err)
	announced, err := gateway.Conn().SubscribeSync(topology.LiveFilter)
	must("gateway subscribes to announcements", err)
	must("gateway subscribes to announcements", gateway.Conn().Flush())
	must("projector announces", proj.Conn().Publish(events.LiveSubject("default", session), []byte("{}")))
	_, err = announced.NextMsg(5 * time.Second)
	must("gateway receives the announcement", err)

	log, err := jan.Stream(ctx, topology.EventsStreamName(0))
	must("janitor opens the log", err)
	last, err := log.GetLastMsgForSubject(ctx, events.LifeSubject("default", session).String())
	must("janitor finds a commit", err)
	must("janitor erases it", log.SecureDeleteMsg(ctx, last.Sequence))
	if info, err := log.Info(ctx); err != nil || info.State.Msgs != 0 {
		t.Errorf("after that: %+v, %v", info, err)
	}
	bucket, err := jan.Stream(ctx, "OBJ_"+topology.BucketPayloads)
	must("janitor opens payloads", err)
	info, err := bucket.Info(ctx, jetstream.WithSubjectFilter("$O.>"))
	must("janitor lists what is in it", err)
	for subject := range info.State.Subjects {
		m, err := bucket.GetLastMsgForSubject(ctx, subject)
		must("janitor finds "+subject, err)
		must("janitor erases "+subject, bucket.SecureDeleteMsg(ctx, m.Sequence))
	}
}

func TestDocs_AreCurrent(t *testing.T) {
	t.Parallel()
	want, err := os.ReadFile("../../docs/subjects.md")
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := topology.WriteDocs(&got); err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Error("docs/subjects.md is out of date: run go generate ./topology")
	}
}

func TestShardOf_AgreesWithSubjectsAndGroups(t *testing.T) {
	t.Parallel()
	for _, partitions := range []events.Partitioning{0, 1, 2, 4, 8, 16, 32, 64} {
		for _, n := range []int{1, 2, 4, 8} {
			if n > partitions.PartitionCount() {
				continue
			}
			streams := topology.Streams(topology.Layout{Shards: n, Partitions: partitions})
			for p := range partitions.PartitionCount() {
				found := 0
				for shard := range n {
					if slices.Contains(streams[shard].Config.Subjects, topology.PartitionFilter(p)) {
						found++
						if shard != topology.ShardOf(p, n) || shard != topology.ShardOfGroup(partitions.GroupOfPartition(p), n) {
							t.Errorf("partition %d of %d shards is in %d, not in %d", p, n, shard, topology.ShardOf(p, n))
						}
					}
				}
				if found != 1 {
					t.Errorf("partition %d is in %d of %d shards", p, found, n)
				}
				if !slices.Contains(partitions.PartitionsInGroup(partitions.GroupOfPartition(p)), p) {
					t.Errorf("partition %d is not in its group", p)
				}
			}
		}
	}
	for _, bad := range []string{"", "a.b", "a*", ">", "a b", "ü", strings.Repeat("a", 65)} {
		if topology.CheckToken("engine", bad) == nil {
			t.Errorf("%q was accepted as a token", bad)
		}
	}
	if err := topology.CheckToken("engine", "host-1_A"); err != nil {
		t.Error(err)
	}
}
