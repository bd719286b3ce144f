package e2e

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session/janitor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// writesWhenAsked is a script with an agent whose tool call waits for a file, and then writes one into its workspace.
const writesWhenAsked = `
rules:
  - match: {user: {regex: 'wait for (\S+)'}, tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: "while ! [ -e {{match 1}} ]; do sleep 0.1; done; echo found > out.txt"}}
      - text: 'It said: {{result}}'
  - match: {user: hello}
    steps: [{text: Hello.}]
`

// storedBy returns the number of stored bytes that is shown to a tenant.
func (k keyHolder) storedBy() float64 {
	k.t.Helper()
	var now struct {
		Used struct{ StorageBytes float64 }
	}
	k.gets(http.StatusOK, "GET", "/api/limits", nil, &now)
	return now.Used.StorageBytes
}

// TestTenantStorage_HoldsOneTenant tests a limit that is lowered below what a tenant stores. It refuses new work of
// the tenant, and ends nothing: the tenant's turn and another tenant's complete, and the snapshot of the turn is
// stored. When the janitor has removed a deleted session, the tenant continues. A rebuild counts the same.
func TestTenantStorage_HoldsOneTenant(t *testing.T) {
	t.Parallel()
	const rootKey = "the-root-key-of-the-tenants-storage"
	c := harness.New(t, harness.Options{Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKey}, Script: writesWhenAsked})
	root := withKey(t, c, rootKey)
	hog, ours := root.tenant("hog"), root.tenant("ours")
	create := func(k keyHolder) string {
		return k.made(http.StatusCreated, "/api/sessions", map[string]any{"architecture": "spool"}).SessionID
	}
	flag := filepath.Join(t.TempDir(), "flag")
	ask := map[string]any{"content": "wait for " + flag}
	post := func(k keyHolder, session string) string {
		return k.made(http.StatusAccepted, "/api/sessions/"+session+"/messages", ask).ExecutionID
	}
	running, big, other := create(hog), create(hog), create(ours)
	runs, theirs := post(hog, running), post(ours, other)
	hog.reaches(runs, "running")
	ours.reaches(theirs, "running")
	put := func(content []byte) (int, []byte) {
		return request(t, "PUT", c.URL(0)+"/api/sessions/"+big+"/files/big", hog.header, content)
	}
	if code, raw := put(bytes.Repeat([]byte("x"), 3<<20)); code != http.StatusAccepted {
		t.Fatalf("put: %d %s", code, raw)
	}
	harness.Eventually(t, "the file is counted", func() bool { return hog.storedBy() > 3<<20 })

	const limit = 1 << 20
	root.gets(http.StatusOK, "PUT", "/api/limits", map[string]any{"tenant": "hog", "limits": map[string]any{"storageBytes": limit}}, nil)
	hello := map[string]any{"content": "hello"}
	harness.Eventually(t, "the limit refuses a session", func() bool {
		code, _ := hog.asks("POST", "/api/sessions", map[string]any{"architecture": "spool"})
		return code == http.StatusTooManyRequests
	})
	for _, r := range []behindRequest{
		{"a session", "POST", "/api/sessions", map[string]any{"architecture": "spool"}},
		{"a message", "POST", "/api/sessions/" + big + "/messages", hello},
		{"a file", "PUT", "/api/sessions/" + big + "/files/a", "x"},
	} {
		code, raw := hog.asks(r.method, r.path, r.body)
		refused(t, r.name, http.StatusTooManyRequests, "TENANT_STORAGE", "", code, raw)
	}
	if err := os.WriteFile(flag, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ours.reaches(theirs, "completed")
	ours.reaches(post(ours, other), "completed")
	hog.reaches(runs, "completed")
	harness.Eventually(t, "the snapshot of the turn is stored", func() bool {
		code, raw := hog.asks("GET", "/api/sessions/"+running+"/files/out.txt", nil)
		return code == http.StatusOK && strings.TrimSpace(string(raw)) == "found"
	})
	var synced struct {
		Events []struct{ Data struct{ Stored uint64 } }
	}
	hog.gets(http.StatusOK, "GET", "/api/sessions/"+running+"/events?types=workspace_synced", nil, &synced)
	if len(synced.Events) == 0 || synced.Events[0].Data.Stored == 0 {
		t.Errorf("the snapshots report %+v as added", synced.Events)
	}

	if code, raw := hog.asks("DELETE", "/api/sessions/"+big, nil); code/100 != 2 {
		t.Fatalf("delete: %d %s", code, raw)
	}
	c.AwaitDeleted("hog", big)
	if stored := hog.storedBy(); stored < 3<<20 {
		t.Errorf("%v bytes count before the janitor's pass", stored)
	}
	j := c.NewJanitor(janitor.Config{Grace: time.Millisecond})
	var again struct{ ExecutionID string }
	harness.Eventually(t, "the janitor has freed what the tenant stores", func() bool {
		if _, err := j.RunPass(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		code, raw := hog.asks("POST", "/api/sessions/"+running+"/messages", hello)
		if code == http.StatusAccepted && json.Unmarshal(raw, &again) != nil {
			t.Fatalf("answered %s", raw)
		}
		return code == http.StatusAccepted
	})
	hog.reaches(again.ExecutionID, "completed")
	if stored := hog.storedBy(); stored <= 0 || stored > limit {
		t.Errorf("%v bytes count after the janitor's pass", stored)
	}
	conn, _, err := c.Servers.Connect(topology.UserAdmin)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for id, k := range map[string]keyHolder{running: hog, other: ours} {
		k.asks("DELETE", "/api/sessions/"+id, nil)
	}
	c.AwaitDeleted("hog", running)
	c.AwaitDeleted("ours", other)
	if _, err := projector.Rebuild(t.Context(), projector.Config{DatabaseURL: c.Servers.DatabaseURL}, projector.Deps{Log: c.Servers.Log, NATS: conn}, true); err != nil {
		t.Errorf("rebuild --compare: %v", err)
	}
}
