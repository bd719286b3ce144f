package skill_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
)

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// sampleZIP returns a ZIP with every kind of entry that is accepted.
func sampleZIP() []byte {
	return skilltest.BuildZIP(
		skilltest.FileEntry("empty/", ""), skilltest.DocumentEntry(), skilltest.ZIPEntry{Name: "scripts/run", Content: []byte("echo"), Mode: 0o100755},
		skilltest.FileEntry("scripts/tool.py", "#!/usr/bin/env python3\n"), skilltest.ZIPEntry{Name: "a/b/c.txt", Content: []byte("deep"), Raw: true},
		skilltest.FileEntry("empty.txt", ""), skilltest.FileEntry("ünïcode/日本.md", "text"), skilltest.ZIPEntry{Name: "setuid", Content: []byte("x"), Mode: 0o104644},
	)
}

// tree returns mode and content of the files in a folder, by path.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil || rel == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		var content []byte
		if !d.IsDir() {
			content, err = os.ReadFile(path)
		}
		out[filepath.ToSlash(rel)] = fmt.Sprintf("%s %s", info.Mode(), content)
		return err
	}))
	return out
}

var sampleTree = map[string]string{
	"empty": "dr-xr-xr-x ", "SKILL.md": "-r--r--r-- " + skilltest.ValidDocument, "scripts": "dr-xr-xr-x ", "scripts/run": "-r-xr-xr-x echo",
	"scripts/tool.py": "-r-xr-xr-x #!/usr/bin/env python3\n", "a": "dr-xr-xr-x ", "a/b": "dr-xr-xr-x ", "a/b/c.txt": "-r--r--r-- deep",
	"empty.txt": "-r--r--r-- ", "ünïcode": "dr-xr-xr-x ", "ünïcode/日本.md": "-r--r--r-- text", "setuid": "-r--r--r-- x",
}

func TestCheck_DescribesAValidSkill(t *testing.T) {
	t.Parallel()
	z := sampleZIP()
	got, err := skill.Check(t.Context(), bytes.NewReader(z), int64(len(z)), skill.Limits{})
	want := skill.Metadata{
		Name: "pdf-tools", Description: "Reads and fills PDF forms.", Document: skilltest.ValidDocument, Files: 7, Bytes: uint64(len(z)),
		UnpackedBytes: uint64(len(skilltest.ValidDocument) + 4 + 23 + 4 + 4 + 1), Digest: sum(z),
	}
	if err != nil || got != want {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}
	// ZIPs of other packers are accepted too: with data descriptors and without modes.
	z = standardZIP(t, "SKILL.md", skilltest.ValidDocument, "__MACOSX/._SKILL.md", "x", "deep/SKILL.md", "another")
	if got, err = skill.Check(t.Context(), bytes.NewReader(z), int64(len(z)), skill.Limits{}); err != nil || got.Files != 3 {
		t.Errorf("%+v, %v", got, err)
	}
}

// standardZIP returns a ZIP that the standard library wrote. pairs alternates names and contents.
func standardZIP(t testing.TB, pairs ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for i := 0; i < len(pairs); i += 2 {
		f, err := w.Create(pairs[i])
		must(t, err)
		_, err = f.Write([]byte(pairs[i+1]))
		must(t, err)
	}
	must(t, w.Close())
	return out.Bytes()
}

