package jslog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// testWait is the time limit of every step.
const testWait = 30 * time.Second

// withResponder returns a publisher, and the messages that it publishes, which the test answers. Their replies are on
// another connection.
func withResponder(t *testing.T) (*publisher, <-chan *nats.Msg) {
	t.Helper()
	ns, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	connect := func() *nats.Conn {
		nc, err := nats.Connect("", nats.InProcessServer(ns), nats.MaxReconnects(-1), nats.ReconnectWait(time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	responder, requests := connect(), make(chan *nats.Msg, 100)
	if _, err := responder.ChanSubscribe("ev.>", requests); err != nil {
		t.Fatal(err)
	}
	if err := responder.Flush(); err != nil {
		t.Fatal(err)
	}
	return &publisher{nc: connect()}, requests
}

// publishResult is the result of a call of publish.
type publishResult struct {
	ack *jetstream.PubAck
	err error
}

// start publishes a message in the background.
func (p *publisher) start(ctx context.Context, subject string, timeout time.Duration) <-chan publishResult {
	done := make(chan publishResult, 1)
	go func() {
		ack, err := p.publish(ctx, nats.NewMsg(subject), timeout)
		done <- publishResult{ack, err}
	}()
	return done
}

// receive returns the next value of a channel.
func receive[T any](t *testing.T, from <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-time.After(testWait):
		t.Fatal("nothing was received in time")
	}
	return v
}

func respond(t *testing.T, request *nats.Msg, seq int) {
	t.Helper()
	if err := request.Respond(fmt.Appendf(nil, `{"stream":"EVENTS-0","seq":%d}`, seq)); err != nil {
		t.Error(err)
	}
}

// TestPublish_DiscardsLateAcknowledgements answers publishes after they gave up, before and after the inbox is used
// again.
func TestPublish_DiscardsLateAcknowledgements(t *testing.T) {
	t.Parallel()
	p, requests := withResponder(t)
	var late []*nats.Msg
	for range 2 {
		if got := receive(t, p.start(t.Context(), "ev.late", time.Millisecond)); !errors.Is(got.err, nats.ErrTimeout) {
			t.Fatalf("publish without an answer: %v, want a timeout", got.err)
		}
		late = append(late, receive(t, requests))
	}
	ctx, cancel := context.WithCancel(t.Context())
	canceled := p.start(ctx, "ev.canceled", testWait)
	late = append(late, receive(t, requests))
	cancel()
	if got := receive(t, canceled); !errors.Is(got.err, context.Canceled) {
		t.Fatalf("publish with a context that ends: %v", got.err)
	}
	respond(t, late[0], 1)
	done := p.start(t.Context(), "ev.next", testWait)
	request := receive(t, requests)
	respond(t, late[1], 2)
	respond(t, late[2], 3)
	respond(t, request, 4)
	respond(t, request, 5)
	if got := receive(t, done); got.err != nil || got.ack.Sequence != 4 {
		t.Errorf("publish returned %v, %v, want sequence 4", got.ack, got.err)
	}
	if p.inboxes != 1 {
		t.Errorf("%d inboxes for publishes one after the other, want 1", p.inboxes)
	}
}

// TestPublish_ConcurrentPublishesGetTheirOwnAcknowledgements publishes more messages at once than there are inboxes.
func TestPublish_ConcurrentPublishesGetTheirOwnAcknowledgements(t *testing.T) {
	t.Parallel()
	p, requests := withResponder(t)
	for range 2 {
		var wg sync.WaitGroup
		for i := range 2 * maxInboxes {
			wg.Go(func() {
				subject := fmt.Sprint("ev.", i+1)
				ack, err := p.publish(t.Context(), nats.NewMsg(subject), testWait)
				if err != nil || ack.Sequence != uint64(i+1) {
					t.Errorf("publish to %s returned %v, %v", subject, ack, err)
				}
			})
		}
		var held []*nats.Msg
		for range 2 * maxInboxes {
			held = append(held, receive(t, requests))
		}
		for _, m := range held {
			var seq int
			if _, err := fmt.Sscanf(m.Subject, "ev.%d", &seq); err != nil {
				t.Fatal(err)
			}
			respond(t, m, seq)
		}
		wg.Wait()
	}
	if p.inboxes != maxInboxes || len(p.free) != maxInboxes {
		t.Errorf("%d inboxes, %d of them free, want %d", p.inboxes, len(p.free), maxInboxes)
	}
}

// TestPublish_EndsWithTheConnection breaks and closes the connection while more publishes wait than there are inboxes.
func TestPublish_EndsWithTheConnection(t *testing.T) {
	t.Parallel()
	p, requests := withResponder(t)
	for _, end := range []func() error{p.nc.ForceReconnect, p.nc.ForceReconnect, func() error { p.nc.Close(); return nil }} {
		var waiting []<-chan publishResult
		for range maxInboxes + 1 {
			waiting = append(waiting, p.start(t.Context(), "ev.wait", time.Hour))
		}
		for range waiting {
			receive(t, requests)
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		for _, done := range waiting {
			if got := receive(t, done); !errors.Is(got.err, nats.ErrDisconnected) && !errors.Is(got.err, nats.ErrConnectionClosed) {
				t.Errorf("publish returned %v, %v, want an error of the connection", got.ack, got.err)
			}
		}
	}
	if got := receive(t, p.start(t.Context(), "ev.closed", time.Hour)); !errors.Is(got.err, nats.ErrConnectionClosed) {
		t.Errorf("publish on a closed connection: %v", got.err)
	}
	if got := receive(t, (&publisher{nc: p.nc}).start(t.Context(), "ev.closed", time.Hour)); !errors.Is(got.err, nats.ErrConnectionClosed) {
		t.Errorf("first publish on a closed connection: %v", got.err)
	}
}

func TestPublish_NeedsAStream(t *testing.T) {
	t.Parallel()
	p, _ := withResponder(t)
	if got := receive(t, p.start(t.Context(), "nobody", testWait)); !errors.Is(got.err, jetstream.ErrNoStreamResponse) || !isTransient(got.err) {
		t.Errorf("publish to a subject without a stream: %v", got.err)
	}
}

func TestDecodeAck_ReadsAllAnswersOfTheServer(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]jetstream.PubAck{
		`{"stream":"EVENTS-0","seq":42}`:                             {Stream: "EVENTS-0", Sequence: 42},
		`{"stream":"EVENTS-0","domain":"hub","seq":42}`:              {Stream: "EVENTS-0", Domain: "hub", Sequence: 42},
		`{"stream":"EVENTS-0","seq":42,"duplicate": true}`:           {Stream: "EVENTS-0", Sequence: 42, Duplicate: true},
		`{"stream":"EVENTS-0", "seq":42}`:                            {Stream: "EVENTS-0", Sequence: 42},
		`{"seq":18446744073709551615,"new":[1],"stream":"EVENTS-0"}`: {Stream: "EVENTS-0", Sequence: 1<<64 - 1},
	} {
		if got, err := decodeAck(&nats.Msg{Data: []byte(data)}); err != nil || *got != want {
			t.Errorf("%s is %+v, %v", data, got, err)
		}
	}
	for _, data := range []string{``, `{}`, `[]`, `{"seq":42}`, `{"stream":"","seq":42}`, `{"stream":"EVENTS-0","seq":42`, `{"stream":"EVENTS-0","seq":-1}`} {
		if got, err := decodeAck(&nats.Msg{Data: []byte(data)}); !errors.Is(err, jetstream.ErrInvalidJSAck) {
			t.Errorf("%s is %+v, %v, want an invalid acknowledgement", data, got, err)
		}
	}
	refused := `{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 7"},"stream":"EVENTS-0","seq":0}`
	if _, err := decodeAck(&nats.Msg{Data: []byte(refused)}); !isWrongSequence(err) {
		t.Errorf("the refusal of a guard is %v", err)
	}
}
