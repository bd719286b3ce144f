package command

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// workspace is a fake gateway with files, which records its requests.
type workspace struct {
	*httptest.Server
	mu        sync.Mutex
	requested []string
	last      []byte // body
}

func serveFiles(t *testing.T) *workspace {
	t.Helper()
	w := &workspace{}
	w.Server = httptest.NewServer(w)
	t.Cleanup(w.Close)
	return w
}

const listing = `{"snapshot":"m-1","at":"2026-01-02T03:04:05Z","files":[{"path":"a\u001b[2J.txt","kind":"file","size":2048,"mode":420,"modTime":"2026-01-02T03:04:05Z","extra":1},` +
	`{"path":"dir","kind":"dir","size":0,"mode":493},{"path":"link","kind":"symlink","size":0,"mode":0,"target":"/etc"}]}`

func (s *workspace) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // the client reports an incomplete body
	s.mu.Lock()
	s.requested, s.last = append(s.requested, r.Method+" "+strings.TrimPrefix(r.RequestURI, "/api/sessions/"+ses)+" "+r.Header.Get("Content-Type")), body
	s.mu.Unlock()
	attach := func(text string) {
		w.Header().Set("Content-Disposition", `attachment; filename="x"`)
		_, _ = io.WriteString(w, text)
	}
	switch {
	case r.Method == http.MethodGet && r.Header.Get("Accept") == "application/x-tar":
		attach("a tar")
	case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/files"):
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, listing)
	case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/missing"):
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"code":"FILE_NOT_FOUND","field":"path","detail":"no such file"}`)
	case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/broken"):
		w.Header().Set("Content-Length", "100")
		attach("half")
	case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/page"):
		_, _ = io.WriteString(w, "<html>")
	case r.Method == http.MethodGet:
		attach("the content")
	case r.Method == http.MethodPut:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, `{"position":"0-1","sha256":"ab","size":3}`)
	default:
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"position":"0-2"}`)
	}
}

func (s *workspace) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.requested)
}

func (s *workspace) request() (string, []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requested[len(s.requested)-1], s.last
}

func TestFiles_ListGetAndTar(t *testing.T) {
	t.Parallel()
	s := serveFiles(t)
	dir := t.TempDir()
	run := func(code int, args ...string) result {
		t.Helper()
		got := spool(t, testIO(t), append([]string{"files"}, append(args, "--url", s.URL)...)...)
		if got.code != code {
			t.Errorf("%v: %+v", args, got)
		}
		return got
	}
	ls := run(ExitDone, "ls", ses, "sub dir")
	if requested, _ := s.request(); requested != "GET /files?dir=sub+dir " || strings.Contains(ls.out, "\x1b") ||
		!strings.Contains(ls.out, "-rw-r--r--  2.0 KiB") || !strings.Contains(ls.out, "dir/\n") || !strings.Contains(ls.out, "link -> /etc\n") {
		t.Errorf("requested %s, printed\n%s", requested, ls.out)
	}
	if got := run(ExitDone, "ls", ses, "--json"); strings.Count(got.out, "\n") != 3 || !strings.Contains(got.out, `"extra":1`) {
		t.Errorf("got %s", got.out)
	}
	if got := run(ExitDone, "get", ses, "a/b c", "-"); got.out != "the content" {
		t.Errorf("got %q", got.out)
	}
	if requested, _ := s.request(); requested != "GET /files/a/b%20c " {
		t.Errorf("requested %s", requested)
	}
	run(ExitDone, "get", ses, "a/name", dir)
	if b, err := os.ReadFile(filepath.Join(dir, "name")); err != nil || string(b) != "the content" {
		t.Errorf("got %q, %v", b, err)
	}
	if got := run(ExitUsage, "get", ses, "a/name", dir); !strings.Contains(got.err, "--force") {
		t.Errorf("got %q", got.err)
	}
	run(ExitDone, "get", ses, "a/name", dir, "--force")
	// An incomplete download leaves no file.
	if got := run(ExitFailed, "get", ses, "broken", filepath.Join(dir, "broken")); !strings.Contains(got.err, "cannot reach") && !strings.Contains(got.err, "unexpected EOF") {
		t.Errorf("got %q", got.err)
	}
	if got := run(ExitFailed, "get", ses, "missing", dir); got.err != "spool: path: no such file (FILE_NOT_FOUND)\n" {
		t.Errorf("got %q", got.err)
	}
	run(ExitFailed, "get", ses, "page", dir)
	run(ExitDone, "tar", ses, "-o", filepath.Join(dir, "all.tar"))
	if got := run(ExitDone, "tar", ses, "sub"); got.out != "a tar" {
		t.Errorf("got %q", got.out)
	}
	list, err := os.ReadDir(dir)
	if err != nil || len(list) != 2 {
		t.Errorf("left behind: %v, %v", list, err)
	}
	w := testIO(t)
	w.OutTTY = true
	if got := spool(t, w, "files", "tar", ses, "--url", s.URL); got.code != ExitUsage || !strings.Contains(got.err, "terminal") {
		t.Errorf("%+v", got)
	}
}

