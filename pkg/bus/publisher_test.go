package bus_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestPublish_StoresHeadersAndDropsDuplicates(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	p, err := bus.NewPublisher(bus.PublisherConfig{JetStream: b.js, Deduplicate: true})
	if err != nil {
		t.Fatal(err)
	}
	msg := bus.NewMessage(bus.WithCorrelationID(t.Context(), "cause"), "id-1", []byte("body"))
	msg.Metadata.Set("Own", "ünï")
	bus.SetNakDelay(msg, time.Second) // stays in the process and is not sent
	for range 2 {
		if err := p.Publish("dead.x", msg); err != nil {
			t.Fatal(err)
		}
	}
	if got := b.messagesIn(t, "DEAD"); got != 1 {
		t.Errorf("%d messages of one id are stored, want 1", got)
	}
	b.publish(t, "dead.x", msg)
	if got := b.messagesIn(t, "DEAD"); got != 2 {
		t.Errorf("without Deduplicate %d messages are stored, want 2", got)
	}
	s, err := b.js.Stream(t.Context(), "DEAD")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := s.GetMsg(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	want := nats.Header{
		"Nats-Msg-Id": {"id-1"}, topology.HeaderMessageID: {"id-1"}, topology.HeaderCorrelation: {"cause"}, "Own": {"ünï"},
	}
	if len(raw.Header) != len(want) || string(raw.Data) != "body" {
		t.Errorf("stored %v %q", raw.Header, raw.Data)
	}
	for key := range want {
		if raw.Header.Get(key) != want.Get(key) {
			t.Errorf("header %s is %q, want %q", key, raw.Header.Get(key), want.Get(key))
		}
	}
}

func TestPublish_RefusesInvalidMessages(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	p := newPublisher(t, b.js)
	with := func(key, value string) *message.Message {
		msg := message.NewMessage("id", nil)
		msg.Metadata.Set(key, value)
		return msg
	}
	for name, tc := range map[string]struct {
		subject string
		msg     *message.Message
		want    error
	}{
		"no subject":      {"", message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"wildcard":        {"work.*", message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"full wildcard":   {"work.>", message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"empty token":     {"work..a", message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"space":           {"work.a b", message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"NUL":             {"work.a\x00", message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"not UTF-8":       {"work.\xff", message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"very long":       {"work." + strings.Repeat("a", 600), message.NewMessage("id", nil), bus.ErrInvalidMessage},
		"injected header": {"work.a", with("Key", "a\r\nNats-Rollup: all"), bus.ErrInvalidMessage},
		"key with colon":  {"work.a", with("Key:", "a"), bus.ErrInvalidMessage},
		"empty key":       {"work.a", with("", "a"), bus.ErrInvalidMessage},
		"value trimmed":   {"work.a", with("Key", " a"), bus.ErrInvalidMessage},
		"id with break":   {"work.a", message.NewMessage("a\nb", nil), bus.ErrInvalidMessage},
		"no stream":       {"nobody.listens", message.NewMessage("id", nil), bus.ErrNoStream},
		"too large":       {"work.a", message.NewMessage("id", make([]byte, natsserver.DefaultMaxPayload+1)), bus.ErrTooLarge},
	} {
		if err := p.Publish(tc.subject, tc.msg); !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", name, err, tc.want)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish("work.a", message.NewMessage("id", nil)); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("closed: got %v", err)
	}
}

func TestPublish_StopsAtTheFirstError(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	bad := message.NewMessage("two", nil)
	bad.Metadata.Set("a:b", "")
	err := newPublisher(t, b.js).Publish("dead.x", message.NewMessage("one", nil), bad, message.NewMessage("three", nil))
	var failed *bus.PublishError
	if !errors.As(err, &failed) || failed.Index != 1 || failed.UUID != "two" || failed.Subject != "dead.x" {
		t.Fatalf("got %v, want one that names message 1, two", err)
	}
	if got := b.messagesIn(t, "DEAD"); got != 1 {
		t.Errorf("%d messages are stored, want 1", got)
	}
}

func TestPublish_ReportsWhyJetStreamRefused(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	createStream(t, b.js, jetstream.StreamConfig{Name: "MSGS", Subjects: []string{"msgs"}, MaxMsgs: 1, Discard: jetstream.DiscardNew})
	createStream(t, b.js, jetstream.StreamConfig{Name: "BYTES", Subjects: []string{"bytes"}, MaxBytes: 200, Discard: jetstream.DiscardNew})
	createStream(t, b.js, jetstream.StreamConfig{Name: "SUBJ", Subjects: []string{"subj"}, MaxMsgsPerSubject: 1, Discard: jetstream.DiscardNew, DiscardNewPerSubject: true})
	createStream(t, b.js, jetstream.StreamConfig{Name: "SIZE", Subjects: []string{"size"}, MaxMsgSize: 100})
	p := newPublisher(t, b.js)
	for _, subject := range []string{"msgs", "bytes", "subj"} {
		if err := p.Publish(subject, message.NewMessage("1", nil)); err != nil {
			t.Fatalf("%s: %v", subject, err)
		}
		err := p.Publish(subject, message.NewMessage("2", make([]byte, 190)))
		if !errors.Is(err, bus.ErrFull) || errors.Is(err, bus.ErrRefused) {
			t.Errorf("%s: got %v, want ErrFull", subject, err)
		}
	}
	if err := p.Publish("size", message.NewMessage("1", make([]byte, 190))); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("size: got %v, want ErrTooLarge", err)
	}
	guarded := message.NewMessage("1", nil)
	guarded.Metadata.Set(jetstream.ExpectedLastSeqHeader, "7")
	var api *jetstream.APIError
	if err := p.Publish("work.a", guarded); !errors.Is(err, bus.ErrRefused) || !errors.As(err, &api) || api.ErrorCode != jetstream.JSErrCodeStreamWrongLastSequence {
		t.Errorf("guarded: got %v, want ErrRefused with its code", err)
	}
}

// TestPublish_WithoutServerSendsNothing tests that Publish fails without a server, and that the message is not sent
// later, after the caller was told of the failure.
func TestPublish_WithoutServerSendsNothing(t *testing.T) {
	t.Parallel()
	server := natstest.RunRestartable(t)
	b := newFixtureOn(t, server.Conn())
	server.Stop()
	eventually(t, "the loss to be noticed", func() bool { return !b.nc.IsConnected() })
	p, err := bus.NewPublisher(bus.PublisherConfig{JetStream: b.js, Timeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish("work.a", message.NewMessage("lost", nil)); !errors.Is(err, bus.ErrUnavailable) || errors.Is(err, bus.ErrOutcomeUnknown) {
		t.Errorf("got %v, want ErrUnavailable", err)
	}
	if _, err := bus.Request(t.Context(), b.js, bus.Command{Subject: "work.a", ID: "c", Deadline: time.Now().Add(200 * time.Millisecond)}); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("Request: got %v, want ErrUnavailable", err)
	}
	server.Start()
	patient := newPublisher(t, b.js)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := patient.Publish("work.a", bus.NewMessage(ctx, "kept", nil)); err != nil {
		t.Fatalf("after the restart: %v", err)
	}
	if got := b.messagesIn(t, "WORK"); got != 1 {
		t.Errorf("%d messages are stored, want only the one that was acknowledged", got)
	}
	b.nc.Close()
	if err := patient.Publish("work.a", message.NewMessage("x", nil)); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("closed connection: got %v, want ErrUnavailable", err)
	}
}
