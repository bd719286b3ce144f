package gateway_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway"
)

const transcriptsPath = "/api/transcripts"

// codexTranscript returns a Codex transcript of the given size in bytes.
func codexTranscript(t *testing.T, size int) string {
	t.Helper()
	raw, err := os.ReadFile("../../pkg/transcript/testdata/codex.jsonl")
	must(t, err)
	if size < len(raw) {
		t.Fatalf("cannot shorten %[2]d bytes to %[1]d", size, len(raw))
	}
	return string(raw) + strings.Repeat("\n", size-len(raw))
}

// TestTranscript_CanBeUsedOnceByItsTenant tests that an uploaded transcript can be used for one session, over REST or gRPC, by the tenant
// that uploaded it and for ten minutes.
func TestTranscript_CanBeUsedOnceByItsTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var late atomic.Int64
	w.now = func() time.Time { return time.Now().Add(time.Duration(late.Load())) }
	s := w.serveCommands()
	root := rootKey()
	g := w.gateway(gateway.Config{Auth: gateway.AuthKeys, RootKey: root})
	acme, other := g.withNewKey(root, "acme"), g.withNewKey(root, "other")
	text := codexTranscript(t, 30_000)
	sum := sha256.Sum256([]byte(text))
	upload := func() string {
		t.Helper()
		a := acme.do("POST", transcriptsPath, text).want(t, 201)
		if a.text("architecture") != "codex" || a.number("size") != 30_000 || a.number("messages") != 5 || a.text("agentSessionId") == "" {
			t.Errorf("the upload answered %s", a)
		}
		return a.text("transcript")
	}
	last := func() (c command.Command, b command.CreateSession) {
		t.Helper()
		all := s.commands(t)
		c = all[len(all)-1]
		var start command.StartExecution
		if c.Type == command.TypeStartExecution {
			must(t, json.Unmarshal(c.Body, &start))
			return c, start.Create
		}
		must(t, json.Unmarshal(c.Body, &b))
		return c, b
	}
	for name, begin := range map[string]func(ref string) string{
		"session": func(ref string) string {
			return acme.do("POST", "/api/sessions", fmt.Sprintf(`{"transcript":%q}`, ref)).want(t, 201).text("sessionId")
		},
		"execution": func(ref string) string {
			return acme.do("POST", "/api/executions", fmt.Sprintf(`{"content":"go","transcript":%q}`, ref)).want(t, 202).text("sessionId")
		},
		"gRPC": func(ref string) string {
			a, err := spoolv1.NewSessionsClient(g.conn()).CreateSession(acme.context(t.Context()), &spoolv1.CreateSessionRequest{Transcript: ref})
			must(t, err)
			return a.GetSessionId()
		},
	} {
		ref := upload()
		if id := begin(ref); id != ref {
			t.Errorf("%s: the session is %s, want %s", name, id, ref)
		}
		c, b := last()
		if b.Transcript == nil || c.SessionID != ref || b.Transcript.Object != command.TranscriptObject("acme", ref) || b.Transcript.Size != 30_000 || b.Transcript.SHA256 != hex.EncodeToString(sum[:]) {
			t.Errorf("%s: the command is %+v with %+v", name, c, b.Transcript)
		}
	}

	ref := upload()
	sent := len(s.commands(t))
	theirs := other.do("POST", "/api/sessions", fmt.Sprintf(`{"transcript":%q}`, ref)).wantProblem(t, 404, "TRANSCRIPT_NOT_FOUND", "transcript")
	none := other.do("POST", "/api/sessions", `{"transcript":"ses_01K00000000000000000000000"}`).wantProblem(t, 404, "TRANSCRIPT_NOT_FOUND", "transcript")
	if string(theirs.body) != string(none.body) {
		t.Errorf("another tenant's can be distinguished from a missing one: %s, %s", theirs, none)
	}
	_, err := spoolv1.NewSessionsClient(g.conn()).CreateSession(other.context(t.Context()), &spoolv1.CreateSessionRequest{Transcript: ref})
	wantCode(t, err, codes.NotFound, "TRANSCRIPT_NOT_FOUND", "transcript")
	repeated := fmt.Sprintf(`{"transcript":%q}`, upload())
	once := acme.do("POST", "/api/sessions", repeated, header("Idempotency-Key", "k")).want(t, 201)
	sent++
	late.Store(int64(10*time.Minute + time.Second))
	if again := acme.do("POST", "/api/sessions", repeated, header("Idempotency-Key", "k")).want(t, 201); string(again.body) != string(once.body) {
		t.Errorf("a repeat was answered %s, the request %s", again, once)
	}
	acme.do("POST", "/api/sessions", fmt.Sprintf(`{"transcript":%q}`, ref)).wantProblem(t, 404, "TRANSCRIPT_NOT_FOUND", "transcript")
	if n := len(s.commands(t)); n != sent {
		t.Errorf("%d commands were sent", n-sent)
	}
	g.do("POST", transcriptsPath, text).wantProblem(t, 401, "UNAUTHENTICATED", "Authorization")
	acme.get(transcriptsPath).wantProblem(t, 405, "METHOD_NOT_ALLOWED", "")
	acme.do("POST", transcriptsPath+"?architecture=codex", text).wantProblem(t, 400, "INVALID_REQUEST", "architecture")
}

