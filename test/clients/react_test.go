package clients

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/http/httptest"
	"os"
	"os/exec"
	"reflect"
	"slices"
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

// TestExampleChat_InABrowser tests the page and the server of examples/chat with real services.
func TestExampleChat_InABrowser(t *testing.T) {
	t.Parallel()
	needTypeScript(t)
	script, err := os.ReadFile("../e2e/testdata/stream.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c := harness.New(t, harness.Options{Script: string(script)})
	const folder = "../../examples/chat"
	run := func(dir, program string, args ...string) {
		t.Helper()
		cmd := exec.Command(program, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", program, args, err, out)
		}
	}
	run(folder, "npx", "--no-install", "tsc", "-p", "tsconfig.json")
	run(folder, "npx", "--no-install", "vite", "build", "--logLevel", "error")
	server := exec.CommandContext(t.Context(), "node", "server.mjs")
	server.Dir = folder
	server.Env = append(os.Environ(), "PORT=0", "SPOOL_URL="+c.URL(0))
	var problems bytes.Buffer
	server.Stderr = &problems
	lines, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Wait() }) // the context of the test has killed it
	url, err := bufio.NewReader(lines).ReadString('\n')
	if err != nil {
		t.Fatalf("%v\n%s", err, problems.Bytes())
	}
	browser := exec.CommandContext(t.Context(), "node", "testdata/chat.mjs")
	browser.Env = append(os.Environ(), "PAGE_URL="+strings.TrimSpace(url))
	var stderr bytes.Buffer
	browser.Stderr = &stderr
	out, err := browser.Output()
	var got struct {
		Session      string
		Shown, Again [2][]string
		Refused      []int
		Errors       []string
	}
	if err != nil || json.Unmarshal(out, &got) != nil {
		t.Fatalf("%v\n%s%s", err, out, stderr.Bytes())
	}
	t.Cleanup(func() { c.DeleteSession(got.Session) })
	var api struct{ Blocks []events.Block }
	c.Call(0, "GET", "/api/sessions/"+got.Session+"/blocks", nil, &api)
	var want [2][]string
	for _, b := range api.Blocks {
		switch b.Kind {
		case events.KindUserMessage:
			want[0] = append(want[0], b.Content)
		case events.KindAssistantText:
			want[1] = append(want[1], b.Content)
		}
	}
	if len(want[1]) == 0 || !reflect.DeepEqual(got.Shown, want) || !reflect.DeepEqual(got.Again, want) {
		t.Errorf("the page showed\n%q\nand again\n%q\nthe API\n%q", got.Shown, got.Again, want)
	}
	if !slices.Equal(got.Refused, []int{403, 403, 403}) || len(got.Errors) > 0 {
		t.Errorf("requests for other sessions: %v; errors of the page: %q", got.Refused, got.Errors)
	}
}
