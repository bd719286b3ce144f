package compat_test

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/test/compat"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestReleasedData opens data that a released build wrote with the present build. Sessions are listed as by that
// build, streams continue from an old cursor with exactly the recorded events, open queries end, further turns run,
// and the log and the read models are sound.
func TestReleasedData(t *testing.T) {
	recorded, err := filepath.Glob("testdata/*/manifest.json.gz")
	if err != nil || len(recorded) == 0 {
		t.Fatalf("no recorded data: %v", err)
	}
	bin := build(t)
	for _, path := range recorded {
		dir := filepath.Dir(path)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			o := &old{manifest: manifest(t, path)}
			o.open(t, bin, filepath.Join(dir, "data.tar.gz"))
			t.Run("the log is as it was written", o.checkLog)
			t.Run("sessions are listed", o.checkSessions)
			t.Run("a stream continues from an old cursor", o.checkStreams)
			t.Run("the state at every event is unchanged", o.checkStates)
			t.Run("a replay shows what happened", o.checkReplays)
			t.Run("sessions are forked between turns", o.checkForks)
			t.Run("open queries end once", o.checkEnds)
			t.Run("a deleted session stays deleted", o.checkDeleted)
			t.Run("another turn runs", o.runTurns)
			t.Run("the catalogue is kept", o.useCatalogue)
			t.Run("the audit is listed", o.checkAudit)
			t.Run("verify and rebuild find it sound", o.verify)
		})
	}
}

// old is a recorded data folder with the present build running on it.
type old struct {
	*compat.Server
	manifest compat.Recording
}

// build builds the present spool and its runner.
func build(t *testing.T) (spool string) {
	t.Helper()
	dir := t.TempDir()
	for _, b := range []string{"github.com/spoolhq/spool/cmd/spool", "github.com/spoolhq/spool/cmd/runner"} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-o", dir+string(filepath.Separator), b)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v: %s", b, err, out)
		}
	}
	return filepath.Join(dir, "spool")
}

func manifest(t *testing.T, path string) (m compat.Recording) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // the file is only read
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(z).Decode(&m); err != nil {
		t.Fatal(err)
	}
	return m
}

// open unpacks the data and starts the present build on it.
func (o *old) open(t *testing.T, bin, archive string) {
	t.Helper()
	dir := o.folder(t)
	data := filepath.Join(dir, "data")
	if err := unpack(archive, data); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left := harness.FindProcesses(dir + string(filepath.Separator)); len(left) > 0 {
			t.Errorf("processes outlive the stack: %v", left)
		}
	})
	script, err := filepath.Abs("../../cmd/mockllm/server/default.yaml")
	if err != nil {
		t.Fatal(err)
	}
	// The context of the test has ended when cleanups run.
	o.Server, err = compat.StartServer(context.Background(), compat.Config{Spool: bin, Data: data, Script: script, RootKey: o.manifest.RootKey})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Stop(); err != nil {
			t.Errorf("spool up ended with: %v", err)
		}
	})
}

// folder creates the folder in which the data was recorded. Another run of the tests on this machine waits for its
// turn.
func (o *old) folder(t *testing.T) string {
	t.Helper()
	dir := o.manifest.Folder
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lock.Close() }) // Close releases the lock
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil { // a killed run may have left the folder
		t.Fatal(err)
	}
	// Postgres may run as another user, who must reach its folder.
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // see above
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// unpack extracts a recorded folder.
func unpack(archive, dir string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // the file is only read
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !filepath.IsLocal(h.Name) {
			return fmt.Errorf("%s: %q is outside of the folder", archive, h.Name)
		}
		path, mode := filepath.Join(dir, h.Name), h.FileInfo().Mode().Perm()
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(path, mode|0o700)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		default:
			err = writeFile(path, mode, t)
		}
		if err != nil {
			return err
		}
	}
}

func writeFile(path string, mode os.FileMode, content io.Reader) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	return errors.Join(err, f.Close())
}

// each runs a check for every session that was not deleted.
func (o *old) each(t *testing.T, check func(t *testing.T, s compat.RecordedSession, key string)) {
	for _, s := range o.manifest.Sessions {
		if !s.Deleted {
			t.Run(s.Name, func(t *testing.T) { check(t, s, o.manifest.Keys[s.Tenant]) })
		}
	}
}

