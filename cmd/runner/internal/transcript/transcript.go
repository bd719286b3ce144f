// Package transcript copies an agent's record of a conversation for a fork.
package transcript

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// ErrNoAnchor is returned by Copy when the transcript does not have the anchor at which the copy ends.
var ErrNoAnchor = errors.New("the record does not have the anchor")

// maxLineBytes is the maximum length in bytes of a line of a transcript that is copied.
const maxLineBytes = 64 << 20

// Line is a whole line of a transcript: valid JSON, without the newline.
type Line = []byte

// LineAction determines whether Copy keeps or drops a line of a transcript.
type LineAction int

// The verdicts.
const (
	KeepLine LineAction = iota
	DropLine
	KeepLineAndStop // keep it, and end the copy: the line is the anchor's
)

// EditLine is a function that Copy calls for each line of a transcript. It returns the line to write in place of the
// given one, and the action.
type EditLine func(Line) (Line, LineAction)

// Copy copies the transcript from to the file to, line by line, as changed by edit. With an anchor the copy ends at the
// first action KeepLineAndStop, and Copy returns ErrNoAnchor if there is none. Without an anchor it copies the whole
// transcript, except for a last line that is incomplete after a crash. The file to is replaced when the copy is
// complete, and removed when it fails.
func Copy(from, to, anchor string, edit EditLine) error {
	if err := writeCopy(from, to, anchor, edit); err != nil {
		if removed := os.Remove(to); removed != nil && !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
		return fmt.Errorf("copy %s: %w", from, err)
	}
	return nil
}

// writeCopy is Copy without the removal of the file to after a failure.
func writeCopy(from, to, anchor string, edit EditLine) error {
	in, err := openRegular(from)
	if err != nil {
		return err
	}
	defer in.Close() //nolint:errcheck // only read
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	out, err := os.CreateTemp(filepath.Dir(to), ".fork-*")
	if err != nil {
		return err
	}
	w := bufio.NewWriter(out)
	err = copyLines(w, bufio.NewReaderSize(in, 64<<10), anchor, edit)
	err = errors.Join(err, w.Flush(), out.Close())
	if err == nil {
		err = os.Rename(out.Name(), to)
	}
	if err != nil {
		return errors.Join(err, os.Remove(out.Name()))
	}
	return nil
}

// openRegular opens a regular file. It refuses a pipe or a link, which an agent could have left in its place.
func openRegular(path string) (*os.File, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	return os.Open(path) //nolint:gosec // in the state folder, by an id that was checked
}

// copyLines writes the lines of in to w, as changed by edit, up to the anchor.
func copyLines(w *bufio.Writer, in *bufio.Reader, anchor string, edit EditLine) error {
	copied := 0
	for n := 1; ; n++ {
		line, err := readLine(in)
		ended := errors.Is(err, io.EOF)
		switch {
		case err != nil && !ended:
			return fmt.Errorf("line %d: %w", n, err)
		case json.Valid(line):
			line, verdict := edit(line)
			if verdict == DropLine {
				break
			}
			if _, err := w.Write(append(line, '\n')); err != nil {
				return err
			}
			copied++
			if verdict == KeepLineAndStop {
				return nil
			}
		case !ended && len(bytes.TrimSpace(line)) > 0:
			return fmt.Errorf("line %d is not JSON", n)
		}
		switch {
		case !ended:
		case anchor != "":
			return ErrNoAnchor
		case copied == 0:
			return errors.New("the record is empty")
		default:
			return nil
		}
	}
}

// readLine returns the next line without its newline. With io.EOF it returns the text after the last newline.
func readLine(in *bufio.Reader) (Line, error) {
	var line Line
	for {
		piece, err := in.ReadSlice('\n')
		line = append(line, piece...)
		switch {
		case len(line) > maxLineBytes:
			return nil, fmt.Errorf("longer than %d bytes", maxLineBytes)
		case errors.Is(err, bufio.ErrBufferFull):
		case err != nil:
			return line, err
		default:
			return line[:len(line)-1], nil
		}
	}
}

// ForkID returns the id, a UUID, of the new agent session of a launch with a Fork. The id is the same for the same
// session, Resume and Fork.
func ForkID(l agent.Launch) string {
	sum := sha256.Sum256([]byte("spool fork\x00" + l.SessionID + "\x00" + l.Resume + "\x00" + l.Fork.Anchor))
	id := sum[:16]
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80 // version 8, of RFC 9562
	s := hex.EncodeToString(id)
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}
