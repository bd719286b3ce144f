package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// sessionsInLog returns the ids of all sessions in the log.
func sessionsInLog(t *testing.T, c *harness.Cluster) map[string]bool {
	t.Helper()
	ids := map[string]bool{}
	for shard := range c.Servers.Log.Shards() {
		for rec, err := range c.Servers.Log.Read(t.Context(), eventlog.Position{Shard: shard}, eventlog.Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			if rec.Subject.Aspect == events.Life {
				ids[rec.Subject.ID] = true
			}
		}
	}
	return ids
}

// shownFork is a session as REST shows it.
type shownFork struct {
	Status, Agent, AgentRef string
	Architecture            string
	Metadata                json.RawMessage
	Parent                  *struct {
		SessionID        string
		Asked, Effective uint32
	}
	Forks int
}

// shows returns a session that is at least as new as a position.
func shows(t *testing.T, c *harness.Cluster, session, position string) shownFork {
	t.Helper()
	var s shownFork
	if code := c.Call(0, "GET", "/api/sessions/"+session+"?minPosition="+position, nil, &s); code != http.StatusOK {
		t.Fatalf("session %s answered %d", session, code)
	}
	return s
}

// TestFork_Commands tests forks of sessions in any state, by REST and by gRPC, with another agent, and repeated.
func TestFork_Commands(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{
		Script: script(t, "fork.yaml"), Executor: executor.Config{Slots: 4, HostPaths: []string{"/"}, SweepEvery: time.Second}, Session: session.Config{HostPaths: []string{"/"}},
	})
	conn, err := grpc.NewClient(c.GRPCAddress(0), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	one := func(t *testing.T) *talk {
		k := newTalkWith(t, c, "spool", map[string]any{"model": "known-model", "metadata": map[string]any{"of": "the parent"}})
		k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
		k.awaitSnapshot()
		return k
	}
	t.Run("of a session that is closed", func(t *testing.T) {
		t.Parallel()
		k := one(t)
		at := k.s.Cursor
		soon := time.Since(k.s.Events[0].Time) + 2*time.Second
		k.c.Call(0, "PATCH", "/api/sessions/"+k.session, map[string]any{"sessionOptions": map[string]any{"sessionLimitMs": soon.Milliseconds()}}, nil)
		harness.Eventually(t, "the session is closed", func() bool { return shows(t, k.c, k.session, "").Status == "closed" })
		code, raw := request(t, "POST", k.c.URL(0)+"/api/sessions/"+k.session+"/messages", nil, []byte(`{"content":"x"}`))
		refused(t, "a message to the closed session", http.StatusConflict, "SESSION_CLOSED", "sessionId", code, raw)
		f := fork(t, k.c, k.session, map[string]any{"at": at})
		if s := shows(t, k.c, f.SessionID, f.Position); s.Status != "open" || f.Parent.Effective != at {
			t.Errorf("the fork is %+v at %+v", s, f.Parent)
		}
		child := k.talkWith(f)
		child.mustComplete("which fruit is it?", "The fruit is apple.")
		if tip := fork(t, k.c, k.session, map[string]any{}); tip.Parent.Effective != tip.Parent.Asked || tip.Parent.Asked <= at {
			t.Errorf("the fork at the last event of a closed session is at %+v", tip.Parent)
		}
	})
	t.Run("of a session in a folder of the server's machine", func(t *testing.T) {
		t.Parallel()
		c := c.ForSubtest(t)
		id := c.CreateSession("spool", map[string]any{"model": "known-model", "sessionOptions": map[string]any{"hostPath": project(t, map[string]string{"a": "a"})}})
		got, raw := request(t, "POST", c.URL(0)+"/api/sessions/"+id+"/fork", nil, []byte(`{}`))
		refused(t, "fork", http.StatusUnprocessableEntity, "HOST_PATH_UNSUPPORTED", "sessionId", got, raw)
		if !bytes.Contains(raw, []byte("--copy")) {
			t.Errorf("the refusal names no remedy: %s", raw)
		}
	})
	t.Run("with another agent", func(t *testing.T) {
		t.Parallel()
		k := one(t)
		first := apply(k.c, "agents", "gardener", map[string]any{"architecture": "spool", "model": "known-model", "instructions": "You are the first gardener."})
		second := apply(k.c, "agents", "gardener", map[string]any{"architecture": "spool", "model": "known-model", "instructions": "You are the second gardener."})
		for ref, said := range map[string]string{"gardener@" + first: "the first gardener", "gardener": "the second gardener"} {
			f := fork(t, k.c, k.session, map[string]any{"agent": ref, "metadata": map[string]any{"of": ref}})
			s := shows(t, k.c, f.SessionID, f.Position)
			if want := "gardener@" + map[string]string{"gardener": second}[ref]; s.Agent != "gardener" || !strings.HasPrefix(s.AgentRef, want) || string(s.Metadata) != `{"of":"`+ref+`"}` {
				t.Errorf("the fork with agent %s is %+v", ref, s)
			}
			asked := len(c.Model.Requests())
			k.talkWith(f).mustComplete("which fruit is it?", "The fruit is apple.")
			if sent := requestsAfter(c, asked, "which fruit is it?"); !strings.Contains(sent, said) || !strings.Contains(sent, "the fruit is apple") {
				t.Errorf("with agent %s the model was sent %s", ref, sent)
			}
		}
		apply(k.c, "agents", "digger", map[string]any{"architecture": "claude-code", "instructions": "You dig in the garden."})
		got, raw := request(t, "POST", k.c.URL(0)+"/api/sessions/"+k.session+"/fork", nil, []byte(`{"agent":"digger"}`))
		refused(t, "an agent of another architecture", http.StatusBadRequest, "INVALID_REQUEST", "agent", got, raw)
		if !bytes.Contains(raw, []byte("claude-code")) || !bytes.Contains(raw, []byte("the session is of spool")) {
			t.Errorf("the refusal does not name the architectures: %s", raw)
		}
	})
	t.Run("over gRPC", func(t *testing.T) {
		t.Parallel()
		forkOverGRPC(t, one(t), spoolv1.NewSessionsClient(conn))
	})
	t.Run("repeated with one Idempotency-Key", func(t *testing.T) {
		t.Parallel()
		k := one(t)
		url, key := k.c.URL(0)+"/api/sessions/"+k.session+"/fork", map[string]string{"Idempotency-Key": "fork-of-" + k.session}
		code, first := request(t, "POST", url, key, []byte(`{"at":1}`))
		var f forked
		if err := json.Unmarshal(first, &f); err != nil || code != http.StatusCreated {
			t.Fatalf("fork answered %d %s", code, first)
		}
		t.Cleanup(func() { k.c.DeleteSession(f.SessionID) })
		if code, again := request(t, "POST", url, key, []byte(`{"at":1}`)); code != http.StatusCreated || string(again) != string(first) {
			t.Errorf("the repeated fork answered %d %s, the first %s", code, again, first)
		}
		code, raw := request(t, "POST", url, key, []byte(`{"at":2}`))
		refused(t, "one key, another event", http.StatusConflict, "IDEMPOTENCY_MISMATCH", "Idempotency-Key", code, raw)
		shows(t, k.c, f.SessionID, f.Position) // wait until the read models have the fork
		if s := shows(t, k.c, k.session, ""); s.Forks != 1 {
			t.Errorf("%d forks were created, want 1", s.Forks)
		}
	})
	t.Run("of a fork of a fork", func(t *testing.T) {
		t.Parallel()
		forkOfForks(t, c.ForSubtest(t))
	})
	t.Run("of a session whose snapshot is gone", func(t *testing.T) {
		t.Parallel()
		k := one(t)
		removeObjects(t, k.c, k.session, "m-")
		before := stored(t, k.c, k.session)
		for _, at := range []string{`{}`, fmt.Sprintf(`{"at":%d}`, k.s.Cursor)} {
			code, raw := request(t, "POST", k.c.URL(0)+"/api/sessions/"+k.session+"/fork", nil, []byte(at))
			refused(t, "fork "+at, http.StatusGone, "SNAPSHOT_GONE", "at", code, raw)
		}
		if after := stored(t, k.c, k.session); after != before {
			t.Errorf("the parent changed: before\n%s\nafter\n%s", before, after)
		}
		for id := range sessionsInLog(t, k.c) {
			for n, err := range eventlog.SessionEvents(t.Context(), k.c.Servers.Log, "default", id) {
				if err != nil {
					t.Fatal(err)
				}
				if d, ok := n.Event.Data.(events.SessionForked); ok && d.Parent == k.session {
					t.Errorf("session %s was created", id)
				}
			}
		}
	})
}

