package e2e

import (
	"errors"
	"fmt"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestReplay_AmidARebuild tests that a replay over gRPC of a real session has all its events, also when the read
// models are rebuilt during the replay.
func TestReplay_AmidARebuild(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: repeating})
	id := c.CreateSession("spool", map[string]any{"model": "known-model"})
	var s *harness.Stream
	for i := range 5 {
		s, _ = c.RunQuery(id, fmt.Sprint("run the command echo ", i), s)
	}
	conn, err := grpc.NewClient(c.GRPCAddress(0), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // the test has ended
	client := spoolv1.NewEventsClient(conn)
	stored, err := client.ListEvents(t.Context(), &spoolv1.ListEventsRequest{SessionId: id, Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	const page = 64 // number of events that a replay reads at once
	if len(stored.Events) < page+10 {
		t.Fatalf("%d events are not enough", len(stored.Events))
	}
	first, last := stored.Events[0].Time.AsTime(), stored.Events[len(stored.Events)-1].Time.AsTime()
	replay, err := client.ReplayEvents(t.Context(), &spoolv1.ReplayEventsRequest{
		SessionId: id, To: &stored.Tip, Speed: fmt.Sprint(last.Sub(first).Seconds() / 10), // a replay of 10 seconds, in which a rebuild ends
	})
	if err != nil {
		t.Fatal(err)
	}
	next := func() *spoolv1.ReplayEventsResponse {
		t.Helper()
		m, err := replay.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	if next().GetStarted().GetTo() != stored.Tip {
		t.Error("the replay does not begin with what is replayed")
	}
	nc, _, err := c.Servers.Connect(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: c.Servers.DatabaseURL}, projector.Deps{Log: c.Servers.Log, NATS: nc}, false); err != nil {
		t.Fatal(err)
	}
	t.Log("the rebuild has ended")
	seq := uint32(0)
	for {
		m := next()
		if ended := m.GetEnded(); ended != nil {
			if ended.Seq != stored.Tip || seq != stored.Tip {
				t.Errorf("the replay ended after event %d, with seq %d of %d", seq, ended.Seq, stored.Tip)
			}
			break
		}
		e := m.GetEvent()
		if e == nil || e.Id == nil { // a notice, or text in flight
			continue
		}
		if seq++; e.Seq != seq || e.GetId() != stored.Events[seq-1].GetId() {
			t.Fatalf("event %d came as %d: %v", e.Seq, seq, e)
		}
		if seq == page {
			t.Log("the second page begins")
		}
	}
	if _, err := replay.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the call ended with %v", err)
	}
}
