package local

import (
	"context"
	"crypto/rand"
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

// partialPrefix is the prefix of the names of files in the workspace whose content is not complete yet.
const partialPrefix = ".spool-put-"

// files reads and writes a workspace on this machine. It implements sandbox.Files. It uses os.Root, so no path and
// no symbolic link leads out of the workspace.
type files struct{ dir string }

// Files returns the workspace.
func (b *box) Files() sandbox.Files { return files{b.workspaceDir()} }

// cleanRelativePath returns the shortest form of a slash-separated path, or an error if the path is not below the
// workspace.
func cleanRelativePath(name string) (string, error) {
	clean := path.Clean(name)
	switch {
	case name == "" || strings.ContainsRune(name, 0):
		return "", fmt.Errorf("path %q: %w", name, fs.ErrInvalid)
	case path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../"):
		return "", fmt.Errorf("path %q: %w", name, sandbox.ErrOutsideWorkspace)
	}
	return clean, nil
}

// translateError converts an error of os.Root to an error of package sandbox. An error that does not come from a
// system call means that the path leads out of the workspace.
func translateError(name string, err error) error {
	var errno syscall.Errno
	var p *fs.PathError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("path %q: %w", name, sandbox.ErrNotFound)
	case errors.As(err, &p) && !errors.As(err, &errno):
		return fmt.Errorf("path %q: %w", name, sandbox.ErrOutsideWorkspace)
	}
	return fmt.Errorf("path %q: %w", name, err)
}

// Put writes a file of the workspace, which it replaces atomically.
func (f files) Put(ctx context.Context, name string, content io.Reader) error {
	rel, err := cleanRelativePath(name)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(f.dir)
	if err != nil {
		return fmt.Errorf("open workspace: %w", err)
	}
	defer root.Close() //nolint:errcheck // only a handle
	if dir := path.Dir(rel); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return translateError(name, err)
		}
	}
	tmp := path.Join(path.Dir(rel), partialPrefix+rand.Text())
	if err := f.writeTemporary(ctx, root, tmp, content); err != nil {
		return translateError(name, errors.Join(err, ignoreNotExist(root.Remove(tmp))))
	}
	if err := root.Rename(tmp, rel); err != nil {
		return translateError(name, errors.Join(err, ignoreNotExist(root.Remove(tmp))))
	}
	return nil
}

// writeTemporary writes the content of a file to a new file with the given name.
func (f files) writeTemporary(ctx context.Context, root *os.Root, name string, content io.Reader) error {
	file, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, contextReader{ctx, content})
	return errors.Join(err, file.Close())
}

// contextReader is a reader that returns the error of its context after the context has ended.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (r contextReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// ignoreNotExist returns nil for the error that a file does not exist, and other errors unchanged.
func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Get opens a file of the workspace for reading. The caller must close the reader.
func (f files) Get(_ context.Context, name string) (io.ReadCloser, error) {
	rel, err := cleanRelativePath(name)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(f.dir)
	if err != nil {
		return nil, fmt.Errorf("open workspace: %w", err)
	}
	defer root.Close() //nolint:errcheck // an open file outlives it
	// Without O_NONBLOCK the open of a named pipe would wait for a writer.
	file, err := root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, translateError(name, err)
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%w: not a regular file", fs.ErrInvalid)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("path %q: %w", name, err), file.Close())
	}
	return file, nil
}

// List returns the files and folders below a folder of the workspace. It does not follow symbolic links.
func (f files) List(ctx context.Context, dir string) ([]sandbox.File, error) {
	rel := "."
	if dir != "" {
		var err error
		if rel, err = cleanRelativePath(dir); err != nil {
			return nil, err
		}
	}
	root, err := os.OpenRoot(f.dir)
	if err != nil {
		return nil, fmt.Errorf("open workspace: %w", err)
	}
	defer root.Close() //nolint:errcheck // only a handle
	var out []sandbox.File
	err = fs.WalkDir(root.FS(), rel, func(name string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil || name == rel || strings.HasPrefix(d.Name(), partialPrefix) {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		out = append(out, sandbox.File{Path: name, Size: info.Size(), ModTime: info.ModTime(), Dir: d.IsDir()})
		return nil
	})
	if err != nil {
		return nil, translateError(dir, err)
	}
	slices.SortFunc(out, func(a, b sandbox.File) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}

// Remove removes a file of the workspace, or a folder with everything in it.
func (f files) Remove(_ context.Context, name string) error {
	rel, err := cleanRelativePath(name)
	if err != nil {
		return err
	}
	if rel == "." {
		return fmt.Errorf("path %q: %w", name, fs.ErrInvalid)
	}
	root, err := os.OpenRoot(f.dir)
	if err != nil {
		return fmt.Errorf("open workspace: %w", err)
	}
	defer root.Close() //nolint:errcheck // nothing was written through it
	if _, err := root.Lstat(rel); err != nil {
		return translateError(name, err)
	}
	return translateError(name, root.RemoveAll(rel))
}