// TestTranscript_RefusedUploadIsNotReadFurther tests that a transcript that is refused or too large is not read any further.
func TestTranscript_RefusedUploadIsNotReadFurther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{MaxTranscript: 1 << 20})
	for name, c := range map[string]struct{ head string }{"of unknown length": {chunked}, "announced": {"Content-Length: 1073741824"}} {
		a, sent := g.endless("POST", transcriptsPath, c.head)
		if a.wantProblem(t, 413, "PAYLOAD_TOO_LARGE", "transcript"); sent > 128<<20 {
			t.Errorf("%s: %d bytes were taken", name, sent)
		}
	}
	large := w.gateway(gateway.Config{MaxTranscript: 1 << 30})
	a, sent := large.endless("POST", transcriptsPath, chunked)
	if a.wantProblem(t, 422, "TRANSCRIPT_INVALID", "transcript"); sent > 128<<20 {
		t.Errorf("one line: %d bytes were taken", sent)
	}
	if n := w.messages(topology.BucketWorkspaces); n > 1000 {
		t.Errorf("%d messages are stored", n)
	}
	r, wr := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), "POST", g.url+transcriptsPath, r)
	must(t, err)
	go func() {
		_, _ = io.WriteString(wr, codexTranscript(t, 30_000))
		wr.CloseWithError(errors.New("gone"))
	}()
	if resp, err := client.Do(req); err == nil {
		must(t, resp.Body.Close())
		t.Errorf("a transcript that broke off was answered %d", resp.StatusCode)
	}
	g.stop() // waits for the request
	o, err := w.js.ObjectStore(t.Context(), topology.BucketWorkspaces)
	must(t, err)
	list, err := o.List(t.Context())
	must(t, err)
	for _, x := range list {
		if strings.HasSuffix(x.Name, "-found") {
			t.Errorf("%s of a refused transcript is stored", x.Name)
		}
	}
}

// TestStorageLimit_CountsTranscriptsOnce tests that a transcript counts once while a session can be created with it, and that
// a refused one counts until it is removed.
func TestStorageLimit_CountsTranscriptsOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{MaxTenantStorage: 100_000})
	ref := g.do("POST", transcriptsPath, codexTranscript(t, 60_000)).want(t, 201).text("transcript")
	g.do("POST", transcriptsPath, codexTranscript(t, 60_000)).wantProblem(t, 429, "TENANT_STORAGE", "")
	g.do("POST", "/api/sessions", fmt.Sprintf(`{"transcript":%q}`, ref)).want(t, 201)
	w.addStoredBytes("default", 60_000)
	g.do("POST", transcriptsPath, codexTranscript(t, 30_000)).want(t, 201)
	g.do("POST", transcriptsPath, codexTranscript(t, 30_000)).wantProblem(t, 429, "TENANT_STORAGE", "")
	w.empty(topology.BucketWorkspaces)
	g.do("POST", transcriptsPath, codexTranscript(t, 30_000)).want(t, 201)
}
