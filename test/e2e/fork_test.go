package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session/janitor"
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

// fork forks a session. The fork is deleted when the test ends.
func fork(t *testing.T, c *harness.Cluster, session string, body map[string]any) forked {
	t.Helper()
	var f forked
	if code := c.Call(0, "POST", "/api/sessions/"+session+"/fork", body, &f); code != http.StatusCreated {
		t.Fatalf("fork %v answered %d, %+v", body, code, f)
	}
	t.Cleanup(func() { c.DeleteSession(f.SessionID) })
	return f
}

// stored returns everything that the log and the object store have of a session, byte for byte.
func stored(t *testing.T, c *harness.Cluster, session string) string {
	t.Helper()
	var b strings.Builder
	shard := eventlog.Position{Shard: events.Partition(session) % c.Servers.Log.Shards()}
	tenant := tenantOf(t, c, session)
	for rec, err := range c.Servers.Log.Read(t.Context(), shard, eventlog.Filter{Subject: events.Subject{Tenant: tenant, ID: session}}) {
		if err != nil {
			t.Fatal(err)
		}
		raw, err := rec.Commit.Encode()
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s %s %s %s\n", rec.Subject, rec.Position, rec.Time, raw)
	}
	nc, _, err := c.Servers.Connect(topology.UserAdmin)
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
	if err != nil && !errors.Is(err, jetstream.ErrNoObjectsFound) {
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
	for rec, err := range c.Servers.Log.Read(t.Context(), eventlog.Position{Shard: events.Partition(session) % c.Servers.Log.Shards()}, eventlog.Filter{}) {
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
	options := forkOptions()[architecture]
	options["metadata"] = map[string]any{"of": "the parent"}
	k := newTalkWith(t, c, architecture, options)
	k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.awaitSnapshot() // a message that came at once would prevent the snapshot
	k.mustComplete("the fruit is pear; run echo two > a.txt; echo b > b.txt; exit 3", "Noted pear.")
	k.awaitSnapshot()
	k.mustComplete("the fruit is plum; run echo three > a.txt; rm b.txt", "Noted plum.")
	k.awaitSnapshot()
	return k
}

// awaitSnapshot reads the stream until a snapshot follows the last end of an execution.
func (k *talk) awaitSnapshot() {
	k.t.Helper()
	ends := slices.Collect(k.seqs(func(e events.WireEvent) bool { return events.IsTerminal(e.Type) }))
	done := func() bool {
		return slices.ContainsFunc(k.s.Events, func(e events.WireEvent) bool { return e.Type == "workspace_synced" && e.Seq > ends[len(ends)-1] })
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

// seqs yields the seqs of the wanted events.
func (k *talk) seqs(wanted func(events.WireEvent) bool) func(func(uint32) bool) {
	return func(yield func(uint32) bool) {
		for _, e := range k.s.Events {
			if wanted(e) && !yield(e.Seq) {
				return
			}
		}
	}
}

// talkWith returns a talk with a fork.
func (k *talk) talkWith(f forked) *talk {
	return &talk{t: k.t, c: k.c, session: f.SessionID, reportsCost: k.reportsCost}
}

// TestFork_BetweenTurns forks after each turn, at the tip, and before the first message. The fork's agent knows what
// its parent knew there, its files are those of that event, and nothing of the parent changes.
func TestFork_BetweenTurns(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml"), Executors: 2})
	k := threeTurns(t, c, "spool")
	forksBetweenTurns(t, k)
	k.mustComplete("which fruit is it?", "The fruit is plum.")
	checkRebuild(t, c)
}

// forksBetweenTurns forks a session of three turns after each of them, and before the first.
func forksBetweenTurns(t *testing.T, k *talk) {
	c := k.c
	before := stored(t, k.c, k.session)
	var ends []uint32
	for seq := range k.seqs(func(e events.WireEvent) bool { return events.IsTerminal(e.Type) }) {
		ends = append(ends, seq)
	}
	for _, w := range []struct {
		name  string
		at    any
		fruit string // the fruit that the fork's agent knows; "" for none
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
		child := k.talkWith(f)
		asked := len(c.Model.Requests())
		child.mustComplete("which fruit is it?", "The fruit is "+w.fruit+".")
		sent := requestsAfter(c, asked, "which fruit is it?")
		if sent == "" || w.fruit != "" && !strings.Contains(sent, w.fruit) {
			t.Errorf("%s: the model received %s", w.name, sent)
		}
		for _, later := range w.later {
			if strings.Contains(sent, "the fruit is "+later) {
				t.Errorf("%s: the model received %s, which is from a later turn: %s", w.name, later, sent)
			}
		}
		child.awaitSnapshot()
		for path, content := range w.files {
			child.awaitFile(path, content)
		}
		for _, path := range w.gone {
			if status, raw := request(t, "GET", c.URL(0)+"/api/sessions/"+f.SessionID+"/files/"+path, nil, nil); status != http.StatusNotFound {
				t.Errorf("%s: %s is %d %s", w.name, path, status, raw)
			}
		}
		child.mustComplete("the fruit is fig; run echo mine > a.txt", "Noted fig.")
		child.mustComplete("which fruit is it?", "The fruit is fig.")
	}
	if after := stored(t, k.c, k.session); after != before {
		t.Errorf("the parent changed: before\n%s\nafter\n%s", before, after)
	}
}

// requestsAfter returns the bodies of the model requests after the first n that contain a text.
func requestsAfter(c *harness.Cluster, n int, text string) string {
	var b bytes.Buffer
	for _, r := range c.Model.Requests()[n:] {
		if bytes.Contains(r.Body, []byte(text)) {
			b.Write(r.Body)
		}
	}
	return b.String()
}

// checkRebuild checks that a rebuild gives the same read models.
func checkRebuild(t *testing.T, c *harness.Cluster) {
	t.Helper()
	nc, log, err := c.Servers.Connect(topology.UserProjector)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if _, err := projector.Rebuild(context.WithoutCancel(t.Context()), projector.Config{DatabaseURL: c.Servers.DatabaseURL}, projector.Deps{Log: log, NATS: nc}, true); err != nil {
		t.Errorf("rebuild --compare: %v", err)
	}
}

// forkOptions returns the options of a session for each architecture. The agents are installed on this machine.
func forkOptions() map[string]map[string]any {
	return map[string]map[string]any{
		"spool": {"model": "known-model"}, "claude-code": {"model": "known-model"}, "codex": {"model": "gpt-5.5"}, "opencode": {"model": "known-model"},
		"acp": {"model": "known-model", "sessionOptions": map[string]any{"command": []string{"opencode", "acp"}, "modelSettings": map[string]any{"preset": "opencode"}}},
	}
}

// TestFork_AmidTurn forks within a turn, at a text, at a call and at its result. The fork's agent knows what preceded
// that event and nothing that follows it. If a conversation cannot be cut within a turn, the fork begins before the
// turn's message. Architectures that can never be cut there run only with -matrix: each of their forks starts
// OpenCode, which takes seconds.
func TestFork_AmidTurn(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml"), Executor: executor.Config{Slots: 3}})
	for _, architecture := range slices.Sorted(maps.Keys(forkOptions())) {
		if *matrixTable == "" && (architecture == "opencode" || architecture == "acp") {
			continue
		}
		t.Run(architecture, func(t *testing.T) {
			forksAmidTurn(t, threeTurns(t, c.ForSubtest(t), architecture), architecture)
		})
	}
}

// TestFork_InDocker tests the same, and forks between turns, with Claude Code in containers.
func TestFork_InDocker(t *testing.T) {
	harness.NeedDocker(t)
	c := harness.New(t, harness.Options{Docker: true, Script: script(t, "fork.yaml"), Executor: executor.Config{Slots: 3}})
	k := threeTurns(t, c.ForSubtest(t), "claude-code")
	forksBetweenTurns(t, k)
	forksAmidTurn(t, k, "claude-code")
}

// forksAmidTurn forks a session of three turns within its second turn and at its last text.
func forksAmidTurn(t *testing.T, k *talk, architecture string) {
	before := stored(t, k.c, k.session)
	text, call, result := k.block("pear", events.KindAssistantText), k.block("pear", events.KindToolUse), k.block("pear", events.KindToolResult)
	type where struct {
		name          string
		at, effective uint32
		fruit         string
		told, later   []string
	}
	rest := k.messageOf("pear") - 1
	list := []where{
		{"at the first text", text, text, "pear", []string{"the fruit is pear", "I keep pear."}, []string{"Run of pear"}},
		{"at the call", call, text, "pear", []string{"I keep pear."}, []string{"Run of pear"}},
		{"at its result", result, result, "pear", []string{"I keep pear.", "Run of pear"}, []string{"It said of pear"}},
	}
	whole := func(w *where) {
		w.effective, w.fruit, w.told, w.later = rest, "apple", []string{"Noted apple."}, []string{"the fruit is pear"}
	}
	switch architecture {
	case "spool": // only whole messages: the call is in one message with the text
		whole(&list[0])
		whole(&list[1])
		list[2].told = []string{"I keep pear.", "exit status 3"}
	case "opencode", "acp": // only whole turns
		list = list[1:2]
		whole(&list[0])
	}
	asks := func(f forked, fruit string) (sent string) {
		asked := len(k.c.Model.Requests())
		child := k.talkWith(f)
		child.mustComplete("which fruit is it?", "The fruit is "+fruit+".")
		return requestsAfter(k.c, asked, "which fruit is it?")
	}
	for _, w := range list {
		f := fork(t, k.c, k.session, map[string]any{"at": w.at})
		if f.Parent.Effective != w.effective || (f.Parent.Reason == "") != (w.at == w.effective) {
			t.Errorf("%s, event %d: the fork begins at %+v, want %d", w.name, w.at, f.Parent, w.effective)
		}
		sent := asks(f, w.fruit)
		for _, text := range w.told {
			if !strings.Contains(sent, text) {
				t.Errorf("%s: the model did not receive %q: %s", w.name, text, sent)
			}
		}
		for _, text := range append(w.later, "Noted pear", "the fruit is plum") {
			if strings.Contains(sent, text) {
				t.Errorf("%s: the model received %q, which is from a later event: %s", w.name, text, sent)
			}
		}
		child := k.talkWith(f)
		child.awaitFile("a.txt", "one\n")
		child.awaitFile("log.txt", "apple\n")
		asks(fork(t, k.c, f.SessionID, map[string]any{}), w.fruit)
	}
	// This is the last line of the record. Claude Code writes it after it has reported the end of the turn.
	end, wanted := k.lastText(), "Noted plum."
	want := end
	if architecture == "acp" {
		want, wanted = k.messageOf("plum")-1, "Noted pear."
	}
	f := fork(t, k.c, k.session, map[string]any{"at": end})
	if sent := asks(f, map[bool]string{true: "plum", false: "pear"}[want == end]); f.Parent.Effective != want || !strings.Contains(sent, wanted) {
		t.Errorf("a fork at the last text, event %d, begins at %d, and the model was sent %s", end, f.Parent.Effective, sent)
	}
	if after := stored(t, k.c, k.session); after != before {
		t.Errorf("the parent changed: before\n%s\nafter\n%s", before, after)
	}
}

// lastText returns the seq of the agent's last text.
func (k *talk) lastText() (seq uint32) {
	k.t.Helper()
	for _, e := range k.s.Events {
		if d, ok := e.Event().Data.(events.BlockComplete); ok && d.Block.Kind == events.KindAssistantText {
			seq = e.Seq
		}
	}
	return seq
}

// messageOf returns the seq of the message that names a fruit.
func (k *talk) messageOf(fruit string) uint32 {
	k.t.Helper()
	for _, e := range k.s.Events {
		if d, ok := e.Event().Data.(events.MessageAccepted); ok && strings.Contains(d.Content, "the fruit is "+fruit) {
			return e.Seq
		}
	}
	k.t.Fatalf("no message names %s", fruit)
	return 0
}

// block returns the seq of the first complete block of a kind in the turn of a fruit.
func (k *talk) block(fruit string, kind events.BlockKind) uint32 {
	k.t.Helper()
	execution := ""
	for _, e := range k.s.Events {
		switch d := e.Event().Data.(type) {
		case events.MessageAccepted:
			if execution = ""; strings.Contains(d.Content, "the fruit is "+fruit) {
				execution = e.ExecutionID
			}
		case events.BlockStart:
			if e.ExecutionID == execution && d.Block.Kind == kind && d.Block.Status != events.StatusPending {
				return e.Seq
			}
		case events.BlockComplete:
			if e.ExecutionID == execution && d.Block.Kind == kind {
				return e.Seq
			}
		}
	}
	k.t.Fatalf("the turn of %s has no %s", fruit, kind)
	return 0
}

// TestFork_RefusesBadInput tests that invalid forks are refused by name, and leave nothing behind.
func TestFork_RefusesBadInput(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml")})
	k := newTalkWith(t, c, "spool", map[string]any{"model": "known-model"})
	k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.awaitSnapshot()
	gone := c.CreateSession("spool", nil)
	c.DeleteSession(gone)
	agent := "claude-" + strings.ToLower(k.session[len(k.session)-8:])
	c.Call(0, "POST", "/api/agents", map[string]any{"ref": map[string]any{"slug": agent}, "spec": map[string]any{"architecture": "claude-code", "instructions": "Answer in one short sentence."}}, nil)
	sessions := func() int {
		var list struct{ Sessions []struct{ SessionID string } }
		c.Call(0, "GET", "/api/sessions?pageSize=200", nil, &list)
		return len(list.Sessions)
	}
	// The read models may be behind the deletion for a moment.
	harness.Eventually(t, "the deleted session is not listed", func() bool { return sessions() == 1 })
	refused := func(session, body string, status int, code, field string) {
		t.Helper()
		got, raw := request(t, "POST", c.URL(0)+"/api/sessions/"+session+"/fork", nil, []byte(body))
		var p struct{ Code, Field string }
		if err := json.Unmarshal(raw, &p); err != nil || got != status || p.Code != code || p.Field != field {
			t.Errorf("fork %s answered %d %s, want %d %s of field %s", body, got, raw, status, code, field)
		}
	}
	for _, at := range []string{"0", "-1", "18446744073709551616", "4294967296", "1.5", `"x"`} {
		refused(k.session, `{"at":`+at+`}`, http.StatusBadRequest, "INVALID_REQUEST", "at")
	}
	refused(k.session, `{"at":4294967295}`, http.StatusConflict, "CURSOR_AHEAD", "at")
	refused(k.session, `{"at":100000}`, http.StatusConflict, "CURSOR_AHEAD", "at")
	refused(k.session, `{"agent":"`+agent+`"}`, http.StatusBadRequest, "INVALID_REQUEST", "agent")
	refused(k.session, `{"agent":"no-such-agent"}`, http.StatusNotFound, "AGENT_NOT_FOUND", "agent")
	refused(gone, `{}`, http.StatusNotFound, "SESSION_NOT_FOUND", "sessionId")
	refused("ses_00000000000000000000000000", `{}`, http.StatusNotFound, "SESSION_NOT_FOUND", "sessionId")
	removeObjects(t, c, k.session, "m-")
	refused(k.session, `{}`, http.StatusGone, "SNAPSHOT_GONE", "at")
	if n := sessions(); n != 1 {
		t.Errorf("there are %d sessions after refused forks, want the one that was not forked", n)
	}
	f := fork(t, c, k.session, map[string]any{"at": 1, "metadata": map[string]any{"a": 1}}) // this fork needs no snapshot
	var s struct {
		Metadata map[string]any
		Parent   *struct{ SessionID string }
	}
	c.Call(0, "GET", "/api/sessions/"+f.SessionID+"?minPosition="+f.Position, nil, &s)
	if s.Metadata["a"] != 1.0 || s.Parent == nil || s.Parent.SessionID != k.session {
		t.Errorf("the fork is %+v", s)
	}
	var parent struct{ Forks int }
	if c.Call(0, "GET", "/api/sessions/"+k.session, nil, &parent); parent.Forks != 1 {
		t.Errorf("the parent has %d forks, want 1", parent.Forks)
	}
}

// TestFork_SaysWhichFilesAreNotKept tests a file that was uploaded after the snapshot of the fork, and that the
// janitor has removed because a later snapshot contains it. The file is missing in the fork, and the answer names it.
func TestFork_SaysWhichFilesAreNotKept(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml")})
	k := newTalkWith(t, c, "spool", map[string]any{"model": "known-model"})
	k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.awaitSnapshot()
	if code, raw := request(t, "PUT", c.URL(0)+"/api/sessions/"+k.session+"/files/b.txt", nil, []byte("two")); code/100 != 2 {
		t.Fatalf("PUT answered %d %s", code, raw)
	}
	var seq uint32
	var object string
	for n, err := range eventlog.SessionEvents(t.Context(), c.Servers.Log, tenantOf(t, c, k.session), k.session) {
		if err != nil {
			t.Fatal(err)
		}
		if put, ok := n.Event.Data.(events.FilePut); ok {
			seq, object = n.Seq, put.Object[strings.LastIndexByte(put.Object, '/')+1:]
		}
	}
	if with := fork(t, c, k.session, map[string]any{"at": seq}); with.Parent.Effective != seq || with.Parent.Reason != "" {
		t.Errorf("while the file exists the fork is %+v, want it at %d without a reason", with.Parent, seq)
	}
	removeObjects(t, c, k.session, object)
	if without := fork(t, c, k.session, map[string]any{"at": seq}); without.Parent.Effective != seq || !strings.Contains(without.Parent.Reason, `"b.txt"`) {
		t.Errorf("when the file is gone the fork is %+v, want it at %d and a reason that names the file", without.Parent, seq)
	}
}

// removeObjects removes the objects of a session's workspace whose names begin with a prefix, such as m- for the
// manifests of snapshots.
func removeObjects(t *testing.T, c *harness.Cluster, session, prefix string) {
	t.Helper()
	nc, _, err := c.Servers.Connect(topology.UserAdmin)
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
	for _, info := range list {
		if strings.Contains(info.Name, "/"+session+"/"+prefix) {
			if err := o.Delete(t.Context(), info.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestFork_HistoryOutlivesTheParent tests that the inherited part of a fork can be read through the fork, also after
// the parent was deleted and the janitor has passed. The parent is erased after its last fork was deleted.
func TestFork_HistoryOutlivesTheParent(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml")})
	k := &talk{t: t, c: c, session: c.CreateSession("spool", map[string]any{"model": "known-model"})}
	k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.awaitSnapshot()
	at := k.s.Cursor
	k.put("late.txt", "text/plain", []byte("late\n")) // no snapshot before the fork contains this file
	k.mustComplete("the fruit is pear; run echo two > a.txt", "Noted pear.")
	f := fork(t, c, k.session, map[string]any{"at": at + 1})
	child := k.talkWith(f)
	child.mustComplete("which fruit is it?", "The fruit is apple.")
	child.awaitSnapshot()
	child.awaitFile("a.txt", "one\n")
	child.awaitFile("late.txt", "late\n")
	again := fork(t, c, f.SessionID, map[string]any{})
	type history struct {
		Events      []events.WireEvent
		Total, Next uint32
		Ancestors   []struct {
			SessionID string
			Effective uint32
		}
	}
	read := func(session string) (all []events.WireEvent, h history) {
		t.Helper()
		for {
			h = history{}
			if code := c.Call(0, "GET", fmt.Sprintf("/api/sessions/%s/history?after=%d&limit=7", session, len(all)), nil, &h); code != http.StatusOK {
				t.Fatalf("the history of %s answered %d, %+v", session, code, h)
			}
			if all = append(all, h.Events...); h.Next >= h.Total {
				return all, h
			}
		}
	}
	own := append(slices.Clone(k.s.Events[:f.Parent.Effective]), child.s.Events[:again.Parent.Effective]...)
	wants := func(what string) {
		t.Helper()
		all, h := read(again.SessionID)
		if len(all) != len(own) || len(h.Ancestors) != 2 || h.Ancestors[0].SessionID != k.session || h.Ancestors[1].SessionID != f.SessionID {
			t.Fatalf("%s: %d events of %+v, want %d", what, len(all), h.Ancestors, len(own))
		}
		for i, e := range all {
			if w := own[i]; e.Seq != w.Seq || e.ID != w.ID || e.SessionID != w.SessionID || !bytes.Equal(e.Data, w.Data) {
				t.Fatalf("%s: event %d is %+v, want %+v", what, i, e, w)
			}
		}
		var blocks struct {
			Ancestors []struct {
				SessionID string
				Blocks    []events.Block
			}
		}
		c.Call(0, "GET", "/api/sessions/"+again.SessionID+"/history/blocks", nil, &blocks)
		raw, err := json.Marshal(blocks)
		if err != nil {
			t.Fatal(err)
		}
		if len(blocks.Ancestors) != 2 || !bytes.Contains(raw, []byte("Noted apple.")) || !bytes.Contains(raw, []byte("The fruit is apple.")) || bytes.Contains(raw, []byte("pear")) {
			t.Fatalf("%s: the inherited blocks are %s", what, raw)
		}
	}
	wants("while the parent is there")
	c.DeleteSession(k.session)
	j := c.NewJanitor(janitor.Config{Grace: time.Millisecond})
	pass := func() {
		t.Helper()
		if _, err := j.RunPass(t.Context(), false); err != nil {
			t.Fatal(err)
		}
	}
	pass()
	pass()
	wants("once the parent is deleted")
	if code := c.Call(0, "GET", "/api/sessions/"+k.session, nil, new(map[string]any)); code != http.StatusNotFound {
		t.Errorf("the deleted parent answers %d", code)
	}
	k.talkWith(again).mustComplete("which fruit is it?", "The fruit is apple.")
	checkRebuild(t, c)
	c.DeleteSession(f.SessionID)
	pass()
	wants("once the fork between is deleted")
	c.DeleteSession(again.SessionID)
	tenant := tenantOf(t, c, k.session)
	harness.Eventually(t, "the parent is erased", func() bool {
		pass()
		l, err := eventlog.Sessions{Log: c.Servers.Log}.Load(t.Context(), tenant, k.session, eventlog.LeaderOnly)
		return err == nil && l.Run.Retired && len(stored(t, c, k.session)) < 4000
	})
	checkRebuild(t, c)
}

// TestFork_SurvivesKilledExecutors tests that another executor takes over if an executor is cut off at any step of a
// fork's first turn, and that the fork begins with the same conversation and files.
func TestFork_SurvivesKilledExecutors(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml")})
	k := &talk{t: t, c: c, session: c.CreateSession("spool", map[string]any{"model": "known-model"})}
	k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.awaitSnapshot()
	for i, step := range []events.Type{"sandbox_creating", "sandbox_ready", "workspace_restored", "execution_started"} {
		child := k.talkWith(fork(t, k.c, k.session, map[string]any{"at": k.s.Cursor}))
		execution := child.post("which fruit is it?", func(w events.WireEvent) bool { return w.Type != step })
		c.KillExecutor(i)
		c.StartExecutor()
		x := child.until(execution)
		if end := ended[events.ExecutionCompleted](x); end.Result != "The fruit is apple." {
			t.Errorf("killed after %s: ended with %+v", step, end)
		}
		c.Call(0, "POST", "/api/sessions/"+child.session+"/sync", map[string]any{}, nil) // the snapshot after the turn may have been lost with the executor
		child.awaitFile("a.txt", "one\n")
		child.awaitFile("log.txt", "apple\n")
		c.DeleteSession(child.session) // otherwise the executors of this step would end only with the test
	}
	c.DeleteSession(k.session)
}

// TestFork_OfARunningTurn tests a fork of a session whose agent is working: it begins after the last block that a
// snapshot certainly contains. The parent continues.
func TestFork_OfARunningTurn(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "fork.yaml")})
	k := newTalkWith(t, c, "spool", map[string]any{"model": "known-model", "sessionOptions": map[string]any{"syncIntervalMs": 1000}})
	k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.awaitSnapshot()
	gate := filepath.Join(t.TempDir(), "open")
	calls, synced := 0, false
	execution := k.post("the fruit is pear; wait twice for "+gate, func(w events.WireEvent) bool {
		if d, ok := w.Event().Data.(events.BlockComplete); ok && d.Block.Kind == events.KindToolUse {
			calls++
		}
		synced = synced || calls == 2 && w.Type == "workspace_synced"
		return !synced
	})
	f := fork(t, k.c, k.session, map[string]any{})
	first := k.block("pear", events.KindToolResult)
	if f.Parent.Effective != first || f.Parent.Asked < first || f.Parent.Reason == "" {
		t.Errorf("the fork begins at %+v, want %d", f.Parent, first)
	}
	child := k.talkWith(f)
	child.mustComplete("which fruit is it?", "The fruit is pear.")
	child.awaitSnapshot()
	child.awaitFile("a.txt", "one\n") // the nearest snapshot before the block is that of the first turn
	if err := os.WriteFile(gate, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if end := ended[events.ExecutionCompleted](k.until(execution)); end.Result != "Waited." {
		t.Errorf("the parent ended with %+v", end)
	}
}
