package live_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

const (
	textPartitions = events.Partitioning(topology.DefaultPartitions)
	textTenant     = "acme"
)

// writer is an executor and a projector: it publishes the text of blocks, stores their events, and announces them.
type writer struct {
	t       *testing.T
	nc      *nats.Conn
	js      jetstream.JetStream
	session string
	rand    *rand.Rand

	number   uint64 // of the last frame
	position uint64 // a sequence of DELTAS that precedes all later text
	blocks   []*writtenBlock

	mu        sync.Mutex
	stored    []reads.StoredEvent
	announced int // events that were announced
}

// writtenBlock is a block and how much of its text was published.
type writtenBlock struct {
	id, text  string
	published int
	start     deltas.StartPosition
	complete  bool
}

func newWriter(t *testing.T, seed uint64) *writer {
	t.Helper()
	w := &writer{t: t, nc: natstest.Conn(t, natstest.Run(t)), session: events.DeriveID(events.KindSession, fmt.Sprint(seed)), rand: rand.New(rand.NewPCG(seed, 1))}
	var err error
	if w.js, err = jetstream.New(w.nc); err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), w.js, topology.ProvisionConfig{Partitions: topology.DefaultPartitions}); err != nil {
		t.Fatal(err)
	}
	w.store(events.Log{Message: "the first event"})
	return w
}

// Tip, Events, CheckVisible, Tips and Progress implement live.ReadModels.
func (w *writer) Tip(context.Context, string, string) (reads.SessionTip, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	tip := reads.SessionTip{Seq: uint32(len(w.stored)), Position: "0-1"}
	for _, b := range w.blocks {
		if !b.complete {
			tip.Open = append(tip.Open, reads.OpenText{ID: b.id, From: b.start})
		}
	}
	return tip, nil
}

func (w *writer) Events(_ context.Context, _, _ string, q reads.EventQuery) (reads.EventPage, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := w.stored[min(int(q.After), len(w.stored)):]
	list = slices.Clone(list[:min(q.Limit, len(list))])
	return reads.EventPage{Events: list, Tip: uint32(len(w.stored)), Next: q.After + uint32(len(list))}, nil
}

func (w *writer) CheckVisible(context.Context, string, string, []string) error { return nil }

func (w *writer) Tips(_ context.Context, _ string, sessions []string) (map[string]uint32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]uint32{}
	for _, id := range sessions {
		out[id] = uint32(len(w.stored))
	}
	return out, nil
}

func (w *writer) Progress(context.Context) (map[int]reads.GroupProgress, error) { return nil, nil }

// store adds an event to the read models.
func (w *writer) store(data events.Payload) {
	seq := uint32(len(w.stored) + 1)
	wire, err := events.Event{ID: fmt.Sprint("evt", seq), Time: time.Now().UTC(), ConversationID: events.MainConversation, Source: events.FromRunner, Data: data}.ToWire(w.session, seq, "0-1")
	if err != nil {
		w.t.Fatal(err)
	}
	raw, err := json.Marshal(wire)
	if err != nil {
		w.t.Fatal(err)
	}
	w.stored = append(w.stored, reads.StoredEvent{Seq: seq, Type: wire.Type, JSON: raw})
}

