package clients

import (
	"bytes"
	"encoding/json"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

func TestReact_OwnTestsPass(t *testing.T) {
	t.Parallel()
	needTypeScript(t)
	cmd := exec.Command("npm", "run", "--silent", "test")
	cmd.Dir = "../../clients/react"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// TestReact_HooksShowWhatTheAPIReturns tests the hooks against real services, with streams that are cut after every event.
func TestReact_HooksShowWhatTheAPIReturns(t *testing.T) {
	t.Parallel()
	needTypeScript(t)
	script, err := os.ReadFile("../e2e/testdata/stream.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c := harness.New(t, harness.Options{Gateways: 2, Script: string(script)})
	var urls []string
	var cutters []*cutter
	for i := range 2 {
		cut := &cutter{gateway: c.URL(i)}
		server := httptest.NewServer(cut)
		t.Cleanup(server.Close)
		urls, cutters = append(urls, server.URL), append(cutters, cut)
	}
	const turns = 3
	cmd := exec.CommandContext(t.Context(), "node", "testdata/hooks.mjs")
	cmd.Env = append(os.Environ(), "SPOOL_URLS="+strings.Join(urls, ","), "TURNS="+strconv.Itoa(turns))
	var problems bytes.Buffer
	cmd.Stderr = &problems
	out, err := cmd.Output()
	var got struct {
		Session          string
		Blocks, Replayed []events.Block
		Keys             int
		Streamed         bool
		Usage            struct{ InputTokens int }
		Errors           []string
	}
	if err != nil || json.Unmarshal(out, &got) != nil {
		t.Fatalf("%v\n%s%s", err, out, problems.Bytes())
	}
	t.Cleanup(func() { c.DeleteSession(got.Session) })
	var api struct{ Blocks []events.Block }
	c.Call(0, "GET", "/api/sessions/"+got.Session+"/blocks", nil, &api)
	want, _ := json.Marshal(api.Blocks) // blocks always encode
	for name, blocks := range map[string][]events.Block{"useMessages": got.Blocks, "useReplay": got.Replayed} {
		if shown, _ := json.Marshal(blocks); string(shown) != string(want) {
			t.Errorf("%s shows\n%s\nthe API\n%s", name, shown, want)
		}
	}
	if len(api.Blocks) < turns*3 || got.Keys != turns || !got.Streamed || got.Usage.InputTokens == 0 || len(got.Errors) > 0 {
		t.Errorf("%d blocks, %d keys of user messages, streamed %t, %d input tokens, errors %q", len(api.Blocks), got.Keys, got.Streamed, got.Usage.InputTokens, got.Errors)
	}
	if cutters[0].cuts.Load()+cutters[1].cuts.Load() < int32(len(api.Blocks)) {
		t.Errorf("the streams were cut %d times", cutters[0].cuts.Load()+cutters[1].cuts.Load())
	}
}
