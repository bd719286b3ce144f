package frames_test

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/frames"
)

const partitions = events.Partitioning(8)

// world is a NATS server with the streams, and a Publisher.
type world struct {
	nc        *nats.Conn
	js        jetstream.JetStream
	publisher *frames.Publisher
}

func newWorld(t *testing.T, interval time.Duration) world {
	t.Helper()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{}); err != nil {
		t.Fatal(err)
	}
	publisher := frames.New(frames.Config{NATS: nc, Executor: "xtr_test", Partitions: partitions, Interval: interval, Logger: slog.New(slog.DiscardHandler)})
	stop, err := publisher.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return world{nc, js, publisher}
}

// session returns the id of a session in partition 0; each n is another one.
func session(n int) string {
	for i := 0; ; i++ {
		id := events.DeriveID(events.KindSession, fmt.Sprint(n), fmt.Sprint(i))
		if partitions.PartitionOf(id) == 0 {
			return id
		}
	}
}

// publish publishes text of a block; the offset counts the block's earlier texts.
func (w world) publish(t *testing.T, session, block string, offset int, text string) {
	t.Helper()
	if err := w.publisher.Publish("acme", session, events.Delta{BlockID: block, Offset: uint32(offset), Text: text, Time: time.Now().UTC()}); err != nil {
		t.Fatal(err)
	}
}

// awaitText waits until DELTAS has a text of a session's block.
func (w world) awaitText(t *testing.T, session, block, want string) {
	t.Helper()
	for {
		texts, err := w.publisher.ReadTexts(t.Context(), "acme", session, deltas.StartPosition{})
		if err != nil {
			t.Fatal(err)
		}
		if texts[block] == want {
			return
		}
		if len(texts[block]) >= len(want) {
			t.Fatalf("block %s has text %q, want %q", block, texts[block], want)
		}
	}
}

// TestPublisher_SharesFramesBetweenSessions checks that deltas that come within an interval are one message, in order,
// and that each session reads only its own.
func TestPublisher_SharesFramesBetweenSessions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, time.Hour)
	a, b := session(1), session(2)
	w.publish(t, a, "first", 0, "at once") // the first delta is published without a wait
	w.awaitText(t, a, "first", "at once")
	for i := range 100 {
		w.publish(t, a, "x", 2*i, fmt.Sprintf("%02d", i))
		w.publish(t, b, "x", 2*i, fmt.Sprintf("%02d", 99-i))
	}
	if texts, err := w.publisher.ReadTexts(t.Context(), "acme", a, deltas.StartPosition{}); err != nil || texts["x"] != "" {
		t.Errorf("deltas were published before the interval had passed: %q, %v", texts["x"], err)
	}
	w.publish(t, a, "large", 0, strings.Repeat("x", 300<<10)) // neither the frame before a large delta waits, nor the large one
	w.awaitText(t, a, "large", strings.Repeat("x", 300<<10))
	var wantA, wantB strings.Builder
	for i := range 100 {
		fmt.Fprintf(&wantA, "%02d", i)
		fmt.Fprintf(&wantB, "%02d", 99-i)
	}
	w.awaitText(t, a, "x", wantA.String())
	w.awaitText(t, b, "x", wantB.String())
	frames, err := deltas.LastFrames(t.Context(), w.nc, 0)
	if err != nil || len(frames) != 1 || frames[0].Number != 3 || frames[0].Executor != "xtr_test" {
		t.Errorf("last frames = %+v, %v; want frame 3", frames, err)
	}
}

// TestPublisher_LargeDeltasDoNotDelayOthers checks that a delta that NATS refuses because of its size takes no text of other
// sessions with it.
func TestPublisher_LargeDeltasDoNotDelayOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, time.Hour)
	a, b := session(1), session(2)
	w.publish(t, a, "first", 0, "at once")
	w.publish(t, a, "x", 0, strings.Repeat("a", 200<<10)) // waits
	w.publish(t, b, "y", 0, strings.Repeat("b", 9<<20))   // NATS accepts 8 MB
	w.awaitText(t, a, "x", strings.Repeat("a", 200<<10))
}

// TestPublisher_PublishesWhatWaits checks that a waiting frame is published when the interval has passed, and one at the
// end.
func TestPublisher_PublishesWhatWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 20*time.Millisecond)
	a := session(1)
	want := ""
	for i := range 50 {
		text := fmt.Sprintf("%02d", i)
		w.publish(t, a, "x", len(want), text)
		want += text
	}
	w.awaitText(t, a, "x", want)
}

func TestPublisher_PublishesWhatWaitsWhenItStops(t *testing.T) {
	t.Parallel()
	w := newWorld(t, time.Hour)
	publisher := frames.New(frames.Config{NATS: w.nc, Executor: "xtr_other", Partitions: partitions, Interval: time.Hour, Logger: slog.New(slog.DiscardHandler)})
	stop, err := publisher.Open()
	if err != nil {
		t.Fatal(err)
	}
	a := session(1)
	for i, text := range []string{"one ", "two"} {
		if err := publisher.Publish("acme", a, events.Delta{BlockID: "x", Offset: uint32(4 * i), Text: text}); err != nil {
			t.Fatal(err)
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.awaitText(t, a, "x", "one two")
}

// TestPublisher_PositionPrecedesLaterText checks that text that is published after Position was called comes after the
// position.
func TestPublisher_PositionPrecedesLaterText(t *testing.T) {
	t.Parallel()
	w := newWorld(t, time.Millisecond)
	a := session(1)
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := make(chan struct{})
	defer close(stop)
	wg.Go(func() { // other sessions of the partition
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				w.publish(t, session(2), "other", i, "x")
				time.Sleep(time.Millisecond)
			}
		}
	})
	for i := 0; i < 20; {
		position := w.publisher.Position()
		if position == 0 {
			continue
		}
		block := fmt.Sprint("block", i)
		w.publish(t, a, block, 0, "hello")
		for {
			texts, err := w.publisher.ReadTexts(t.Context(), "acme", a, deltas.StartPosition{After: position})
			if err != nil {
				t.Fatal(err)
			}
			if texts[block] == "hello" {
				break
			}
		}
		i++
	}
}

// TestPublisher_ReadsDeltasOfEarlierBuilds checks that messages of single sessions are read, also between frames.
func TestPublisher_ReadsDeltasOfEarlierBuilds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, time.Millisecond)
	a, b := session(1), session(2)
	for i, text := range []string{"one ", "two "} {
		raw, err := events.Delta{BlockID: "x", Offset: uint32(4 * i), Text: text}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{a, b} {
			if _, err := w.js.Publish(t.Context(), "dl."+events.PartitionToken(partitions.PartitionOf(id))+".acme."+id, raw); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.publish(t, a, "x", 8, "three")
	w.awaitText(t, a, "x", "one two three")
	w.awaitText(t, b, "x", "one two ")
}

// TestPublisher_LosesTextWithoutNATS checks that deltas are dropped without an error or a wait when NATS is away.
func TestPublisher_LosesTextWithoutNATS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nc := &nats.Conn{} // never connected
		publisher := frames.New(frames.Config{NATS: nc, Executor: "xtr_test", Partitions: partitions, Interval: time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
		for i := range 1000 {
			if err := publisher.Publish("acme", session(1), events.Delta{BlockID: "x", Offset: uint32(i), Text: "x"}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		if publisher.Position() != 0 {
			t.Error("a position is known")
		}
	})
}