func TestCheck_ReadsTheFrontMatter(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ document, description string }{
		"plain":        {"---\nname: x\ndescription: one\n---\n", "one"},
		"others kept":  {"---\nlicense: MIT\nallowed-tools: [a, b]\nname: 'x'\ndescription: \"two\"\nmetadata: {a: 1}\n---\nbody\n---\n", "two"},
		"many lines":   {"---\nname: x\ndescription: |\n  one\n  two\n---\n", "one\ntwo\n"},
		"CRLF":         {"---\r\nname: x\r\ndescription: one\r\n---\r\nbody\r\n", "one"},
		"BOM":          {"\ufeff---\nname: x\ndescription: one\n---", "one"},
		"spaces":       {"---  \nname: x\ndescription: one\n--- \n", "one"},
		"at the limit": {"---\nname: x\ndescription: " + strings.Repeat("é", 1024) + "\n---\n", strings.Repeat("é", 1024)},
	} {
		z := skilltest.BuildZIP(skilltest.ZIPEntry{Name: "SKILL.md", Content: []byte(c.document), Raw: true})
		got, err := skill.Check(t.Context(), bytes.NewReader(z), int64(len(z)), skill.Limits{})
		if err != nil || got.Name != "x" || got.Description != c.description || got.Document != c.document {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func TestExtract_WritesReadOnlyFiles(t *testing.T) {
	t.Parallel()
	z := sampleZIP()
	parent := filepath.Join(skillsFolder(t), "not", "there")
	dir, err := skill.Extract(t.Context(), bytes.NewReader(z), int64(len(z)), parent, sum(z))
	if err != nil || dir != filepath.Join(parent, sum(z)) {
		t.Fatalf("%s, %v", dir, err)
	}
	if got := tree(t, dir); !maps.Equal(got, sampleTree) {
		t.Errorf("got  %q\nwant %q", got, sampleTree)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode() != fs.ModeDir|0o555 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	// The folder exists, so Extract does not read the ZIP.
	again, err := skill.Extract(t.Context(), nil, 0, parent, sum(z))
	if err != nil || again != dir {
		t.Errorf("again: %s, %v", again, err)
	}
}

func TestExtract_RefusesOtherDigestsAndFiles(t *testing.T) {
	t.Parallel()
	z := sampleZIP()
	parent := skillsFolder(t)
	var refused *skill.Error
	_, err := skill.Extract(t.Context(), bytes.NewReader(z), int64(len(z)), parent, sum([]byte("another")))
	if !errors.As(err, &refused) || refused.Code != skill.CodeDigestMismatch || refused.Field != "sha256" {
		t.Errorf("another digest: %v", err)
	}
	if _, err := skill.Extract(t.Context(), bytes.NewReader(z), int64(len(z)), parent, "../x"); err == nil {
		t.Error("a digest that is a path was accepted")
	}
	must(t, os.WriteFile(filepath.Join(parent, sum(z)), nil, 0o600))
	if _, err := skill.Extract(t.Context(), bytes.NewReader(z), int64(len(z)), parent, sum(z)); err == nil || !strings.Contains(err.Error(), "not a folder") {
		t.Errorf("a file in its place: %v", err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
		t.Errorf("%d files were left, %v", len(left), err)
	}
}

// failingReader is a reader that fails after some bytes.
type failingReader struct {
	*bytes.Reader
	left int
}

func (f *failingReader) ReadAt(p []byte, at int64) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, fs.ErrPermission
	}
	return f.Reader.ReadAt(p, at)
}

// TestExtract_LeavesNothingAfterAFailure tests that a failure at any byte leaves no files, and that its error is not
// reported as a refusal of the ZIP.
func TestExtract_LeavesNothingAfterAFailure(t *testing.T) {
	t.Parallel()
	z := sampleZIP()
	failed := 0
	for left := 0; ; left += 97 {
		parent := skillsFolder(t)
		_, err := skill.Extract(t.Context(), &failingReader{bytes.NewReader(z), left}, int64(len(z)), parent, sum(z))
		if err == nil {
			break
		}
		failed++
		var refused *skill.Error
		if errors.As(err, &refused) || !errors.Is(err, fs.ErrPermission) {
			t.Errorf("after %d bytes: %v", left, err)
		}
		if list, err := os.ReadDir(parent); err != nil || len(list) > 0 {
			t.Errorf("after %d bytes: %d files were left, %v", left, len(list), err)
		}
	}
	if failed < 10 {
		t.Errorf("Extract failed %d times", failed)
	}
}

func TestExtract_Concurrently(t *testing.T) {
	t.Parallel()
	z := sampleZIP()
	parent := skillsFolder(t)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			dir, err := skill.Extract(t.Context(), bytes.NewReader(z), int64(len(z)), parent, sum(z))
			if err != nil || dir != filepath.Join(parent, sum(z)) {
				t.Errorf("%s, %v", dir, err)
			}
		})
	}
	all.Wait()
	list, err := os.ReadDir(parent)
	if err != nil || len(list) != 1 {
		t.Errorf("%d folders, %v", len(list), err)
	}
	if got := tree(t, filepath.Join(parent, sum(z))); !maps.Equal(got, sampleTree) {
		t.Errorf("got %q", got)
	}
}

func TestTar_IsReproducible(t *testing.T) {
	t.Parallel()
	z := sampleZIP()
	var out, again bytes.Buffer
	must(t, skill.Tar(t.Context(), bytes.NewReader(z), int64(len(z)), &out))
	must(t, skill.Tar(t.Context(), bytes.NewReader(z), int64(len(z)), &again))
	if !bytes.Equal(out.Bytes(), again.Bytes()) {
		t.Error("two tars of one ZIP differ")
	}
	got := map[string]string{}
	var order []string
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s: %+v", h.Name, h)
		}
		content, err := io.ReadAll(r)
		must(t, err)
		name := strings.TrimSuffix(h.Name, "/")
		got[name] = fmt.Sprintf("%s %s", h.FileInfo().Mode(), content)
		order = append(order, name)
	}
	if !maps.Equal(got, sampleTree) {
		t.Errorf("got  %q\nwant %q", got, sampleTree)
	}
	if folders := order[:5]; !slices.IsSorted(folders) || !slices.IsSorted(order[5:]) {
		t.Errorf("order %q", order)
	}
}

// TestCheck_DoesNotHoldTheArchiveInMemory tests that a skill at the size limit is checked with little memory.
func TestCheck_DoesNotHoldTheArchiveInMemory(t *testing.T) {
	z := skilltest.BuildZIP(skilltest.DocumentEntry(), skilltest.ZIPEntry{Name: "large", Content: skilltest.IncompressibleBytes(40 << 20), Raw: true})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	_, err := skill.Check(t.Context(), bytes.NewReader(z), int64(len(z)), skill.Limits{})
	runtime.ReadMemStats(&after)
	must(t, err)
	if took := after.TotalAlloc - before.TotalAlloc; took > 4<<20 {
		t.Errorf("%d bytes were allocated", took)
	}
}
