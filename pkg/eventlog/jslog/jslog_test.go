package jslog_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// open provisions the server of nc and opens the log on it.
func open(t *testing.T, nc *nats.Conn, shards int) *jslog.Log {
	t.Helper()
	return openLayout(t, nc, topology.Layout{Shards: shards})
}

// openLayout is like open for any layout.
func openLayout(t *testing.T, nc *nats.Conn, layout topology.Layout) *jslog.Log {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	cfg := topology.ProvisionConfig{Shards: layout.Shards}
	if layout.Partitions != 0 {
		cfg.Partitions = layout.Partitions.PartitionCount()
	}
	if err := topology.Provision(t.Context(), js, cfg); err != nil {
		t.Fatal(err)
	}
	return openConfig(t, jslog.Config{JetStream: js, Shards: layout.Shards, Partitions: layout.Partitions})
}

func openConfig(t *testing.T, cfg jslog.Config) *jslog.Log {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = natstest.Logger(t)
	}
	l, err := jslog.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestLog_PassesTheConformanceSuiteInBatches stores every commit in a batch.
func TestLog_PassesTheConformanceSuiteInBatches(t *testing.T) {
	t.Parallel()
	for name, shards := range map[string]int{"one shard": 1, "four shards": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eventlogtest.Exercise(t, func(t *testing.T) eventlog.Log {
				l := open(t, natstest.Conn(t, natstest.Run(t)), shards)
				jslog.ForceBatches(l)
				return l
			})
		})
	}
}

func TestLog_PassesTheConformanceSuite(t *testing.T) {
	t.Parallel()
	for _, layout := range []topology.Layout{{Shards: 1}, {Shards: 4}, {Shards: 4, Partitions: 8}} {
		t.Run(layout.String(), func(t *testing.T) {
			t.Parallel()
			eventlogtest.Exercise(t, func(t *testing.T) eventlog.Log {
				return openLayout(t, natstest.Conn(t, natstest.Run(t)), layout)
			})
		})
	}
}

// The NATS subjects of a log depend on its number of partitions; hashes, signatures and the names of chains do not.
func TestLog_PartitionsChangeSubjectsOnly(t *testing.T) {
	t.Parallel()
	var stored []string
	for _, partitions := range []events.Partitioning{0, 8, 1} {
		nc := natstest.Conn(t, natstest.Run(t))
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		l := openLayout(t, nc, topology.Layout{Shards: 1, Partitions: partitions})
		s := events.LifeSubject("acme", events.DeriveID(events.KindSession, "partitions"))
		head := eventlogtest.AppendCommits(t, l, s, "same", 3)[2]
		stored = append(stored, head.Hash)
		stream, err := js.Stream(t.Context(), topology.EventsStreamName(0))
		if err != nil {
			t.Fatal(err)
		}
		m, err := stream.GetMsg(t.Context(), head.Seq)
		if err != nil || m.Subject != partitions.Subject(s) {
			t.Errorf("%d partitions: the subject is %v, %v", partitions, m, err)
		}
		changes, err := l.Changed(t.Context(), eventlog.Position{}, 10)
		if err != nil || changes.Last[s.String()] != head.Seq {
			t.Errorf("%d partitions: changed are %v, %v", partitions, changes.Last, err)
		}
	}
	if stored[0] != stored[1] || stored[0] != stored[2] {
		t.Errorf("the hashes differ: %v", stored)
	}
}

// A session's id may be on subjects that are not part of the session. They do not disturb its readers.
func TestRead_SkipsOtherAspectsOfASession(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	l := openLayout(t, nc, topology.Layout{Shards: 1, Partitions: 8})
	s := eventlogtest.SessionSubject(0, 1, "other aspects")
	eventlogtest.AppendCommits(t, l, s, "before", 2)
	for _, aspect := range []events.Aspect{events.Skill, "unknown"} {
		other := s
		other.Aspect = aspect
		if _, err := nc.Request(l.Partitioning().Subject(other), []byte("garbage"), time.Second); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for _, err := range l.Read(t.Context(), eventlog.Position{}, eventlog.Filter{Subject: events.Subject{Tenant: s.Tenant, ID: s.ID}}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != 2 {
		t.Errorf("read %d commits, want 2", n)
	}
}
