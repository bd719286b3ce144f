package bus_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestRequest_ReturnsTheAnswer(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.>", func(ctx context.Context, cmd *message.Message) error {
		return bus.Reply(b.nc, cmd, bus.Answer{
			Payload: append([]byte("did "), cmd.Payload...),
			Metadata: map[string]string{
				"Command": cmd.Metadata.Get(topology.HeaderCommandID), "Cause": bus.CorrelationID(ctx), "Own": cmd.Metadata.Get("Own"),
			},
		})
	})
	// The same command is sent twice, like a retry within the duplicate window of the stream. Both requests are
	// answered.
	for range 2 {
		answer, err := bus.Request(t.Context(), b.js, bus.Command{Subject: "work.a", ID: "cmd-1", Payload: []byte("it"), Metadata: map[string]string{"Own": "x"}})
		if err != nil {
			t.Fatal(err)
		}
		if string(answer.Payload) != "did it" || answer.Metadata["Command"] != "cmd-1" || answer.Metadata["Cause"] != "cmd-1" || answer.Metadata["Own"] != "x" {
			t.Errorf("answer %q %v", answer.Payload, answer.Metadata)
		}
	}
	answer, err := bus.Request(bus.WithCorrelationID(t.Context(), "page"), b.js, bus.Command{Subject: "work.a", ID: "cmd-2"})
	if err != nil || answer.Metadata["Cause"] != "page" {
		t.Errorf("answer %v %v, want the cause of the context", answer, err)
	}
	// A message without a reply subject is handled too.
	b.publish(t, "work.a", message.NewMessage("no reply wanted", nil))
	eventually(t, "the queue to be empty", func() bool { return b.messagesIn(t, "WORK") == 0 })
}

// TestRequest_UnansweredCommandsDoNotRunAfterTheirDeadline tests that an unanswered request returns ErrOutcomeUnknown, and
// that a stored command whose deadline has passed does not run.
func TestRequest_UnansweredCommandsDoNotRunAfterTheirDeadline(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	_, err := bus.Request(t.Context(), b.js, bus.Command{Subject: "work.a", ID: "late", Deadline: time.Now().Add(200 * time.Millisecond)})
	if !errors.Is(err, bus.ErrOutcomeUnknown) || errors.Is(err, bus.ErrUnavailable) {
		t.Fatalf("got %v, want ErrOutcomeUnknown", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := bus.Request(ctx, b.js, bus.Command{Subject: "work.a", ID: "late too", Deadline: time.Now().Add(time.Hour)}); !errors.Is(err, bus.ErrOutcomeUnknown) {
		t.Fatalf("got %v, want ErrOutcomeUnknown", err)
	}
	if got := b.messagesIn(t, "WORK"); got != 2 {
		t.Fatalf("%d commands are stored, want 2", got)
	}
	var ran atomic.Int64
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.a", func(context.Context, *message.Message) error {
		ran.Add(1)
		return nil
	})
	eventually(t, "the commands to be dropped", func() bool { return b.messagesIn(t, "WORK") == 0 })
	if ran.Load() != 0 || b.messagesIn(t, "DEAD") != 0 {
		t.Errorf("%d expired commands ran and %d are in DEAD, want none", ran.Load(), b.messagesIn(t, "DEAD"))
	}
}

func TestRouter_DeadLettersUnreadableDeadlines(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.route(t, bus.RouterConfig{}, b.quick(t), "work.a", func(context.Context, *message.Message) error {
		t.Error("a command with an unreadable deadline ran")
		return nil
	})
	for _, header := range []string{topology.HeaderTimeToLive, topology.HeaderDeadline} {
		msg := message.NewMessage(header, nil)
		msg.Metadata.Set(header, "tomorrow")
		b.publish(t, "work.a", msg)
	}
	eventually(t, "both to be dead", func() bool { return b.messagesIn(t, "DEAD") == 2 })
}

