package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// forked is the answer to a fork.
type forked struct {
	SessionID string
	Position  string
	Parent    struct {
		SessionID        string
		Asked, Effective uint32
		Reason, Snapshot string
		SnapshotSeq      uint32
	}
}

// fork forks a session; the fork is deleted when the test ends.
func fork(t *testing.T, c *harness.Cluster, session string, body map[string]any) forked {
	t.Helper()
	var f forked
	if code := c.Call(0, "POST", "/api/sessions/"+session+"/fork", body, &f); code != http.StatusCreated {
		t.Fatalf("fork %v answered %d, %+v", body, code, f)
	}
	t.Cleanup(func() { c.Delete(f.SessionID) })
	return f
}

// stored is all that the log and the object store have of a session, byte for byte.
func stored(t *testing.T, c *harness.Cluster, session string) string {
	t.Helper()
	var b strings.Builder
	shard := eventlog.Position{Shard: events.Partition(session) % c.Base.Log.Shards()}
	tenant := tenantOf(t, c, session)
	for rec, err := range c.Base.Log.Read(t.Context(), shard, eventlog.Filter{Subject: events.Subject{Tenant: tenant, ID: session}}) {
		if err != nil {
			t.Fatal(err)
		}
		raw, err := rec.Commit.Encode()
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s %s %s %s\n", rec.Subject, rec.Position, rec.Time, raw)
	}
	nc, _, err := c.Base.Connect(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	o, err := js.ObjectStore(t.Context(), topology.BucketWorkspaces)
	if err != nil {
		t.Fatal(err)
	}
	list, err := o.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, info := range list {
		if strings.Contains(info.Name, "/"+session+"/") {
			names = append(names, fmt.Sprintf("%s %s %d %s %s", info.Name, info.NUID, info.Size, info.Digest, info.ModTime))
		}
	}
	slices.Sort(names)
	return b.String() + strings.Join(names, "\n")
}

func tenantOf(t *testing.T, c *harness.Cluster, session string) string {
	t.Helper()
	for rec, err := range c.Base.Log.Read(t.Context(), eventlog.Position{Shard: events.Partition(session) % c.Base.Log.Shards()}, eventlog.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if rec.Subject.ID == session {
			return rec.Subject.Tenant
		}
	}
	t.Fatalf("session %s is not in the log", session)
	return ""
}

// threeTurns runs three turns with edits and a failing tool, and waits for the snapshot after each.
func threeTurns(t *testing.T, c *harness.Cluster, architecture string) *talk {
	t.Helper()
	k := newTalkWith(t, c, architecture, map[string]any{"model": "known-model", "metadata": map[string]any{"of": "the parent"}})
	k.completed("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.synced() // a message that came at once would keep the snapshot from being taken
	k.completed("the fruit is pear; run echo two > a.txt; echo b > b.txt; exit 3", "Noted pear.")
	k.synced()
	k.completed("the fruit is plum; run echo three > a.txt; rm b.txt", "Noted plum.")
	k.synced()
	return k
}

// synced reads the stream until a snapshot follows the last end of an execution.
func (k *talk) synced() {
	k.t.Helper()
	ends := slices.Collect(k.seqs(func(e events.Wire) bool { return events.Terminal(e.Type) }))
	done := func() bool {
		return slices.ContainsFunc(k.s.Events, func(e events.Wire) bool { return e.Type == "workspace_synced" && e.Seq > ends[len(ends)-1] })
	}
	if done() {
		return
	}
	k.join()
	defer k.s.Close()
	for !done() {
		if _, err := k.s.Next(); err != nil {
			k.t.Fatal(err)
		}
	}
}

// seqs yields the seqs of some events.
func (k *talk) seqs(wanted func(events.Wire) bool) func(func(uint32) bool) {
	return func(yield func(uint32) bool) {
		for _, e := range k.s.Events {
			if wanted(e) && !yield(e.Seq) {
				return
			}
		}
	}
}

// of is a talk with a fork.
func (k *talk) of(f forked) *talk {
	return &talk{t: k.t, c: k.c, session: f.SessionID, reckons: k.reckons}
}

// TestFork_BetweenTurns forks after each turn, at the tip, and before the first message: the fork's agent knows what its parent knew
// there, its files are those of then, and nothing of the parent changes.
func TestFork_BetweenTurns(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml"), Executors: 2})
	k := threeTurns(t, c, "spool")
	before := stored(t, k.c, k.session)
	var ends []uint32
	for seq := range k.seqs(func(e events.Wire) bool { return events.Terminal(e.Type) }) {
		ends = append(ends, seq)
	}
	for _, w := range []struct {
		name  string
		at    any
		fruit string // that the fork's agent knows; "" for none
		later []string
		files map[string]string
		gone  []string
	}{
		{"after turn 1", ends[0], "apple", []string{"pear", "plum"}, map[string]string{"a.txt": "one\n", "log.txt": "apple\n"}, []string{"b.txt"}},
		{"after turn 2", ends[1], "pear", []string{"plum"}, map[string]string{"a.txt": "two\n", "b.txt": "b\n", "log.txt": "apple\npear\n"}, nil},
		{"at the tip", nil, "plum", nil, map[string]string{"a.txt": "three\n", "log.txt": "apple\npear\nplum\n"}, []string{"b.txt"}},
		{"before the first message", uint32(1), "", []string{"apple", "pear", "plum"}, nil, []string{"a.txt", "log.txt"}},
	} {
		body := map[string]any{}
		if w.at != nil {
			body["at"] = w.at
		}
		f := fork(t, k.c, k.session, body)
		if f.Parent.SessionID != k.session || f.Parent.Effective != f.Parent.Asked || w.at != nil && f.Parent.Asked != w.at || f.Parent.Reason != "" {
			t.Errorf("%s: the fork begins at %+v", w.name, f.Parent)
		}
		child := k.of(f)
		asked := len(c.Model.Requests())
		child.completed("which fruit is it?", "The fruit is "+w.fruit+".")
		sent := requestsAfter(c, asked, "which fruit is it?")
		if sent == "" || w.fruit != "" && !strings.Contains(sent, w.fruit) {
			t.Errorf("%s: the model was asked %s", w.name, sent)
		}
		for _, later := range w.later {
			if strings.Contains(sent, later) {
				t.Errorf("%s: the model was told of %s, which came later: %s", w.name, later, sent)
			}
		}
		child.synced()
		for path, content := range w.files {
			child.wantFile(path, content)
		}
		for _, path := range w.gone {
			if status, raw := request(t, "GET", c.URL(0)+"/api/sessions/"+f.SessionID+"/files/"+path, nil, nil); status != http.StatusNotFound {
				t.Errorf("%s: %s is %d %s", w.name, path, status, raw)
			}
		}
		child.completed("the fruit is fig; run echo mine > a.txt", "Noted fig.")
		child.completed("which fruit is it?", "The fruit is fig.")
	}
	if after := stored(t, k.c, k.session); after != before {
		t.Errorf("the parent changed: before\n%s\nafter\n%s", before, after)
	}
	k.completed("which fruit is it?", "The fruit is plum.")
	rebuilt(t, c)
}

// requestsAfter returns the bodies of the model requests that came after the first n and hold a text.
func requestsAfter(c *harness.Cluster, n int, text string) string {
	var b bytes.Buffer
	for _, r := range c.Model.Requests()[n:] {
		if bytes.Contains(r.Body, []byte(text)) {
			b.Write(r.Body)
		}
	}
	return b.String()
}

// rebuilt wants the read models to be what the log gives.
func rebuilt(t *testing.T, c *harness.Cluster) {
	t.Helper()
	nc, log, err := c.Base.Connect(topology.UserProjector)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if _, err := projector.Rebuild(context.WithoutCancel(t.Context()), projector.Config{DatabaseURL: c.Base.DatabaseURL}, projector.Deps{Log: log, NATS: nc}, true); err != nil {
		t.Errorf("rebuild --compare: %v", err)
	}
}