// announce announces the events that were stored since the last call.
func (w *writer) announce() {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := readmodel.LiveMessage{Session: w.session, Tip: uint32(len(w.stored))}
	for _, e := range w.stored[w.announced:] {
		var wire events.WireEvent
		if err := json.Unmarshal(e.JSON, &wire); err != nil {
			w.t.Fatal(err)
		}
		m.Events = append(m.Events, wire)
	}
	w.announced = len(w.stored)
	raw, err := json.Marshal(m)
	if err == nil {
		err = w.nc.Publish(events.LiveSubject(textTenant, w.session), raw)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// open begins a block whose text may be published before its event is stored.
func (w *writer) open(text string) *writtenBlock {
	b := &writtenBlock{id: fmt.Sprint("blk", len(w.blocks)), text: text, start: deltas.StartPosition{Time: time.Now().UTC()}}
	if w.rand.IntN(3) > 0 {
		b.start.After = w.position
	}
	return b
}

func (w *writer) storeStart(b *writtenBlock) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.blocks = append(w.blocks, b)
	w.store(events.BlockStart{TextAfter: b.start.After, Block: events.Block{ID: b.id, Kind: events.KindAssistantText, Status: events.StatusPending, Time: b.start.Time}})
}

func (w *writer) complete(b *writtenBlock) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b.complete = true
	w.store(events.BlockComplete{Block: events.Block{ID: b.id, Kind: events.KindAssistantText, Status: events.StatusComplete, Content: b.text}})
}

// publish publishes the next piece of a block's text, or a piece again. If it is lost, only DELTAS has it.
func (w *writer) publish(b *writtenBlock, lost bool) {
	from := b.published
	if from > 0 && w.rand.IntN(5) == 0 {
		from = w.rand.IntN(from) // again, as after a takeover
	}
	// The last piece is left for the end of the test.
	w.publishText(b, from, min(len(b.text)-10, max(b.published, from)+w.rand.IntN(8)), lost)
}

// publishText publishes a part of a block's text.
func (w *writer) publishText(b *writtenBlock, from, to int, lost bool) {
	w.t.Helper()
	raw, err := events.Delta{BlockID: b.id, ConversationID: events.MainConversation, Epoch: 1, Offset: uint32(from), Text: b.text[from:to], Time: time.Now().UTC()}.Encode()
	if err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	b.published = max(b.published, to)
	w.mu.Unlock()
	w.number++
	p := textPartitions.PartitionOf(w.session)
	subject, data := events.FrameSubject(p, "xtr_test"), events.AppendFrameDelta(events.AppendFrameHeader(nil, w.number), events.FrameSessionKey(textTenant, w.session), raw)
	if lost {
		subject, data = "dl."+events.PartitionToken(p)+"."+textTenant+"."+w.session, raw
	}
	ack, err := w.js.Publish(w.t.Context(), subject, data)
	if err != nil {
		w.t.Fatal(err)
	}
	w.position = ack.Sequence
}

// publishEmpty publishes a frame without text of the session, whose number shows whether frames before it were lost.
func (w *writer) publishEmpty() {
	w.t.Helper()
	w.number++
	if _, err := w.js.Publish(w.t.Context(), events.FrameSubject(textPartitions.PartitionOf(w.session), "xtr_test"), events.AppendFrameHeader(nil, w.number)); err != nil {
		w.t.Fatal(err)
	}
}

// newHub runs a Hub on the writer's read models until the test ends.
func (w *writer) newHub(checkEvery time.Duration) *live.Hub {
	h := live.NewHub(live.Config{
		ReadModels: w, Partitions: textPartitions, NATS: w.nc, Logger: natstest.Logger(w.t), CheckEvery: checkEvery,
		Admission: admission.New(admission.Limits{Bytes: 256 << 20, TenantBytes: 256 << 20}),
	})
	ctx, cancel := context.WithCancel(w.t.Context())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- h.Run(ctx, func() { close(started) }) }()
	<-started
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Error(err)
		}
	})
	return h
}

// client is a client of a Hub. It checks what it receives.
type client struct {
	w      *writer
	cancel context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex
	seq  uint32
	open map[string]string // text of the open blocks
	err  error
}