// TestRequest_EndsWithItsConnection tests that a request whose command is stored does not wait for its deadline after the
// connection is closed.
func TestRequest_EndsWithItsConnection(t *testing.T) {
	t.Parallel()
	srv := natstest.RunRestartable(t)
	b := newFixtureOn(t, srv.Conn())
	nc := srv.Conn()
	js := jetStream(t, nc)
	ended := make(chan error, 1)
	go func() {
		_, err := bus.Request(t.Context(), js, bus.Command{Subject: "work.a", ID: "c", Deadline: time.Now().Add(time.Hour)})
		ended <- err
	}()
	eventually(t, "the command to be stored", func() bool { return b.messagesIn(t, "WORK") == 1 })
	nc.Close()
	if err := wait(t, ended, "the request to end"); !errors.Is(err, bus.ErrOutcomeUnknown) {
		t.Errorf("got %v, want ErrOutcomeUnknown", err)
	}
}

// A connection that is closed before the acknowledgement arrives leaves it unknown whether the command was stored.
func TestRequest_ClosedBeforeTheAcknowledgement(t *testing.T) {
	t.Parallel()
	srv := natstest.RunRestartable(t)
	other, nc := srv.Conn(), srv.Conn()
	received, err := other.SubscribeSync("mute.a") // it receives the message and acknowledges nothing
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Flush(); err != nil {
		t.Fatal(err)
	}
	js := jetStream(t, nc)
	ended := make(chan error, 1)
	go func() {
		_, err := bus.Request(t.Context(), js, bus.Command{Subject: "mute.a", ID: "c", Deadline: time.Now().Add(time.Hour)})
		ended <- err
	}()
	if _, err := received.NextMsg(10 * time.Second); err != nil {
		t.Fatal(err)
	}
	nc.Close()
	if err := wait(t, ended, "the request to end"); !errors.Is(err, bus.ErrOutcomeUnknown) || errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("got %v, want ErrOutcomeUnknown", err)
	}
}

func TestRequest_ReportsWhyTheCommandWasNotStored(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	createStream(t, b.js, jetstream.StreamConfig{Name: "SMALL", Subjects: []string{"small"}, MaxMsgs: 1, Discard: jetstream.DiscardNew})
	b.publish(t, "small", message.NewMessage("1", nil))
	for name, tc := range map[string]struct {
		cmd  bus.Command
		want []error
		not  error
	}{
		"full":      {bus.Command{Subject: "small", ID: "c"}, []error{bus.ErrUnavailable, bus.ErrFull}, bus.ErrOutcomeUnknown},
		"no stream": {bus.Command{Subject: "nobody.listens", ID: "c"}, []error{bus.ErrUnavailable, bus.ErrNoStream}, bus.ErrOutcomeUnknown},
		"no id":     {bus.Command{Subject: "work.a"}, []error{bus.ErrInvalidMessage}, bus.ErrUnavailable},
		"wildcard":  {bus.Command{Subject: "work.*", ID: "c"}, []error{bus.ErrInvalidMessage}, bus.ErrUnavailable},
		"bad id":    {bus.Command{Subject: "work.a", ID: "c\n"}, []error{bus.ErrInvalidMessage}, bus.ErrUnavailable},
		"too large": {bus.Command{Subject: "work.a", ID: "c", Payload: make([]byte, natsserver.DefaultMaxPayload+1)}, []error{bus.ErrTooLarge}, bus.ErrUnavailable},
	} {
		_, err := bus.Request(t.Context(), b.js, tc.cmd)
		for _, want := range tc.want {
			if !errors.Is(err, want) {
				t.Errorf("%s: got %v, want %v", name, err, want)
			}
		}
		if errors.Is(err, tc.not) {
			t.Errorf("%s: got %v, not wanted", name, err)
		}
	}
	if got := b.messagesIn(t, "WORK"); got != 0 {
		t.Errorf("%d commands are stored", got)
	}
}

func TestReply_RefusesInvalidSubjects(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	cmd := message.NewMessage("1", nil)
	for _, subject := range []string{"a.>", "_INBOX.>", "ev.00.default.x.key", "$JS.API.STREAM.PURGE.EVENTS-0"} {
		cmd.Metadata.Set(topology.HeaderReply, subject)
		if err := bus.Reply(b.nc, cmd, bus.Answer{}); !errors.Is(err, bus.ErrInvalidMessage) {
			t.Errorf("reply to %s: %v", subject, err)
		}
	}
}
