package command

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

// changeLetters are the letters that "spool files pull" prints before changed paths: those of git, and R for a change
// that is refused.
var changeLetters = map[string]string{changeKindAdded: "A", changeKindModified: "M", changeKindDeleted: "D", changeKindRefused: "R"}

// maxDiffBytes is the maximum size of a text file whose content or differences are printed.
const maxDiffBytes = 256 << 10

// printChanges prints the list of changes, and then the content of new files and the differences in other files.
func (p *pullRun) printChanges() {
	for _, c := range p.changes {
		terminal.Fprintln(p.app.Out, changeLetters[c.Change]+" "+c.Path+c.describe())
	}
	for _, c := range p.changes {
		if c.Kind == entryKindFile && c.remote != nil && (c.local == nil || c.local.SHA256 != c.remote.SHA256) {
			terminal.Fprintf(p.app.Out, "\n%s", terminal.Lines(p.fileDiff(c)))
		}
	}
}

// describe returns what is printed of a change after its path: size and mode of a file, the target of a link, and why
// the change is a conflict or is refused.
func (c *pathChange) describe() (text string) {
	switch {
	case c.Kind == entryKindDir:
		text = "/"
	case c.remote == nil:
	case c.Kind == entryKindSymlink:
		text = " -> " + c.remote.Target
	case c.Kind == entryKindFile:
		mode := ""
		switch isFile := c.local != nil && c.local.Kind == entryKindFile; {
		case isFile && c.local.Mode != c.remote.Mode:
			mode = fmt.Sprintf(", mode %o -> %o", c.local.Mode, c.remote.Mode)
		case !isFile && c.remote.Mode&0o111 != 0:
			mode = fmt.Sprintf(", mode %o", c.remote.Mode)
		}
		text = " (" + formatSize(c.Size) + mode + ")"
	}
	switch {
	case c.Conflict:
		text += "  CONFLICT: " + c.Reason
	case c.Reason != "":
		text += "  not applied: " + c.Reason
	}
	return text
}

// fileDiff returns a unified diff of a file that a pull adds or changes, or the name, size and hash of content that is
// not shown: content that is binary or too large, and content that has changed since the comparison, which
// copyStagedFile does not apply either.
func (p *pullRun) fileDiff(c *pathChange) string {
	from, before := "/dev/null", []byte(nil)
	to, after, err := terminal.SafeLine("b/"+c.Path), []byte(nil), error(nil)
	if c.local != nil && c.local.Kind == entryKindFile {
		from = terminal.SafeLine("a/" + c.Path)
		before, err = readEntry(c.local, func() (io.ReadCloser, error) { f, _, err := openRegularFile(p.root, c.Path); return f, err })
	}
	if err == nil {
		after, err = readEntry(c.remote, func() (io.ReadCloser, error) { return os.Open(c.staged) })
	}
	hidden := ""
	switch {
	case err != nil:
		hidden = fmt.Sprintf("content of %s is not shown, SHA-256 %s: %v; read it with `spool files get %s %s -`", formatSize(c.Size), c.remote.SHA256, err, p.cmd.Session, terminal.SafeLine(c.Path))
	case !isText(before) || !isText(after):
		hidden = fmt.Sprintf("binary content of %s is not shown, SHA-256 %s", formatSize(c.Size), c.remote.SHA256)
	default:
		return udiff.Unified(from, to, string(before), string(after))
	}
	return fmt.Sprintf("--- %s\n+++ %s\n%s\n", from, to, hidden)
}

// Errors of readEntry.
var (
	errTooLargeToShow = fmt.Errorf("larger than %s", formatSize(maxDiffBytes))
	errContentChanged = errors.New("changed since the comparison")
)

// readEntry returns the content of a file, which open opens. It returns an error if the content is too large to be
// shown, or is not the content of the entry.
func readEntry(e *folderEntry, open func() (io.ReadCloser, error)) ([]byte, error) {
	if e.Size > maxDiffBytes {
		return nil, errTooLargeToShow
	}
	f, err := open()
	if err != nil {
		return nil, err
	}
	content, err := io.ReadAll(io.LimitReader(f, maxDiffBytes+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(content); hex.EncodeToString(sum[:]) != e.SHA256 {
		return nil, errContentChanged
	}
	return content, nil
}

// isText reports whether b is text: valid UTF-8 without zero bytes.
func isText(b []byte) bool { return utf8.Valid(b) && bytes.IndexByte(b, 0) < 0 }
