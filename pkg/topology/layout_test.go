package topology_test

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

func TestProvision_RecordsPartitions(t *testing.T) {
	t.Parallel()
	for _, partitions := range []int{1, 8, 64} {
		ctx, js := connect(t)
		cfg := topology.ProvisionConfig{Shards: min(4, partitions), Partitions: partitions}
		provision(ctx, t, js, cfg)
		provision(ctx, t, js, cfg)
		provision(ctx, t, js, topology.ProvisionConfig{})
		l, err := topology.ReadLayout(ctx, js)
		if err != nil || l.Shards != cfg.Shards || l.Partitions.PartitionCount() != partitions || l.Partitions.GroupCount() != partitions {
			t.Errorf("%d partitions: the layout is %s, %v", partitions, l, err)
		}
		if p, err := topology.ReadPartitions(ctx, js); err != nil || p != l.Partitions {
			t.Errorf("%d partitions: COMMANDS records %d, %v", partitions, p, err)
		}
		if _, ok := metadata(ctx, t, js, "EVENTS-0")["spool-shards"]; ok {
			t.Errorf("%d partitions: earlier builds would run on this log", partitions)
		}
	}
}

func TestProvision_KeepsALogWithoutPartitions(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	provision(ctx, t, js, topology.ProvisionConfig{Shards: 2})
	before := snapshot(ctx, t, js, 2)
	provision(ctx, t, js, topology.ProvisionConfig{})
	l, err := topology.ReadLayout(ctx, js)
	if err != nil || l != (topology.Layout{Shards: 2}) || l.Partitions.PartitionCount() != 64 || l.Partitions.GroupCount() != 8 {
		t.Errorf("the layout is %s, %v", l, err)
	}
	for _, n := range []int{8, 64} {
		if err := topology.Provision(ctx, js, topology.ProvisionConfig{Partitions: n}); err == nil || !strings.HasPrefix(err.Error(), "partitions: the log was installed by an earlier build") {
			t.Errorf("%d partitions: %v", n, err)
		}
	}
	if after := snapshot(ctx, t, js, 2); !reflect.DeepEqual(after, before) {
		t.Errorf("the streams changed: %v, want %v", after, before)
	}
}

func TestProvision_RefusesAnotherNumberOfPartitions(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	provision(ctx, t, js, topology.ProvisionConfig{Shards: 2, Partitions: 8})
	before := snapshot(ctx, t, js, 2)
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{Partitions: 16}); err == nil || !strings.HasPrefix(err.Error(), "partitions: the log is installed with 8, not 16") {
		t.Error(err)
	}
	if after := snapshot(ctx, t, js, 2); !reflect.DeepEqual(after, before) {
		t.Errorf("the streams changed: %v, want %v", after, before)
	}
}

