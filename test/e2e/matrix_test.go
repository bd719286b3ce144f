package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

var matrixTable = flag.String("matrix", "", "run TestMatrix, TestReplay_InATerminal and TestFork_AmidTurn for every agent, and write the table of TestMatrix to this file")

// agentCase is an agent in a kind of sandbox.
type agentCase struct {
	architecture string
	program      string // program that must be on the PATH; "" for none
	docker       bool
	cuts         int // number of blocks of the second turn, of seven, after which its conversation can be cut
}

// agentCases returns the agents to test: all of them with -matrix, otherwise the built-in one.
func agentCases() []agentCase {
	list := []agentCase{
		{architecture: "spool", cuts: 3},
		{architecture: "claude-code", program: "claude", cuts: 5},
		{architecture: "codex", program: "codex", cuts: 5},
		{architecture: "opencode", program: "opencode", cuts: 1}, // after the last block
		{architecture: "acp", program: "opencode"},
		{architecture: "spool", docker: true, cuts: 3},
		{architecture: "claude-code", docker: true, cuts: 5},
	}
	if *matrixTable == "" {
		list = list[:1]
	}
	return list
}

// name returns the agent, or "agent in docker".
func (a agentCase) name() string {
	if a.docker {
		return a.architecture + " in docker"
	}
	return a.architecture + " in local"
}

// need skips the test if the agent cannot run on this machine.
func (a agentCase) need(t *testing.T) {
	t.Helper()
	if a.docker {
		harness.NeedDocker(t)
		return
	}
	if a.program == "" {
		return
	}
	if _, err := exec.LookPath(a.program); err != nil {
		t.Skipf("%s is not on the PATH: run scripts/install: %v", a.program, err)
	}
}

// settings returns the session options of the agent. No snapshot is taken within a turn unless the test requests one.
func (a agentCase) settings() map[string]any {
	more := maps.Clone(architectures()[a.architecture])
	options := map[string]any{}
	if a.architecture == "acp" {
		more = map[string]any{"model": "known-model"}
		options = maps.Clone(acpAgents()["opencode"])
	}
	options["syncIntervalMs"] = 86_400_000
	more["sessionOptions"] = options
	return more
}

// TestMatrix runs three turns with edits and a failing tool, and reads the session's past in every way: state, files,
// replay, diff, and forks between turns and at each event of the second turn that ends a block.
func TestMatrix(t *testing.T) {
	t.Parallel()
	table := "| agent | sandbox | events | states compared | forks | agents of forks asked | cuts within a turn | seconds |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
	for _, a := range agentCases() {
		t.Run(a.name(), func(t *testing.T) {
			a.need(t)
			began := time.Now()
			p := newPast(t, a)
			p.states()
			p.files()
			p.replays()
			p.diffs()
			p.forks()
			if !t.Failed() {
				agent, sandbox, _ := strings.Cut(a.name(), " in ")
				table += fmt.Sprintf("| %s | %s | %d | %d | %d | %d | after %d of %d blocks | %.0f |\n", agent, sandbox, len(p.log), p.compared, p.forked, len(p.begun)+1, p.exact, p.asked, time.Since(began).Seconds())
			}
		})
	}
	if *matrixTable != "" {
		if err := os.WriteFile(*matrixTable, []byte(table), 0o600); err != nil {
			t.Error(err)
		}
	}
}

// past is a session of three turns with everything that was observed while it ran.
type past struct {
	*talk
	agentCase
	rpc   spoolv1.SessionsClient
	held  *heldModel
	live  map[uint32][]events.Block // the client's view after each event
	trees map[uint32]tree           // the workspace at each snapshot, by the seq of its workspace_synced
	put   uint32                    // seq of the file that the client put between the turns
	log   []events.WireEvent        // all events, read from the log
	begun map[uint32]bool           // events at which forks begin whose agents were asked

	compared, forked, exact, asked int // numbers for the table
}

// clientFile is the file that the client puts between the turns, with its content.
const clientFile, clientContent = "client.txt", "of the client\n"

