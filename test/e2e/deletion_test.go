package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session/janitor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// repeating is a script of a model that runs a command and repeats its output, in pieces that contain a whole marker.
const repeating = `
models: [known-model]
stream: {piece: 4096, delay: 1ms}
rules:
  - name: shell
    match: {user: {regex: 'run the command (?s)(.*)'}, tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: '{{match 1}}'}}
      - text: 'It said: {{result}}'
  - name: greet
    match: {user: hello}
    steps: [{text: Hello.}]
`

// createMarkedSession returns a session that contains a marker in everything that a session stores: the text of a message, a
// message so large that the log stores it as an object, the output of a tool, the model's answer, a file, and a
// secret.
func createMarkedSession(t *testing.T, c *harness.Cluster, marker string) string {
	t.Helper()
	id := c.CreateSession("spool", map[string]any{
		"model": "known-model", "workspaceFiles": []map[string]any{{"path": "in.txt", "content": marker + "-workspace-file\n"}},
		"metadata":       map[string]any{"note": marker + "-metadata"},
		"sessionOptions": map[string]any{"egress": []string{marker + "-host.example.com"}},
	})
	post := func(text string, more map[string]any) {
		t.Helper()
		body := map[string]any{"content": text}
		for k, v := range more {
			body[k] = v
		}
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		code, raw := request(t, "POST", c.URL(0)+"/api/sessions/"+id+"/messages", map[string]string{"Idempotency-Key": marker + "-" + text[:3]}, raw)
		var a struct{ ExecutionID string }
		if err := json.Unmarshal(raw, &a); err != nil || code != http.StatusAccepted {
			t.Fatalf("post answered %d %s", code, raw)
		}
		harness.Eventually(t, "the execution has ended", func() bool {
			var x struct{ Phase, Code, Message string }
			c.Call(0, "GET", "/api/executions/"+a.ExecutionID, nil, &x)
			if x.Phase == "failed" {
				t.Fatalf("execution %s failed: %s %s", a.ExecutionID, x.Code, x.Message)
			}
			return x.Phase == "completed"
		})
	}
	post("run the command cat in.txt; printf "+marker+"-to; printf 'ol-output'; echo "+marker+"-written > out.txt", map[string]any{
		"environment": map[string]any{"TOKEN": map[string]any{"value": marker + "-secret", "secret": true}},
	})
	post("hello "+marker+"-large "+strings.Repeat("x", 300<<10), nil)
	harness.Eventually(t, "the workspace is in the object store", func() bool {
		status, raw := request(t, "GET", c.URL(0)+"/api/sessions/"+id+"/files/out.txt", nil, nil)
		return status == http.StatusOK && strings.Contains(string(raw), marker)
	})
	return id
}

// contents are the streams whose files hold the content of sessions that the janitor erases. DELTAS also has content,
// which ends by age.
var contents = []string{topology.EventsStreamName(0), "OBJ_" + topology.BucketWorkspaces, "OBJ_" + topology.BucketPayloads}

// streamsWith returns the streams whose files contain a text.
func streamsWith(t *testing.T, store, text string) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	err := filepath.WalkDir(store, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && d.IsDir() {
			return nil
		}
		if err != nil {
			return err
		}
		raw, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the server has replaced the file
		}
		if err == nil && bytes.Contains(raw, []byte(text)) {
			parts := strings.Split(filepath.ToSlash(path), "/streams/")
			name, _, _ := strings.Cut(parts[len(parts)-1], "/")
			found[name] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// tablesWith returns the tables of the read models with a row that contains a text.
func tablesWith(t *testing.T, c *harness.Cluster, text string) map[string]bool {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), c.Servers.DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background()) //nolint:errcheck // the connection only reads
	rows, err := conn.Query(t.Context(), "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')")
	if err != nil {
		t.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, table := range tables {
		var n int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM "+table+" t WHERE strpos(t::text, $1) > 0", text).Scan(&n); err != nil {
			t.Fatalf("%s: %v", table, err)
		}
		if n > 0 {
			found[table] = true
		}
	}
	return found
}

// usageOf returns the whole usage of the default tenant.
func usageOf(t *testing.T, c *harness.Cluster) (turns, tokens, ms int64) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), c.Servers.DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background()) //nolint:errcheck // the connection only reads
	err = conn.QueryRow(t.Context(), "SELECT sum(turns)::bigint, sum(tokens)::bigint, sum(time_ms)::bigint FROM spool.tenant_usage WHERE tenant = 'default'").Scan(&turns, &tokens, &ms)
	if err != nil {
		t.Fatal(err)
	}
	return turns, tokens, ms
}

