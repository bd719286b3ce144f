package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/session/janitor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// untilFile is a script with an agent whose tool call prints until a file exists.
const untilFile = `
rules:
  - match: {user: {regex: 'wait for (\S+)'}, tools: [run_code]}
    steps:
      - tool: {name: run_code, input: {language: bash, code: "while ! [ -e {{match 1}} ]; do sleep 0.1; done; echo found"}}
      - text: 'It said: {{result}}'
  - match: {user: hello}
    steps: [{text: Hello.}]
`

// TestStoreFull_EndsAndControlsAreStored lets one tenant fill the store of NATS with files. After that, requests that
// need space are refused with STORAGE_FULL, while another tenant's executions end and take controls, and services
// start. When the janitor has erased the files, everything continues.
func TestStoreFull_EndsAndControlsAreStored(t *testing.T) {
	t.Parallel()
	const rootKey = "the-root-key-of-the-storage-test-000"
	c := harness.New(t, harness.Options{MaxStore: natsserver.MinStoreSize, Gateway: gateway.Config{Auth: gateway.AuthKeys, RootKey: rootKey}, Script: untilFile, KeepLogs: true})
	root := withKey(t, c, rootKey)
	hog, ours := root.tenant("hog"), root.tenant("ours")
	spool := map[string]any{"architecture": "spool"}
	create := func(k keyHolder) string { return k.made(http.StatusCreated, "/api/sessions", spool).SessionID }
	flag := filepath.Join(t.TempDir(), "flag")
	ask := map[string]any{"content": "wait for " + flag}
	post := func(session string) string {
		return ours.made(http.StatusAccepted, "/api/sessions/"+session+"/messages", ask).ExecutionID
	}
	ending, cancelled, terminated := create(ours), create(ours), create(ours)
	ends, cancels, terminates := post(ending), post(cancelled), post(terminated)
	for _, execution := range []string{ends, cancels, terminates} {
		ours.reaches(execution, "running")
	}
	waits := post(cancelled) // queued behind the cancelled execution
	big := create(hog)
	hog.fills(c, big)
	useReserve(t, c)
	awaitLowStore(t, c, 1)

	for _, r := range []behindRequest{
		{"a message", "POST", "/api/sessions/" + ending + "/messages", ask},
		{"a session", "POST", "/api/sessions", spool},
		{"a file", "PUT", "/api/sessions/" + ending + "/files/a", "x"},
		{"an agent", "POST", "/api/agents", map[string]any{"ref": map[string]any{"scope": "organization", "org": "o", "slug": "a"}, "spec": map[string]any{}}},
	} {
		code, raw := ours.asks(r.method, r.path, r.body)
		refused(t, r.name, http.StatusInsufficientStorage, "STORAGE_FULL", "", code, raw)
	}
	c.StartSessionService("while-full")
	c.StartExecutor()
	c.StartGateway()
	awaitLowStore(t, c, 2)
	if code, raw := ours.asks("POST", "/api/executions/"+cancels+"/cancel", nil); code/100 != 2 {
		t.Errorf("cancel: %d %s", code, raw)
	}
	if code, raw := ours.asks("POST", "/api/executions/"+terminates+"/terminate", nil); code/100 != 2 {
		t.Errorf("terminate: %d %s", code, raw)
	}
	if err := os.WriteFile(flag, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ours.reaches(ends, "completed")
	ours.reaches(cancels, "cancelled")
	ours.reaches(terminates, "cancelled")
	if phase := ours.phase(waits); phase != "queued" {
		t.Errorf("an execution that was not started is %s", phase)
	}

	if code, raw := hog.asks("DELETE", "/api/sessions/"+big, nil); code/100 != 2 {
		t.Fatalf("delete: %d %s", code, raw)
	}
	c.AwaitDeleted("hog", big)
	j := c.NewJanitor(janitor.Config{Grace: time.Millisecond})
	harness.Eventually(t, "the janitor has freed the store", func() bool {
		if _, err := j.RunPass(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		code, _ := ours.asks("POST", "/api/sessions/"+ending+"/messages", map[string]any{"content": "hello"})
		return code == http.StatusAccepted
	})
	ours.reaches(waits, "completed")
	for _, session := range []string{ending, cancelled, terminated} {
		ours.asks("DELETE", "/api/sessions/"+session, nil)
		c.AwaitDeleted("ours", session)
	}
}

// fills puts files into a session until they are refused.
func (k keyHolder) fills(c *harness.Cluster, session string) {
	k.t.Helper()
	content := bytes.Repeat([]byte("spool"), 40<<20/5)
	for i := range 100 {
		code, raw := request(k.t, "PUT", fmt.Sprintf("%s/api/sessions/%s/files/f%d", c.URL(0), session, i), k.header, content)
		if code/100 == 2 {
			continue
		}
		refused(k.t, "a file", http.StatusInsufficientStorage, "STORAGE_FULL", "", code, raw)
		// The next file is smaller, until no file is accepted.
		if content = content[:len(content)/4]; len(content) < 1000 {
			return
		}
	}
	k.t.Fatal("the store accepts every file")
}

// useReserve uses 8 MiB of the reserve, so that short-lived data, such as commands, does not lift the store out of the
// reserve again.
func useReserve(t *testing.T, c *harness.Cluster) {
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
	for range 8 {
		if _, err := js.Publish(t.Context(), "$O."+topology.BucketWorkspaces+".C.sink", make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
}

// awaitLowStore blocks until n executors have read that only the reserve of the store is left. Each reads the fill
// level once a second, and logs changes.
func awaitLowStore(t *testing.T, c *harness.Cluster, n int) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d executors know that the store is full", n), func() bool {
		low := map[any]bool{} // by the executor's id
		for _, r := range c.LogRecords() {
			if r["part"] == "executor" && r["msg"] == "fill level of the NATS store changed" {
				low[r["executor"]] = r["reserveOnly"] == true
			}
		}
		count := 0
		for _, is := range low {
			if is {
				count++
			}
		}
		return count == n
	})
}

func (k keyHolder) phase(execution string) string {
	k.t.Helper()
	code, raw := k.asks("GET", "/api/executions/"+execution, nil)
	var x struct{ Phase string }
	if err := json.Unmarshal(raw, &x); err != nil || code != http.StatusOK && code != http.StatusNotFound && !strings.Contains(string(raw), "READ_MODEL_BEHIND") {
		k.t.Fatalf("execution: %d %s", code, raw)
	}
	return x.Phase
}

// reaches waits until an execution is in a phase.
func (k keyHolder) reaches(execution, phase string) {
	k.t.Helper()
	harness.Eventually(k.t, "the execution is "+phase, func() bool { return k.phase(execution) == phase })
}
