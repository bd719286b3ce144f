package command

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"github.com/spoolhq/spool/pkg/ignore"
	"github.com/spoolhq/spool/pkg/truncate"
)

// folderLimits are limits on the number of entries and the size of a folder that is uploaded or downloaded.
type folderLimits struct {
	entries int
	bytes   int64 // approximate size of the tar
}

// uploadLimits are the limits that a server with default settings has for the upload of a folder.
var uploadLimits = folderLimits{entries: 50_000, bytes: 1 << 30}

// The kinds of entries, with the names of the API.
const (
	entryKindFile    = "file"
	entryKindDir     = "dir"
	entryKindSymlink = "symlink"
)

// folderEntry is a file, a folder or a symbolic link in a folder. Its path is relative to the folder, with slashes.
type folderEntry struct {
	Path   string `json:"path"`
	Kind   string `json:"kind"`
	Size   int64  `json:"size,omitempty"` // bytes
	Mode   uint32 `json:"mode,omitempty"` // permission bits; 0 for a link
	Target string `json:"target,omitempty"`
	SHA256 string `json:"sha256,omitempty"` // hex, of a file's content
}

// equals reports whether two entries agree in everything that "spool files pull" transfers: kind, mode, link target and
// content.
func (e *folderEntry) equals(other *folderEntry) bool {
	if e == nil || other == nil {
		return e == other
	}
	return e.Kind == other.Kind && e.Mode == other.Mode && e.Target == other.Target && e.SHA256 == other.SHA256
}

// localFolder returns the absolute path of a folder that the user has named. It returns a usage error if name is not a
// folder.
func localFolder(field, name string) (string, error) {
	abs, err := filepath.Abs(name)
	if err != nil {
		return "", usageError("%s: %v", field, err)
	}
	info, err := os.Stat(abs)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", usageError("%s: folder %q does not exist", field, name)
	case err != nil:
		return "", usageError("%s: %v", field, err)
	case !info.IsDir():
		return "", usageError("%s: %q is not a folder", field, name)
	}
	return abs, nil
}

// describeSensitiveFolder reports whether dir is the root of the file system or the user's home, and returns a
// description of it.
func describeSensitiveFolder(dir string) (what string, is bool) {
	if dir == filepath.VolumeName(dir)+string(filepath.Separator) {
		return "the root of the file system", true
	}
	if home, err := os.UserHomeDir(); err == nil && sameFolder(dir, home) {
		return "your home folder", true
	}
	return "", false
}

// sameFolder reports whether two paths name the same folder.
func sameFolder(a, b string) bool {
	one, err1 := os.Stat(a)
	two, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(one, two)
}

// folderScanner lists the entries of a folder, without those that its ignore files exclude.
type folderScanner struct {
	ctx     context.Context
	root    *os.Root
	limits  folderLimits
	entries []folderEntry
	bytes   int64
}

// scanFolder returns the entries of a folder that its ignore files do not exclude, sorted by path and without digests.
// It returns an error for an entry that cannot be uploaded.
func scanFolder(ctx context.Context, root *os.Root, limits folderLimits) ([]folderEntry, error) {
	tree, err := ignore.ReadTree(root.FS())
	if err != nil {
		return nil, usageError("workspace: %v", err)
	}
	s := &folderScanner{ctx: ctx, root: root, limits: limits}
	if err := s.listFolder("", tree); err != nil {
		return nil, err
	}
	slices.SortFunc(s.entries, func(a, b folderEntry) int { return strings.Compare(a.Path, b.Path) })
	return s.entries, nil
}

// listFolder adds the entries of a folder that are not ignored.
func (s *folderScanner) listFolder(dir string, tree ignore.Tree) error {
	list, err := fs.ReadDir(s.root.FS(), dirOrRoot(dir))
	if err != nil {
		return unreadableError(dir, err)
	}
	for _, d := range list {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		p := path.Join(dir, d.Name())
		if tree.Ignores(p, d.IsDir()) {
			continue
		}
		info, err := s.root.Lstat(p)
		if err != nil {
			return unreadableError(p, err)
		}
		if err := s.addEntry(p, info); err != nil {
			return err
		}
		if !info.IsDir() {
			continue
		}
		if err := s.listSubfolder(p, tree); err != nil {
			return err
		}
	}
	return nil
}

// listSubfolder adds the entries of a folder below the root, to which the ignore rules of its parents and its own
// apply.
func (s *folderScanner) listSubfolder(p string, above ignore.Tree) error {
	sub, err := fs.Sub(s.root.FS(), p)
	if err != nil {
		return unreadableError(p, err)
	}
	tree, err := above.EnterFolder(sub, p)
	if errors.Is(err, fs.ErrPermission) {
		return unreadableError(p, err)
	}
	if err != nil {
		return usageError("workspace: %v", err)
	}
	return s.listFolder(p, tree)
}

// dirOrRoot returns dir, or "." if dir is "".
func dirOrRoot(dir string) string {
	if dir == "" {
		return "."
	}
	return dir
}

// Entries of a tar are rounded up to tarBlockBytes. longNameTarBytes is the size of a name that does not fit into a
// header.
const (
	tarBlockBytes     = 512
	longNameTarBytes  = 3 * tarBlockBytes
	maxShortNameBytes = 100
)

