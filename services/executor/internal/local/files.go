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

// partialPrefix is the prefix of the names of files that are not completely written.
const partialPrefix = ".spool-put-"

// files implements sandbox.Files for a workspace on this machine. It uses os.Root, so no path and no symbolic link
// leads out of the workspace.
type files struct{ dir string }

// Files returns the workspace.
func (b *box) Files() sandbox.Files { return files{b.workspace()} }

// relative cleans a slash-separated path and returns an error if it is not below the workspace.
func relative(name string) (string, error) {
	clean := path.Clean(name)
	switch {
	case name == "" || strings.ContainsRune(name, 0):
		return "", fmt.Errorf("path %q: %w", name, fs.ErrInvalid)
	case path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../"):
		return "", fmt.Errorf("path %q: %w", name, sandbox.ErrOutsideWorkspace)
	}
	return clean, nil
}

// wrapError returns the error of package sandbox for an error of os.Root. An error that is not of a system call
// means that the path leaves the Root.
func wrapError(name string, err error) error {
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

// Put replaces a file atomically.
func (f files) Put(ctx context.Context, name string, content io.Reader) error {
	rel, err := relative(name)
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
			return wrapError(name, err)
		}
	}
	tmp := path.Join(path.Dir(rel), partialPrefix+rand.Text())
	if err := f.write(ctx, root, tmp, content); err != nil {
		return wrapError(name, errors.Join(err, ignoreMissing(root.Remove(tmp))))
	}
	if err := root.Rename(tmp, rel); err != nil {
		return wrapError(name, errors.Join(err, ignoreMissing(root.Remove(tmp))))
	}
	return nil
}

func (f files) write(ctx context.Context, root *os.Root, name string, content io.Reader) error {
	file, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, reader{ctx, content})
	return errors.Join(err, file.Close())
}

// reader is a reader that returns the error of its context once the context has ended.
type reader struct {
	ctx context.Context
	r   io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Get opens a file for reading. The caller closes it.
func (f files) Get(_ context.Context, name string) (io.ReadCloser, error) {
	rel, err := relative(name)
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
		return nil, wrapError(name, err)
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

// List returns the files and folders below a folder. It does not follow symbolic links.
func (f files) List(ctx context.Context, dir string) ([]sandbox.File, error) {
	rel := "."
	if dir != "" {
		var err error
		if rel, err = relative(dir); err != nil {
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
		return nil, wrapError(dir, err)
	}
	slices.SortFunc(out, func(a, b sandbox.File) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}

// Remove removes a file, or a folder with everything in it.
func (f files) Remove(_ context.Context, name string) error {
	rel, err := relative(name)
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
		return wrapError(name, err)
	}
	return wrapError(name, root.RemoveAll(rel))
}
