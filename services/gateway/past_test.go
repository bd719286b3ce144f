package gateway_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// large emits blocks of 700,000 bytes each.
func (w *world) large(session string, n int) {
	w.t.Helper()
	x := newID(w.t, events.KindExecution)
	w.emit("default", session, events.Event{ExecutionID: x, Data: events.MessageAccepted{BlockID: "message", Content: "q"}})
	for i := range n {
		w.emit("default", session, events.Event{ExecutionID: x, ConversationID: events.MainConversation, Source: events.FromRunner, Data: events.BlockComplete{Block: events.Block{
			ID: fmt.Sprint("large", i), Kind: events.KindAssistantText, Content: strings.Repeat("x", 700_000),
		}}})
	}
}

// TestState_PagesAreLimitedInBytes tests that pages of a state's blocks, and the blocks of a diff, are also limited in
// bytes.
func TestState_PagesAreLimitedInBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.large(id, 8)
	path, pages, all := "/api/sessions/"+id+"/state?pageSize=200", 0, ""
	for token := ""; ; pages++ {
		a := g.get(path+token).want(t, 200)
		if len(a.body) > 3<<20 || a.number("blockCount") != 9 {
			t.Errorf("a page of %d bytes, of %v blocks", len(a.body), a.number("blockCount"))
		}
		for i := 0; a.text("blocks", fmt.Sprint(i), "id") != ""; i++ {
			all += a.text("blocks", fmt.Sprint(i), "id") + " "
		}
		if a.text("nextPageToken") == "" {
			break
		}
		token = "&pageToken=" + a.text("nextPageToken")
	}
	if all != "message large0 large1 large2 large3 large4 large5 large6 large7 " || pages < 2 {
		t.Errorf("%d pages have %s", pages+1, all)
	}
	d := g.get("/api/sessions/"+id+"/diff?from=1&to=10").want(t, 200)
	if len(d.body) > 3<<20 || d.number("blockCount") != 9 || d.text("blocks", "2", "block", "id") != "large1" {
		t.Errorf("a diff of %d bytes, of %v blocks", len(d.body), d.number("blockCount"))
	}
}

// TestCompare_CountsAsBytesInFlight tests that a comparison of sessions holds a few events at a time, which count
// as bytes in flight of the tenant.
func TestCompare_CountsAsBytesInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root, MaxRequest: 8 << 20, MaxTenantBytes: 10 << 20, ReadTimeout: time.Hour})
	one := g.withNewKey(root, "one")
	a, b := w.session("one"), w.session("one")
	w.turn("one", a, "q", "answer")
	w.turn("one", b, "q", "answer")
	if got := one.get("/api/sessions/"+a+"/compare?with="+b).want(t, 200); got.field("equal") != true {
		t.Errorf("got %s", got)
	}
	body := one.begin("POST", "/api/sessions", 7<<20)
	defer func() { _ = body.Close() }()
	g.wantHeld(root, func(n float64) bool { return n >= 7<<20 })
	one.get("/api/sessions/"+a+"/compare?with="+b).wantProblem(t, 429, "TOO_MUCH_IN_FLIGHT", "")
}

// TestStreams_AreUnavailableWhileFolding tests that an event is not reported as missing while the read models are
// being folded again.
func TestStreams_AreUnavailableWhileFolding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	w.emit("default", id, events.Event{Data: events.Log{}}, events.Event{Data: events.Log{}})
	w.exec("UPDATE checkpoints SET caught_up = false")
	unavailable := func(what string, err error) {
		t.Helper()
		var p errProblem
		if !errors.As(err, &p) || p.code != "UNAVAILABLE" {
			t.Errorf("%s: got %v", what, err)
		}
	}
	for _, query := range []string{"after=9", "replay=1&from=9", "replay=1&to=9"} {
		g.get("/api/sessions/"+id+"/events/stream?"+query).wantProblem(t, 503, "UNAVAILABLE", "")
	}
	g.get("/api/sessions/"+id+"/events?after=9").wantProblem(t, 503, "UNAVAILABLE", "")
	r := g.rpc(id, 9)
	_, err := r.next()
	unavailable("gRPC", err)
	r.close()
	c := g.dial()
	c.send(fmt.Sprintf(`{"type":"session:join","sessionId":%q,"after":9}`, id))
	c.wantError("UNAVAILABLE", "")
}

// TestReplay_IsUnavailableWhileFolding tests that a replay ends with a temporary error if the read models are
// folded again during it, as after an upgrade, and can be continued at its next event.
func TestReplay_IsUnavailableWhileFolding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	var list []events.Event
	for i := range 60 { // five events of a page arrive together, and the next after a gap
		list = append(list, events.Event{Time: recordedAt.Add(time.Duration(i/5) * time.Hour), Data: events.Log{Message: strings.Repeat("x", 60_000)}})
	}
	w.emit("default", id, list...)
	var open []replayed
	for _, tr := range replays {
		c := tr.open(g, id, slowestSpeed, 0, 0)
		_, err := c.next()
		must(t, err)
		open = append(open, c)
	}
	w.exec("UPDATE checkpoints SET caught_up = false")
	w.exec("DELETE FROM events WHERE session = $1 AND seq > 3", id)
	w.exec("UPDATE sessions SET tip = 3 WHERE id = $1", id)
	for i, c := range open {
		for {
			_, err := c.next()
			var p errProblem
			if err == nil {
				continue
			}
			if !errors.As(err, &p) || p.code != "UNAVAILABLE" {
				t.Errorf("%s: got %v", replays[i].name, err)
			}
			break
		}
		c.close()
	}
}

// TestDiff_QuotesNamesOfFiles tests that names with control characters are quoted, as in git, so that a file name
// cannot add lines to a diff.
func TestDiff_QuotesNamesOfFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	const name = "x\n+++ .profile\n@@ -0,0 +1 @@\n+evil"
	w.snapshot("default", id, snapshotTime, [2]string{"with space é", "old\n"}, [2]string{name, "old\n"})
	w.snapshot("default", id, snapshotTime, [2]string{"with space é", "new\n"}, [2]string{name, "new\n"})
	d := g.get("/api/sessions/"+id+"/diff?from=2&to=3").want(t, 200)
	for i, want := range []string{"a/with space é", `"a/x\n+++ .profile\n@@ -0,0 +1 @@\n+evil"`} {
		want = "--- " + want + "\n+++ " + strings.Replace(want, "a/", "b/", 1) + "\n@@ -1 +1 @@\n-old\n+new\n"
		if got := d.text("files", "files", fmt.Sprint(i), "text"); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	}
}