// forkOverGRPC forks with each field and reads each field of the answer. Invalid requests are refused as over REST.
func forkOverGRPC(t *testing.T, k *talk, sessions spoolv1.SessionsClient) {
	ctx := metadata.AppendToOutgoingContext(t.Context(), "idempotency-key", "grpc-fork-of-"+k.session)
	apply(k.c, "agents", "waiter", map[string]any{"architecture": "spool", "model": "known-model", "instructions": "You wait for what comes."})
	at := k.block("apple", events.KindToolUse)
	r := &spoolv1.ForkSessionRequest{SessionId: k.session, At: &at, Metadata: &spoolv1.Json{Text: `{"big":1152921504606846976}`}, Agent: "waiter"}
	f, err := sessions.ForkSession(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.c.DeleteSession(f.GetSessionId()) })
	again, err := sessions.ForkSession(ctx, r)
	if err != nil || again.GetSessionId() != f.GetSessionId() || again.GetPosition() != f.GetPosition() {
		t.Errorf("repeated with one key: %v, %v, want %v", again, err, f)
	}
	p := f.GetParent()
	before := k.messageOf("apple") - 1
	if p.GetSessionId() != k.session || p.GetAsked() != at || p.GetEffective() != before || p.GetReason() == "" || p.Snapshot != nil || p.GetSnapshotSeq() != 0 {
		t.Errorf("a fork at the call begins at %v, want event %d", p, before)
	}
	s, err := sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: f.GetSessionId(), MinPosition: f.GetPosition()})
	if err != nil || s.GetMetadata().GetText() != `{"big":1152921504606846976}` || s.GetAgent() != "waiter" || s.GetParent().GetEffective() != before || s.GetParent().GetReason() != p.GetReason() {
		t.Errorf("the fork is %v, %v", s, err)
	}
	tip, err := sessions.ForkSession(t.Context(), &spoolv1.ForkSessionRequest{SessionId: k.session})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.c.DeleteSession(tip.GetSessionId()) })
	if p := tip.GetParent(); p.GetEffective() != p.GetAsked() || p.GetReason() != "" || p.GetSnapshot() == "" || p.GetSnapshotSeq() == 0 {
		t.Errorf("a fork at the last event begins at %v", p)
	}
	if _, err := sessions.GetSession(t.Context(), &spoolv1.GetSessionRequest{SessionId: tip.GetSessionId(), MinPosition: tip.GetPosition()}); err != nil {
		t.Error(err)
	}
	list, err := sessions.ListSessions(t.Context(), &spoolv1.ListSessionsRequest{Parent: k.session})
	if err != nil || len(list.GetSessions()) != 2 || list.GetSessions()[1].GetSessionId() != f.GetSessionId() {
		t.Errorf("the forks are %v, %v", list, err)
	}
	u := func(n uint32) *uint32 { return &n }
	for _, x := range []struct {
		name string
		r    *spoolv1.ForkSessionRequest
		code codes.Code
		want string
	}{
		{"no session", &spoolv1.ForkSessionRequest{}, codes.InvalidArgument, "INVALID_REQUEST sessionId"},
		{"a session that is not there", &spoolv1.ForkSessionRequest{SessionId: "ses_00000000000000000000000000"}, codes.NotFound, "SESSION_NOT_FOUND sessionId"},
		{"event 0", &spoolv1.ForkSessionRequest{SessionId: k.session, At: u(0)}, codes.InvalidArgument, "INVALID_REQUEST at"},
		{"an event that is not there", &spoolv1.ForkSessionRequest{SessionId: k.session, At: u(4_000_000_000)}, codes.OutOfRange, "CURSOR_AHEAD at"},
		{"metadata that is no JSON", &spoolv1.ForkSessionRequest{SessionId: k.session, Metadata: &spoolv1.Json{Text: "{"}}, codes.InvalidArgument, "INVALID_REQUEST metadata"},
		{"an agent that is no reference", &spoolv1.ForkSessionRequest{SessionId: k.session, Agent: "a@@"}, codes.InvalidArgument, "INVALID_REQUEST agent"},
		{"an agent that is not there", &spoolv1.ForkSessionRequest{SessionId: k.session, Agent: "nobody"}, codes.NotFound, "AGENT_NOT_FOUND agent"},
	} {
		_, err := sessions.ForkSession(t.Context(), x.r)
		got := ""
		for _, d := range status.Convert(err).Details() {
			if info, ok := d.(*errdetails.ErrorInfo); ok {
				got = info.GetReason() + " " + info.GetMetadata()["field"]
			}
		}
		if status.Code(err) != x.code || got != x.want {
			t.Errorf("%s: %v with %q, want %v with %q", x.name, err, got, x.code, x.want)
		}
	}
}