func TestLayout_RefusesChangedMetadata(t *testing.T) {
	t.Parallel()
	type edit map[string]string // "" removes a field
	both := func(e edit) map[string]edit { return map[string]edit{"EVENTS-0": e, "EVENTS-1": e} }
	for name, c := range map[string]struct {
		cfg   topology.ProvisionConfig
		edits map[string]edit
		want  string
	}{
		"not a number":              {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": "eight"}), "stream EVENTS-0: metadata spool-partitions is \"eight\""},
		"with a sign":               {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": "+8"}), "stream EVENTS-0: metadata spool-partitions is \"+8\""},
		"out of range":              {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": "128"}), "stream EVENTS-0: metadata spool-partitions is \"128\""},
		"less than the shards":      {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": "1"}), "stream EVENTS-0: metadata spool-partitions is \"1\""},
		"another number":            {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": "16"}), "stream EVENTS-0: metadata spool-partitions is 16, but the stream has the subjects ev.00"},
		"another number in a shard": {topology.ProvisionConfig{Partitions: 8}, map[string]edit{"EVENTS-1": {"spool-partitions": "16"}}, "stream EVENTS-1: metadata spool-partitions records"},
		"another number of shards":  {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitioned-shards": "1"}), "stream EVENTS-0: metadata spool-partitions is 8, but the stream has the subjects ev.00"},
		"no partitions":             {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": ""}), "stream EVENTS-0: metadata spool-partitions is \"\""},
		"no metadata":               {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": "", "spool-partitioned-shards": ""}), "stream EVENTS-0: metadata spool-shards is \"\""},
		"that of an earlier build":  {topology.ProvisionConfig{Partitions: 8}, both(edit{"spool-partitions": "", "spool-partitioned-shards": "", "spool-shards": "2"}), "stream EVENTS-0: metadata spool-shards is 2, but the stream has the subjects ev.00"},
		"partitions on an earlier log": {topology.ProvisionConfig{}, both(edit{"spool-partitions": "8", "spool-partitioned-shards": "2"}),
			"stream EVENTS-0: metadata spool-partitions is 8, but the stream has the subjects ev.00"},
		"no shards on an earlier log": {topology.ProvisionConfig{}, both(edit{"spool-shards": ""}), "stream EVENTS-0: metadata spool-shards is \"\""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, js := connect(t)
			c.cfg.Shards = 2
			provision(ctx, t, js, c.cfg)
			for stream, fields := range c.edits {
				s, err := js.Stream(ctx, stream)
				if err != nil {
					t.Fatal(err)
				}
				next := s.CachedInfo().Config
				next.Metadata = maps.Clone(next.Metadata)
				for field, value := range fields {
					if next.Metadata[field] = value; value == "" {
						delete(next.Metadata, field)
					}
				}
				if _, err := js.UpdateStream(ctx, next); err != nil {
					t.Fatal(err)
				}
			}
			before := snapshot(ctx, t, js, 2)
			_, read := topology.ReadLayout(ctx, js)
			for call, err := range map[string]error{"ReadLayout": read, "Provision": topology.Provision(ctx, js, topology.ProvisionConfig{})} {
				var invalid *topology.LayoutError
				if !errors.As(err, &invalid) || !strings.HasPrefix(err.Error(), c.want) {
					t.Errorf("%s: %v, want %s", call, err, c.want)
				}
			}
			if after := snapshot(ctx, t, js, 2); !reflect.DeepEqual(after, before) {
				t.Errorf("the streams changed: %v, want %v", after, before)
			}
		})
	}
}

func TestReadPartitions_RefusesStreamsThatDisagree(t *testing.T) {
	t.Parallel()
	ctx, js := connect(t)
	if _, err := topology.ReadPartitions(ctx, js); !errors.Is(err, topology.ErrNotInstalled) {
		t.Errorf("on an empty server: %v", err)
	}
	provision(ctx, t, js, topology.ProvisionConfig{Partitions: 8})
	s, err := js.Stream(ctx, topology.StreamDead)
	if err != nil {
		t.Fatal(err)
	}
	next := s.CachedInfo().Config
	next.Metadata["spool-partitions"] = "16"
	if _, err := js.UpdateStream(ctx, next); err != nil {
		t.Fatal(err)
	}
	want := "stream DEAD: metadata spool-partitions records"
	if _, err := topology.ReadPartitions(ctx, js); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{}); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("provision: %v, want %s", err, want)
	}
}

func provision(ctx context.Context, t *testing.T, js jetstream.JetStream, cfg topology.ProvisionConfig) {
	t.Helper()
	if err := topology.Provision(ctx, js, cfg); err != nil {
		t.Fatal(err)
	}
}

func metadata(ctx context.Context, t *testing.T, js jetstream.JetStream, stream string) map[string]string {
	t.Helper()
	s, err := js.Stream(ctx, stream)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().Config.Metadata
}

// snapshot returns the configuration of the streams of the log.
func snapshot(ctx context.Context, t *testing.T, js jetstream.JetStream, shards int) map[string]jetstream.StreamConfig {
	t.Helper()
	out := map[string]jetstream.StreamConfig{}
	for shard := range shards {
		s, err := js.Stream(ctx, topology.EventsStreamName(shard))
		if err != nil {
			t.Fatal(err)
		}
		out[topology.EventsStreamName(shard)] = s.CachedInfo().Config
	}
	return out
}
