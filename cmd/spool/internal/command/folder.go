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

// folderLimits limit the upload of a folder.
type folderLimits struct {
	entries int
	bytes   int64 // approximate size of the tar
}

// uploadLimits are the limits of a server with default settings.
var uploadLimits = folderLimits{entries: 50_000, bytes: 1 << 30}

// The kinds of entries, with the names of the API.
const (
	kindFile    = "file"
	kindDir     = "dir"
	kindSymlink = "symlink"
)

// entry is a file, a folder or a symbolic link in a folder, with its slash-separated path.
type entry struct {
	Path   string `json:"path"`
	Kind   string `json:"kind"`
	Size   int64  `json:"size,omitempty"` // bytes
	Mode   uint32 `json:"mode,omitempty"` // permission bits; 0 for a link
	Target string `json:"target,omitempty"`
	SHA256 string `json:"sha256,omitempty"` // hex, of a file's content
}

// same reports whether two entries are equal in everything that a pull transfers.
func (e *entry) same(other *entry) bool {
	if e == nil || other == nil {
		return e == other
	}
	return e.Kind == other.Kind && e.Mode == other.Mode && e.Target == other.Target && e.SHA256 == other.SHA256
}

// localFolder returns the absolute path of a folder that the user named, or an error if it is not a folder.
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

// sensitiveFolder reports whether a folder is the root of the file system or the user's home, and describes it.
func sensitiveFolder(dir string) (what string, is bool) {
	if dir == filepath.VolumeName(dir)+string(filepath.Separator) {
		return "the root of the file system", true
	}
	if home, err := os.UserHomeDir(); err == nil && sameFolder(dir, home) {
		return "your home folder", true
	}
	return "", false
}

func sameFolder(a, b string) bool {
	one, err1 := os.Stat(a)
	two, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(one, two)
}

// scanner walks a folder and applies its ignore files.
type scanner struct {
	ctx     context.Context
	root    *os.Root
	limits  folderLimits
	entries []entry
	bytes   int64
}

// scan lists the entries of a folder that are not ignored, sorted by path, without digests of their content. It
// returns an error that names the first entry that cannot be uploaded.
func scan(ctx context.Context, root *os.Root, limits folderLimits) ([]entry, error) {
	tree, err := ignore.ReadTree(root.FS())
	if err != nil {
		return nil, usageError("workspace: %v", err)
	}
	s := &scanner{ctx: ctx, root: root, limits: limits}
	if err := s.listFolder("", tree); err != nil {
		return nil, err
	}
	slices.SortFunc(s.entries, func(a, b entry) int { return strings.Compare(a.Path, b.Path) })
	return s.entries, nil
}