// newPast runs the session.
func newPast(t *testing.T, a agentCase) *past {
	t.Helper()
	p := &past{agentCase: a, held: newHeldModel(), live: map[uint32][]events.Block{}, trees: map[uint32]tree{}, begun: map[uint32]bool{}}
	c := harness.New(t, harness.Options{
		Script: script(t, "fork.yaml"), Docker: a.docker, Executor: executor.Config{AnthropicModel: "known-model", Slots: 4},
		ModelURL: func(url string) string { return p.held.serve(t, url) },
	})
	p.talk = &talk{t: t, c: c, session: c.CreateSession(a.architecture, a.settings()), reportsCost: a.architecture == "claude-code"}
	p.s = &harness.Stream{View: blocks.NewBlockView(), Seen: func(w events.WireEvent) { p.live[w.Seq] = p.s.View.Blocks() }}
	conn, err := grpc.NewClient(c.GRPCAddress(0), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	p.rpc = spoolv1.NewSessionsClient(conn)

	p.mustComplete("the fruit is apple; run echo one > a.txt; echo apple-$((400+11))", "Noted apple.")
	p.awaitSnapshot()
	p.recordWorkspace()
	p.putFile()
	p.secondTurn()
	p.mustComplete("the fruit is plum; write kept.txt", "Noted plum.")
	p.awaitSnapshot()
	p.recordWorkspace()
	p.readLog()
	if !slices.ContainsFunc(p.s.View.Blocks(), func(b events.Block) bool { return b.Kind == events.KindToolResult && b.IsError }) {
		t.Errorf("no tool failed in:\n%s", p.s.View)
	}
	return p
}

// putFile puts a file into the workspace between two turns, and waits for the snapshot that includes it.
func (p *past) putFile() {
	p.t.Helper()
	p.talk.put(clientFile, "text/plain", []byte(clientContent))
	p.join()
	defer p.s.Close()
	p.reads(func(e events.Event) bool { _, ok := e.Data.(events.FilePut); return ok })
	p.put = p.s.Cursor
	p.reads(func(e events.Event) bool { d, ok := e.Data.(events.WorkspaceSynced); return ok && d.Applied > 0 })
	p.recordWorkspace()
}

// reads reads the stream up to an event.
func (p *past) reads(right func(events.Event) bool) {
	p.t.Helper()
	for {
		w, err := p.s.Next()
		if err != nil {
			p.t.Fatal(err)
		}
		if w.Type != events.TextDelta && right(w.Event()) {
			return
		}
	}
}

// secondTurn stops the second turn after its first tool has ended: a snapshot is taken, the state so far is read, and
// the session is forked while it runs.
func (p *past) secondTurn() {
	p.t.Helper()
	p.held.hold("pear-422")
	execution := p.post("the fruit is pear; run echo two > a.txt; echo b > b.txt; echo pear-$((400+22)); exit 3", func(w events.WireEvent) bool {
		b, ok := block(w.Event())
		return !ok || b.Kind != events.KindToolResult
	})
	p.held.wait(p.t)
	p.c.Call(0, "POST", "/api/sessions/"+p.session+"/sync", map[string]any{}, nil)
	p.reads(func(e events.Event) bool { d, ok := e.Data.(events.WorkspaceSynced); return ok && d.Request > 0 })
	p.s.Close()
	p.recordWorkspace()
	p.readLog()
	p.states()
	p.forkWhileItRuns()
	p.held.release()
	p.join()
	if end := ended[events.ExecutionCompleted](p.until(execution)); !strings.Contains(end.Result, "Noted pear.") {
		p.t.Fatalf("the second turn ended with %+v", end)
	}
	p.awaitSnapshot()
	p.recordWorkspace()
}

// readLog reads the session's events from the log, up to the last one that the client has received.
func (p *past) readLog() {
	p.t.Helper()
	p.log = nil
	for n, err := range eventlog.SessionEvents(p.t.Context(), p.c.Servers.Log, tenantOf(p.t, p.c, p.session), p.session) {
		if err != nil {
			p.t.Fatal(err)
		}
		w, err := n.Event.ToWire(p.session, n.Seq, n.Position.String())
		if err != nil {
			p.t.Fatal(err)
		}
		if n.Seq <= p.s.Cursor {
			p.log = append(p.log, w)
		}
	}
	for i, w := range p.log {
		if got, want := text(p.t, p.s.Events[i]), text(p.t, w); got != want {
			p.t.Fatalf("the client saw\n%s\nthe log has\n%s", got, want)
		}
	}
}

// recordWorkspace records the workspace for the snapshots since the last call. Nothing must be running.
func (p *past) recordWorkspace() {
	p.t.Helper()
	now := p.workspace()
	for seq := range p.seqs(func(e events.WireEvent) bool { return e.Type == (events.WorkspaceSynced{}).EventType() }) {
		if p.trees[seq] == nil {
			p.trees[seq] = now
		}
	}
}

// tree holds the content of the files of a workspace, by path.
type tree map[string]string

// workspace reads the workspace in the sandbox.
func (p *past) workspace() tree {
	p.t.Helper()
	if p.docker {
		return untar(p.t, []byte(harness.RunDocker(p.t, "exec", p.c.SandboxContainer(p.session), "tar", "-C", "/workspace", "-cf", "-", ".")))
	}
	out, root := tree{}, os.DirFS(p.c.WorkspaceFolder(p.session))
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		raw, err := fs.ReadFile(root, path)
		out[path] = string(raw)
		return err
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

// untar returns the regular files of an archive.
func untar(t *testing.T, raw []byte) tree {
	t.Helper()
	out, archive := tree{}, tar.NewReader(bytes.NewReader(raw))
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		out[filepath.Clean(h.Name)] = string(content)
	}
}

// heldModel forwards requests to the model server, and can hold requests that contain a text.
type heldModel struct {
	mu      sync.Mutex
	text    string
	arrived chan struct{} // closed when a request is held
	open    chan struct{} // closed to release held requests
}

// question is the query to a fork's agent. It is never held.
const question = "which fruit is it?"

func newHeldModel() *heldModel {
	return &heldModel{arrived: make(chan struct{}), open: make(chan struct{})}
}

// serve returns the URL of a server that forwards requests to another server.
func (h *heldModel) serve(t *testing.T, model string) string {
	t.Helper()
	to, err := url.Parse(model)
	if err != nil {
		t.Fatal(err)
	}
	forward := httputil.NewSingleHostReverseProxy(to)
	forward.FlushInterval = -1
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if h.holds(body) {
			select {
			case <-h.open:
			case <-r.Context().Done():
				return
			}
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s.URL
}

// holds reports whether a request must be held, and records that it has arrived.
func (h *heldModel) holds(body []byte) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.text == "" || !bytes.Contains(body, []byte(h.text)) || bytes.Contains(body, []byte(question)) {
		return false
	}
	select {
	case <-h.arrived:
	default:
		close(h.arrived)
	}
	return true
}

func (h *heldModel) hold(text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.text = text
}

// wait blocks until a request is held.
func (h *heldModel) wait(t *testing.T) {
	t.Helper()
	select {
	case <-h.arrived:
	case <-time.After(harness.WaitTimeout):
		t.Fatal("the model received no request")
	}
}

func (h *heldModel) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.text = ""
	close(h.open)
}
