// Package clients tests the clients of other languages against real services.
package clients

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// buildTypeScript builds clients/typescript once for all tests of the process.
var buildTypeScript = sync.OnceValues(func() ([]byte, error) {
	return exec.Command("../../scripts/clients", "build").CombinedOutput()
})

// needTypeScript builds the client. It skips the test where Node is not installed.
func needTypeScript(t *testing.T) {
	t.Helper()
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not on the PATH: run scripts/install", program)
		}
	}
	if out, err := buildTypeScript(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestTypeScript_OwnTestsPass(t *testing.T) {
	t.Parallel()
	needTypeScript(t)
	cmd := exec.Command("npm", "run", "--silent", "test")
	cmd.Dir = "../../clients/typescript"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// cutter is a proxy before a gateway that cuts each stream of events after its first event with data, and a stream of changes
// after the event that follows its event started.
type cutter struct {
	gateway string
	cuts    atomic.Int32
}

func (c *cutter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "" {
		c.serveSocket(w, r)
		return
	}
	req, err := http.NewRequestWithContext(r.Context(), r.Method, c.gateway+r.URL.RequestURI(), r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	req.Header = r.Header.Clone()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	for name, values := range resp.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(resp.StatusCode)
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		_, _ = io.Copy(w, resp.Body) // the client may be gone
		return
	}
	var sent []byte
	buffer := make([]byte, 64<<10)
	for {
		n, err := resp.Body.Read(buffer)
		unsent := len(sent)
		sent = append(sent, buffer[:n]...)
		end := len(sent)
		events := 1
		if strings.HasSuffix(r.URL.Path, "/sessions/stream") {
			events = 2 // the first one is started
		}
		if cut := endOfEvent(sent, events); cut >= 0 {
			end = min(len(sent), cut+20) // up to 20 bytes of the next event follow, which the client must drop
			err = io.EOF
		}
		_, _ = w.Write(sent[unsent:end])
		w.(http.Flusher).Flush()
		if errors.Is(err, io.EOF) {
			c.cuts.Add(1)
			panic(http.ErrAbortHandler)
		}
		if err != nil {
			return
		}
	}
}

// endOfEvent returns the length of a stream of server-sent events up to the end of its nth event with data, or -1 if the
// stream is shorter.
func endOfEvent(stream []byte, n int) int {
	end := 0
	for range n {
		data := bytes.Index(stream[end:], []byte("\ndata: "))
		if data < 0 {
			return -1
		}
		blank := bytes.Index(stream[end+data:], []byte("\n\n"))
		if blank < 0 {
			return -1
		}
		end += data + blank + 2
	}
	return end
}

// serveSocket passes on the first message of the client and the messages of the gateway, up to the first event.
func (c *cutter) serveSocket(w http.ResponseWriter, r *http.Request) {
	//nolint:bodyclose // after Dial the body never needs to be closed
	gateway, _, err := websocket.Dial(r.Context(), "ws"+strings.TrimPrefix(c.gateway, "http")+r.URL.RequestURI(), nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer func() { _ = gateway.CloseNow() }()
	gateway.SetReadLimit(16 << 20)
	client, err := websocket.Accept(w, r, nil)
	if err != nil {
		return // Accept has sent the response
	}
	defer func() { _ = client.CloseNow() }()
	_, join, err := client.Read(r.Context())
	if err == nil {
		err = gateway.Write(r.Context(), websocket.MessageText, join)
	}
	for err == nil {
		var message []byte
		if _, message, err = gateway.Read(r.Context()); err == nil {
			err = client.Write(r.Context(), websocket.MessageText, message)
		}
		if bytes.Contains(message, []byte(`"type":"session:event"`)) {
			c.cuts.Add(1)
			return
		}
	}
}

// TestTypeScript_CutAfterEveryEvent tests that a client whose connection is cut after every event and every piece of
// text, on two gateways in turn, receives each event once and shows the blocks of the API.
func TestTypeScript_CutAfterEveryEvent(t *testing.T) {
	t.Parallel()
	needTypeScript(t)
	script, err := os.ReadFile("../e2e/testdata/stream.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c := harness.New(t, harness.Options{Gateways: 2, Script: string(script)})
	for _, transport := range []string{"sse", "websocket"} {
		t.Run(transport, func(t *testing.T) { followWithCuts(t, c.ForSubtest(t), transport) })
	}
}

// followWithCuts runs a client in Node that follows a session during three turns, and checks what it received.
func followWithCuts(t *testing.T, c *harness.Cluster, transport string) {
	t.Helper()
	var urls []string
	var cutters []*cutter
	for i := range 2 {
		cut := &cutter{gateway: c.URL(i)}
		server := httptest.NewServer(cut)
		t.Cleanup(server.Close)
		urls, cutters = append(urls, server.URL), append(cutters, cut)
	}
	session := c.CreateSession("spool", nil)
	const turns = 3
	cmd := exec.CommandContext(t.Context(), "node", "--experimental-websocket", "testdata/follow.mjs")
	cmd.Env = append(os.Environ(), "SPOOL_URLS="+strings.Join(urls, ","), "SESSION="+session, "TRANSPORT="+transport, "TURNS="+strconv.Itoa(turns))
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range turns {
		c.PostMessage(session, "list the folder")
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s%s", err, out.Bytes(), problems.Bytes())
	}
	var got struct {
		Seqs      []uint32
		Texts     map[string]string
		Blocks    []events.Block
		Execution string
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v\n%s%s", err, out.Bytes(), problems.Bytes())
	}
	for i, seq := range got.Seqs {
		if seq != uint32(i)+1 {
			t.Fatalf("event %d has seq %d", i+1, seq)
		}
	}
	var api struct{ Blocks []events.Block }
	c.Call(0, "GET", "/api/sessions/"+session+"/blocks", nil, &api)
	want, _ := json.Marshal(api.Blocks) // blocks always encode
	shown, _ := json.Marshal(got.Blocks)
	if string(shown) != string(want) || len(api.Blocks) < turns*3 {
		t.Errorf("the client shows\n%s\nthe API\n%s", shown, want)
	}
	content := map[string]string{}
	for _, b := range api.Blocks {
		content[b.ID] = b.Content
	}
	if len(got.Texts) < turns {
		t.Errorf("text in flight of %d blocks came, want at least %d", len(got.Texts), turns)
	}
	for id, text := range got.Texts {
		// The streamed input of a tool call is not part of its complete block.
		if content[id] != "" && !strings.HasPrefix(content[id], text) {
			t.Errorf("the pieces of %s add up to\n%q, its text is\n%q", id, text, content[id])
		}
	}
	if got.Execution != "completed" {
		t.Errorf("waitForEnd returned an execution in phase %q", got.Execution)
	}
	for i, cut := range cutters {
		if n := int(cut.cuts.Load()); n < len(got.Seqs)/3 {
			t.Errorf("gateway %d was cut %d times in %d events", i, n, len(got.Seqs))
		}
	}
}

// TestTypeScript_ReadmeExampleRuns runs the example in the README of the client.
func TestTypeScript_ReadmeExampleRuns(t *testing.T) {
	t.Parallel()
	needTypeScript(t)
	page, err := os.ReadFile("../../clients/typescript/README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```ts\n")
	example, _, ok := strings.Cut(rest, "```\n")
	const url = "http://127.0.0.1:7700"
	if !ok || !strings.Contains(example, url) {
		t.Fatalf("the page has no example with %s", url)
	}
	c := harness.New(t, harness.Options{})
	// Below the package's folder, its name stands for the package itself.
	file := "../../clients/typescript/dist/readme.mjs"
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(example, url, c.URL(0))), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "node", file).CombinedOutput()
	var list struct {
		Sessions []struct{ SessionID string }
	}
	c.Call(0, "GET", "/api/sessions", nil, &list)
	for _, s := range list.Sessions {
		c.DeleteSession(s.SessionID)
	}
	if err != nil || !bytes.Contains(out, []byte("assistant_text")) {
		t.Errorf("%v\n%s", err, out)
	}
}