// awaitErased makes passes of the janitor until a session's content was removed.
func awaitErased(t *testing.T, c *harness.Cluster, j *janitor.Janitor, id string) {
	t.Helper()
	awaitErasedOf(t, c, j, harness.DefaultTenant, id)
}

// awaitErasedOf is like erased for a session of the given tenant.
func awaitErasedOf(t *testing.T, c *harness.Cluster, j *janitor.Janitor, tenant, id string) {
	t.Helper()
	sessions := eventlog.Sessions{Log: c.Servers.Log}
	harness.Eventually(t, "the content of "+id+" is removed", func() bool {
		if _, err := j.RunPass(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		l, err := sessions.Load(t.Context(), tenant, id, eventlog.LeaderOnly)
		if err != nil {
			t.Fatal(err)
		}
		rec, err := c.Servers.Log.CommitAt(t.Context(), sessions.Position(id, max(l.RunHead.Seq, 1)))
		return err == nil && rec.Subject == l.RunHead.Subject && rec.Events[0].Type() == events.ContentRemoved{}.EventType()
	})
}

// TestDeletion_LeavesNoContentBehind tests that, after a session was deleted, no API, stream, bucket, table or block
// file holds its content, while the same search finds the content of another session. The log is sound, a rebuild
// gives the same read models, and the tenant's usage does not change.
func TestDeletion_LeavesNoContentBehind(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: repeating})
	const gone, kept = "heron-5530", "osprey-8841"
	deleted, other := createMarkedSession(t, c, gone), createMarkedSession(t, c, kept)
	for _, marker := range []string{gone, kept} {
		for _, stream := range contents {
			if !streamsWith(t, c.NATSStore(), marker)[stream] {
				t.Errorf("before: %s is not in the files of %s", marker, stream)
			}
		}
		if len(tablesWith(t, c, marker)) == 0 {
			t.Errorf("before: %s is in no table", marker)
		}
	}
	turns, tokens, ms := usageOf(t, c)
	if turns != 4 || tokens == 0 {
		t.Errorf("%d turns and %d tokens are counted", turns, tokens)
	}
	planted := plant(t, c, deleted, other)
	stale, err := eventlog.Sessions{Log: c.Servers.Log}.Load(t.Context(), harness.DefaultTenant, deleted, eventlog.LeaderOnly)
	if err != nil {
		t.Fatal(err)
	}
	c.DeleteSession(deleted)
	j := c.NewJanitor(janitor.Config{Grace: time.Millisecond})
	awaitErased(t, c, j, deleted)

	control := streamsWith(t, c.NATSStore(), kept)
	left := streamsWith(t, c.NATSStore(), gone)
	for _, stream := range contents {
		if !control[stream] {
			t.Errorf("%s is not in the files of %s, so the search proves nothing", kept, stream)
		}
		if left[stream] {
			t.Errorf("%s is still in the files of %s", gone, stream)
		}
	}
	harness.Eventually(t, "the rows are gone", func() bool { return len(tablesWith(t, c, gone)) == 0 })
	if len(tablesWith(t, c, kept)) == 0 {
		t.Errorf("%s is in no table", kept)
	}
	for _, path := range []string{"", "/events", "/blocks", "/files", "/files/out.txt", "/conversations", "/executions"} {
		if status, raw := request(t, "GET", c.URL(0)+"/api/sessions/"+deleted+path, nil, nil); status != http.StatusNotFound || strings.Contains(string(raw), gone) {
			t.Errorf("GET %s answers %d %s", path, status, raw)
		}
	}
	for _, path := range []string{"/api/sessions", "/api/executions"} {
		if _, raw := request(t, "GET", c.URL(0)+path, nil, nil); strings.Contains(string(raw), deleted) {
			t.Errorf("GET %s still lists the session: %s", path, raw)
		}
	}
	leavesNoKeys(t, c, deleted)
	leavesNoRecords(t, c, deleted, other, planted)
	harness.Eventually(t, "no file of NATS holds the content, apart from text in flight", func() bool {
		found := streamsWith(t, c.NATSStore(), gone)
		delete(found, topology.StreamDeltas)
		return len(found) == 0
	})
	refusesWrites(t, c, stale)

	if a, b, d := usageOf(t, c); a != turns || b != tokens || d != ms {
		t.Errorf("the tenant has used %d turns, %d tokens and %d ms, before the removal %d, %d and %d", a, b, d, turns, tokens, ms)
	}
	c.VerifyLog()
	nc, log := c.Servers.Connect, c.Servers.Log
	conn, _, err := nc(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: c.Servers.DatabaseURL}, projector.Deps{Log: log, NATS: conn}, true); err != nil {
		t.Errorf("rebuild --compare: %v", err)
	}
	if _, end := c.RunQuery(other, "run the command echo on", nil); end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Errorf("the other session's next turn ended with %s %s", end.Type, end.Data)
	}
	report, err := j.RunPass(t.Context(), false)
	if err != nil || len(report.Items) != 0 {
		t.Errorf("a pass with nothing to do found %+v, %v", report.Items, err)
	}
}

