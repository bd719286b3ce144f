package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestWorkspace_FilesGoInAndOut tests that files are uploaded with a session, with a message, by PUT and as an
// archive. They are read from the last snapshot by GET, in a listing and as a tar. Invalid paths are refused by name.
func TestWorkspace_FilesGoInAndOut(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Gateways: 2, Script: script(t, "docker.yaml")})
	k := newTalkWith(t, c, "spool", map[string]any{
		"model": "known-model", "workspaceFiles": []map[string]any{{"path": "in/first.txt", "content": "first\n"}},
	})
	base := c.URL(0) + "/api/sessions/" + k.session
	if status, raw := request(t, "GET", base+"/files/in/first.txt", nil, nil); status != http.StatusNotFound {
		t.Errorf("before the first snapshot a file is %d %s", status, raw)
	}
	execution := k.c.PostMessage(k.session, "run the command cat in/first.txt > seen.txt; ln -s /etc/passwd link; head -c 300 /dev/zero > zeros; : > empty")
	k.join()
	k.until(execution)
	k.awaitFile("seen.txt", "first\n")
	k.put("by/put.txt", "text/plain", []byte("put\n"))
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "of/tar.txt", Mode: 0o644, Size: 4}), write(w, "tar\n"), w.Close()); err != nil {
		t.Fatal(err)
	}
	k.put("?dir=unpacked", "application/x-tar", archive.Bytes())
	k.awaitFile("by/put.txt", "put\n")
	k.awaitFile("unpacked/of/tar.txt", "tar\n")
	k.awaitFile("zeros", strings.Repeat("\x00", 300))
	k.awaitFile("empty", "")
	var listing struct {
		Files []struct {
			Path string
			Size uint64
		}
	}
	if _, raw := request(t, "GET", base+"/files", nil, nil); json.Unmarshal(raw, &listing) != nil || len(listing.Files) == 0 {
		t.Errorf("the listing is %s", raw)
	}
	found := map[string]bool{}
	for _, f := range listing.Files {
		found[f.Path] = true
	}
	for _, path := range []string{"in/first.txt", "seen.txt", "by/put.txt", "unpacked/of/tar.txt", "zeros", "empty"} {
		if !found[path] {
			t.Errorf("%s is not listed in %v", path, found)
		}
	}
	k.checkTar(found)
	if status, raw := request(t, "DELETE", base+"/files/by", nil, nil); status != http.StatusAccepted {
		t.Errorf("delete answered %d %s", status, raw)
	}
	harness.Eventually(t, "the folder is gone", func() bool {
		status, _ := request(t, "GET", base+"/files/by/put.txt", nil, nil)
		return status == http.StatusNotFound
	})
	for _, bad := range []string{"..%2Fevil", "%2Fetc%2Fevil", "a%2F..%2F..%2Fevil", "a%00b", "..%2Fworkspace-evil%2Fx"} {
		if status, raw := request(t, "PUT", base+"/files/"+bad, nil, []byte("x")); status != http.StatusBadRequest {
			t.Errorf("PUT of %s answered %d %s", bad, status, raw)
		}
	}
	if status, _ := request(t, "GET", base+"/files/link", nil, nil); status < 400 {
		t.Errorf("a link out of the workspace answered %d", status)
	}
	k.idle()
	k.mustComplete("run the command cat in/first.txt unpacked/of/tar.txt", "first\ntar\n")
	created := 0
	for _, e := range k.s.Events {
		if e.Type == (events.FileCreated{}).EventType() {
			created++
		}
	}
	if created == 0 {
		t.Error("no event about a file")
	}
}

func write(w io.Writer, s string) error { _, err := io.WriteString(w, s); return err }

// join opens the stream at its cursor.
func (k *talk) join() {
	k.t.Helper()
	s, err := k.c.JoinSocket(0, k.session, k.s)
	if err != nil {
		k.t.Fatal(err)
	}
	k.s = s
}

func (k *talk) put(path, kind string, content []byte) {
	k.t.Helper()
	sep := "/"
	if strings.HasPrefix(path, "?") {
		sep = ""
	}
	status, raw := request(k.t, "PUT", k.c.URL(0)+"/api/sessions/"+k.session+"/files"+sep+path, map[string]string{"Content-Type": kind}, content)
	if status != http.StatusAccepted {
		k.t.Fatalf("PUT of %s answered %d %s", path, status, raw)
	}
}

// checkTar reads the whole workspace as a tar, which must contain the listed files.
func (k *talk) checkTar(listed map[string]bool) {
	k.t.Helper()
	status, raw := request(k.t, "GET", k.c.URL(1)+"/api/sessions/"+k.session+"/files", map[string]string{"Accept": "application/x-tar"}, nil)
	if status != http.StatusOK {
		k.t.Fatalf("tar answered %d %s", status, raw)
	}
	in := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(raw)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			k.t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			k.t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			in[h.Name] = string(content)
		}
	}
	if in["seen.txt"] != "first\n" || in["unpacked/of/tar.txt"] != "tar\n" {
		k.t.Errorf("the tar contains %v, the listing %v", in, listed)
	}
}
