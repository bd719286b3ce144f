package e2e

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session/janitor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// auditEntry is an entry of the audit in the API.
type auditEntry struct {
	Time, Position, Aspect, SessionID, ExecutionID, About string
	Types                                                 []string
	Actor                                                 struct{ Kind, ID, KeyID, KeyName, User, Address, Service string }
}

// firstType returns the type of the entry's first event.
func (a auditEntry) firstType() string { return a.Types[0] }

// audits returns all entries of the audit, page by page.
func (k keyHolder) audits(query url.Values) (list []auditEntry) {
	k.t.Helper()
	for {
		var page struct {
			Entries       []auditEntry
			NextPageToken string
		}
		k.gets(http.StatusOK, "GET", "/api/audit?"+query.Encode(), nil, &page)
		if list = append(list, page.Entries...); page.NextPageToken == "" {
			return list
		}
		query = maps.Clone(query)
		query.Set("pageToken", page.NextPageToken)
	}
}

// asEndUser returns a keyHolder that sends requests for an end user, with a forged address.
func (k keyHolder) asEndUser(user string) keyHolder {
	k.header = maps.Clone(k.header)
	k.header["Spool-User"], k.header["X-Forwarded-For"] = user, "203.0.113.9"
	return k
}

// lifeActors returns the actors of a session's life, by the type of the commit's first event.
func lifeActors(t *testing.T, c *harness.Cluster, subject events.Subject) map[events.Type]events.Actor {
	t.Helper()
	out := map[events.Type]events.Actor{}
	shard := eventlog.Position{Shard: subject.Partition() % c.Servers.Log.Shards()}
	for rec, err := range c.Servers.Log.Read(t.Context(), shard, eventlog.Filter{Subject: subject}) {
		if err != nil {
			t.Fatal(err)
		}
		if rec.Commit.V != 2 {
			t.Errorf("%s on %s has version %d", rec.Position, subject, rec.Commit.V)
		}
		out[rec.Events[0].Type()] = rec.Commit.Actor
	}
	return out
}