func TestFiles_PutAndRemove(t *testing.T) {
	t.Parallel()
	s := serveFiles(t)
	dir := t.TempDir()
	script := filepath.Join(dir, "run.sh")
	for name, content := range map[string]string{"run.sh": "#!/bin/sh\n", "sub/x": "1", "sub/deep/y": "22"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755)); err != nil { //nolint:gosec // the mode of a program
			t.Fatal(err)
		}
	}
	run := func(w IO, want string, args ...string) (result, []byte) {
		t.Helper()
		got := spool(t, w, append([]string{"files"}, append(args, "--url", s.URL)...)...)
		if requested, body := s.request(); got.code == ExitDone && requested == want {
			return got, body
		}
		requested, _ := s.request()
		t.Errorf("%v: %+v, requested %s, want %s", args, got, requested, want)
		return got, nil
	}
	if got, body := run(testIO(t), "PUT /files/run.sh?mode=755 application/octet-stream", "put", ses, script); string(body) != "#!/bin/sh\n" || got.out != "stored 3 B for run.sh\n" {
		t.Errorf("sent %q, %+v", body, got)
	}
	w := testIO(t)
	w.In = strings.NewReader("piped")
	if _, body := run(w, "PUT /files/a/b application/octet-stream", "put", ses, "-", "a/b"); string(body) != "piped" {
		t.Errorf("sent %q", body)
	}
	_, body := run(testIO(t), "PUT /files?dir=to application/x-tar", "put", ses, filepath.Join(dir, "sub"), "to")
	var names []string
	for r := tar.NewReader(bytes.NewReader(body)); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		names = append(names, h.Name)
	}
	if !slices.Equal(names, []string{"deep/", "deep/y", "x"}) {
		t.Errorf("the tar holds %v", names)
	}
	run(testIO(t), "PUT /files?dir=sub application/x-tar", "put", ses, filepath.Join(dir, "sub"))
	run(testIO(t), "PUT /files application/x-tar", "put", ses, "--tar", script)
	if got, _ := run(testIO(t), "DELETE /files/b ", "rm", ses, "a", "b"); got.out != "requested to remove a\nrequested to remove b\n" {
		t.Errorf("%+v", got)
	}
	before := s.count()
	for _, args := range [][]string{
		{"put", ses, "/nonsense"}, {"put", ses, "-"}, {"put", ses, script, "../x"}, {"put", ses, script, "/etc/x"}, {"put", "ses_*", script}, {"put", ses, dir, "--tar"},
		{"rm", ses, "a", "b/../../c"}, {"rm", ses, `a\b`}, {"get", ses, "/etc/passwd"}, {"ls", ses, ".."}, {"ls", ses, "a//b"},
	} {
		if got := spool(t, testIO(t), append([]string{"files"}, append(args, "--url", s.URL)...)...); got.code != ExitUsage || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	if after := s.count(); after != before {
		t.Errorf("%d requests", after-before)
	}
}