// leavesNoKeys checks that no key of the buckets has the session's id in its name.
func leavesNoKeys(t *testing.T, c *harness.Cluster, id string) {
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
	for _, bucket := range []string{topology.BucketWorkspaces, topology.BucketPayloads} {
		o, err := js.ObjectStore(t.Context(), bucket)
		if err != nil {
			t.Fatal(err)
		}
		list, err := o.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range list {
			if strings.Contains(x.Name, id) {
				t.Errorf("bucket %s still holds %s", bucket, x.Name)
			}
		}
	}
}

// buckets opens key-value buckets with the rights of admin.
func buckets(t *testing.T, c *harness.Cluster, names ...string) (list []jetstream.KeyValue) {
	t.Helper()
	nc, _, err := c.Servers.Connect(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		kv, err := js.KeyValue(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, kv)
	}
	return list
}

// plant stores a secret for the first execution of each session after its end, as if the session service had not
// removed it. It returns the keys by session.
func plant(t *testing.T, c *harness.Cluster, sessions ...string) map[string]string {
	t.Helper()
	kv, planted := buckets(t, c, topology.BucketSecrets)[0], map[string]string{}
	for _, id := range sessions {
		var page struct {
			Executions []struct{ ExecutionID string }
		}
		if code := c.Call(0, "GET", "/api/sessions/"+id+"/executions", nil, &page); code != http.StatusOK || len(page.Executions) == 0 {
			t.Fatalf("the list of executions answered %d with %+v", code, page)
		}
		planted[id] = harness.DefaultTenant + ".x." + page.Executions[0].ExecutionID + ".PLANTED"
		if _, err := kv.Put(t.Context(), planted[id], []byte("sealed")); err != nil {
			t.Fatal(err)
		}
	}
	return planted
}

// leavesNoRecords checks that no secret and no idempotency record of a session exists, and that those of the other
// session do.
func leavesNoRecords(t *testing.T, c *harness.Cluster, id, other string, planted map[string]string) {
	t.Helper()
	list := buckets(t, c, topology.BucketSecrets, topology.BucketIdempotency)
	secrets, idempotency := list[0], list[1]
	if _, err := secrets.Get(t.Context(), planted[id]); !errors.Is(err, jetstream.ErrKeyNotFound) {
		t.Errorf("the secret of the deleted session: %v", err)
	}
	if _, err := secrets.Get(t.Context(), planted[other]); err != nil {
		t.Errorf("the secret of the other session: %v", err)
	}
	keys, err := idempotency.ListKeys(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	records := map[string]int{}
	for key := range keys.Keys() {
		entry, err := idempotency.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []string{id, other} {
			if bytes.Contains(entry.Value(), []byte(s)) {
				records[s]++
			}
		}
	}
	if records[id] != 0 || records[other] != 2 {
		t.Errorf("idempotency records: %d of the deleted session and %d of the other, want 0 and 2", records[id], records[other])
	}
}

// refusesWrites appends to both subjects of a removed session like a late writer, with the head that it knew and with
// none. Both must be refused.
func refusesWrites(t *testing.T, c *harness.Cluster, stale *eventlog.SessionState) {
	t.Helper()
	for name, head := range map[string]eventlog.Head{
		"life, as it was": stale.LifeHead, "run, as it was": stale.RunHead,
		"life, of none": {Subject: stale.LifeHead.Subject}, "run, of none": {Subject: stale.RunHead.Subject},
	} {
		id := events.DeriveID(events.KindCommit, "late", name)
		_, err := c.Servers.Log.Append(t.Context(), head, events.Draft{
			ID: id, Actor: events.Actor{Kind: "service", ID: "late"}, Epoch: 9,
			Events: []events.Event{{ID: events.DeriveID(events.KindEvent, id), Time: time.Now(), Source: events.FromServer, Data: events.Log{}}},
		})
		var conflict *eventlog.ConflictError
		if !errors.As(err, &conflict) {
			t.Errorf("%s: a late write got %v, want a conflict", name, err)
		}
	}
}
