package command

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

// changeLetters are the letters that "spool files pull" prints before changed paths: those of git, and R for a change
// that is refused.
var changeLetters = map[string]string{changeKindAdded: "A", changeKindModified: "M", changeKindDeleted: "D", changeKindRefused: "R"}

// maxDiffBytes is the maximum size of a text file whose differences are printed.
const maxDiffBytes = 256 << 10

// printChanges prints the list of changes, and the differences in text files.
func (p *pullRun) printChanges() {
	for _, c := range p.changes {
		line := changeLetters[c.Change] + " " + terminal.SafeLine(c.Path)
		if c.Kind == entryKindDir {
			line += "/"
		}
		if c.Change != changeKindDeleted && c.Kind == entryKindFile {
			line += " (" + formatSize(c.Size) + ")"
		}
		switch {
		case c.Conflict:
			line += "  CONFLICT: " + c.Reason
		case c.Reason != "":
			line += "  not applied: " + c.Reason
		}
		fmt.Fprintln(p.app.Out, line)
	}
	for _, c := range p.changes {
		if text := p.unifiedDiff(c); text != "" {
			if p.app.OutTTY {
				text = terminal.SafeText(text)
			}
			fmt.Fprintf(p.app.Out, "\n%s", text)
		}
	}
}

// unifiedDiff returns a unified diff of a changed text file, or "" for other changes.
func (p *pullRun) unifiedDiff(c *pathChange) string {
	if c.Change != changeKindModified || c.local == nil || c.local.Kind != entryKindFile || c.Kind != entryKindFile || c.staged == "" ||
		c.local.Size > maxDiffBytes || c.Size > maxDiffBytes {
		return ""
	}
	f, _, err := openRegularFile(p.root, c.Path)
	if err != nil {
		return "" // the error appears when the file is replaced
	}
	here, err := io.ReadAll(io.LimitReader(f, maxDiffBytes))
	if err = errors.Join(err, f.Close()); err != nil {
		return ""
	}
	there, err := os.ReadFile(c.staged)
	if err != nil || !isText(here) || !isText(there) {
		return ""
	}
	return udiff.Unified(quoteDiffName("a/"+c.Path), quoteDiffName("b/"+c.Path), string(here), string(there))
}

// quoteDiffName returns the name of a file for the header of a unified diff. A name that could be mistaken for a line
// of the diff is quoted.
func quoteDiffName(name string) string {
	if strings.ContainsFunc(name, unicode.IsControl) || strings.ContainsAny(name, `"\`) {
		return strconv.Quote(name)
	}
	return name
}

// isText reports whether b is text: valid UTF-8 without zero bytes.
func isText(b []byte) bool { return utf8.Valid(b) && bytes.IndexByte(b, 0) < 0 }