// closed reports whether the session's lifetime has ended since it was recorded.
func closed(t *testing.T, s compat.RecordedSession) bool {
	t.Helper()
	var v struct {
		CreatedAt      time.Time
		SessionOptions struct{ SessionLimitMs int64 }
	}
	if err := json.Unmarshal(s.Listed, &v); err != nil {
		t.Fatal(err)
	}
	return time.Now().After(v.CreatedAt.Add(time.Duration(v.SessionOptions.SessionLimitMs) * time.Millisecond))
}

// checkLog compares every message of the log: no subject, id, position or hash may change. The content of a deleted
// session may be missing.
func (o *old) checkLog(t *testing.T) {
	url, err := o.NATSURL()
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect(url, nats.CustomInboxPrefix("_INBOX_admin"))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	log, err := compat.ReadLog(t.Context(), nc, func(uint64, []byte) {})
	if err != nil {
		t.Fatal(err)
	}
	now := map[uint64]compat.RecordedCommit{}
	for _, c := range log {
		now[c.Seq] = c
	}
	for _, want := range o.manifest.Log {
		got, ok := now[want.Seq]
		if !ok && slices.ContainsFunc(o.manifest.Sessions, func(s compat.RecordedSession) bool {
			return s.Deleted && strings.Contains(want.Subject, s.ID)
		}) {
			continue
		}
		if got != want {
			t.Errorf("commit %d is %+v, and was written as %+v", want.Seq, got, want)
		}
	}
}

// moving are the fields of a listed session that change while the session continues.
var moving = []string{"status", "updatedAt", "tip", "position", "activeExecutionId", "queued", "executions", "idle", "currentSandbox", "snapshot", "snapshotAt", "workspaceFiles", "workspaceBytes"}

// checkSessions compares what the read models show: everything that the old build showed must be the same. A build may show
// more.
func (o *old) checkSessions(t *testing.T) {
	for _, s := range o.manifest.Sessions {
		if !s.Deleted { // the read models may be behind the log for a moment
			o.must(t, o.CallAPI(o.manifest.Keys[s.Tenant], "GET", "/api/sessions/"+s.ID+"?minPosition="+s.Events[len(s.Events)-1].Position, nil, nil))
		}
	}
	sessions := map[string]any{}
	for _, key := range o.manifest.Keys {
		var page struct{ Sessions []map[string]any }
		o.must(t, o.CallAPI(key, "GET", "/api/sessions?pageSize=200", nil, &page))
		for _, s := range page.Sessions {
			sessions[fmt.Sprint(s["sessionId"])] = s
		}
	}
	kept := 0
	o.each(t, func(t *testing.T, s compat.RecordedSession, key string) {
		kept++
		var ignored []string
		if s.Name == compat.OpenTurnSession || closed(t, s) {
			ignored = moving
		}
		shows(t, "the session", s.Listed, sessions[s.ID], ignored...)
		var f struct{ Files []struct{ Path string } }
		if len(s.Files) > 0 { // otherwise the session had no snapshot
			o.must(t, o.CallAPI(key, "GET", "/api/sessions/"+s.ID+"/files", nil, &f))
		}
		var files []string
		for _, file := range f.Files {
			files = append(files, file.Path)
		}
		if s.Name == compat.OpenTurnSession {
			return // the turn of this session continues
		}
		if !slices.Equal(files, s.Files) {
			t.Errorf("the session's files are %v, and were %v", files, s.Files)
		}
		var x struct{ Executions []any }
		var b struct{ Blocks []any }
		o.must(t, errors.Join(o.CallAPI(key, "GET", "/api/sessions/"+s.ID+"/executions?pageSize=200", nil, &x), o.CallAPI(key, "GET", "/api/sessions/"+s.ID+"/blocks", nil, &b)))
		if len(x.Executions) != len(s.Executions) || len(b.Blocks) != len(s.Blocks) {
			t.Fatalf("the session has %d executions and %d blocks, and had %d and %d", len(x.Executions), len(b.Blocks), len(s.Executions), len(s.Blocks))
		}
		for i := range s.Executions {
			shows(t, fmt.Sprint("execution ", i), s.Executions[i], x.Executions[i])
		}
		for i := range s.Blocks {
			shows(t, fmt.Sprint("block ", i), s.Blocks[i], b.Blocks[i])
		}
	})
	if len(sessions) != kept {
		t.Errorf("%d sessions are listed, and %d were", len(sessions), kept)
	}
}