// forkOfForks forks three times in a row, each time before the fork has a turn. The last fork has the conversation,
// the files and the history of the first session.
func forkOfForks(t *testing.T, c *harness.Cluster) {
	k := &talk{t: t, c: c, session: c.CreateSession("spool", map[string]any{"model": "known-model"})}
	k.mustComplete("the fruit is apple; run echo one > a.txt", "Noted apple.")
	k.awaitSnapshot()
	ids, total := []string{k.session}, uint32(0)
	for range 3 {
		f := fork(t, k.c, ids[len(ids)-1], map[string]any{})
		if ids, total = append(ids, f.SessionID), total+f.Parent.Effective; f.Parent.Effective != f.Parent.Asked {
			t.Errorf("a fork begins at %+v", f.Parent)
		}
		last := &talk{t: t, c: k.c, session: f.SessionID}
		last.awaitFile("a.txt", "one\n") // before the fork has a snapshot
		if code, raw := request(t, "GET", k.c.URL(0)+"/api/sessions/"+f.SessionID+"/files/a.txt?at=2", nil, nil); code != http.StatusOK || string(raw) != "one\n" {
			t.Errorf("the file at event 2 is %d %s", code, raw)
		}
	}
	last := &talk{t: t, c: k.c, session: ids[3], reportsCost: k.reportsCost}
	k.c.DeleteSession(ids[1]) // two of its ancestors
	k.c.DeleteSession(k.session)
	last.awaitFile("a.txt", "one\n")
	var h struct {
		Total     uint32
		Events    []events.WireEvent
		Ancestors []struct{ SessionID string }
	}
	if k.c.Call(0, "GET", "/api/sessions/"+ids[3]+"/history?limit=1000", nil, &h); h.Total != total || len(h.Ancestors) != 3 || h.Ancestors[0].SessionID != k.session || len(h.Events) != int(total) {
		t.Errorf("the history has %d of %d events of %+v, want %d", len(h.Events), h.Total, h.Ancestors, total)
	}
	last.mustComplete("which fruit is it?", "The fruit is apple.")
	last.mustComplete("the fruit is fig; run echo mine >> a.txt", "Noted fig.")
	last.awaitSnapshot()
	last.awaitFile("a.txt", "one\nmine\n")
	if code, raw := request(t, "GET", k.c.URL(0)+"/api/sessions/"+ids[3]+"/files/a.txt?at=2", nil, nil); code != http.StatusOK || string(raw) != "one\n" {
		t.Errorf("the file at event 2 is %d %s", code, raw)
	}
}