func (s *scanner) listFolder(dir string, tree ignore.Tree) error {
	list, err := fs.ReadDir(s.root.FS(), cleanDir(dir))
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
		if err := s.add(p, info); err != nil {
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

// listSubfolder lists a folder below the root with the rules of its parents and its own.
func (s *scanner) listSubfolder(p string, above ignore.Tree) error {
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

func cleanDir(dir string) string {
	if dir == "" {
		return "."
	}
	return dir
}

// Entries of a tar are rounded up to tarBlock. longName is the size of a name that does not fit into a header.
const (
	tarBlock = 512
	longName = 3 * tarBlock
	maxShort = 100
)

func (s *scanner) add(p string, info fs.FileInfo) error {
	if strings.ContainsFunc(p, unicode.IsControl) {
		return usageError("workspace: %q: the name contains a control character; rename it, or list it in %s", p, ignore.SpoolIgnoreFile)
	}
	if err := checkPath("workspace", p, false); err != nil {
		return err
	}
	e := entry{Path: p, Mode: uint32(info.Mode().Perm())}
	switch info.Mode().Type() {
	case 0:
		e.Kind, e.Size = kindFile, info.Size()
	case fs.ModeDir:
		e.Kind = kindDir
	case fs.ModeSymlink:
		target, err := s.root.Readlink(p)
		if err != nil {
			return unreadableError(p, err)
		}
		if !staysInside(p, target) {
			return usageError("workspace: %q is a link to %q, outside the folder: replace it with its target, or list it in %s", p, truncate.Text(target, 64), ignore.SpoolIgnoreFile)
		}
		e.Kind, e.Mode, e.Target = kindSymlink, 0, target
	default:
		return usageError("workspace: %q is not a file, folder or link (it is a %s): remove it, or list it in %s", p, special(info.Mode()), ignore.SpoolIgnoreFile)
	}
	s.bytes += tarBlock + (e.Size+tarBlock-1)/tarBlock*tarBlock
	if len(p) > maxShort || len(e.Target) > maxShort {
		s.bytes += longName
	}
	switch {
	case len(s.entries) >= s.limits.entries:
		return usageError("workspace: the folder has more than %d files and folders; list what the agent does not need in %s or .gitignore", s.limits.entries, ignore.SpoolIgnoreFile)
	case e.Size > s.limits.bytes:
		return usageError("workspace: %q has %s; at most %s are uploaded: list it in %s", p, size(e.Size), size(s.limits.bytes), ignore.SpoolIgnoreFile)
	case s.bytes > s.limits.bytes:
		return usageError("workspace: the folder has more than %s; list what the agent does not need in %s or .gitignore", size(s.limits.bytes), ignore.SpoolIgnoreFile)
	}
	if e.Kind == kindFile {
		f, _, err := openRegular(s.root, p)
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

// special returns the name of a file type that is not a file, folder or link.
func special(mode fs.FileMode) string {
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

// unreadableError returns the error for a path of the folder that cannot be read.
func unreadableError(p string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return usageError("workspace: no permission to read %q: change its mode, or list it in %s", cleanDir(p), ignore.SpoolIgnoreFile)
	}
	return usageError("workspace: %q: %v", cleanDir(p), err)
}

// staysInside reports whether a link leads into its own folder, whatever links are on the way: a ".." after a name
// counts as outside.
func staysInside(p, target string) bool {
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

// totalBytes returns the size of all files in bytes.
func totalBytes(list []entry) (n int64) {
	for _, e := range list {
		n += e.Size
	}
	return n
}

// errChanged is returned for a file that changed since the folder was listed.
var errChanged = errors.New("changed while it was read: try again when no program writes to the folder")

// pack writes the entries of a folder as a tar and sets the digests of their content. It calls moved with the
// number of bytes as it writes them.
func pack(ctx context.Context, root *os.Root, list []entry, to io.Writer, moved func(n int64)) error {
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

func packEntry(root *os.Root, e *entry, w *tar.Writer, moved func(n int64)) error {
	h := &tar.Header{Name: e.Path, Mode: int64(e.Mode), Format: tar.FormatPAX}
	switch e.Kind {
	case kindDir:
		h.Typeflag, h.Name = tar.TypeDir, e.Path+"/"
		return w.WriteHeader(h)
	case kindSymlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, e.Target
		return w.WriteHeader(h)
	}
	f, info, err := openRegular(root, e.Path)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	if info.Size() != e.Size {
		return errChanged
	}
	h.Typeflag, h.Size, h.ModTime = tar.TypeReg, e.Size, info.ModTime()
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(w, sum, countingWriter(moved)), io.LimitReader(f, e.Size))
	if err != nil {
		return err
	}
	if n != e.Size {
		return errChanged
	}
	e.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// openRegular opens a regular file. It does not block on a named pipe.
func openRegular(root *os.Root, p string) (*os.File, fs.FileInfo, error) {
	f, err := root.OpenFile(p, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errChanged
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

// countingWriter is a writer that reports the number of written bytes.
type countingWriter func(n int64)

func (c countingWriter) Write(p []byte) (int, error) {
	c(int64(len(p)))
	return len(p), nil
}