func (o *old) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shows checks that a value is still shown, except for the ignored fields of an object.
func shows(t *testing.T, what string, was json.RawMessage, is any, ignored ...string) {
	t.Helper()
	var want any
	if err := json.Unmarshal(was, &want); err != nil {
		t.Fatal(err)
	}
	if o, ok := want.(map[string]any); ok {
		for _, field := range ignored {
			delete(o, field)
		}
	}
	if why := lacks(want, is); why != "" {
		t.Errorf("%s%s", what, why)
	}
}

// lacks describes what of want is missing in got, which may have more fields. It returns "" if nothing is missing.
func lacks(want, got any) string {
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok {
			return fmt.Sprintf(" is %v, and was %v", got, want)
		}
		for k, v := range w {
			if why := lacks(v, g[k]); why != "" {
				return "." + k + why
			}
		}
		return ""
	case []any:
		g, ok := got.([]any)
		if !ok || len(g) != len(w) {
			return fmt.Sprintf(" is %v, and was %v", got, want)
		}
		for i := range w {
			if why := lacks(w[i], g[i]); why != "" {
				return fmt.Sprintf("[%d]%s", i, why)
			}
		}
		return ""
	}
	if !reflect.DeepEqual(want, got) {
		return fmt.Sprintf(" is %v, and was %v", got, want)
	}
	return ""
}

// checkStreams follows every session by SSE and by WebSocket from cursors that a client of the old build may have.
func (o *old) checkStreams(t *testing.T) {
	o.each(t, func(t *testing.T, s compat.RecordedSession, key string) {
		n := len(s.Events)
		for _, after := range []int{0, n / 2, n - 1} {
			o.sse(t, key, s, after)
			o.socket(t, key, s, after)
		}
	})
}

// checkStates compares the state at every recorded event with the fold of the log and with the view of a client up to that
// event.
func (o *old) checkStates(t *testing.T) {
	o.each(t, func(t *testing.T, s compat.RecordedSession, key string) {
		get := func(path string, out any) error { return o.CallAPI(key, "GET", path, nil, out) }
		for n := range s.Events {
			view := blocks.NewBlockView()
			for _, w := range s.Events[:n+1] {
				view.Apply(w.Event())
			}
			state, err := harness.ReadState(get, s.ID, uint32(n+1), 200)
			if err == nil {
				err = harness.CompareState(state, s.Events[:n+1], view.Blocks())
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
}

// same compares an event with the recorded one at its index.
func same(t *testing.T, where string, s compat.RecordedSession, i int, raw []byte) {
	t.Helper()
	want, err := json.Marshal(s.Events[i])
	if err != nil {
		t.Fatal(err)
	}
	var got any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	shows(t, fmt.Sprintf("%s: event %d", where, i+1), want, got)
}

func (o *old) sse(t *testing.T, key string, s compat.RecordedSession, after int) {
	t.Helper()
	at := after
	_, err := o.AwaitEvent(key, s.ID, uint32(after), func(w events.WireEvent) bool {
		if w.Type == events.TextDelta {
			return false
		}
		raw, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "SSE", s, at, raw)
		at++
		return at == len(s.Events)
	})
	if err != nil {
		t.Errorf("SSE after %d returned %d of %d events: %v", after, at-after, len(s.Events)-after, err)
	}
}

func (o *old) socket(t *testing.T, key string, s compat.RecordedSession, after int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.WaitTimeout)
	defer cancel()
	// the body of a WebSocket handshake does not need to be closed
	//nolint:bodyclose // after Dial the body never needs to be closed
	conn, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(o.URL, "http")+"/api/ws", &websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + key}}})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow() //nolint:errcheck // the connection is cut off
	conn.SetReadLimit(16 << 20)
	join, err := json.Marshal(map[string]any{"type": "session:join", "requestId": "r1", "sessionId": s.ID, "after": after})
	if err != nil {
		t.Fatal(err)
	}
	o.must(t, conn.Write(ctx, websocket.MessageText, join))
	for at := after; at < len(s.Events); {
		_, raw, err := conn.Read(ctx)
		if err != nil {
			t.Fatalf("WebSocket after %d returned %d of %d events: %v", after, at-after, len(s.Events)-after, err)
		}
		var m struct {
			Type  string
			Event json.RawMessage
			Code  string
		}
		o.must(t, json.Unmarshal(raw, &m))
		var w events.WireEvent
		switch {
		case m.Type == "error":
			t.Fatalf("WebSocket after %d: %s", after, raw)
		case m.Type != "session:event":
			continue
		}
		o.must(t, json.Unmarshal(m.Event, &w))
		if w.Type != events.TextDelta {
			same(t, "WebSocket", s, at, m.Event)
			at++
		}
	}
}

