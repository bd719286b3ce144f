package command

import (
	"os"
	"path/filepath"
	"testing"
)

// TestDifference_QuotesNamesOfFiles tests that a file's name cannot add lines to the diff that a user accepts.
func TestDifference_QuotesNamesOfFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	const name = "x\n+++ evil"
	staged := filepath.Join(t.TempDir(), "staged")
	if err := root.WriteFile(name, []byte("old\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(staged, []byte("new\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &pullRun{root: root}
	got := p.unifiedDiff(&pathChange{Path: name, Change: changeKindModified, Kind: entryKindFile, local: &folderEntry{Kind: entryKindFile}, staged: staged})
	if want := "--- \"a/x\\n+++ evil\"\n+++ \"b/x\\n+++ evil\"\n@@ -1 +1 @@\n-old\n+new\n"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
