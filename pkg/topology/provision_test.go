package topology_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func connect(t *testing.T) (context.Context, jetstream.JetStream) {
	t.Helper()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx, js
}

func TestProvision_TwiceChangesNothing(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if _, err := topology.ReadLayout(ctx, js); !errors.Is(err, topology.ErrNotInstalled) {
		t.Fatalf("shards of an empty server: %v, want ErrNotInstalled", err)
	}
	for range 2 {
		if err := topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 4}); err != nil {
			t.Fatal(err)
		}
	}
	if l, err := topology.ReadLayout(ctx, js); err != nil || l.Shards != 4 {
		t.Fatalf("layout %s, %v, want 4 shards", l, err)
	}
	for _, want := range topology.Streams(topology.Layout{Shards: 4}) {
		s, err := js.Stream(ctx, want.Config.Name)
		if err != nil {
			t.Fatalf("%s: %v", want.Config.Name, err)
		}
		have := s.CachedInfo().Config
		if have.Storage != want.Config.Storage || have.Retention != want.Config.Retention || have.Discard != want.Config.Discard ||
			have.MaxAge != want.Config.MaxAge || have.PersistMode != want.Config.PersistMode || have.AllowMsgSchedules != want.Config.AllowMsgSchedules {
			t.Errorf("%s is %+v, want %+v", want.Config.Name, have, want.Config)
		}
		if have.DenyDelete || have.DenyPurge {
			t.Errorf("%s denies deletes or purges, which can never be undone", want.Config.Name)
		}
	}
}

func TestProvision_Concurrently(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	var g errgroup.Group
	for range 8 {
		g.Go(func() error { return topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 2}) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestProvision_RefusesChangesThatAreImpossible(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	for _, bad := range []topology.ProvisionConfig{{Shards: 3}, {Shards: 16}, {Shards: -1}, {Replicas: 6}, {Partitions: -1}, {Partitions: 3}, {Partitions: 128}, {Shards: 4, Partitions: 2}, {CommitVersion: -1}, {CommitVersion: events.CommitVersion + 1}} {
		if err := topology.Provision(ctx, js, bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 2}); err != nil {
		t.Fatal(err)
	}
	err := topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 4})
	if err == nil || !strings.Contains(err.Error(), "installed with 2, not 4") {
		t.Errorf("changed shards: %v", err)
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
		t.Errorf("without a number of shards: %v", err)
	}
	if err := js.DeleteStream(ctx, topology.StreamDead); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: topology.StreamDead, Subjects: []string{"dead.>"}, Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	err = topology.Provision(ctx, js, topology.ProvisionConfig{})
	if err == nil || !strings.Contains(err.Error(), "DEAD: storage is Memory and must be File") {
		t.Errorf("changed storage: %v", err)
	}
}

