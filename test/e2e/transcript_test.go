package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/services/session/janitor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// provided is the answer to the upload of a transcript.
type provided struct {
	Transcript, Architecture, AgentSessionID, SHA256, Code, Field, Detail string
	Messages, Size                                                        int
}

// provide uploads a transcript.
func provide(t *testing.T, c *harness.Cluster, raw []byte) (int, provided) {
	t.Helper()
	var p provided
	status, answer := request(t, "POST", c.URL(0)+"/api/transcripts", nil, raw)
	if err := json.Unmarshal(answer, &p); err != nil {
		t.Fatalf("%d %s: %v", status, answer, err)
	}
	return status, p
}

// kept returns a transcript that an agent's own command line wrote.
func kept(t *testing.T, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "..", "pkg", "transcript", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// bareAgent runs an agent's command line outside of Spool, with the same model server.
type bareAgent struct {
	t         *testing.T
	dir, home string
	env       []string
}

func (b bareAgent) run(args ...string) []byte {
	b.t.Helper()
	if _, err := exec.LookPath(args[0]); err != nil {
		if os.Getenv("CI") == "true" {
			b.t.Fatalf("%v; scripts/install tests installs it", err)
		}
		b.t.Skipf("%v; scripts/install tests installs it", err)
	}
	var out, says bytes.Buffer
	cmd := exec.CommandContext(b.t.Context(), args[0], args[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.Env = b.dir, &out, &says, append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.home}, b.env...)
	if err := cmd.Run(); err != nil {
		b.t.Fatalf("%v: %v, %s%s", args, err, out.Bytes(), says.Bytes())
	}
	return out.Bytes()
}

// file returns the only file in the home folder that matches a pattern.
func (b bareAgent) file(pattern ...string) []byte {
	b.t.Helper()
	found, err := filepath.Glob(filepath.Join(append([]string{b.home}, pattern...)...))
	if err != nil || len(found) != 1 {
		b.t.Fatalf("%v: %v, %v", pattern, found, err)
	}
	raw, err := os.ReadFile(found[0])
	if err != nil {
		b.t.Fatal(err)
	}
	return raw
}

const rememberFruit = "Remember the fruit apple"

// bareTranscript has a conversation with the bare agent of an architecture and returns its transcript.
func bareTranscript(t *testing.T, architecture, model string) []byte {
	t.Helper()
	b := bareAgent{t: t, dir: t.TempDir(), home: t.TempDir()}
	switch architecture {
	case "claude-code":
		b.env = []string{"ANTHROPIC_BASE_URL=" + model, "ANTHROPIC_API_KEY=test", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"}
		b.run("claude", "-p", rememberFruit, "--allowedTools", "Bash")
		return b.file(".claude", "projects", "*", "*.jsonl")
	case "codex":
		b.env = []string{"OPENAI_API_KEY=test"}
		b.run("codex", "exec", "--skip-git-repo-check", "-m", "gpt-5.5", "-c", `model_provider="bare"`, "-c", `model_providers.bare.name="Bare"`,
			"-c", `model_providers.bare.wire_api="responses"`, "-c", `model_providers.bare.base_url="`+model+`/v1"`, "-c", `sandbox_mode="danger-full-access"`, rememberFruit)
		return b.file(".codex", "sessions", "*", "*", "*", "rollout-*.jsonl")
	}
	b.env = []string{
		"OPENCODE_DISABLE_MODELS_FETCH=1", "OPENCODE_DISABLE_AUTOUPDATE=1", "OPENCODE_DISABLE_DEFAULT_PLUGINS=1",
		`OPENCODE_CONFIG_CONTENT={"provider":{"bare":{"npm":"@ai-sdk/openai-compatible","models":{"known-model":{}},"options":{"baseURL":"` + model + `/v1","apiKey":"test"}}},"model":"bare/known-model"}`,
	}
	b.run("opencode", "run", rememberFruit)
	session := regexp.MustCompile(`ses_\w+`).Find(b.run("opencode", "session", "list", "--format", "json"))
	return b.run("opencode", "export", string(session))
}

// TestTranscript_RealAgents tests that a conversation with the bare command line continues in a session: in its first
// turn, during which executors are cut off, in later turns, in another sandbox, and in a fork. The log records with
// which transcript the session began.
func TestTranscript_RealAgents(t *testing.T) {
	t.Parallel()
	for architecture, model := range map[string]string{"claude-code": "known-model", "codex": "gpt-5.5", "opencode": "known-model"} {
		t.Run(architecture, func(t *testing.T) {
			t.Parallel()
			var url string
			c := harness.New(t, harness.Options{Script: script(t, "transcript.yaml"), Executors: 2, ModelURL: func(u string) string { url = u; return u }})
			raw := bareTranscript(t, architecture, url)
			status, p := provide(t, c, raw)
			if status != http.StatusCreated || p.Architecture != architecture || p.Size != len(raw) || p.Messages == 0 {
				t.Fatalf("the transcript answered %d %+v", status, p)
			}
			k := &talk{t: t, c: c, session: c.CreateSession("", map[string]any{"transcript": p.Transcript, "model": model})}
			if k.session != p.Transcript {
				t.Errorf("the session is %s, want %s", k.session, p.Transcript)
			}
			began := first(t, c, k.session)
			if got := began.Transcript; got == nil || began.Architecture != architecture || got.SHA256 != p.SHA256 || got.AgentSessionID != p.AgentSessionID || got.Messages != uint32(p.Messages) {
				t.Errorf("session_created is %+v with %+v", began, got)
			}

			execution := k.post("which fruit is it?", func(w events.WireEvent) bool { return w.Type != "sandbox_ready" })
			c.KillExecutor(0)
			if end := ended[events.ExecutionCompleted](k.until(execution)); end.Result != "The fruit is apple." {
				t.Errorf("the first turn ended with %+v", end)
			}
			if lost := slicesOf(k.s.Events, "error"); len(lost) > 0 {
				t.Errorf("errors %s", lost)
			}
			k.awaitSnapshot()
			k.mustComplete("Remember the fruit pear", "Noted pear.")
			k.awaitSnapshot()
			f := k.talkWith(fork(t, c, k.session, map[string]any{}))
			if began := first(t, c, f.session); began.Transcript != nil {
				t.Errorf("a fork that has the conversation begins with %+v", began.Transcript)
			}
			f.mustComplete("which fruit is it?", "The fruit is pear.")
			c.Call(0, "POST", "/api/sessions/"+k.session+"/environment/terminate", map[string]any{}, nil)
			k.mustComplete("which fruit is it?", "The fruit is pear.")
			requests := c.Model.Requests()
			if last := string(requests[len(requests)-1].Body); !strings.Contains(last, rememberFruit) {
				t.Errorf("the last model request lacks the beginning of the conversation: %s", last)
			}
		})
	}
}

// first returns the session_created event of a session.
func first(t *testing.T, c *harness.Cluster, session string) events.SessionCreated {
	t.Helper()
	for n, err := range eventlog.SessionEvents(t.Context(), c.Servers.Log, tenantOf(t, c, session), session) {
		if err != nil {
			t.Fatal(err)
		}
		if d, ok := n.Event.Data.(events.SessionCreated); ok {
			return d
		}
	}
	t.Fatalf("session %s was not created", session)
	return events.SessionCreated{}
}

func slicesOf(list []events.WireEvent, kind events.Type) (out []json.RawMessage) {
	for _, e := range list {
		if e.Type == kind {
			out = append(out, e.Data)
		}
	}
	return out
}

// TestTranscript_RunCommand tests spool run --transcript in a user's folder. Neither the files nor the transcript
// change.
func TestTranscript_RunCommand(t *testing.T) {
	t.Parallel()
	needClaude(t)
	c := harness.New(t, harness.Options{Script: script(t, "transcript.yaml"), Session: session.Config{HostPaths: []string{"/"}}, Executor: executor.Config{HostPaths: []string{"/"}}})
	folder, data := t.TempDir(), t.TempDir()
	file := filepath.Join(t.TempDir(), "transcript.jsonl")
	raw := kept(t, "claude.jsonl")
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, says := c.RunCLI(t, folder, data, "run", "--workspace", folder, "--transcript", file, "--model", "known-model", "which fruit is it?")
	if code != 0 || !strings.Contains(out, "The fruit is apple.") || !strings.Contains(says, "claude-code") {
		t.Errorf("exit code %d, %s, %s", code, out, says)
	}
	if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, raw) {
		t.Errorf("the file has changed: %v", err)
	}
	made := regexp.MustCompile(`ses_\w+`).FindString(says)
	code, out, says = c.RunCLI(t, folder, data, "run", "--session", made, "and which fruit was that?")
	if code != 0 || !strings.Contains(out, "The fruit is apple.") {
		t.Errorf("exit code %d, %s, %s", code, out, says)
	}
	c.DeleteSession(made)
	binary := filepath.Join(t.TempDir(), "binary")
	if err := os.WriteFile(binary, []byte("\x7fELF\x02\x01\x01\x00\xff\n\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, w := range map[string]struct {
		args []string
		code int
		says string
	}{
		"no file":          {[]string{"--transcript", "/nowhere/at/all", "hello"}, 2, "transcript"},
		"a folder":         {[]string{"--transcript", folder, "hello"}, 2, "not a regular file"},
		"another agent":    {[]string{"--transcript", file, "--architecture", "codex", "hello"}, 1, "TRANSCRIPT_MISMATCH"},
		"with a session":   {[]string{"--transcript", file, "--session", made, "hello"}, 2, "as is --transcript"},
		"not a transcript": {[]string{"--transcript", binary, "hello"}, 1, "TRANSCRIPT_INVALID"},
	} {
		if code, out, says := c.RunCLI(t, folder, data, append([]string{"run"}, w.args...)...); code != w.code || !strings.Contains(says, w.says) {
			t.Errorf("%s: exit code %d, %s, %s", name, code, out, says)
		}
	}
}

// oneByOne is a body of one gigabyte that counts the bytes that are read.
type oneByOne struct {
	line []byte
	left int64
	read atomic.Int64
}

func (o *oneByOne) Read(p []byte) (int, error) {
	if o.left <= 0 {
		return 0, io.EOF
	}
	n := copy(p, o.line)
	o.left -= int64(n)
	o.read.Add(int64(n))
	return n, nil
}

// TestTranscript_Refused tests that a transcript that is invalid, too large or of another agent is refused with the
// field and the remedy. No session is created, and the janitor removes what was uploaded.
func TestTranscript_Refused(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{
		Script: script(t, "transcript.yaml"), Gateway: gateway.Config{MaxTranscript: 1 << 20},
	})
	claude, codex := kept(t, "claude.jsonl"), kept(t, "codex.jsonl")
	lines := bytes.SplitAfter(claude, []byte("\n"))
	for name, w := range map[string]struct {
		body   []byte
		status int
		code   string
		says   string
	}{
		"empty":             {nil, 422, "TRANSCRIPT_INVALID", "empty"},
		"truncated":         {claude[:len(claude)-200], 422, "TRANSCRIPT_INVALID", "cut off"},
		"without beginning": {bytes.Join(lines[5:], nil), 422, "TRANSCRIPT_INVALID", "part of the transcript is missing"},
		"foreign":           {[]byte(`{"role":"user","content":"hello"}` + "\n"), 422, "TRANSCRIPT_INVALID", "Claude Code"},
		"not UTF-8":         {bytes.Replace(codex, []byte("apple"), []byte("\xff\xfe"), 1), 422, "TRANSCRIPT_INVALID", "UTF-8"},
		"deep":              {append(bytes.Clone(claude), bytes.Repeat([]byte(`{"type":`), 100_000)...), 422, "TRANSCRIPT_INVALID", "deeper"},
		"wrong id":          {bytes.ReplaceAll(claude, []byte("920a1c81"), []byte("../../..")), 422, "TRANSCRIPT_INVALID", "sessionId"},
		"too large":         {append(bytes.Clone(claude), bytes.Repeat([]byte("\n"), 1<<20)...), 413, "PAYLOAD_TOO_LARGE", "--max-transcript"},
	} {
		if status, p := provide(t, c, w.body); status != w.status || p.Code != w.code || p.Field != "transcript" || !strings.Contains(p.Detail, w.says) {
			t.Errorf("%s: %d %+v", name, status, p)
		}
	}

	t.Run("a gigabyte", func(t *testing.T) {
		for name, length := range map[string]int64{"announced": 1 << 30, "of unknown length": -1} {
			body := &oneByOne{line: lines[2], left: 1 << 30}
			req, err := http.NewRequestWithContext(t.Context(), "POST", c.URL(0)+"/api/transcripts", body)
			if err != nil {
				t.Fatal(err)
			}
			req.ContentLength = length
			resp, err := http.DefaultClient.Do(req)
			if err != nil { // the server closes the connection after it has refused the upload
				t.Logf("%s: %v", name, err)
			} else {
				raw, _ := io.ReadAll(resp.Body)
				if resp.Body.Close(); resp.StatusCode != http.StatusRequestEntityTooLarge || !bytes.Contains(raw, []byte("PAYLOAD_TOO_LARGE")) {
					t.Errorf("%s: %d %s", name, resp.StatusCode, raw)
				}
			}
			if n := body.read.Load(); n > 128<<20 {
				t.Errorf("%s: %d bytes were read", name, n)
			}
		}
	})

	status, p := provide(t, c, codex)
	if status != http.StatusCreated {
		t.Fatalf("%d %+v", status, p)
	}
	refuse := func(name string, body map[string]any, status int, code, says string) {
		t.Helper()
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{"/api/sessions", "/api/executions"} {
			if path == "/api/executions" {
				raw = bytes.Replace(raw, []byte("{"), []byte(`{"content":"hello",`), 1)
			}
			got, answer := request(t, "POST", c.URL(0)+path, nil, raw)
			if got != status || !bytes.Contains(answer, []byte(code)) || !bytes.Contains(answer, []byte(says)) {
				t.Errorf("%s: POST %s answered %d %s", name, path, got, answer)
			}
		}
	}
	refuse("another architecture", map[string]any{"transcript": p.Transcript, "architecture": "claude-code"}, 422, "TRANSCRIPT_MISMATCH", "is of codex, but the session is of claude-code")
	refuse("an architecture without transcripts", map[string]any{"transcript": p.Transcript, "architecture": "spool"}, 422, "TRANSCRIPT_MISMATCH", "is of codex, but the session is of spool")
	refuse("no reference", map[string]any{"transcript": "../../x"}, 404, "TRANSCRIPT_NOT_FOUND", "upload it again")
	refuse("an unknown reference", map[string]any{"transcript": "ses_01K00000000000000000000000"}, 404, "TRANSCRIPT_NOT_FOUND", "upload it again")
	if n := len(uploads(t, c)); n == 0 {
		t.Error("nothing is stored before the janitor passes")
	}
	var list struct{ Sessions []any }
	if c.Call(0, "GET", "/api/sessions", nil, &list); len(list.Sessions) > 0 {
		t.Errorf("there are sessions: %v", list.Sessions)
	}
}

// uploads returns the names of the objects of transcripts.
func uploads(t *testing.T, c *harness.Cluster) (names []string) {
	t.Helper()
	for _, name := range objectNames(t, c) {
		if strings.Contains(name, "/u-transcript") {
			names = append(names, name)
		}
	}
	return names
}

// TestTranscript_GoneFromTheStore tests that a session whose transcript is missing does not begin another
// conversation. Its execution fails and names what is missing.
func TestTranscript_GoneFromTheStore(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "transcript.yaml")})
	_, p := provide(t, c, kept(t, "claude.jsonl"))
	k := &talk{t: t, c: c, session: c.CreateSession("", map[string]any{"transcript": p.Transcript, "model": "known-model"})}
	removeObjects(t, c, k.session, "u-transcript")
	k.mustFail("which fruit is it?", "TRANSCRIPT_LOST", "no longer in the object store")
}

