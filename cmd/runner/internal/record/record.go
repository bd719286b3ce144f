// Package record waits for the end of an agent's own record of the conversation. Some agents end a turn before they
// have written the last line of their record: a snapshot right after the turn would lack the line, and a fork, or a
// session that continues in another sandbox, would not know it.
package record

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// NoteFileName is the name of a file in the state folder, the note. The note names the transcript that is not complete
// yet, and a text by which a complete transcript is recognised. Snapshots do not contain the note.
const NoteFileName = ".spool-record"

const (
	// completionTimeout is the maximum time that AwaitComplete waits for a transcript to become complete.
	completionTimeout   = 2 * time.Second
	transcriptPollPause = 20 * time.Millisecond
	// searchedTailBytes is the size of the end of a transcript that AwaitComplete searches for the text of the note.
	searchedTailBytes = 1 << 20
	// maxNoteSize is the maximum size of the note in bytes. It is limited because the agent can write to the file.
	maxNoteSize = 4 << 10
)

// completionNote is the content of the file NoteFileName, in JSON.
type completionNote struct {
	Path string `json:"path"` // path of the record, relative to the state folder
	Text string `json:"text"` // text that stands near the end of the complete record
}

// ExpectText writes a note: the transcript at path is complete once text occurs near its end. path is absolute and
// below the state folder.
func ExpectText(state, path, text string) error {
	rel, err := filepath.Rel(state, path)
	if err != nil || !filepath.IsLocal(rel) {
		return fmt.Errorf("record %s is not in %s", path, state)
	}
	raw, err := json.Marshal(completionNote{rel, text})
	if err != nil {
		return fmt.Errorf("note on record %s: %w", path, err)
	}
	tmp := filepath.Join(state, NoteFileName+".new")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("note on record %s: %w", path, err)
	}
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) //nolint:gosec // below the state folder; EXCL follows no link
	if err != nil {
		return fmt.Errorf("note on record %s: %w", path, err)
	}
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(tmp, filepath.Join(state, NoteFileName))
	}
	if err != nil {
		return fmt.Errorf("note on record %s: %w", path, err)
	}
	return nil
}

// AwaitComplete blocks until the transcript that the note names is complete, for two seconds at most, and removes the
// note. whole is false if the transcript did not become complete. The agent can write both files, so AwaitComplete
// reads only regular files below the state folder.
func AwaitComplete(ctx context.Context, state *os.Root) (whole bool, err error) {
	noted, err := readTail(state, NoteFileName, maxNoteSize)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	var n completionNote
	if err == nil {
		err = json.Unmarshal(noted, &n)
	}
	if err != nil || n.Text == "" {
		return false, errors.Join(err, state.Remove(NoteFileName))
	}
	late := time.NewTimer(completionTimeout)
	defer late.Stop()
	for {
		end, err := readTail(state, n.Path, searchedTailBytes)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, errors.Join(err, removeNote(state, noted))
		}
		if bytes.Contains(end, []byte(n.Text)) {
			return true, removeNote(state, noted)
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-late.C:
			return false, removeNote(state, noted)
		case <-time.After(transcriptPollPause):
		}
	}
}

// removeNote removes the note if it still has the content noted. Otherwise a later turn has written another note, for
// which the next snapshot waits.
func removeNote(state *os.Root, noted []byte) error {
	now, err := readTail(state, NoteFileName, maxNoteSize)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(now, noted) {
		return nil
	}
	return state.Remove(NoteFileName)
}

// readTail returns the last bytes of the regular file path, at most the number most. It does not block on a pipe.
func readTail(state *os.Root, path string, most int64) ([]byte, error) {
	f, err := state.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-most), most))
}