// TestProvision_DeletesTheStreamLIVEOfEarlierBuilds tests that the stream is deleted while a projector of an earlier
// build publishes and a gateway of an earlier build listens, that neither notices, and that a stream of that name
// which Spool did not create is kept.
func TestProvision_DeletesTheStreamLIVEOfEarlierBuilds(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	earlier := jetstream.StreamConfig{
		Name: "LIVE", Description: "Changes of the read models, for connected clients.", Subjects: []string{"live.>"},
		Storage: jetstream.MemoryStorage, MaxAge: time.Minute, Metadata: map[string]string{"spool-shards": "1"},
	}
	if _, err := js.CreateStream(ctx, earlier); err != nil {
		t.Fatal(err)
	}
	subject := events.LiveSubject("default", session)
	sub, err := js.Conn().SubscribeSync(subject)
	if err != nil {
		t.Fatal(err)
	}
	wantDelivery := func(text string) {
		t.Helper()
		if err := js.Conn().Publish(subject, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if m, err := sub.NextMsg(time.Minute); err != nil || string(m.Data) != text {
			t.Fatalf("received %v, %v, want %q", m, err, text)
		}
	}
	wantDelivery("before")
	var g errgroup.Group
	for range 4 {
		g.Go(func() error { return topology.Provision(ctx, js, topology.ProvisionConfig{}) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Stream(ctx, "LIVE"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("stream LIVE of an earlier build: %v, want it to be deleted", err)
	}
	wantDelivery("after")

	for name, change := range map[string]func(c *jetstream.StreamConfig){
		"no metadata of Spool": func(c *jetstream.StreamConfig) { c.Metadata = nil },
		"other subjects":       func(c *jetstream.StreamConfig) { c.Subjects = []string{"live.>", "mine.>"} },
	} {
		foreign := earlier
		change(&foreign)
		if _, err := js.CreateStream(ctx, foreign); err != nil {
			t.Fatal(err)
		}
		if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
			t.Fatal(err)
		}
		if err := js.DeleteStream(ctx, "LIVE"); err != nil {
			t.Errorf("%s: delete the stream after provisioning: %v, want it to be kept", name, err)
		}
	}
}

func TestProvision_KeepsTheOperatorsSettings(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(ctx, topology.StreamDead)
	if err != nil {
		t.Fatal(err)
	}
	c := s.CachedInfo().Config
	c.MaxAge, c.Metadata = time.Hour, map[string]string{"team": "blue"}
	c.Compression = jetstream.S2Compression
	if _, err := js.UpdateStream(ctx, c); err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	if s, err = js.Stream(ctx, topology.StreamDead); err != nil {
		t.Fatal(err)
	}
	have := s.CachedInfo().Config
	if have.MaxAge != topology.DeadMaxAge || have.Metadata["team"] != "blue" || have.Compression != jetstream.S2Compression {
		t.Errorf("after provisioning: age %s, metadata %v, compression %v", have.MaxAge, have.Metadata, have.Compression)
	}
}

func TestDurables_CanBeCreated(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 2}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, d := range []topology.Durable{
			topology.SessionCommandsConsumer(), topology.ReactorConsumer(0, topology.DefaultPartitions), topology.ReactorConsumer(1, topology.DefaultPartitions), topology.TimersConsumer(),
			topology.ProviderJobsConsumer("local"), topology.EngineJobsConsumer("local", "host-1"), topology.EngineJobsConsumer("local", "host-2"),
		} {
			c, err := js.CreateOrUpdateConsumer(ctx, d.Stream, d.Config)
			if err != nil {
				t.Fatalf("%s on %s: %v", d.Config.Durable, d.Stream, err)
			}
			if th := c.CachedInfo().Config.InactiveThreshold; th != 0 {
				t.Errorf("%s would be deleted after %s", d.Config.Durable, th)
			}
		}
	}
}

// TestDead_KeepsAdvisoriesOfMaxDeliveries tests that DEAD stores the advisory of a message that reached its maximum
// of deliveries. In a work queue, this advisory is the only sign of such a message.
func TestDead_KeepsAdvisoriesOfMaxDeliveries(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	d := topology.SessionCommandsConsumer()
	d.Config.MaxDeliver = 1
	c, err := js.CreateOrUpdateConsumer(ctx, d.Stream, d.Config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, topology.CommandSubject(topology.ServiceSession, "default", session), nil); err != nil {
		t.Fatal(err)
	}
	msg, err := c.Next(jetstream.FetchMaxWait(5 * time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if err := msg.Nak(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Fetch(1, jetstream.FetchMaxWait(time.Second)); err != nil {
		t.Fatal(err)
	}
	dead, err := js.OrderedConsumer(ctx, topology.StreamDead, jetstream.OrderedConsumerConfig{FilterSubjects: []string{topology.AdvisoryMaxDeliveries}})
	if err != nil {
		t.Fatal(err)
	}
	advisory, err := dead.Next(jetstream.FetchMaxWait(10 * time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if want := "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.COMMANDS.session"; advisory.Subject() != want {
		t.Errorf("DEAD keeps %s, want %s", advisory.Subject(), want)
	}
}

// TestProvision_CommitVersion tests that a new log begins with the newest version of commits. A log from before
// versions were recorded has version 1 until it is provisioned, and keeps it if the configuration demands version 1.
// No log goes back to an older version.
func TestProvision_CommitVersion(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	version := func() int {
		t.Helper()
		s, err := topology.ReadSigning(ctx, js, 2)
		if err != nil {
			t.Fatal(err)
		}
		return s.CommitVersion
	}
	provision := func(cfg topology.ProvisionConfig) {
		t.Helper()
		if err := topology.Provision(ctx, js, cfg); err != nil {
			t.Fatal(err)
		}
	}
	provision(topology.ProvisionConfig{Shards: 2})
	if v := version(); v != events.CommitVersion {
		t.Errorf("a new log has commits of version %d", v)
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{CommitVersion: 1}); err == nil || !strings.HasPrefix(err.Error(), "provision stream EVENTS-0: commit-version: ") {
		t.Errorf("a log went back to version 1: %v", err)
	}
	// A build that recorded no version left streams like these.
	for _, name := range []string{"EVENTS-0", "EVENTS-1"} {
		s, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		c := s.CachedInfo().Config
		delete(c.Metadata, "spool-commit-version")
		if _, err := js.UpdateStream(ctx, c); err != nil {
			t.Fatal(err)
		}
		if v := version(); v != 1 {
			t.Errorf("without the record of %s the log has commits of version %d", name, v)
		}
	}
	provision(topology.ProvisionConfig{CommitVersion: 1})
	if v := version(); v != 1 {
		t.Errorf("provisioned for version 1, the log has commits of version %d", v)
	}
	provision(topology.ProvisionConfig{})
	if v := version(); v != events.CommitVersion {
		t.Errorf("provisioned again, the log has commits of version %d", v)
	}
}

// TestProvision_AllowsBatchesOnExistingStreams tests that streams of an installation without atomic batches, with a
// commit, keep their commits and every other setting when batches are allowed. A stream that allows them keeps it.
func TestProvision_AllowsBatchesOnExistingStreams(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 2}); err != nil {
		t.Fatal(err)
	}
	subject := events.RunSubject("default", events.DeriveID(events.KindSession, "batches")).String()
	ack, err := js.Publish(ctx, subject, []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	old := map[string]jetstream.StreamConfig{}
	for i := range 2 {
		s, err := js.Stream(ctx, topology.EventsStreamName(i))
		if err != nil {
			t.Fatal(err)
		}
		cfg := s.CachedInfo().Config
		if !cfg.AllowAtomicPublish {
			t.Fatalf("%s does not allow batches", cfg.Name)
		}
		cfg.AllowAtomicPublish = false
		if _, err := js.UpdateStream(ctx, cfg); err != nil {
			t.Fatal(err)
		}
		old[cfg.Name] = cfg
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	for name, want := range old {
		s, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		have := s.CachedInfo().Config
		want.AllowAtomicPublish = true
		if !reflect.DeepEqual(have, want) {
			t.Errorf("%s is %+v, want %+v", name, have, want)
		}
	}
	s, err := js.Stream(ctx, ack.Stream)
	if err != nil {
		t.Fatal(err)
	}
	if m, err := s.GetMsg(ctx, ack.Sequence); err != nil || m.Subject != subject || string(m.Data) != "x" {
		t.Errorf("the stored message is %+v, %v", m, err)
	}
}

// crowdedCluster is a NATS whose cluster has no servers for the first new object buckets.
type crowdedCluster struct {
	jetstream.JetStream
	refusals int
	refused  func()
}

func (c *crowdedCluster) CreateOrUpdateObjectStore(ctx context.Context, cfg jetstream.ObjectStoreConfig) (jetstream.ObjectStore, error) {
	if c.refusals == 0 {
		return c.JetStream.CreateOrUpdateObjectStore(ctx, cfg)
	}
	c.refusals--
	c.refused()
	return nil, &jetstream.APIError{Code: 400, ErrorCode: 10005, Description: "no suitable peers for placement, peer offline"}
}

// TestProvision_WaitsForServersOfACluster tests that servers that are not known to the cluster's leader yet delay the installation and do not fail it.
func TestProvision_WaitsForServersOfACluster(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, &crowdedCluster{js, 2, func() {}}, topology.ProvisionConfig{}); err != nil {
		t.Errorf("the servers are known at the third attempt: %v", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	attempts := 0
	err := topology.Provision(ctx, &crowdedCluster{js, -1, func() {
		if attempts++; attempts == 3 {
			cancel()
		}
	}}, topology.ProvisionConfig{})
	if attempts != 3 || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "no suitable peers") {
		t.Errorf("cancelled at the third attempt: %d attempts, %v", attempts, err)
	}
}