// TestTranscript_OneSession tests that a transcript creates one session. A repeated request with the same
// Idempotency-Key has the same answer. Deleting the session removes the transcript, but not before its forks are
// deleted.
func TestTranscript_OneSession(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "transcript.yaml")})
	_, p := provide(t, c, kept(t, "claude.jsonl"))
	body := fmt.Appendf(nil, `{"transcript":%q}`, p.Transcript)
	key := map[string]string{"Idempotency-Key": "the-same"}
	for range 2 {
		if status, raw := request(t, "POST", c.URL(0)+"/api/sessions", key, body); status != http.StatusCreated || !bytes.Contains(raw, []byte(p.Transcript)) {
			t.Fatalf("%d %s", status, raw)
		}
	}
	if status, raw := request(t, "POST", c.URL(0)+"/api/sessions", nil, body); status != http.StatusConflict || !bytes.Contains(raw, []byte("SESSION_EXISTS")) {
		t.Errorf("a second session: %d %s", status, raw)
	}
	f := fork(t, c, p.Transcript, map[string]any{})
	if began := first(t, c, f.SessionID); began.Transcript == nil || began.Transcript.Object != first(t, c, p.Transcript).Transcript.Object {
		t.Errorf("a fork before the first turn begins with %+v", began.Transcript)
	}
	j := c.NewJanitor(janitor.Config{Grace: time.Millisecond, Uploads: time.Millisecond})
	pass := func() {
		t.Helper()
		if _, err := j.RunPass(t.Context(), false); err != nil {
			t.Fatal(err)
		}
	}
	object := first(t, c, p.Transcript).Transcript.Object
	has := func() bool {
		for _, name := range objectNames(t, c) {
			if name == object {
				return true
			}
		}
		return false
	}
	c.DeleteSession(p.Transcript)
	pass()
	pass()
	if !has() {
		t.Error("the transcript is gone while a fork begins with it")
	}
	c.DeleteSession(f.SessionID)
	harness.Eventually(t, "the transcript is removed", func() bool { pass(); return !has() })
}

// objectNames returns the names of the objects in bucket workspaces.
func objectNames(t *testing.T, c *harness.Cluster) (names []string) {
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
	o, err := js.ObjectStore(t.Context(), topology.BucketWorkspaces)
	if err != nil {
		t.Fatal(err)
	}
	list, err := o.List(t.Context())
	if err != nil && !errors.Is(err, jetstream.ErrNoObjectsFound) {
		t.Fatal(err)
	}
	for _, info := range list {
		names = append(names, info.Name)
	}
	return names
}
