package deltas_test

import (
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/deltas"
)

// TestTexts_RequestsStreamInfoOnce: repeated reads request the information of the stream DELTAS once.
func TestTexts_RequestsStreamInfoOnce(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.Config{}); err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	if _, err := nc.Subscribe("$JS.API.STREAM.INFO."+topology.StreamDeltas, func(*nats.Msg) { asked.Add(1) }); err != nil {
		t.Fatal(err)
	}
	sid := events.Derive(events.KindSession, "s")
	body, err := json.Marshal(events.Delta{BlockID: "blk", Text: "hello"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), events.Partitioning(8).DeltaSubject("default", sid), body); err != nil {
		t.Fatal(err)
	}
	s := deltas.New(js, 8)
	for range 5 {
		texts, err := s.Texts(t.Context(), "default", sid, time.Now().Add(-time.Minute))
		if err != nil || texts["blk"] != "hello" {
			t.Fatalf("texts %v, %v", texts, err)
		}
	}
	if n := asked.Load(); n > 1 {
		t.Errorf("the information of DELTAS was requested %d times", n)
	}
}
