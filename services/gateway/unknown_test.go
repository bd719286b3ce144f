package gateway_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// TestState_UnknownEventsChangeOnlyTheSeq tests that events of unknown types, and events that the projector could not
// fold, are replayed as they are stored, and change only the seq of a state.
func TestState_UnknownEventsChangeOnlyTheSeq(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id, other := w.session("default"), w.session("default")
	x := w.turn("default", id, "one", "answer")
	w.emit("default", id,
		events.Event{ExecutionID: x, Source: events.FromRunner, Data: events.OpaquePayload{Name: "plan_proposed", Raw: json.RawMessage(`{"steps":[1,{"a":"\u0000"}],"text":"line\nfeed"}`)}},
		events.Event{ExecutionID: x, Source: events.FromRunner, Data: events.OpaquePayload{Name: "block_complete", Raw: json.RawMessage(`{"unprojectable":true}`)}},
		events.Event{ExecutionID: x, Source: events.FromRunner, Data: events.OpaquePayload{Name: "block_start", Raw: json.RawMessage(`{"unprojectable":true}`)}},
		events.Event{ExecutionID: x, Source: events.FromRunner, Data: events.OpaquePayload{Name: "execution_completed", Raw: json.RawMessage(`[]`)}},
	)
	w.turn("default", other, "one", "answer")
	stored := w.stored(id)
	if len(stored) != 11 {
		t.Fatalf("%d events", len(stored))
	}
	for _, tr := range replays {
		if kept, _, _ := split(all(t, tr.open(g, id, "max", 0, 0))); !slices.Equal(kept, stored) {
			t.Errorf("%s: replayed\n%s\nstored\n%s", tr.name, strings.Join(kept, "\n"), strings.Join(stored, "\n"))
		}
	}
	want, _ := g.stateAt(id, 7)
	for at := uint32(7); at <= 11; at++ {
		if got, _ := g.stateAt(id, at); got != want {
			t.Errorf("at %d: %s, want %s", at, got, want)
		}
	}
	d := g.get("/api/sessions/"+id+"/diff?from=7&to=11").want(t, 200)
	if d.number("blockCount") != 0 || d.field("statuses", "0") != nil {
		t.Errorf("diff: %s", d)
	}
	// An event of an unknown type is compared too.
	c := g.get("/api/sessions/"+id+"/compare?with="+other).want(t, 200)
	if c.field("equal") != false || c.number("event", "seq") != 8 || c.text("event", "type") != "plan_proposed" {
		t.Errorf("comparison: %s", c)
	}
}

// TestState_ShowsNoValuesOfVariables tests that a state and a diff contain the resolved versions of an execution and
// no value of a variable, and that a comparison contains events as in lists: without the values of secrets, which the
// log never has.
func TestState_ShowsNoValuesOfVariables(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	const value, sealed = "zq-plain-value", "zq-sealed-key"
	var ids []string
	for _, environment := range []string{"one", "two"} {
		id := w.session("default")
		x := newID(t, events.KindExecution)
		w.emit("default", id, events.Event{ExecutionID: x, Data: events.MessageAccepted{BlockID: "b" + x, Content: "q"}}, events.Event{ExecutionID: x, Data: events.ExecutionResolved{
			Environments: []events.Reference{reference("identity_account/acme/" + environment + "@" + strings.Repeat("a", 64))},
			Variables:    []events.Provenance{{Name: "PLAIN", From: environment, Value: value}, {Name: "SECRET", From: environment, Secret: true, Sealed: sealed}},
		}})
		ids = append(ids, id)
	}
	for _, path := range []string{"/state", "/state?at=3", "/diff?from=1&to=3", "/diff?from=2&to=3"} {
		if a := g.get("/api/sessions/"+ids[0]+path).want(t, 200); strings.Contains(string(a.body), value) || strings.Contains(string(a.body), sealed) {
			t.Errorf("%s: %s", path, a)
		}
	}
	if a := g.get("/api/sessions/"+ids[0]+"/state").want(t, 200); !strings.Contains(a.text("resolved", "environments", "0"), "one@") {
		t.Errorf("the state lacks the resolved versions: %s", a)
	}
	conn := g.conn()
	state, err := spoolv1.NewSessionsClient(conn).GetSessionState(t.Context(), &spoolv1.GetSessionStateRequest{SessionId: ids[0]})
	must(t, err)
	diff, err := spoolv1.NewSessionsClient(conn).DiffSession(t.Context(), &spoolv1.DiffSessionRequest{SessionId: ids[0], From: 1, To: 3})
	must(t, err)
	if text := fmt.Sprint(state, diff); strings.Contains(text, value) || strings.Contains(text, sealed) {
		t.Errorf("gRPC: %s", text)
	}
	if a := g.get("/api/sessions/"+ids[0]+"/compare?with="+ids[1]).want(t, 200); a.field("equal") != false || !strings.HasPrefix(a.text("field"), "data.environments") {
		t.Errorf("comparison: %s", a)
	}
}
