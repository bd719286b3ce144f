package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestLiveFiles_AreThoseOfTheSandbox tests that live files are read as the sandbox has them now, during a turn and
// between turns, while the last snapshot has the earlier content. A file that cannot be read is a typed error.
func TestLiveFiles_AreThoseOfTheSandbox(t *testing.T) {
	t.Parallel()
	testLiveFiles(t, harness.New(t, harness.Options{Script: script(t, "docker.yaml")}), os.Geteuid() != 0)
}

// TestLiveFiles_InDocker tests the same in a container.
func TestLiveFiles_InDocker(t *testing.T) {
	harness.NeedDocker(t)
	t.Parallel()
	testLiveFiles(t, harness.New(t, harness.Options{Docker: true, Script: script(t, "docker.yaml")}), true)
}

// testLiveFiles runs the test. modes reports whether file modes restrict the process that reads the sandbox's files.
// They do not restrict root.
func testLiveFiles(t *testing.T, c *harness.Cluster, modes bool) {
	t.Helper()
	k := newTalkWith(t, c, "spool", map[string]any{"model": "known-model", "sessionOptions": map[string]any{"syncIntervalMs": 86_400_000}})
	base := c.URL(0) + "/api/sessions/" + k.session + "/files"
	refusedLive := func(what, path string, status int, code, field string) {
		t.Helper()
		got, raw := request(t, "GET", base+path, nil, nil)
		refused(t, what, status, code, field, got, raw)
	}
	refusedLive("before there is a sandbox", "/a.txt?live=1", http.StatusConflict, "NO_LIVE_SANDBOX", "live")
	refusedLive("before there is a sandbox, a listing", "?live=1", http.StatusConflict, "NO_LIVE_SANDBOX", "live")

	first := k.c.PostMessage(k.session, "run the command echo old > a.txt; mkdir -p d; echo x > d/x.txt; head -c 3000000 /dev/zero > big; ln -s a.txt in; ln -s /etc/passwd out; ln -s /etc outdir")
	k.join()
	k.until(first)
	k.awaitFile("a.txt", "old\n")

	// The turn waits for a file that this test puts. No snapshot is taken meanwhile.
	second := k.c.PostMessage(k.session, "run the command mkfifo pipe; echo secret > closed; chmod 000 closed; head -c 70000000 /dev/zero > huge; echo new > a.txt; for i in $(seq 600); do test -e d/go && break; sleep 0.1; done")
	live := func(path string) (int, string) {
		status, raw := request(t, "GET", base+path, nil, nil)
		return status, string(raw)
	}
	harness.Eventually(t, "the file is read live, in the turn", func() bool { status, text := live("/a.txt?live=1"); return status == http.StatusOK && text == "new\n" })
	if status, text := live("/a.txt"); status != http.StatusOK || text != "old\n" {
		t.Errorf("the snapshot's file is %d %q", status, text)
	}
	k.put("d/go", "text/plain", []byte("go"))
	k.join()
	k.until(second)

	if status, text := live("/a.txt?live=1"); status != http.StatusOK || text != "new\n" {
		t.Errorf("between turns: %d %q", status, text)
	}
	if status, text := live("/big?live=1"); status != http.StatusOK || len(text) != 3_000_000 {
		t.Errorf("a file of many chunks: %d, %d bytes", status, len(text))
	}
	if status, text := live("/in?live=1"); status != http.StatusOK || text != "new\n" {
		t.Errorf("a link in the workspace: %d %q", status, text)
	}
	var listing struct {
		Live  bool
		Files []struct {
			Path, Kind string
			Size       int64
		}
	}
	status, raw := request(t, "GET", base+"?live=1&dir=d", nil, nil)
	if err := json.Unmarshal(raw, &listing); err != nil || status != http.StatusOK || !listing.Live || len(listing.Files) != 2 || listing.Files[1].Path != "d/x.txt" || listing.Files[1].Size != 2 {
		t.Errorf("the listing is %d %s", status, raw)
	}
	for what, x := range map[string]struct {
		path   string
		status int
		code   string
		field  string
	}{
		"a file that is not there":    {"/none?live=1", http.StatusNotFound, "FILE_NOT_FOUND", "path"},
		"a folder that is not there":  {"?live=1&dir=none", http.StatusNotFound, "FILE_NOT_FOUND", "dir"},
		"a folder's content":          {"/d?live=1", http.StatusNotFound, "FILE_NOT_FOUND", "path"},
		"a pipe":                      {"/pipe?live=1", http.StatusNotFound, "FILE_NOT_FOUND", "path"},
		"a link out":                  {"/out?live=1", http.StatusBadRequest, "INVALID_REQUEST", "path"},
		"a path through a link out":   {"/outdir/passwd?live=1", http.StatusBadRequest, "INVALID_REQUEST", "path"},
		"a folder through a link out": {"?live=1&dir=outdir/ssl", http.StatusBadRequest, "INVALID_REQUEST", "dir"},
		"a path out":                  {"/..%2Fx?live=1", http.StatusBadRequest, "INVALID_REQUEST", "path"},
		"a path out from a folder":    {"/d%2F..%2F..%2Fx?live=1", http.StatusBadRequest, "INVALID_REQUEST", "path"},
		"a folder out":                {"?live=1&dir=../x", http.StatusBadRequest, "INVALID_REQUEST", "dir"},
		"70 MB":                       {"/huge?live=1", http.StatusUnprocessableEntity, "FILE_TOO_LARGE", "path"},
		"live is neither 1 nor 0":     {"?live=yes", http.StatusBadRequest, "INVALID_REQUEST", "live"},
		"live and a position":         {"?live=1&minPosition=0-1", http.StatusBadRequest, "INVALID_REQUEST", "minPosition"},
	} {
		refusedLive(what, x.path, x.status, x.code, x.field)
	}
	status, raw = request(t, "GET", base+"?live=1", map[string]string{"Accept": "application/x-tar"}, nil)
	refused(t, "a tar", http.StatusBadRequest, "INVALID_REQUEST", "live", status, raw)
	if modes {
		refusedLive("a file that its mode does not let be read", "/closed?live=1", http.StatusForbidden, "FORBIDDEN", "path")
	}

	here := t.TempDir()
	if code, out, says := c.RunCLI(t, here, here, "files", "get", k.session, "a.txt", "got.txt", "--live"); code != 0 {
		t.Errorf("spool files get --live: %d %s %s", code, out, says)
	}
	if got, err := os.ReadFile(filepath.Join(here, "got.txt")); err != nil || string(got) != "new\n" {
		t.Errorf("spool files get wrote %q, %v", got, err)
	}
	if code, out, says := c.RunCLI(t, here, here, "files", "ls", k.session, "--live"); code != 0 || !strings.Contains(out, "d/x.txt") {
		t.Errorf("spool files ls --live: %d %s %s", code, out, says)
	}
}
