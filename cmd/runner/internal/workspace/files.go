package workspace

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// UnfinishedPrefix is the prefix of the names of temporary files whose content is still being written. Listings leave
// these files out.
const UnfinishedPrefix = ".spool-put-"

// Entry is a file or folder in the listing of a workspace folder.
type Entry struct {
	Path    string `json:"path"`    // slash-separated, relative to the workspace
	Size    int64  `json:"size"`    // bytes
	ModTime string `json:"modTime"` // RFC 3339 with nanoseconds, UTC
	Dir     bool   `json:"dir"`
}

// pathError is an error about a path: a message, and a sentinel error such as sandbox.ErrNotFound that callers
// distinguish.
type pathError struct {
	says string
	kind error
}

func (f *pathError) Error() string { return f.says }
func (f *pathError) Unwrap() error { return f.kind }

// cleanLocal returns the clean form of a path from a caller that sees the workspace as its root. It refuses an absolute
// path, which is outside.
func cleanLocal(name string) (string, error) {
	clean := path.Clean(name)
	switch {
	case name == "" || strings.ContainsRune(name, 0):
		return "", fmt.Errorf("path %q: is empty or has a NUL: %w", name, fs.ErrInvalid)
	case path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../"):
		return "", &pathError{fmt.Sprintf("path %q: is outside the workspace", name), sandbox.ErrOutsideWorkspace}
	}
	return clean, nil
}

// wrapError wraps an error of os.Root about the path name in sandbox.ErrNotFound, sandbox.ErrOutsideWorkspace or another error
// that callers distinguish.
func wrapError(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return &pathError{fmt.Sprintf("path %q: there is no such file in the workspace", name), sandbox.ErrNotFound}
	case isEscapeError(err):
		return &pathError{fmt.Sprintf("path %q: is outside the workspace", name), sandbox.ErrOutsideWorkspace}
	}
	return fmt.Errorf("path %q: %w", name, err)
}

// OpenFile opens a regular file of the workspace for reading. It follows a symbolic link inside the workspace.
func (w *Workspace) OpenFile(name string) (*os.File, error) {
	rel, err := cleanLocal(name)
	if err != nil {
		return nil, err
	}
	// Without O_NONBLOCK, opening a named pipe would wait for a writer.
	f, err := w.root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, wrapError(name, err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("is not a regular file: %w", fs.ErrInvalid)
	}
	if err != nil {
		return nil, errors.Join(wrapError(name, err), f.Close())
	}
	return f, nil
}

// List returns everything below the folder dir ("" for the whole workspace), sorted by path. It does not follow
// symbolic links.
func (w *Workspace) List(dir string) ([]Entry, error) {
	rel, err := cleanLocal(cmp.Or(dir, "."))
	if err != nil {
		return nil, err
	}
	var out []Entry
	err = fs.WalkDir(w.root.FS(), rel, func(name string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && name != rel {
			return nil // removed meanwhile
		}
		if err != nil || name == rel || strings.HasPrefix(d.Name(), UnfinishedPrefix) {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		out = append(out, Entry{Path: name, Size: info.Size(), ModTime: info.ModTime().UTC().Format("2006-01-02T15:04:05.000000000Z07:00"), Dir: d.IsDir()})
		return nil
	})
	if err != nil {
		return nil, wrapError(dir, err)
	}
	slices.SortFunc(out, func(a, b Entry) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}

// Remove removes a file, a symbolic link, or a folder with everything below it.
func (w *Workspace) Remove(name string) error {
	rel, err := cleanLocal(name)
	if err != nil {
		return err
	}
	if rel == "." {
		return fmt.Errorf("path %q: names the workspace itself: %w", name, fs.ErrInvalid)
	}
	if _, err := w.root.Lstat(rel); err != nil {
		return wrapError(name, err)
	}
	return wrapError(name, w.root.RemoveAll(rel))
}

// PutRelative is PutFile for a path that is relative to the workspace. A symbolic link with the file's name is itself
// replaced, wherever it leads.
func (w *Workspace) PutRelative(name string, content io.Reader, mode fs.FileMode) (rel string, n int64, err error) {
	if rel, err = cleanLocal(name); err != nil {
		return "", 0, err
	}
	if n, err = w.putCleaned(name, rel, content, mode); err != nil {
		return "", 0, err
	}
	return rel, n, nil
}