// TestFork_OfAnotherTenant tests that another tenant's session cannot be forked, and that its forks, their files and
// their history cannot be read.
func TestFork_OfAnotherTenant(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKeyOfKeys}})
	root := withKey(t, c, rootKeyOfKeys)
	ours, theirs := root.tenant("ours"), root.tenant("theirs")
	var parent, child struct{ SessionID, Position string }
	ours.gets(http.StatusCreated, "POST", "/api/sessions", map[string]any{"architecture": "spool"}, &parent)
	ours.gets(http.StatusCreated, "POST", "/api/sessions/"+parent.SessionID+"/fork", map[string]any{"at": 1}, &child)
	ours.gets(http.StatusOK, "GET", "/api/sessions/"+child.SessionID+"/history?minPosition="+child.Position, nil, nil)
	had := len(sessionsInLog(t, c))
	for _, x := range [][2]string{
		{"POST", parent.SessionID + "/fork"}, {"POST", child.SessionID + "/fork"}, {"GET", child.SessionID + "/history"}, {"GET", child.SessionID + "/history/blocks"},
		{"GET", child.SessionID + "/files"}, {"GET", child.SessionID + "/state?at=2"},
	} {
		var body any
		if x[0] == "POST" {
			body = map[string]any{"at": 1}
		}
		code, raw := theirs.asks(x[0], "/api/sessions/"+x[1], body)
		refused(t, strings.Join(x[:], " "), http.StatusNotFound, "SESSION_NOT_FOUND", "sessionId", code, raw)
	}
	var list struct{ Sessions []json.RawMessage }
	theirs.gets(http.StatusOK, "GET", "/api/sessions?parent="+parent.SessionID, nil, &list)
	if len(list.Sessions) != 0 || len(sessionsInLog(t, c)) != had {
		t.Errorf("the other tenant sees the forks %s; the log had %d sessions and has %d", list.Sessions, had, len(sessionsInLog(t, c)))
	}
}
