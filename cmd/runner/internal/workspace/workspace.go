// Package workspace keeps paths inside the workspace, with any combination of "..", symbolic links, and sibling folders
// with a common prefix.
package workspace

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// workspaceAliases are the paths that agents may use for the workspace in addition to its real path.
var workspaceAliases = []string{"/mnt/workspace", "/workspace"}

// Workspace is an open workspace folder. Paths that its methods get are relative to it, or absolute and begin with the
// folder's own path, /mnt/workspace or /workspace. For a path that leaves the workspace, its methods return an error
// that wraps sandbox.ErrOutsideWorkspace.
type Workspace struct {
	root     *os.Root
	prefixes []string
}

// Open opens the workspace folder dir, which must exist.
func Open(dir string) (*Workspace, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("workspace %s: %w", dir, err)
	}
	root, err := os.OpenRoot(abs)
	if err != nil {
		return nil, fmt.Errorf("open workspace: %w", err)
	}
	prefixes := append([]string{abs}, workspaceAliases...)
	if real, err := filepath.EvalSymlinks(abs); err == nil && real != abs {
		prefixes = append(prefixes, real)
	}
	return &Workspace{root: root, prefixes: prefixes}, nil
}

// Close closes the workspace's folder.
func (w *Workspace) Close() error { return w.root.Close() }

// Root returns the os.Root of the workspace. At every call it refuses a path that leaves the workspace, also through a
// link that was created after a check of the path.
func (w *Workspace) Root() *os.Root { return w.root }

// RelativePath converts a path to a path relative to the workspace, "." for the workspace itself.
func (w *Workspace) RelativePath(path string) (string, error) {
	if strings.ContainsRune(path, 0) {
		return "", fmt.Errorf("path %q: has a NUL: %w", path, fs.ErrInvalid)
	}
	rel := filepath.Clean(path)
	if filepath.IsAbs(rel) {
		var ok bool
		if rel, ok = w.cutWorkspacePrefix(rel); !ok {
			return "", fmt.Errorf("path %s: %w", path, sandbox.ErrOutsideWorkspace)
		}
	}
	if !filepath.IsLocal(rel) {
		return "", fmt.Errorf("path %s: %w", path, sandbox.ErrOutsideWorkspace)
	}
	// Links in the existing part of the path are followed; a part that does not exist yet cannot lead out.
	for at := rel; ; at = filepath.Dir(at) {
		_, err := w.root.Stat(at)
		switch {
		case err == nil || errors.Is(err, fs.ErrPermission):
			return rel, nil
		case errors.Is(err, fs.ErrNotExist) && at != ".":
			if target, linkErr := w.root.Readlink(at); linkErr == nil && filepath.IsAbs(target) {
				return "", fmt.Errorf("path %s: %w", path, sandbox.ErrOutsideWorkspace)
			}
		case isEscapeError(err):
			return "", fmt.Errorf("path %s: %w", path, sandbox.ErrOutsideWorkspace)
		default:
			return "", fmt.Errorf("path %s: %w", path, err)
		}
	}
}

// cutWorkspacePrefix removes the path of the workspace from the absolute path abs. The real path comes first: a
// workspace whose real path is below /workspace keeps its own paths.
func (w *Workspace) cutWorkspacePrefix(abs string) (string, bool) {
	for _, p := range w.prefixes {
		if abs == p {
			return ".", true
		}
		if rest, ok := strings.CutPrefix(abs, strings.TrimSuffix(p, "/")+"/"); ok {
			return rest, true
		}
	}
	return "", false
}

// isEscapeError reports whether err is the error of os.Root for a path that leaves the root. Package os does not export
// it.
func isEscapeError(err error) bool {
	var pe *fs.PathError
	for errors.As(err, &pe) { // MkdirAll wraps one in another
		if err = pe.Err; err != nil && err.Error() == "path escapes from parent" {
			return true
		}
	}
	return false
}

// IsOutside reports whether an operation on Root failed because the path leaves the workspace.
func IsOutside(err error) bool {
	return errors.Is(err, sandbox.ErrOutsideWorkspace) || isEscapeError(err)
}

// RelativePath converts path to a path relative to the workspace dir, as Workspace.RelativePath does.
func RelativePath(dir, path string) (string, error) {
	w, err := Open(dir)
	if err != nil {
		return "", err
	}
	defer w.Close()
	return w.RelativePath(path)
}

// PutFile writes a file, creates its folders as needed, and replaces an existing file atomically: a reader sees the old
// or the new content. It returns the relative path and the number of bytes written.
func (w *Workspace) PutFile(path string, content io.Reader, mode fs.FileMode) (rel string, n int64, err error) {
	if rel, err = w.RelativePath(path); err != nil {
		return "", 0, err
	}
	if n, err = w.putCleaned(path, rel, content, mode); err != nil {
		return "", 0, err
	}
	return rel, n, nil
}

// putCleaned writes a file to the cleaned path rel. path is the caller's spelling, for errors.
func (w *Workspace) putCleaned(path, rel string, content io.Reader, mode fs.FileMode) (n int64, err error) {
	if rel == "." {
		return 0, fmt.Errorf("path %q: names the workspace, not a file: %w", path, fs.ErrInvalid)
	}
	if info, statErr := w.root.Lstat(rel); statErr == nil && info.IsDir() {
		return 0, fmt.Errorf("path %s: is a folder: %w", path, fs.ErrInvalid)
	}
	dir, base := filepath.Split(rel)
	if dir != "" {
		if err := w.root.MkdirAll(filepath.Clean(dir), 0o755); err != nil {
			return 0, fmt.Errorf("make folder: %w", wrapError(path, err))
		}
	}
	tmp := dir + UnfinishedPrefix + rand.Text()
	if n, err = w.writeTemporary(tmp, content, mode); err == nil {
		err = w.root.Rename(tmp, dir+base)
	}
	if err != nil {
		return 0, errors.Join(fmt.Errorf("write: %w", wrapError(path, err)), w.removeTemporary(tmp))
	}
	return n, nil
}

// writeTemporary creates the temporary file tmp with the content, and returns the number of bytes.
func (w *Workspace) writeTemporary(tmp string, content io.Reader, mode fs.FileMode) (int64, error) {
	f, err := w.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, content)
	return n, errors.Join(err, f.Close())
}

// removeTemporary removes the temporary file tmp.
func (w *Workspace) removeTemporary(tmp string) error {
	if err := w.root.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
