package jslog_test

import (
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// open provisions the server of nc and opens the log on it.
func open(t *testing.T, nc *nats.Conn, shards int) *jslog.Log {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.Config{Shards: shards}); err != nil {
		t.Fatal(err)
	}
	return openConfig(t, jslog.Config{JetStream: js, Shards: shards})
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

func TestLog_PassesTheConformanceSuite(t *testing.T) {
	t.Parallel()
	for name, shards := range map[string]int{"one shard": 1, "four shards": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eventlogtest.Exercise(t, func(t *testing.T) eventlog.Log {
				return open(t, natstest.Conn(t, natstest.Run(t)), shards)
			})
		})
	}
}
