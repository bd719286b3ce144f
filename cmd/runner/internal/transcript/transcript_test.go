package transcript

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestCopy_CutsAfterTheAnchor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		from   string
		anchor string
		want   string
		err    string
	}{
		"the whole file":                    {"{\"a\":1}\n{\"b\":2}\n", "", "{\"a\":1}\n{\"b\":2}\n", ""},
		"half a line at the end":            {"{\"a\":1}\n{\"b\":", "", "{\"a\":1}\n", ""},
		"a last line without a newline":     {"{\"a\":1}\n{\"b\":2}", "", "{\"a\":1}\n{\"b\":2}\n", ""},
		"empty lines":                       {"{\"a\":1}\n\n \n{\"b\":2}\n", "", "{\"a\":1}\n{\"b\":2}\n", ""},
		"up to an anchor":                   {"{\"a\":1}\n{\"b\":2}\n{\"c\":3}\n", "b", "{\"a\":1}\n{\"b\":2}\n", ""},
		"broken lines after the anchor":     {"{\"a\":1}\n{\"b\":2}\nnot JSON\n", "b", "{\"a\":1}\n{\"b\":2}\n", ""},
		"edited lines":                      {"{\"old\":1}\n{\"dropped\":2}\n{\"b\":3}\n", "", "{\"new\":1}\n{\"b\":3}\n", ""},
		"an empty file":                     {"", "", "", "the record is empty"},
		"half a line alone":                 {"{\"a\":", "", "", "the record is empty"},
		"an unknown anchor":                 {"{\"a\":1}\n", "b", "", ErrNoAnchor.Error()},
		"an anchor in half a line":          {"{\"a\":1}\n{\"b\":", "b", "", ErrNoAnchor.Error()},
		"a broken line before the anchor":   {"{\"a\":1}\nnot JSON\n{\"b\":2}\n", "b", "", "line 2 is not JSON"},
		"a line longer than the buffer":     {"{\"a\":\"" + strings.Repeat("x", 200<<10) + "\"}\n", "", "{\"a\":\"" + strings.Repeat("x", 200<<10) + "\"}\n", ""},
		"a line longer than any record has": {"{\"a\":\"" + strings.Repeat("x", maxLineBytes) + "\"}\n", "", "", "line 1: longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			from, to := filepath.Join(dir, "from"), filepath.Join(dir, "sub", "to")
			write(t, from, c.from)
			if err := os.Mkdir(filepath.Dir(to), 0o700); err != nil {
				t.Fatal(err)
			}
			write(t, to, "of an earlier attempt")
			err := Copy(from, to, c.anchor, func(line Line) (Line, LineAction) {
				switch {
				case bytes.Contains(line, []byte("dropped")):
					return line, DropLine
				case c.anchor != "" && bytes.Contains(line, []byte(c.anchor)):
					return line, KeepLineAndStop
				}
				return bytes.ReplaceAll(line, []byte("old"), []byte("new")), KeepLine
			})
			got, readErr := os.ReadFile(to) //nolint:gosec // a test's
			switch {
			case c.err == "" && (err != nil || string(got) != c.want):
				t.Errorf("copied %.300q, %v, want %.300q", got, err, c.want)
			case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || !errors.Is(readErr, os.ErrNotExist)):
				t.Errorf("error %v, want %q; the copy: %.100q, %v", err, c.err, got, readErr)
			}
			if raw, err := os.ReadFile(from); err != nil || string(raw) != c.from { //nolint:gosec // a test's
				t.Errorf("the original is %.100q, %v", raw, err)
			}
			if left, err := filepath.Glob(filepath.Join(dir, "sub", ".fork-*")); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// A pipe or link in place of a record must not block the runner, or make it read another file.
func TestCopyReadsRegularFilesOnly(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "target"), "{}\n")
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("target", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, from := range []string{"pipe", "link", ".", "missing"} {
		if err := Copy(filepath.Join(dir, from), filepath.Join(dir, "to"), "", func(line Line) (Line, LineAction) { return line, KeepLine }); err == nil {
			t.Errorf("%s was copied", from)
		}
	}
}

func TestForkID_DependsOnSessionResumeAndFork(t *testing.T) {
	t.Parallel()
	base := agent.Launch{SessionID: "ses_1", Resume: "a", Fork: &runner.Fork{Anchor: "b"}}
	id := ForkID(base)
	if again := ForkID(base); again != id || len(id) != 36 || id[14] != '8' {
		t.Errorf("%s, then %s", id, again)
	}
	for name, other := range map[string]agent.Launch{
		"session": {SessionID: "ses_2", Resume: "a", Fork: &runner.Fork{Anchor: "b"}},
		"resume":  {SessionID: "ses_1", Resume: "b", Fork: &runner.Fork{Anchor: "b"}},
		"anchor":  {SessionID: "ses_1", Resume: "a", Fork: &runner.Fork{}},
	} {
		if ForkID(other) == id {
			t.Errorf("another %s has the same id", name)
		}
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