// join joins the session at its beginning.
func (w *writer) join(h *live.Hub) *client {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	r, err := h.Join(ctx, textTenant, nil, w.session, 0)
	if err != nil {
		cancel()
		w.t.Fatal(err)
	}
	c := &client{w: w, cancel: cancel, done: make(chan struct{}), open: map[string]string{}}
	go func() {
		defer close(c.done)
		defer r.Close()
		for {
			frames, err := r.Next(ctx)
			c.mu.Lock()
			for _, f := range frames {
				if c.err == nil {
					c.err = c.receive(f)
				}
			}
			if err != nil && ctx.Err() == nil && c.err == nil {
				c.err = err
			}
			c.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return c
}

// receive checks a frame: events without a gap, and text of open blocks only, without a gap, at the last event.
func (c *client) receive(f live.Frame) error {
	if f.Lag != nil {
		return nil
	}
	var w events.WireEvent
	if err := json.Unmarshal(f.JSON, &w); err != nil {
		return err
	}
	if w.Type == events.TextDelta {
		var d struct {
			BlockID string `json:"blockId"`
			Offset  int    `json:"offset"`
			Delta   string `json:"delta"`
		}
		if err := json.Unmarshal(w.Data, &d); err != nil {
			return err
		}
		known, open := c.open[d.BlockID]
		switch {
		case !open:
			return fmt.Errorf("text of block %s, which is not open", d.BlockID)
		case d.Offset != len(known):
			return fmt.Errorf("text of block %s at offset %d after %d bytes", d.BlockID, d.Offset, len(known))
		case w.Seq != c.seq:
			return fmt.Errorf("text at event %d after event %d", w.Seq, c.seq)
		}
		c.open[d.BlockID] = known + d.Delta
		return nil
	}
	if w.Seq != c.seq+1 {
		return fmt.Errorf("event %d after event %d", w.Seq, c.seq)
	}
	c.seq = w.Seq
	switch d := w.Event().Data.(type) {
	case events.BlockStart:
		c.open[d.Block.ID] = ""
	case events.BlockComplete:
		if text := c.open[d.Block.ID]; !strings.HasPrefix(d.Block.Content, text) {
			return fmt.Errorf("block %s had text %q and is completed with %q", d.Block.ID, text, d.Block.Content)
		}
		delete(c.open, d.Block.ID)
	}
	return nil
}

// leave ends the client and returns what it found wrong.
func (c *client) leave() error {
	c.cancel()
	<-c.done
	return c.err
}

// awaitAll waits until the client has every event and all published text.
func (c *client) awaitAll(t *testing.T) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		c.mu.Lock()
		missing := c.err
		c.w.mu.Lock()
		if missing == nil && int(c.seq) != len(c.w.stored) {
			missing = fmt.Errorf("the client has %d of %d events", c.seq, len(c.w.stored))
		}
		for _, b := range c.w.blocks {
			if missing == nil && !b.complete && c.open[b.id] != b.text[:b.published] {
				missing = fmt.Errorf("block %s has %d of %d bytes, or other text", b.id, len(c.open[b.id]), b.published)
			}
		}
		c.w.mu.Unlock()
		failed := c.err != nil
		c.mu.Unlock()
		if missing == nil {
			return
		}
		if failed || time.Now().After(deadline) {
			t.Fatal(missing)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestHub_DeliversTextOnceAndInOrder plays random sessions with several open blocks. Deltas are lost, repeated, and
// published before their block_start is stored; events are announced late; clients join and leave at any moment. Each
// client receives the text of each block from its beginning without a gap, only while the block is open, and in the
// end all of it.
func TestHub_DeliversTextOnceAndInOrder(t *testing.T) {
	t.Parallel()
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			w := newWriter(t, seed)
			h := w.newHub(50 * time.Millisecond)
			clients := []*client{w.join(h)}
			var open []*writtenBlock
			var early *writtenBlock // its block_start is not stored yet
			var gone []error
			for range 300 {
				switch action := w.rand.IntN(20); {
				case action == 0 && early == nil && len(open) < 4:
					early = w.open(strings.Repeat("abcdefghij", 2+w.rand.IntN(20)))
				case action <= 2 && early != nil:
					w.storeStart(early)
					open, early = append(open, early), nil
				case action == 3 && len(open) > 0:
					i := w.rand.IntN(len(open))
					w.complete(open[i])
					open = slices.Delete(open, i, i+1)
				case action <= 7:
					w.announce()
				case action == 8 && len(clients) < 6:
					clients = append(clients, w.join(h))
				case action == 9 && len(clients) > 0: // a feed ends with its last client
					gone = append(gone, clients[0].leave())
					clients = clients[1:]
				default:
					b := early
					if len(open) > 0 && (b == nil || w.rand.IntN(3) > 0) {
						b = open[w.rand.IntN(len(open))]
					}
					if b != nil {
						w.publish(b, w.rand.IntN(6) == 0)
					}
				}
			}
			w.announce()
			clients = append(clients, w.join(h))
			for _, b := range open { // no later text of the blocks shows that these pieces are missing
				w.publishText(b, b.published, len(b.text), true)
			}
			w.publishEmpty()
			for _, c := range clients {
				c.awaitAll(t)
				gone = append(gone, c.leave())
			}
			if err := errors.Join(gone...); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestHub_ReadsLongTextInPages joins a block whose text is much longer than what a feed keeps: every client gets all of
// it.
func TestHub_ReadsLongTextInPages(t *testing.T) {
	t.Parallel()
	w := newWriter(t, 1)
	h := w.newHub(50 * time.Millisecond)
	first := w.join(h)
	const piece, pieces = 60 << 10, 150 // 9 MB
	b := w.open(strings.Repeat("0123456789abcdef", piece*pieces/16))
	w.storeStart(b)
	w.announce()
	for i := range pieces {
		from := i * piece
		raw, err := events.Delta{BlockID: b.id, ConversationID: events.MainConversation, Offset: uint32(from), Text: b.text[from : from+piece], Time: time.Now().UTC()}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		w.number++
		p := textPartitions.PartitionOf(w.session)
		frame := events.AppendFrameDelta(events.AppendFrameHeader(nil, w.number), events.FrameSessionKey(textTenant, w.session), raw)
		if _, err := w.js.Publish(t.Context(), events.FrameSubject(p, "xtr_test"), frame); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		b.published = from + piece
		w.mu.Unlock()
	}
	late := w.join(h)
	for _, c := range []*client{first, late} {
		c.awaitAll(t)
		if err := c.leave(); err != nil {
			t.Error(err)
		}
	}
}

// TestHub_LosesNoEventsInAFloodOfText checks that text of blocks that never begin is bounded and disturbs no session.
func TestHub_LosesNoEventsInAFloodOfText(t *testing.T) {
	t.Parallel()
	w := newWriter(t, 2)
	h := w.newHub(50 * time.Millisecond)
	c := w.join(h)
	p := textPartitions.PartitionOf(w.session)
	raw, err := events.Delta{BlockID: "never", Text: strings.Repeat("x", 10), Time: time.Now().UTC()}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		w.number++
		frame := events.AppendFrameHeader(nil, w.number)
		for range 100 {
			frame = events.AppendFrameDelta(frame, events.FrameSessionKey(textTenant, w.session), raw)
		}
		if err := w.nc.Publish(events.FrameSubject(p, "xtr_test"), frame); err != nil {
			t.Fatal(err)
		}
	}
	b := w.open("hello")
	w.storeStart(b)
	w.announce()
	w.mu.Lock()
	b.published = 5
	w.mu.Unlock()
	raw, err = events.Delta{BlockID: b.id, Text: "hello", Time: time.Now().UTC()}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	w.number++
	if _, err := w.js.Publish(t.Context(), events.FrameSubject(p, "xtr_test"), events.AppendFrameDelta(events.AppendFrameHeader(nil, w.number), events.FrameSessionKey(textTenant, w.session), raw)); err != nil {
		t.Fatal(err)
	}
	c.awaitAll(t)
	if err := c.leave(); err != nil {
		t.Error(err)
	}
}