// TestRun_SendsFilesAndOptions tests that the request for a new session has the files and the options.
func TestRun_SendsFilesAndOptions(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "é.txt")
	if err := errors.Join(os.WriteFile(file, []byte("hi\x00"), 0o600), os.Mkdir(filepath.Join(dir, "sub"), 0o755), os.WriteFile(filepath.Join(dir, "sub", "x"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	f := serve(t, accepted, dispatched, events.ExecutionCompleted{})
	got := spool(t, testIO(t), "run", "--url", f.URL, "--architecture", "acp", "--sandbox", "docker", "--image", "agents:2", "--command", `my-agent --acp 'a b'`, "--model-preset", "qwen",
		"--egress", "pypi.org", "--egress", "GET,HEAD a.example.com", "--egress", "*.example.com:8443", "--file", file, "--file", filepath.Join(dir, "sub"), "q")
	want := `{"architecture":"acp","sandbox":"docker","sessionOptions":{"image":"agents:2","command":["my-agent","--acp","a b"],"egress":["pypi.org","GET,HEAD a.example.com","*.example.com:8443"],"modelSettings":{"preset":"qwen"}},"content":"q",` +
		`"workspaceFiles":[{"path":"é.txt","contentBase64":"aGkA","mode":384},{"path":"sub/x","contentBase64":"","mode":384}],"permissions":{"unattended":true}}`
	if got.code != ExitDone || f.bodies[0] != want {
		t.Errorf("%+v, posted %s", got, f.bodies[0])
	}
	f = serve(t, accepted, dispatched, events.ExecutionCompleted{})
	got = spool(t, testIO(t), "run", "--url", f.URL, "--session", ses, "--file", file, "q")
	if want := `{"content":"q","workspaceFiles":[{"path":"é.txt","contentBase64":"aGkA","mode":384}],"permissions":{"unattended":true}}`; got.code != ExitDone || !slices.Contains(f.bodies, want) {
		t.Errorf("%+v, posted %v", got, f.bodies)
	}
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, make([]byte, maxQueryFileBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	for says, args := range map[string][]string{
		"file: ":                                     {"--file", "/nonsense"},
		"spool files put SESSION":                    {"--file", file, "--file", large},
		"egress: ":                                   {"--egress", "https://x"},
		"command: a quote is not closed":             {"--command", `a "b`},
		"leave them out with --session":              {"--session", ses, "--image", "i"},
		"command: the last character is a backslash": {"--command", `a\`},
	} {
		if got := spool(t, testIO(t), append(append([]string{"run", "--url", nowhere}, args...), "q")...); got.code != ExitUsage || !strings.Contains(got.err, says) {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestWords_SplitsACommandLine(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][]string{
		"": nil, "  ": nil, "a": {"a"}, " a  b\tc ": {"a", "b", "c"}, `a "b c" 'd "e'`: {"a", "b c", `d "e`}, `a\ b \"`: {"a b", `"`}, `'a\b' "c\"d"`: {`a\b`, `c"d`}, `"" x''y`: {"", "xy"},
	} {
		if got, err := splitWords(line); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: got %q, %v", line, got, err)
		}
	}
}

func TestShow_PrintsSandboxSnapshotAndMeteredUsage(t *testing.T) {
	t.Parallel()
	f := serve(t)
	got := spool(t, testIO(t), "sessions", "show", ses, "--url", f.URL)
	if got.code != ExitDone || !strings.Contains(got.out, "running in    sbx_1, paused, unhealthy (no\\u{1b}[2J answer)\n") || !strings.Contains(got.out, "3 files, 5.0 GiB\n") ||
		!strings.Contains(got.out, "sandbox time  1m1.5s, $0.2500\n") {
		t.Errorf("%+v", got)
	}
	got = spool(t, testIO(t), "executions", "show", exe, "--url", f.URL)
	if got.code != ExitDone || !strings.Contains(got.out, "phase         paused\n") || !strings.Contains(got.out, "sandbox time  1.5s\n") || !strings.Contains(got.out, "anthropic   m      3         1       15         2    $0.5000\n") {
		t.Errorf("%+v", got)
	}
}

func TestControls_RequestThePathOfEachCommand(t *testing.T) {
	t.Parallel()
	for requested, args := range map[string][]string{
		"POST /api/executions/" + exe + "/pause":               {"executions", "pause", exe},
		"POST /api/executions/" + exe + "/resume":              {"executions", "resume", exe},
		"POST /api/executions/" + exe + "/terminate":           {"executions", "terminate", exe},
		"POST /api/sessions/" + ses + "/sync":                  {"sessions", "sync", ses},
		"POST /api/sessions/" + ses + "/environment/terminate": {"sessions", "terminate", ses},
	} {
		f := serve(t)
		got := spool(t, testIO(t), append(args, "--url", f.URL)...)
		if got.code != ExitDone || !f.wasRequested(requested) || !strings.Contains(got.out, args[2]) {
			t.Errorf("%v: %+v, requests %v", args, got, f.requests)
		}
		if got := spool(t, testIO(t), args[0], args[1], "x", "--url", f.URL); got.code != ExitUsage {
			t.Errorf("%v of no id: %+v", args[:2], got)
		}
	}
}