// checkEnds waits for the ends of the queries that were open when the old build stopped.
func (o *old) checkEnds(t *testing.T) {
	for _, s := range o.manifest.Sessions {
		if s.Name != compat.OpenTurnSession {
			continue
		}
		open := map[string]bool{}
		for _, e := range s.Events {
			switch {
			case e.Type == (events.MessageAccepted{}).EventType():
				open[e.ExecutionID] = true
			case events.IsTerminal(e.Type):
				delete(open, e.ExecutionID)
			}
		}
		if len(open) == 0 {
			t.Fatal("the recording has no open query")
		}
		if _, err := o.AwaitEvent(o.manifest.Keys[s.Tenant], s.ID, 0, func(w events.WireEvent) bool {
			if events.IsTerminal(w.Type) {
				delete(open, w.ExecutionID)
			}
			return len(open) == 0
		}); err != nil {
			t.Errorf("still open are %v: %v", open, err)
		}
	}
}

func (o *old) checkDeleted(t *testing.T) {
	for _, s := range o.manifest.Sessions {
		if !s.Deleted {
			continue
		}
		var refused *compat.StatusError
		if err := o.CallAPI(o.manifest.Keys[s.Tenant], "GET", "/api/sessions/"+s.ID, nil, nil); !errors.As(err, &refused) || refused.Status != http.StatusNotFound {
			t.Errorf("GET of %s: %v", s.ID, err)
		}
	}
}

// programs are the programs that the agents of sessions need on the PATH.
var programs = map[string]string{compat.ClaudeCodeSession: "claude", compat.CodexSession: "codex", compat.OpenCodeSession: "opencode"}

// runTurns runs another turn in each session: the agent remembers the conversation, and a budget that is used up stays
// used up.
func (o *old) runTurns(t *testing.T) {
	o.each(t, func(t *testing.T, s compat.RecordedSession, key string) {
		if p := programs[s.Name]; p != "" {
			if _, err := exec.LookPath(p); err != nil {
				t.Skipf("%s is not on the PATH: run scripts/install", p)
			}
		}
		var a struct{ ExecutionID string }
		err := o.CallAPI(key, "POST", "/api/sessions/"+s.ID+"/messages", map[string]any{"content": "What did I ask you to remember?"}, &a)
		if closed(t, s) {
			var refused *compat.StatusError
			if !errors.As(err, &refused) || refused.Status != http.StatusConflict {
				t.Errorf("a message to a session past its limit: %v", err)
			}
			return
		}
		o.must(t, err)
		end, err := o.AwaitEvent(key, s.ID, 0, func(w events.WireEvent) bool { return w.ExecutionID == a.ExecutionID && events.IsTerminal(w.Type) })
		o.must(t, err)
		want, says := (events.ExecutionCompleted{}).EventType(), "remember"
		switch s.Name {
		case compat.UsedUpBudgetSession:
			want, says = (events.ExecutionFailed{}).EventType(), "BUDGET_EXCEEDED"
		case compat.ConversationSession, compat.ClaudeCodeSession, compat.CodexSession, compat.OpenCodeSession:
			says = "heron"
		}
		if end.Type != want || !strings.Contains(string(end.Data), says) {
			t.Errorf("the turn ended with %s %s, not with %s and %q", end.Type, end.Data, want, says)
		}
	})
}

