package skill_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
)

// fill writes files into a folder. pairs alternates paths and contents. A path that ends with * is made executable.
func fill(t *testing.T, dir string, pairs ...string) {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		name, run := strings.CutSuffix(pairs[i], "*")
		path := filepath.Join(dir, filepath.FromSlash(name))
		must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		must(t, os.WriteFile(path, []byte(pairs[i+1]), 0o600))
		if run {
			must(t, os.Chmod(path, 0o700)) //nolint:gosec // the file is a script
		}
	}
}

// packFolder packs a folder, and returns the ZIP and the tree that Extract writes.
func packFolder(t *testing.T, dir, ignored string) ([]byte, []string) {
	t.Helper()
	var out bytes.Buffer
	must(t, skill.PackFolder(dir, &out, ignored))
	at, err := skill.Extract(t.Context(), bytes.NewReader(out.Bytes()), int64(out.Len()), skillsFolder(t), sum(out.Bytes()))
	must(t, err)
	var list []string
	for path, what := range tree(t, at) {
		if !strings.HasPrefix(what, "d") {
			list = append(list, path+" "+what[:10])
		}
	}
	slices.Sort(list)
	return out.Bytes(), list
}

func TestPack_IsReproducible(t *testing.T) {
	t.Parallel()
	files := []string{
		"SKILL.md", skilltest.ValidDocument, "scripts/run*", "echo", "z", "z", "a/b/c", "c", ".hidden", "x",
		".git/config", "x", "a/.git/config", "x", "node_modules/x/index.js", "x", "a/__pycache__/x.pyc", "x", "a/.DS_Store", "x",
		"a/x.log", "x", "keep.log", "x", "only/x.log", "x", skill.IgnoreFile, "*.log\n!keep.log\n", "extra/x", "x",
	}
	one, two := t.TempDir(), t.TempDir()
	fill(t, one, files...)
	for i := len(files) - 2; i >= 0; i -= 2 { // in another order than before
		fill(t, two, files[i], files[i+1])
	}
	must(t, os.Chtimes(filepath.Join(two, "z"), time.Unix(0, 0), time.Unix(0, 0)))
	must(t, os.Chmod(filepath.Join(two, "z"), 0o644)) //nolint:gosec // the mode must not matter
	z, list := packFolder(t, one, "extra/\n")
	want := []string{".hidden -r--r--r--", "SKILL.md -r--r--r--", "a/b/c -r--r--r--", "keep.log -r--r--r--", "scripts/run -r-xr-xr-x", "z -r--r--r--"}
	if !slices.Equal(list, want) {
		t.Errorf("got  %q\nwant %q", list, want)
	}
	again, _ := packFolder(t, two, "extra/\n")
	if !bytes.Equal(z, again) {
		t.Error("the same files were packed to different ZIPs")
	}
	fill(t, two, "z", "another")
	if other, _ := packFolder(t, two, "extra/\n"); bytes.Equal(z, other) {
		t.Error("different files were packed to the same ZIP")
	}
}

func TestPack_RefusesUnsafeFolders(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make func(dir string) error
		says string
	}{
		"symlink":           {func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "evil\n")) }, `"evil\n" is a symbolic link`},
		"symlink to inside": {func(dir string) error { return os.Symlink("SKILL.md", filepath.Join(dir, "b")) }, `"b" is a symbolic link`},
		"pipe":              {func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "p"), 0o600) }, `"p" is neither a file nor a folder`},
		"bad rules":         {func(dir string) error { return os.WriteFile(filepath.Join(dir, skill.IgnoreFile), []byte("[x"), 0o600) }, ".skillignore: line 5: pattern"},
		"long rules": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, skill.IgnoreFile), make([]byte, 70<<10), 0o600)
		}, "more than 65536"},
		"no folder": {os.RemoveAll, "no such file"},
	} {
		dir := t.TempDir()
		fill(t, dir, "SKILL.md", skilltest.ValidDocument)
		must(t, c.make(dir))
		var out bytes.Buffer
		if err := skill.PackFolder(dir, &out, ""); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if name == "symlink" { // an ignored symlink is no error
			if err := skill.PackFolder(dir, &out, "evil?"); err != nil {
				t.Errorf("with the symlink ignored: %v", err)
			}
		}
	}
}
