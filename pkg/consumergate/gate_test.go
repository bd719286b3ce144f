package consumergate_test

import (
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/consumergate"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

const createTimeout = 20 * time.Second

func serve(t *testing.T, url string) *nats.Conn {
	t.Helper()
	nc := natstest.ConnAs(t, url, topology.UserGate)
	if err := consumergate.Serve(nc, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	return nc
}

// requestConsumer requests a consumer as the user of nc, and returns the error of the response of JetStream or of the gate.
func requestConsumer(t *testing.T, nc *nats.Conn, path, body string) jetstream.APIError {
	t.Helper()
	m, err := nc.Request("$JS.API.CONSUMER.CREATE."+path, []byte(body), createTimeout)
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	var answer struct{ Error jetstream.APIError }
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		t.Fatalf("%s: %q: %v", body, m.Data, err)
	}
	return answer.Error
}

func TestServe_RefusesRequestsThatJetStreamWouldAccept(t *testing.T) {
	t.Parallel()
	url := natstest.RunWithoutConsumerGate(t)
	serve(t, url)
	skills := natstest.ConnAs(t, url, topology.UserSkills)
	const durable = "COMMANDS.skills.cmd.skills.>"
	for name, c := range map[string]struct{ path, body, want string }{
		"delivery to another user":       {"EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"name":"x","deliver_subject":"_INBOX_session.x"}}`, "deliver_subject"},
		"delivery to all inboxes":        {"EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"name":"x","deliver_subject":"_INBOX_skillsx"}}`, "deliver_subject"},
		"a second document":              {"EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"name":"x"}} {"stream_name":"EVENTS-0"}`, "decode body"},
		"no document":                    {"EVENTS-0.x", ``, "decode body"},
		"another stream":                 {"EVENTS-0.x", `{"stream_name":"EVENTS-1","config":{"name":"x"}}`, "names stream"},
		"another name":                   {"EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"name":"y"}}`, "names consumer"},
		"another durable's name":         {"EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"durable_name":"y"}}`, "names consumer"},
		"the session service's durable":  {"EVENTS-0.reactor-0", `{"stream_name":"EVENTS-0","config":{"durable_name":"reactor-0"}}`, "does not belong to user skills"},
		"its name without durable":       {"EVENTS-0.reactor-0", `{"stream_name":"EVENTS-0","config":{"name":"reactor-0"}}`, "does not belong to user skills"},
		"a durable that is nobody's":     {"EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"durable_name":"x"}}`, "does not belong to user skills"},
		"another filter":                 {durable, `{"stream_name":"COMMANDS","config":{"durable_name":"skills","filter_subject":"cmd.>"}}`, "filters"},
		"another filter beside":          {durable, `{"stream_name":"COMMANDS","config":{"durable_name":"skills","filter_subject":"cmd.skills.>","filter_subjects":["cmd.session.>"]}}`, "filters"},
		"a filter in other letters last": {durable, `{"stream_name":"COMMANDS","config":{"durable_name":"skills","filter_subject":"cmd.skills.>","Filter_Subject":"cmd.>"}}`, "filters"},
	} {
		if got := requestConsumer(t, skills, c.path, c.body); got.Code != 403 || !strings.Contains(got.Description, c.want) {
			t.Errorf("%s: %+v, want %q", name, got, c.want)
		}
	}
	if got := requestConsumer(t, skills, durable, `{"stream_name":"COMMANDS","config":{"durable_name":"skills","filter_subject":"cmd.skills.>","ack_policy":"explicit"}}`); got.Code != 0 {
		t.Errorf("its own durable: %+v", got)
	}
}

// TestServe_SeveralShareTheRequests tests that clients can read while at least one gate runs, and that a client
// receives an error at once when none runs.
func TestServe_SeveralShareTheRequests(t *testing.T) {
	t.Parallel()
	url := natstest.RunWithoutConsumerGate(t)
	js, err := jetstream.New(natstest.ConnAs(t, url, topology.UserProjector))
	if err != nil {
		t.Fatal(err)
	}
	read := func() error {
		_, err := js.CreateConsumer(t.Context(), topology.EventsStreamName(0), jetstream.ConsumerConfig{})
		return err
	}
	if err := read(); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("without a gate: %v", err)
	}
	one, two := serve(t, url), serve(t, url)
	for range 20 {
		if err := read(); err != nil {
			t.Fatal(err)
		}
	}
	for _, gate := range []*nats.Conn{one, two} {
		if got := gate.Stats().InMsgs; got == 0 {
			t.Error("a gate received no request")
		}
	}
	if err := two.Drain(); err != nil {
		t.Fatal(err)
	}
	for !two.IsClosed() {
		time.Sleep(time.Millisecond)
	}
	for range 20 {
		if err := read(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestServe_WorksIfNATSDoesNotConfirmTheSubscription tests that a gate that starts while NATS does not respond serves
// requests afterwards.
func TestServe_WorksIfNATSDoesNotConfirmTheSubscription(t *testing.T) {
	t.Parallel()
	url := natstest.RunWithoutConsumerGate(t)
	var pings atomic.Int32
	relay := natstest.RunRelay(t, strings.TrimPrefix(url, "nats://"), func(subject string) bool {
		return subject == "PING" && pings.Add(1) == 2 // the first is part of connecting
	})
	serve(t, relay.URL)
	skills := natstest.ConnAs(t, url, topology.UserSkills)
	if err := requestConsumer(t, skills, "EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"name":"x"}}`); err.Code != 0 {
		t.Errorf("a valid request: %+v", err)
	}
	if n := pings.Load(); n < 2 {
		t.Errorf("%d pings, so none was lost", n)
	}
}
