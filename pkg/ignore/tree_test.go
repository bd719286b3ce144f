package ignore_test

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/spoolhq/spool/pkg/ignore"
)

func TestTree_DeeperRulesOverrideAndSpoolignoreOverridesAll(t *testing.T) {
	t.Parallel()
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	root := fstest.MapFS{
		".gitignore": file("*.log\n/dist\n!important.tmp\n.env\n[bad\n"), ".spoolignore": file("*.tmp\n!.env\n!node_modules\n"),
		"a/.gitignore": file("!keep.log\n/own\n"), "a/b/x": file(""), "c/x": file(""),
	}
	at := func(dir string) ignore.Tree {
		tree, err := ignore.ReadTree(root)
		if err != nil {
			t.Fatal(err)
		}
		for i, part := range strings.Split(dir, "/") {
			path := strings.Join(strings.Split(dir, "/")[:i+1], "/")
			if part == "" {
				break
			}
			sub, err := fs.Sub(root, path)
			if err != nil {
				t.Fatal(err)
			}
			if tree, err = tree.EnterFolder(sub, path); err != nil {
				t.Fatal(err)
			}
		}
		return tree
	}
	for _, c := range []struct {
		in, path string
		folder   bool
		want     bool
	}{
		{"", "x.log", false, true}, {"", "x.txt", false, false}, {"", "dist", true, true}, {"a", "a/dist", true, false},
		{"", ".git", true, true}, {"", "node_modules", true, false}, {"", "__pycache__", true, true}, {"", ".env", false, false},
		{"", "important.tmp", false, true}, {"a", "a/keep.log", false, false}, {"a", "a/other.log", false, true},
		{"a", "a/own", false, true}, {"a/b", "a/b/own", false, false}, {"a/b", "a/b/keep.log", false, false}, {"c", "c/keep.log", false, true},
	} {
		if got := at(c.in).Ignores(c.path, c.folder); got != c.want {
			t.Errorf("%s is ignored: %v, want %v", c.path, got, c.want)
		}
	}
	if (ignore.Tree{}).Ignores(".git", true) {
		t.Error("the zero value ignores something")
	}
}

func TestReadTree_NamesTheFileThatItCannotRead(t *testing.T) {
	t.Parallel()
	for name, root := range map[string]fstest.MapFS{
		".spoolignore": {".spoolignore": {Data: make([]byte, ignore.MaxRulesFileSize+1)}},
		".gitignore":   {".gitignore": {Mode: fs.ModeNamedPipe}},
	} {
		if _, err := ignore.ReadTree(root); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