// TestAudit_NamesActorsOverTheWholeStack tests that each commit names the key, the end user and the address of the
// request that caused it, by REST and by gRPC, and the service that wrote it. Only the admins of the tenant can list
// these commits, also after the session and its content are gone. A rebuild gives the same audit.
func TestAudit_NamesActorsOverTheWholeStack(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKeyOfKeys}, Script: repeating})
	root := withKey(t, c, rootKeyOfKeys)
	ops, admin := root.makes(map[string]any{"name": "ops", "tenant": "acme"})
	app, user := admin.makes(map[string]any{"name": "app", "role": "use"})
	var made struct{ SessionID string }
	user.asEndUser("ann").gets(http.StatusCreated, "POST", "/api/sessions", map[string]any{"architecture": "spool", "model": "known-model"}, &made)
	id := made.SessionID
	conn, err := grpc.NewClient(c.GRPCAddress(0), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // the test has ended
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+app.Key, "spool-user", "bob", "x-forwarded-for", "203.0.113.9")
	posted, err := spoolv1.NewSessionsClient(conn).PostMessage(ctx, &spoolv1.PostMessageRequest{SessionId: id, Content: "run the command echo on"})
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "the execution has ended", func() bool {
		var x struct{ Phase string }
		user.gets(http.StatusOK, "GET", "/api/executions/"+posted.GetExecutionId(), nil, &x)
		return x.Phase == "completed" || x.Phase == "failed"
	})
	user.asEndUser("Änne").gets(http.StatusOK, "PATCH", "/api/sessions/"+id, map[string]any{"metadata": map[string]any{"a": 1}}, nil)
	admin.asEndUser("ann").applies("agents", "organization", "reviewer", map[string]any{"architecture": "spool", "instructions": "You review code with care."})

	session := lifeActors(t, c, events.LifeSubject("acme", id))
	for typ, want := range map[events.Type]string{"session_created": "ann", "message_accepted": "bob", "session_options_updated": "Änne"} {
		got := session[typ]
		if service, copied, _ := strings.Cut(got.Service, "/"); service != "session" || copied == "" {
			t.Errorf("%s was written by %q", typ, got.Service)
		}
		if got.Service = ""; got != (events.Actor{Kind: "key", ID: app.KeyID, Key: app.KeyID, User: want, Address: "127.0.0.1"}) {
			t.Errorf("%s was caused by %+v", typ, got)
		}
	}
	for typ, got := range lifeActors(t, c, events.RunSubject("acme", id)) {
		if got.Kind != "executor" || got.Service != "executor/"+got.ID || got.Key+got.User+got.Address != "" {
			t.Errorf("%s was written by %+v", typ, got)
		}
	}

	var before []auditEntry
	harness.Eventually(t, "the audit has all", func() bool { before = admin.audits(nil); return len(before) >= 6 })
	var did []string
	for _, a := range slices.Backward(before) {
		if did = append(did, a.firstType()); a.Actor.Address != "127.0.0.1" || !strings.HasPrefix(a.Actor.Service, "session/") {
			t.Errorf("%s was done by %+v", a.firstType(), a.Actor)
		}
	}
	if want := []string{"key_created", "key_created", "session_created", "message_accepted", "session_options_updated", "agent_applied"}; !slices.Equal(did, want) {
		t.Errorf("the audit lists %v, want %v", did, want)
	}
	if a := before[5]; a.Actor.KeyID != "root" || a.About != ops.KeyID || a.Actor.KeyName != "" {
		t.Errorf("the first key was created by %+v", a)
	}
	if a := before[0]; a.About != "reviewer" && !strings.Contains(a.About, "reviewer@") || a.Actor.KeyName != "ops" || a.Actor.User != "ann" || a.Aspect != "agent" {
		t.Errorf("the agent was applied by %+v", a)
	}
	if a := before[2]; a.ExecutionID != posted.GetExecutionId() || a.SessionID != id || a.Position != posted.GetPosition() || a.Actor.User != "bob" || a.Actor.KeyName != "app" {
		t.Errorf("the message was posted by %+v", a)
	}
	for name, f := range map[string]struct {
		query string
		want  []int // indexes into before
	}{
		"a session":              {"session=" + id, []int{1, 2, 3}},
		"a key by its name":      {"actor=app", []int{1, 2, 3}},
		"a key by its id":        {"actor=" + ops.KeyID, []int{0, 4}},
		"an end user":            {"actor=ann", []int{0, 3}},
		"a user of one session":  {"actor=ann&session=" + id, []int{3}},
		"the root key":           {"actor=root", []int{5}},
		"nobody":                 {"actor=eve", nil},
		"a time":                 {"since=" + before[2].Time, []int{0, 1, 2}},
		"pages":                  {"pageSize=2", []int{0, 1, 2, 3, 4, 5}},
		"pages of one entry":     {"pageSize=1&actor=app", []int{1, 2, 3}},
		"a time that is to come": {"since=2999-01-01T00:00:00Z", nil},
	} {
		query, err := url.ParseQuery(f.query)
		if err != nil {
			t.Fatal(err)
		}
		var want []auditEntry
		for _, i := range f.want {
			want = append(want, before[i])
		}
		if got := admin.audits(query); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the audit lists %+v, want %+v", name, got, want)
		}
	}

	user.gets(http.StatusForbidden, "GET", "/api/audit", nil, nil)
	_, limited := admin.makes(map[string]any{"name": "limited", "role": "admin", "agents": []string{"default"}})
	limited.gets(http.StatusForbidden, "GET", "/api/audit", nil, nil)
	_, other := root.makes(map[string]any{"name": "other", "tenant": "globex"})
	if list := other.audits(nil); len(list) != 1 || list[0].firstType() != "key_created" {
		t.Errorf("another tenant's audit lists %+v", list)
	}
	for query, want := range map[string]string{
		"session=" + id: `"SESSION_NOT_FOUND"`, "session=none": `"field":"session"`, "since=yesterday": `"field":"since"`, "pageToken=x": `"field":"pageToken"`,
		"pageSize=101": `"field":"pageSize"`, "actor=%00": `"field":"actor"`, "actor=" + strings.Repeat("a", 257): `"field":"actor"`, "user=ann": `"field":"user"`,
	} {
		if status, raw := other.asks("GET", "/api/audit?"+query, nil); status/100 != 4 || !strings.Contains(string(raw), want) {
			t.Errorf("GET /api/audit?%.40s answers %d %s", query, status, raw)
		}
	}

	admin.asEndUser("dora").gets(http.StatusOK, "DELETE", "/api/sessions/"+id, nil, nil)
	c.AwaitDeleted("acme", id)
	var deleted []auditEntry
	of := url.Values{"session": {id}}
	harness.Eventually(t, "the audit has the deletion", func() bool { deleted = admin.audits(of); return len(deleted) == 4 })
	if a := deleted[0]; a.firstType() != "session_deleted" || a.Actor.User != "dora" || !reflect.DeepEqual(deleted[1:], before[1:4]) {
		t.Errorf("after the deletion the audit lists %+v", deleted)
	}
	awaitErasedOf(t, c, c.NewJanitor(janitor.Config{Grace: time.Millisecond}), "acme", id)
	if first := lifeActors(t, c, events.LifeSubject("acme", id)); len(first) != 1 {
		t.Errorf("the log still has %v of the session's life", first)
	}
	if list := admin.audits(of); !reflect.DeepEqual(list, deleted) {
		t.Errorf("after the content was removed the audit lists %+v, want %+v", list, deleted)
	}
	nc, _, err := c.Servers.Connect(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	for _, compare := range []bool{true, false, true} {
		if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: c.Servers.DatabaseURL}, projector.Deps{Log: c.Servers.Log, NATS: nc}, compare); err != nil {
			t.Errorf("rebuild, compare %t: %v", compare, err)
		}
	}
	if list := admin.audits(of); !reflect.DeepEqual(list, deleted) {
		t.Errorf("after a rebuild the audit lists %+v, want %+v", list, deleted)
	}

	folder := t.TempDir()
	code, out, says := c.RunCLI(t, folder, folder, "audit", "--key", ops.Key, "--session", id, "--actor", "app", "--since", "1h", "--json")
	var first auditEntry
	if line, _, _ := strings.Cut(out, "\n"); code != 0 || json.Unmarshal([]byte(line), &first) != nil || !reflect.DeepEqual(first, deleted[1]) {
		t.Errorf("spool audit ended with %d: %s%s", code, out, says)
	}
	if code, out, says = c.RunCLI(t, folder, folder, "audit", "--key", ops.Key, "--session", id); code != 0 || strings.Count(out, "\n") != 5 || !strings.Contains(out, "session_deleted") || !strings.Contains(out, "dora") {
		t.Errorf("spool audit ended with %d: %s%s", code, out, says)
	}
	if code, _, says = c.RunCLI(t, folder, folder, "audit", "--since", "yesterday"); code == 0 || !strings.Contains(says, "since") {
		t.Errorf("spool audit --since yesterday ended with %d: %s", code, says)
	}
}
