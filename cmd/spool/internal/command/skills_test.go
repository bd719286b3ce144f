package command

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
)

// skillsServer is a server that has the skill that was pushed last, and records its requests.
type skillsServer struct {
	*httptest.Server
	mu       sync.Mutex
	requests []string
	zip      []byte
	digest   string
	refuse   bool // refuse the next push
}

func serveSkills(t *testing.T) *skillsServer {
	t.Helper()
	s := &skillsServer{}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// description contains an escape sequence.
const description = `"description":"Reads\u001b[2J PDF."`

func (s *skillsServer) version() string {
	return `"ref":{"slug":"pdf-tools","version":"` + s.digest + `"},"tags":["latest","v1"],"name":"pdf-tools",` + description +
		`,"bytes":300,"unpackedBytes":2048,"files":2,"createdAt":"2026-01-02T03:04:05Z","extra":1`
}

func (s *skillsServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // the client reports an incomplete body
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r.Method+" "+r.RequestURI)
	answer := func(status int, text string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
	}
	switch {
	case r.Method == http.MethodPost && r.URL.Path == "/api/skills":
		s.push(w, r, body, answer)
	case r.Method == http.MethodPost:
		s.requests[len(s.requests)-1] += " " + string(body)
		answer(http.StatusOK, `{"ref":{"slug":"pdf-tools","version":"`+s.digest+`"},"position":"0-2","same":false}`)
	case r.Method == http.MethodDelete && strings.Contains(r.URL.Path, "missing"), r.Method == http.MethodGet && strings.Contains(r.URL.Path, "missing"):
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"code":"SKILL_NOT_FOUND","field":"slug","detail":"there is no skill missing"}`)
	case r.Method == http.MethodDelete:
		answer(http.StatusOK, `{"position":"0-3"}`)
	case strings.HasSuffix(r.URL.Path, "/archive"):
		w.Header().Set("Content-Type", "application/zip")
		w.Header().Set("Content-Disposition", `attachment; filename="pdf-tools.zip"`)
		_, _ = w.Write(s.zip)
	case r.URL.Path == "/api/skills" && r.URL.Query().Get("pageToken") == "":
		answer(http.StatusOK, `{"skills":[{`+s.version()+`}],"nextPageToken":"more"}`)
	case r.URL.Path == "/api/skills":
		answer(http.StatusOK, `{"skills":[{"ref":{"scope":"platform","slug":"xls"},"name":"xls"}]}`)
	default:
		doc, _ := json.Marshal(skilltest.ValidDocument + "\x1b[2J")
		answer(http.StatusOK, `{`+s.version()+`,"document":`+string(doc)+`}`)
	}
}

func (s *skillsServer) push(w http.ResponseWriter, r *http.Request, body []byte, answer func(int, string)) {
	h := sha256.Sum256(body)
	digest := hex.EncodeToString(h[:])
	if s.refuse || r.Header.Get("Content-Type") != "application/zip" || r.URL.Query().Get("sha256") != digest || r.ContentLength != int64(len(body)) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = io.WriteString(w, `{"code":"SKILL_DIGEST_MISMATCH","field":"sha256","detail":"another"}`)
		return
	}
	same, status := s.digest == digest, http.StatusCreated
	if r.URL.Query().Get("dryRun") == "true" || same {
		status = http.StatusOK
	}
	s.zip, s.digest = body, digest
	answer(status, fmt.Sprintf(`{"ref":{"slug":"pdf-tools","version":%q},"same":%v,"skill":{"name":"pdf-tools","description":"x","bytes":1,"unpackedBytes":2,"files":3},"position":"0-1"}`, digest, same))
}

// last returns the last request, with DIGEST in place of the digest.
func (s *skillsServer) last() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.requests) == 0 {
		return ""
	}
	return strings.ReplaceAll(s.requests[len(s.requests)-1], s.digest, "DIGEST")
}

// skillFolder returns a folder with a skill.
func skillFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"SKILL.md": skilltest.ValidDocument, "run.sh": "#!/bin/sh\n", "x.log": "x", "node_modules/x": "x", ".skillignore": "*.log\n"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func (s *skillsServer) run(t *testing.T, code int, args ...string) result {
	t.Helper()
	got := spool(t, testIO(t), append(append([]string{"skills"}, args...), "--url", s.URL)...)
	if got.code != code {
		t.Errorf("%v: %+v", args, got)
	}
	return got
}

func TestSkillsPush_UploadsAFolderOrZIP(t *testing.T) {
	t.Parallel()
	s := serveSkills(t)
	dir := skillFolder(t)
	got := s.run(t, ExitDone, "push", dir, "--tag", "v1", "--tag", "stable", "--scope", "identity_account", "--org", "ann")
	if want := "POST /api/skills?org=ann&scope=identity_account&sha256=DIGEST&slug=pdf-tools&tag=v1&tag=stable"; s.last() != want {
		t.Errorf("requested %s", s.last())
	}
	if !strings.HasPrefix(got.out, "pushed pdf-tools@"+s.digest+", 2 files, ") {
		t.Errorf("printed %q", got.out)
	}
	// The same folder gives the same ZIP, and a ZIP is pushed unchanged.
	if got := s.run(t, ExitDone, "push", dir); !strings.HasPrefix(got.out, "already pushed: pdf-tools@") {
		t.Errorf("printed %q", got.out)
	}
	zip := filepath.Join(t.TempDir(), "skill.zip")
	if err := os.WriteFile(zip, s.zip, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := s.run(t, ExitDone, "push", zip, "--json"); !strings.Contains(got.out, `"same":true`) || strings.Count(got.out, "\n") != 1 {
		t.Errorf("printed %q", got.out)
	}
	before := s.digest
	if got := s.run(t, ExitDone, "push", dir, "--ignore", "run.*", "--dry-run"); !strings.HasPrefix(got.out, "valid, not pushed: pdf-tools@") || !strings.Contains(got.out, "1 files") || !strings.Contains(s.last(), "dryRun=true") || s.digest == before {
		t.Errorf("requested %s, printed %q", s.last(), got.out)
	}
	s.refuse = true
	if got := s.run(t, ExitFailed, "push", dir); got.err != "spool: sha256: another (SKILL_DIGEST_MISMATCH)\n" {
		t.Errorf("printed %q", got.err)
	}
}

// TestSkillsPush_ReportsErrorsBeforeARequest tests that invalid folders are refused without a request.
func TestSkillsPush_ReportsErrorsBeforeARequest(t *testing.T) {
	t.Parallel()
	s := serveSkills(t)
	dir, bad, none := skillFolder(t), skillFolder(t), t.TempDir()
	if err := os.WriteFile(filepath.Join(bad, "SKILL.md"), []byte("---\nname: x\n---\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	linked := skillFolder(t)
	if err := os.Symlink("/etc/passwd", filepath.Join(linked, "secret")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		code int
		says string
		args []string
	}{
		{ExitFailed, "SKILL.md: description: is required", []string{bad}},
		{ExitFailed, "SKILL.md: is not at the root", []string{none}},
		{ExitFailed, `"secret" is a symbolic link`, []string{linked}},
		{ExitFailed, "zip: is not a ZIP", []string{filepath.Join(dir, "SKILL.md")}},
		{ExitUsage, "no such file", []string{filepath.Join(dir, "nothing")}},
		{ExitUsage, "neither a folder nor a ZIP", []string{os.DevNull}},
		{ExitUsage, `tag: "No"`, []string{dir, "--tag", "No"}},
		{ExitUsage, "--scope", []string{dir, "--scope", "world"}},
		{ExitUsage, "org: is empty: the scope identity_account", []string{dir, "--scope", "identity_account"}},
		{ExitUsage, "leave --ignore out", []string{filepath.Join(dir, "SKILL.md"), "--ignore", "x"}},
		{ExitUsage, "is outside the repository", []string{"https://host.invalid/x.git#main:../y"}},
		{ExitUsage, "hyphen", []string{"https://host.invalid/x.git#--upload-pack=x"}},
	} {
		if got := s.run(t, c.code, append([]string{"push"}, c.args...)...); !strings.Contains(got.err, c.says) {
			t.Errorf("%v: %q, want %q", c.args, got.err, c.says)
		}
	}
	if s.last() != "" {
		t.Errorf("requested %s", s.last())
	}
}

func TestSkillsPush_ClonesARepository(t *testing.T) {
	t.Parallel()
	repo := skillFolder(t)
	git := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir = repo
		cmd.Env = append(os.Environ(), "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b.c", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b.c")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(repo, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git("init", "--quiet", "--initial-branch=main")
	git("config", "uploadpack.allowAnySHA1InWant", "true")
	git("add", "--force", ".")
	git("commit", "--quiet", "-m", "one")
	first := git("rev-parse", "HEAD")
	git("tag", "v1")
	write("sub/dir/SKILL.md", skilltest.ValidDocument)
	if err := os.Symlink("/etc", filepath.Join(repo, "away")); err != nil {
		t.Fatal(err)
	}
	git("add", "--force", ".")
	git("commit", "--quiet", "-m", "two")
	git("branch", "other")
	s := serveSkills(t)
	url := "file://" + repo
	files := func(from string) []string {
		t.Helper()
		s.run(t, ExitDone, "push", from)
		s.mu.Lock()
		z := s.zip
		s.mu.Unlock()
		dir, err := skill.Extract(t.Context(), bytes.NewReader(z), int64(len(z)), t.TempDir(), s.digest)
		if err != nil {
			t.Fatal(err)
		}
		defer makeFilesWritable(dir) //nolint:errcheck // the test's folder is removed anyway
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	whole, part := []string{"SKILL.md", "run.sh"}, []string{"SKILL.md"}
	for from, want := range map[string][]string{
		url + "#v1": whole, url + "#" + first: whole, url + "#other:sub/dir": part, url + "#:sub/dir": part, url + "/.git:sub/dir": part,
	} {
		if got := files(from); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", from, got, want)
		}
	}
	for from, says := range map[string]string{
		url: `"away" is a symbolic link`, url + "#nothing": "git fetch", url + "#:nothing": "has no folder", url + "#:away": "is outside the repository",
		"file:///nowhere/x.git": "git fetch",
	} {
		got := spool(t, testIO(t), "skills", "push", from, "--url", s.URL)
		if got.code == ExitDone || !strings.Contains(got.err, says) {
			t.Errorf("%s: %+v, want %q", from, got, says)
		}
	}
}

func TestParseSource(t *testing.T) {
	t.Parallel()
	for from, want := range map[string]gitSource{
		"https://host:8080/a/b":         {"https://host:8080/a/b", "HEAD", ""},
		"https://host/a.git#v1":         {"https://host/a.git", "v1", ""},
		"https://host/a.git#v1:x/y":     {"https://host/a.git", "v1", "x/y"},
		"https://host/a.git#:x":         {"https://host/a.git", "HEAD", "x"},
		"https://host/a.git:x":          {"https://host/a.git", "HEAD", "x"},
		"git@host:a/b.git#feature/x:y":  {"git@host:a/b.git", "feature/x", "y"},
		"ssh://git@host:22/a.git#main:": {"ssh://git@host:22/a.git", "main", ""},
	} {
		if got, err := parseGitSource(from); err != nil || got != want || !isGitURL(from) {
			t.Errorf("%s: %+v, %v", from, got, err)
		}
	}
	for _, path := range []string{"skill", "./skill", "/a/b", "../x:y/z"} {
		if isGitURL(path) {
			t.Errorf("%s is taken for a repository", path)
		}
	}
}

func TestSkills_ListShowTagAndRemove(t *testing.T) {
	t.Parallel()
	s := serveSkills(t)
	s.run(t, ExitDone, "push", skillFolder(t))
	ls := s.run(t, ExitDone, "ls")
	if strings.Contains(ls.out, "\x1b") || !strings.Contains(ls.out, "pdf-tools     "+s.digest[:12]+"  2      2.0 KiB  latest v1  ") || !strings.Contains(ls.out, "platform/xls") {
		t.Errorf("printed\n%s", ls.out)
	}
	if got := s.run(t, ExitDone, "ls", "--json"); strings.Count(got.out, "\n") != 2 || !strings.Contains(got.out, `"extra":1`) {
		t.Errorf("printed %s", got.out)
	}
	s.run(t, ExitUsage, "ls", "--limit", "-1")
	show := s.run(t, ExitDone, "show", "platform/pdf-tools@v1")
	if s.last() != "GET /api/skills/pdf-tools?scope=platform&version=v1" || show.out != skilltest.ValidDocument+"\x1b[2J" || !strings.Contains(show.err, "tags latest v1") {
		t.Errorf("requested %s, printed %q, %q", s.last(), show.out, show.err)
	}
	tty := testIO(t)
	tty.OutTTY = true
	if got := spool(t, tty, "skills", "show", "pdf-tools", "--url", s.URL); strings.Contains(got.out, "\x1b") {
		t.Errorf("a terminal is sent %q", got.out)
	}
	if got := s.run(t, ExitFailed, "show", "missing"); got.err != "spool: slug: there is no skill missing (SKILL_NOT_FOUND)\n" {
		t.Errorf("printed %q", got.err)
	}
	s.run(t, ExitUsage, "show", "Not A Slug")
	tag := s.run(t, ExitDone, "tag", "team/pdf-tools@v1", "stable")
	if s.last() != `POST /api/skills/pdf-tools/tags {"org":"team","version":"v1","tag":"stable"}` || tag.out != "stable names pdf-tools@"+s.digest+"\n" {
		t.Errorf("requested %s, printed %q", s.last(), tag.out)
	}
	s.run(t, ExitUsage, "tag", "pdf-tools", "No")
	rm := s.run(t, ExitFailed, "rm", "missing", "team/pdf-tools@"+s.digest)
	if s.last() != "DELETE /api/skills/pdf-tools?org=team&version=DIGEST" || rm.out != "removed team/pdf-tools@"+s.digest+"\n" || !strings.Contains(rm.err, "missing: slug: there is no skill") {
		t.Errorf("requested %s, printed %q, %q", s.last(), rm.out, rm.err)
	}
}

func TestSkillsPull_DownloadsAllFilesOrNone(t *testing.T) {
	t.Parallel()
	s := serveSkills(t)
	s.run(t, ExitDone, "push", skillFolder(t))
	parent := t.TempDir()
	to := filepath.Join(parent, "here")
	got := s.run(t, ExitDone, "pull", "pdf-tools@v1", "-o", to)
	if s.last() != "GET /api/skills/pdf-tools/archive?version=DIGEST" || got.out != to+": pdf-tools@"+s.digest+", 2 files\n" {
		t.Errorf("requested %s, printed %q", s.last(), got.out)
	}
	for name, want := range map[string]string{"SKILL.md": "-rw-r--r-- " + skilltest.ValidDocument, "run.sh": "-rwxr-xr-x #!/bin/sh\n"} {
		info, err := os.Stat(filepath.Join(to, name))
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(to, name))
		if have := info.Mode().String() + " " + string(text); err != nil || have != want {
			t.Errorf("%s: %q, %v", name, have, err)
		}
	}
	if got := s.run(t, ExitUsage, "pull", "pdf-tools", "-o", to); !strings.Contains(got.err, "already exists") {
		t.Errorf("printed %q", got.err)
	}
	// Another version than the requested one, or an invalid skill, leaves no files.
	other := filepath.Join(parent, "other")
	for _, zip := range [][]byte{skilltest.BuildZIP(skilltest.DocumentEntry()), []byte("no zip"), skilltest.UnsafeEntryZIPs()[0].ZIP} {
		s.mu.Lock()
		s.zip = zip
		s.mu.Unlock()
		if got := s.run(t, ExitFailed, "pull", "pdf-tools", "-o", other); got.err == "" {
			t.Error("no error is printed")
		}
	}
	if got := s.run(t, ExitFailed, "pull", "missing", "-o", other); !strings.Contains(got.err, "SKILL_NOT_FOUND") {
		t.Errorf("printed %q", got.err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
		t.Errorf("left behind %v, %v", left, err)
	}
}