// useCatalogue uses the entries that were applied to the old build in a new session.
func (o *old) useCatalogue(t *testing.T) {
	key := o.manifest.Keys["default"]
	var made struct{ SessionID string }
	o.must(t, o.CallAPI(key, "POST", "/api/sessions", map[string]any{"instance": "reviewer", "environments": []string{"staging"}}, &made))
	var a struct{ ExecutionID string }
	// The data folder also contains the key of secrets. Without it the turn would end with SECRET_UNREADABLE.
	o.must(t, o.CallAPI(key, "POST", "/api/sessions/"+made.SessionID+"/messages", map[string]any{"content": "hello"}, &a))
	var resolved string
	end, err := o.AwaitEvent(key, made.SessionID, 0, func(w events.WireEvent) bool {
		if w.Type == (events.ExecutionResolved{}).EventType() {
			resolved = string(w.Data)
		}
		return w.ExecutionID == a.ExecutionID && events.IsTerminal(w.Type)
	})
	o.must(t, err)
	if end.Type != (events.ExecutionCompleted{}).EventType() {
		t.Fatalf("ended with %s %s", end.Type, end.Data)
	}
	for _, part := range []string{"reviewer", "staging", "style", "TOKEN"} {
		if !strings.Contains(resolved, part) {
			t.Errorf("the resolution %s lacks %s", resolved, part)
		}
	}
}

// checkAudit checks the audit of commits of the old build, as far as they hold it, and of the present one. The stack
// raised the log to the newest version of commits when it started.
func (o *old) checkAudit(t *testing.T) {
	out, err := o.RunCLI(o.manifest.Keys["default"], "audit", "--json", "--limit", "0")
	o.must(t, err)
	oldest, news := 0, 0
	for line := range strings.Lines(out) {
		var e struct {
			Position string
			Actor    struct{ KeyID, Address, Service string }
		}
		o.must(t, json.Unmarshal([]byte(line), &e))
		_, seq, _ := strings.Cut(e.Position, "-")
		n, err := strconv.ParseUint(seq, 10, 64)
		o.must(t, err)
		if e.Actor.KeyID == "" {
			t.Errorf("the audit lists %s, without a key", line)
		}
		if n <= o.manifest.Last {
			oldest++
		} else if news++; e.Actor.Address != "127.0.0.1" || !strings.HasPrefix(e.Actor.Service, "session/") {
			t.Errorf("the present build wrote %s", line)
		}
	}
	if oldest < len(o.manifest.Sessions) || news == 0 {
		t.Errorf("the audit lists %d commits of the old build and %d of the present one: %s", oldest, news, out)
	}
}

// verify runs the commands that verify the log and the read models, on the running stack.
func (o *old) verify(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{{[]string{"verify"}, o.uncounted() + "sound: "}, {[]string{"rebuild", "--compare"}, "equal: "}} {
		out, err := o.RunCLI("", c.args...)
		if err != nil || !strings.Contains(out, c.says) {
			t.Errorf("spool %s: %v %s", strings.Join(c.args, " "), err, out)
		}
	}
}

// uncounted returns what verify prints about the deletions with impossible counts.
func (o *old) uncounted() string {
	if len(o.manifest.Uncounted) == 0 {
		return ""
	}
	return fmt.Sprintf("unknown: %d deleted sessions have a count of commits that cannot be true, which an earlier build wrote; the first is at 0-%d\n",
		len(o.manifest.Uncounted), o.manifest.Uncounted[0])
}

// TestLacks_FindsWhatIsNoLongerShown tests that the comparison above can fail.
func TestLacks_FindsWhatIsNoLongerShown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ was, is, why string }{
		"equal":             {`{"a":[1,{"b":"x"}]}`, `{"a":[1,{"b":"x"}]}`, ""},
		"a new field":       {`{"a":[1,{"b":"x"}]}`, `{"a":[1,{"b":"x","c":2}],"d":3}`, ""},
		"another value":     {`{"a":[1,{"b":"x"}]}`, `{"a":[1,{"b":"y"}]}`, ".a[1].b is y, and was x"},
		"a missing field":   {`{"a":1}`, `{}`, ".a is <nil>, and was 1"},
		"a missing element": {`{"a":[1,2]}`, `{"a":[1]}`, ".a is [1], and was [1 2]"},
		"another type":      {`{"a":{}}`, `{"a":[]}`, ".a is [], and was map[]"},
	} {
		var was, is any
		if err := errors.Join(json.Unmarshal([]byte(c.was), &was), json.Unmarshal([]byte(c.is), &is)); err != nil {
			t.Fatal(err)
		}
		if why := lacks(was, is); why != c.why {
			t.Errorf("%s: %q, not %q", name, why, c.why)
		}
	}
}
