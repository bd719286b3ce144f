package deltas_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

const partitions = events.Partitioning(8)

func newStream(t *testing.T) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Partitions: 8}); err != nil {
		t.Fatal(err)
	}
	return nc, js
}

// publish stores a frame of an executor with one delta, and returns its sequence.
func publish(t *testing.T, js jetstream.JetStream, executor string, number uint64, session string, d events.Delta) uint64 {
	t.Helper()
	raw, err := d.Encode()
	if err != nil {
		t.Fatal(err)
	}
	frame := events.AppendFrameDelta(events.AppendFrameHeader(nil, number), events.FrameSessionKey("acme", session), raw)
	ack, err := js.Publish(t.Context(), events.FrameSubject(partitions.PartitionOf(session), executor), frame)
	if err != nil {
		t.Fatal(err)
	}
	return ack.Sequence
}

// TestReader_ReadsFromItsStart checks that a Reader returns the session's deltas after a sequence or a time, and none of
// other sessions, also over several pages.
func TestReader_ReadsFromItsStart(t *testing.T) {
	t.Parallel()
	nc, js := newStream(t)
	session, other := events.DeriveID(events.KindSession, "a"), ""
	for i := 0; other == ""; i++ {
		if id := events.DeriveID(events.KindSession, fmt.Sprint("other", i)); partitions.PartitionOf(id) == partitions.PartitionOf(session) {
			other = id
		}
	}
	var positions []uint64
	const count = 600 // more than two pages
	for i := range count {
		publish(t, js, "xtr_1", uint64(2*i+1), other, events.Delta{BlockID: "o", Text: "not mine"})
		positions = append(positions, publish(t, js, "xtr_1", uint64(2*i+2), session, events.Delta{BlockID: "b", Offset: uint32(i), Text: "x", Time: time.Now()}))
	}
	for _, c := range []struct {
		name string
		from deltas.StartPosition
		want int
	}{
		{"the beginning", deltas.StartPosition{}, count},
		{"a time, with room for other clocks", deltas.StartPosition{Time: time.Now()}, count},
		{"a sequence", deltas.StartPosition{After: positions[99], Time: time.Now()}, count - 100},
		{"the last sequence", deltas.StartPosition{After: positions[count-1]}, 0},
		{"a sequence that is not there yet", deltas.StartPosition{After: positions[count-1] + 100}, 0},
	} {
		r := deltas.NewReader(nc, partitions, "acme", session, c.from)
		n := 0
		for {
			d, ok, err := r.Peek(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if d.BlockID != "b" || int(d.Offset) != count-c.want+n {
				t.Fatalf("%s: delta %d is %+v", c.name, n, d)
			}
			n++
			r.DropPeeked()
		}
		if n != c.want {
			t.Errorf("%s: %d deltas, want %d", c.name, n, c.want)
		}
	}
}

// TestReader_SkipsForwardOnly checks that SkipTo drops earlier deltas and never goes back.
func TestReader_SkipsForwardOnly(t *testing.T) {
	t.Parallel()
	nc, js := newStream(t)
	session := events.DeriveID(events.KindSession, "a")
	var positions []uint64
	for i := range 10 {
		positions = append(positions, publish(t, js, "xtr_1", uint64(i+1), session, events.Delta{BlockID: "b", Offset: uint32(i), Text: "x"}))
	}
	r := deltas.NewReader(nc, partitions, "acme", session, deltas.StartPosition{})
	next := func() int {
		t.Helper()
		d, ok, err := r.Peek(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return -1
		}
		r.DropPeeked()
		return int(d.Offset)
	}
	r.SkipTo(deltas.StartPosition{After: positions[4]})
	if got := next(); got != 5 {
		t.Errorf("the first delta after the skip is %d, want 5", got)
	}
	r.SkipTo(deltas.StartPosition{After: positions[1]})
	r.SkipTo(deltas.StartPosition{Time: time.Now()})
	if got := next(); got != 6 {
		t.Errorf("after a skip back the next delta is %d, want 6", got)
	}
}

func TestLastFrames_ReturnsOneForEachExecutor(t *testing.T) {
	t.Parallel()
	nc, js := newStream(t)
	session := events.DeriveID(events.KindSession, "a")
	p := partitions.PartitionOf(session)
	if list, err := deltas.LastFrames(t.Context(), nc, p); err != nil || len(list) > 0 {
		t.Errorf("frames of an empty stream: %+v, %v", list, err)
	}
	last := map[string]uint64{}
	for i := range 20 {
		executor := fmt.Sprint("xtr_", i%3)
		publish(t, js, executor, uint64(i+1), session, events.Delta{BlockID: "b", Text: strings.Repeat("x", 1000)})
		last[executor] = uint64(i + 1)
	}
	if _, err := js.Publish(t.Context(), "dl."+events.PartitionToken(p)+".acme."+session, []byte(`{"blockId":"b"}`)); err != nil { // of an earlier build
		t.Fatal(err)
	}
	list, err := deltas.LastFrames(t.Context(), nc, p)
	if err != nil || len(list) != len(last) {
		t.Fatalf("frames: %+v, %v", list, err)
	}
	for _, f := range list {
		if f.Number != last[f.Executor] || f.Time.IsZero() || f.Seq == 0 {
			t.Errorf("frame %+v, want number %d", f, last[f.Executor])
		}
	}
}

// TestPartitionReader_FailsWithoutDELTAS checks that a missing stream is an error, and not the end.
func TestPartitionReader_FailsWithoutDELTAS(t *testing.T) {
	t.Parallel()
	nc, js := newStream(t)
	if err := js.DeleteStream(t.Context(), topology.StreamDeltas); err != nil {
		t.Fatal(err)
	}
	s := deltas.NewPartitionReader(nc, 0, deltas.StartPosition{})
	if err := s.Read(t.Context(), func(deltas.SessionDelta) {}); err == nil || s.AtEnd() {
		t.Errorf("read: %v, at end %v", err, s.AtEnd())
	}
}

// TestPartitionReader_SkipsDamagedMessages checks that a damaged frame or delta ends neither the read nor the frame before it.
func TestPartitionReader_SkipsDamagedMessages(t *testing.T) {
	t.Parallel()
	nc, js := newStream(t)
	session := events.DeriveID(events.KindSession, "a")
	for _, data := range []string{"", "frame 1 x\n", "frame 1 3\nacme", "frame 1 4\nacme " + session + " 1\n{\n"} {
		if _, err := js.Publish(t.Context(), events.FrameSubject(partitions.PartitionOf(session), "xtr_1"), []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	publish(t, js, "xtr_1", 5, session, events.Delta{BlockID: "b", Text: "hello"})
	r := deltas.NewReader(nc, partitions, "acme", session, deltas.StartPosition{})
	if d, ok, err := r.Peek(t.Context()); err != nil || !ok || d.Text != "hello" {
		t.Errorf("got %+v, %v, %v", d, ok, err)
	}
}