// addEntry adds an entry to the list. It returns a usage error if the entry cannot be uploaded or exceeds the limits.
func (s *folderScanner) addEntry(p string, info fs.FileInfo) error {
	if strings.ContainsFunc(p, unicode.IsControl) {
		return usageError("workspace: %q: the name contains a control character; rename it, or list it in %s", p, ignore.SpoolIgnoreFile)
	}
	if err := checkWorkspacePath("workspace", p, false); err != nil {
		return err
	}
	e := folderEntry{Path: p, Mode: uint32(info.Mode().Perm())}
	switch info.Mode().Type() {
	case 0:
		e.Kind, e.Size = entryKindFile, info.Size()
	case fs.ModeDir:
		e.Kind = entryKindDir
	case fs.ModeSymlink:
		target, err := s.root.Readlink(p)
		if err != nil {
			return unreadableError(p, err)
		}
		if !linkStaysInside(p, target) {
			return usageError("workspace: %q is a link to %q, outside the folder: replace it with its target, or list it in %s", p, truncate.Text(target, 64), ignore.SpoolIgnoreFile)
		}
		e.Kind, e.Mode, e.Target = entryKindSymlink, 0, target
	default:
		return usageError("workspace: %q is not a file, folder or link (it is a %s): remove it, or list it in %s", p, specialFileType(info.Mode()), ignore.SpoolIgnoreFile)
	}
	s.bytes += tarBlockBytes + (e.Size+tarBlockBytes-1)/tarBlockBytes*tarBlockBytes
	if len(p) > maxShortNameBytes || len(e.Target) > maxShortNameBytes {
		s.bytes += longNameTarBytes
	}
	switch {
	case len(s.entries) >= s.limits.entries:
		return usageError("workspace: the folder has more than %d files and folders; list what the agent does not need in %s or .gitignore", s.limits.entries, ignore.SpoolIgnoreFile)
	case e.Size > s.limits.bytes:
		return usageError("workspace: %q has %s; at most %s are uploaded: list it in %s", p, formatSize(e.Size), formatSize(s.limits.bytes), ignore.SpoolIgnoreFile)
	case s.bytes > s.limits.bytes:
		return usageError("workspace: the folder has more than %s; list what the agent does not need in %s or .gitignore", formatSize(s.limits.bytes), ignore.SpoolIgnoreFile)
	}
	if e.Kind == entryKindFile {
		f, _, err := openRegularFile(s.root, p)
		if err != nil {
			return unreadableError(p, err)
		}
		if err := f.Close(); err != nil {
			return unreadableError(p, err)
		}
	}
	s.entries = append(s.entries, e)
	return nil
}

// specialFileType returns a name for the type of a file that is not a regular file, a folder or a link.
func specialFileType(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeNamedPipe != 0:
		return "named pipe"
	case mode&fs.ModeSocket != 0:
		return "socket"
	case mode&fs.ModeDevice != 0:
		return "device"
	}
	return "special file"
}

// unreadableError returns the error for a path in the folder that could not be read because of err.
func unreadableError(p string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return usageError("workspace: no permission to read %q: change its mode, or list it in %s", dirOrRoot(p), ignore.SpoolIgnoreFile)
	}
	return usageError("workspace: %q: %v", dirOrRoot(p), err)
}

// linkStaysInside reports whether the target of a link at path p stays inside the folder, wherever other links lead. A
// ".." after a name counts as outside.
func linkStaysInside(p, target string) bool {
	if target == "" || path.IsAbs(target) || strings.ContainsFunc(target, unicode.IsControl) {
		return false
	}
	up, named := strings.Count(p, "/"), false
	for part := range strings.SplitSeq(target, "/") {
		switch {
		case part == "" || part == ".":
		case part != "..":
			named = true
		case named || up == 0:
			return false
		default:
			up--
		}
	}
	return true
}

// totalBytes returns the total size of all files in the list.
func totalBytes(list []folderEntry) (n int64) {
	for _, e := range list {
		n += e.Size
	}
	return n
}

// errFileChanged is returned for a file that has changed since the folder was listed.
var errFileChanged = errors.New("changed while it was read: try again when no program writes to the folder")

// packFolder writes the entries of a folder to a tar archive, and sets the digests of their content. It calls moved
// with the number of bytes after each write.
func packFolder(ctx context.Context, root *os.Root, list []folderEntry, to io.Writer, moved func(n int64)) error {
	w := tar.NewWriter(to)
	for i := range list {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := packEntry(root, &list[i], w, moved); errors.Is(err, fs.ErrPermission) {
			return unreadableError(list[i].Path, err)
		} else if err != nil {
			return fmt.Errorf("workspace: %q: %w", list[i].Path, err)
		}
	}
	return w.Close()
}

// packEntry writes one entry to a tar archive, and sets the digest of its content.
func packEntry(root *os.Root, e *folderEntry, w *tar.Writer, moved func(n int64)) error {
	h := &tar.Header{Name: e.Path, Mode: int64(e.Mode), Format: tar.FormatPAX}
	switch e.Kind {
	case entryKindDir:
		h.Typeflag, h.Name = tar.TypeDir, e.Path+"/"
		return w.WriteHeader(h)
	case entryKindSymlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, e.Target
		return w.WriteHeader(h)
	}
	f, info, err := openRegularFile(root, e.Path)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	if info.Size() != e.Size {
		return errFileChanged
	}
	h.Typeflag, h.Size, h.ModTime = tar.TypeReg, e.Size, info.ModTime()
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(w, sum, writeCounter(moved)), io.LimitReader(f, e.Size))
	if err != nil {
		return err
	}
	if n != e.Size {
		return errFileChanged
	}
	e.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// openRegularFile opens a regular file. It returns an error for other files, and does not block on a named pipe.
func openRegularFile(root *os.Root, p string) (*os.File, fs.FileInfo, error) {
	f, err := root.OpenFile(p, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errFileChanged
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

// writeCounter is an io.Writer that calls itself with the number of bytes of each write.
type writeCounter func(n int64)

func (c writeCounter) Write(p []byte) (int, error) {
	c(int64(len(p)))
	return len(p), nil
}
