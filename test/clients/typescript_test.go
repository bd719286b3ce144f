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

// cutter is a proxy before a gateway that cuts each stream of events after its first event with data.
type cutter struct {
	gateway string
	cuts    atomic.Int32
}

func (c *cutter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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
		if data := bytes.Index(sent, []byte("\ndata: ")); data >= 0 {
			if blank := bytes.Index(sent[data:], []byte("\n\n")); blank >= 0 {
				// Up to 20 bytes of the next event follow, which the client must drop.
				end = min(len(sent), data+blank+2+20)
				err = io.EOF
			}
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
	cmd := exec.CommandContext(t.Context(), "node", "testdata/follow.mjs")
	cmd.Env = append(os.Environ(), "SPOOL_URLS="+strings.Join(urls, ","), "SESSION="+session, "TURNS="+strconv.Itoa(turns))
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
		if !strings.HasPrefix(content[id], text) {
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
