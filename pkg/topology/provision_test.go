package topology_test

import (
	"context"
	"errors"
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
	if _, err := topology.Shards(ctx, js); !errors.Is(err, topology.ErrNotInstalled) {
		t.Fatalf("shards of an empty server: %v, want ErrNotInstalled", err)
	}
	for range 2 {
		if err := topology.Provision(ctx, js, topology.Config{Shards: 4}); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := topology.Shards(ctx, js); err != nil || n != 4 {
		t.Fatalf("shards = %d, %v, want 4", n, err)
	}
	for _, want := range topology.Streams(4) {
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
		g.Go(func() error { return topology.Provision(ctx, js, topology.Config{Shards: 2}) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestProvision_RefusesChangesThatAreImpossible(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	for _, bad := range []topology.Config{{Shards: 3}, {Shards: 16}, {Shards: -1}, {Replicas: 6}, {CommitVersion: -1}, {CommitVersion: events.CommitVersion + 1}} {
		if err := topology.Provision(ctx, js, bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
	if err := topology.Provision(ctx, js, topology.Config{Shards: 2}); err != nil {
		t.Fatal(err)
	}
	err := topology.Provision(ctx, js, topology.Config{Shards: 4})
	if err == nil || !strings.Contains(err.Error(), "installed with 2, not 4") {
		t.Errorf("changed shards: %v", err)
	}
	if err := topology.Provision(ctx, js, topology.Config{}); err != nil {
		t.Errorf("without a number of shards: %v", err)
	}
	if err := js.DeleteStream(ctx, topology.StreamLive); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: topology.StreamLive, Subjects: []string{"live.>"}, Storage: jetstream.FileStorage}); err != nil {
		t.Fatal(err)
	}
	err = topology.Provision(ctx, js, topology.Config{})
	if err == nil || !strings.Contains(err.Error(), "LIVE: storage is File and must be Memory") {
		t.Errorf("changed storage: %v", err)
	}
}

func TestProvision_KeepsTheOperatorsSettings(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, js, topology.Config{}); err != nil {
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
	if err := topology.Provision(ctx, js, topology.Config{}); err != nil {
		t.Fatal(err)
	}
	if s, err = js.Stream(ctx, topology.StreamDead); err != nil {
		t.Fatal(err)
	}
	have := s.CachedInfo().Config
	if have.MaxAge != topology.DeadAge || have.Metadata["team"] != "blue" || have.Compression != jetstream.S2Compression {
		t.Errorf("after provisioning: age %s, metadata %v, compression %v", have.MaxAge, have.Metadata, have.Compression)
	}
}

func TestDurables_CanBeCreated(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if err := topology.Provision(ctx, js, topology.Config{Shards: 2}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, d := range []topology.Durable{
			topology.CommandsConsumer(), topology.ReactorConsumer(0), topology.ReactorConsumer(1), topology.TimersConsumer(),
			topology.JobsAnyConsumer("local"), topology.JobsOnConsumer("local", "host-1"), topology.JobsOnConsumer("local", "host-2"),
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
	if err := topology.Provision(ctx, js, topology.Config{}); err != nil {
		t.Fatal(err)
	}
	d := topology.CommandsConsumer()
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
	provision := func(cfg topology.Config) {
		t.Helper()
		if err := topology.Provision(ctx, js, cfg); err != nil {
			t.Fatal(err)
		}
	}
	provision(topology.Config{Shards: 2})
	if v := version(); v != events.CommitVersion {
		t.Errorf("a new log has commits of version %d", v)
	}
	if err := topology.Provision(ctx, js, topology.Config{CommitVersion: 1}); err == nil || !strings.HasPrefix(err.Error(), "provision stream EVENTS-0: commit-version: ") {
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
	provision(topology.Config{CommitVersion: 1})
	if v := version(); v != 1 {
		t.Errorf("provisioned for version 1, the log has commits of version %d", v)
	}
	provision(topology.Config{})
	if v := version(); v != events.CommitVersion {
		t.Errorf("provisioned again, the log has commits of version %d", v)
	}
}
