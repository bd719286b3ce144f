package janitor_test

import (
	"bytes"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/services/session/janitor"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Content that no object names is erased once it is old, and content that is named stays.
func TestPass_ErasesUploadsThatFailed(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.Config{}))
	url := pgtest.URL(t)
	must(t, readmodel.Migrate(t.Context(), url))
	store, err := natsstore.Open(t.Context(), js, topology.BucketWorkspaces)
	must(t, err)
	must(t, store.Put(t.Context(), "default/ses/named", bytes.NewReader([]byte("named"))))
	const orphan = "$O." + topology.BucketWorkspaces + ".C.ORPHAN"
	for range 3 {
		_, err = js.Publish(t.Context(), orphan, []byte("abandoned"))
		must(t, err)
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	now := time.Now()
	j, err := janitor.New(janitor.Config{DatabaseURL: url, Uploads: time.Hour},
		janitor.Deps{NATS: nc, Log: log, Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }})
	must(t, err)
	left := func() uint64 {
		t.Helper()
		s, err := js.Stream(t.Context(), "OBJ_"+topology.BucketWorkspaces)
		must(t, err)
		info, err := s.Info(t.Context(), jetstream.WithSubjectFilter("$O.>"))
		must(t, err)
		return info.State.Subjects[orphan]
	}
	pass := func(dry bool, items int) {
		t.Helper()
		report, err := j.Pass(t.Context(), dry)
		must(t, err)
		if len(report.Items) != items {
			t.Errorf("the pass found %+v, want %d items", report.Items, items)
		}
	}
	pass(false, 0) // an upload may still be under way
	now = now.Add(2 * time.Hour)
	pass(true, 1)
	if n := left(); n != 3 {
		t.Errorf("%d chunks are left after a dry run, want 3", n)
	}
	pass(false, 1)
	if n := left(); n != 0 {
		t.Errorf("%d chunks are left", n)
	}
	if has, err := store.Has(t.Context(), "default/ses/named"); err != nil || !has {
		t.Errorf("the object that is named is gone: %v", err)
	}
	pass(false, 0)
}

// A janitor whose host's clock is hours ahead leaves the chunks of an upload that is under way.
func TestPass_OfAHostWhoseClockIsAheadKeepsUploads(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.Config{}))
	url := pgtest.URL(t)
	must(t, readmodel.Migrate(t.Context(), url))
	_, err = js.Publish(t.Context(), "$O."+topology.BucketWorkspaces+".C.UPLOAD", []byte("under way"))
	must(t, err)
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	ahead := bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.EventsStream(0), Host: func() time.Time { return time.Now().Add(3 * time.Hour) }})
	j, err := janitor.New(janitor.Config{DatabaseURL: url, Uploads: time.Hour}, janitor.Deps{NATS: nc, Log: log, Logger: slog.New(slog.DiscardHandler), Clock: ahead})
	must(t, err)
	report, err := j.Pass(t.Context(), false)
	must(t, err)
	if len(report.Items) != 0 {
		t.Errorf("the pass removed %+v", report.Items)
	}
}
