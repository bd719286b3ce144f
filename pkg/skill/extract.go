package skill

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// Modes of extracted files, which nobody may write.
const (
	extractedFileMode   = 0o444
	extractedScriptMode = 0o555 // files with an execute bit in the ZIP, or that begin with #!
	extractedFolderMode = 0o555
)

// Extract extracts a skill's ZIP into the folder parent/digest and returns its path. It performs all checks of Check,
// and the ZIP must have the digest. The folder appears atomically, even if other processes extract the same ZIP at the
// same time. An existing folder is returned unchanged, without reading the ZIP. The parent is created if it does not
// exist.
func Extract(ctx context.Context, r io.ReaderAt, size int64, parent, digest string) (dir string, err error) {
	if !events.IsDigest(digest) {
		return "", fmt.Errorf("extract a skill: %s is not a SHA-256 in hex", quoteName(digest))
	}
	dir = filepath.Join(parent, digest)
	if there, err := isFolder(dir); there || err != nil {
		return dir, err
	}
	a, err := openArchive(ctx, r, size, Limits{})
	if err != nil {
		return "", err
	}
	if err := a.checkDigest(ctx, digest); err != nil {
		return "", err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil { //nolint:gosec // sandboxes run as another user
		return "", fmt.Errorf("extract a skill: %w", err)
	}
	own, err := os.MkdirTemp(parent, ".skill-")
	if err != nil {
		return "", fmt.Errorf("extract a skill: %w", err)
	}
	if err = a.writeTree(ctx, own); err == nil {
		err = moveToFinalName(own, dir)
	}
	if err != nil {
		return "", errors.Join(wrapWriteError(err), removeExtracted(own))
	}
	return dir, nil
}

// checkDigest returns an error unless the ZIP has the given SHA-256.
func (a *zipArchive) checkDigest(ctx context.Context, digest string) error {
	have, err := sha256Of(ctx, a.r, a.size)
	if err == nil && have != digest {
		err = &Error{Code: CodeDigestMismatch, Field: "sha256", Detail: fmt.Sprintf("the ZIP has %s, not %s", have, digest)}
	}
	return err
}

// isFolder reports whether dir exists and is a folder. It returns an error if dir exists and is not a folder.
func isFolder(dir string) (bool, error) {
	info, err := os.Lstat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("extract a skill: %w", err)
	case !info.IsDir():
		return false, fmt.Errorf("extract a skill: %s exists and is not a folder", dir)
	}
	return true, nil
}

// writeTree writes the folders and files of the ZIP below dir, syncs them to disk, and makes the folders read-only.
func (a *zipArchive) writeTree(ctx context.Context, dir string) (err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	for _, name := range a.folders {
		if err := root.Mkdir(filepath.FromSlash(name), 0o700); err != nil {
			return err
		}
	}
	err = a.forEachFile(ctx, func(e *zipEntry, content io.Reader) error {
		return writeEntry(root, filepath.FromSlash(e.name), e.run, content)
	})
	if err != nil {
		return err
	}
	for _, name := range append(slices.Clone(a.folders), ".") {
		name = filepath.FromSlash(name)
		if err := root.Chmod(name, extractedFolderMode); err != nil {
			return err
		}
		if err := syncFolder(root, name); err != nil {
			return err
		}
	}
	return nil
}

// writeEntry writes content to the new file name below root, as an executable file if run is
// true or content begins with #!.
func writeEntry(root *os.Root, name string, run bool, content io.Reader) (err error) {
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	run, content, err = isScript(run, content)
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, content); err != nil {
		return err
	}
	mode := fs.FileMode(extractedFileMode)
	if run {
		mode = extractedScriptMode
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	return f.Sync()
}

// isScript reports whether a file is executable: by its mode bit, or because it begins with #!. It returns a reader of
// the complete content.
func isScript(run bool, content io.Reader) (bool, io.Reader, error) {
	in := bufio.NewReader(content)
	first, err := in.Peek(2)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, nil, err
	}
	return run || string(first) == "#!", in, nil
}

func syncFolder(root *os.Root, name string) error {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// moveToFinalName renames the extracted folder own to dir. If another process was faster, the existing folder dir has
// the same content and own is not needed.
func moveToFinalName(own, dir string) error {
	err := os.Rename(own, dir)
	if err == nil {
		parent, err := os.OpenRoot(filepath.Dir(dir))
		if err != nil {
			return err
		}
		return errors.Join(syncFolder(parent, "."), parent.Close())
	}
	if there, look := isFolder(dir); look == nil && there {
		return removeExtracted(own)
	}
	return err
}

// removeExtracted removes extracted files; it first makes read-only folders writable.
func removeExtracted(dir string) error {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() && !errors.Is(err, fs.ErrNotExist) {
			return os.Chmod(path, 0o700) //nolint:gosec // a folder
		}
		return nil
	})
	return errors.Join(err, os.RemoveAll(dir))
}

// wrapWriteError adds context to an error of writing files, but returns an *Error unchanged.
func wrapWriteError(err error) error {
	var refused *Error
	if errors.As(err, &refused) {
		return err
	}
	return fmt.Errorf("extract a skill: %w", err)
}
