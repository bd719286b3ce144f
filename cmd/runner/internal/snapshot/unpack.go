package snapshot

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// Unpacker unpacks tar archives into a folder of a workspace.
type Unpacker struct {
	Workspace  string
	Dir        string // relative to the workspace; created if absent
	MaxEntries int
	MaxBytes   int64 // limit for all files together
}

// UnpackedTotal is the number and the total size of the files that were unpacked from one archive.
type UnpackedTotal struct {
	Files uint32 `json:"files"`
	Bytes int64  `json:"bytes"`
}

// ErrRefused is returned for an archive with an entry that must not be written into a workspace. The error names the entry. The entries before it
// stay in the workspace.
var ErrRefused = errors.New("refused")

// Run unpacks the tar archive in. Its files, folders and links replace existing ones of the same name, except folders, whose existing content
// stays.
func (u Unpacker) Run(ctx context.Context, in io.Reader) (UnpackedTotal, error) {
	root, err := os.OpenRoot(u.Workspace)
	if err != nil {
		return UnpackedTotal{}, fmt.Errorf("workspace: %w", err)
	}
	defer root.Close() //nolint:errcheck // nothing is buffered
	p := &runningUnpack{Unpacker: u, root: root, made: map[string]bool{}}
	if p.base, err = cleanPath(u.Dir); err != nil {
		return UnpackedTotal{}, fmt.Errorf("folder %q: %w", u.Dir, err)
	}
	if p.base != "." {
		if err := p.createFolders(p.base); err != nil {
			return UnpackedTotal{}, fmt.Errorf("folder %q: %w", u.Dir, err)
		}
	}
	for from := tar.NewReader(in); ; {
		if err := ctx.Err(); err != nil {
			return p.done, err
		}
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return p.done, p.setFolderModes()
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
			return p.done, fmt.Errorf("the archive is not a complete tar, after %d entries: %w: %w", p.entries, ErrRefused, err)
		}
		if err != nil {
			return p.done, fmt.Errorf("read the archive after %d entries: %w", p.entries, err)
		}
		if err := p.unpackEntry(h, from); err != nil {
			return p.done, fmt.Errorf("entry %q: %w", h.Name, err)
		}
	}
}

// runningUnpack is the state of an archive that is being unpacked.
type runningUnpack struct {
	Unpacker
	root    *os.Root
	base    string
	entries int
	made    map[string]bool // files of this archive, to which a hard link may point
	dirs    []*tar.Header   // Name is the path below the root
	done    UnpackedTotal
}

// refusalError returns a formatted error that wraps ErrRefused.
func refusalError(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, ErrRefused)...)
}

// cleanPath returns the relative path of an archive's entry in its shortest form, "." for "". The error for a path that leads out of the workspace,
// or may do so, wraps ErrRefused.
func cleanPath(name string) (string, error) {
	if name == "" {
		return ".", nil
	}
	if strings.IndexByte(name, 0) >= 0 || len(name) > wire.MaxPathLength {
		return "", refusalError("a path has at most %d bytes and no NUL", wire.MaxPathLength)
	}
	clean := path.Clean(name)
	if path.IsAbs(clean) || clean == ".." || strings.HasPrefix(clean, "../") {
		return "", refusalError("it leads out of the workspace")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." { // where it leads would depend on the part before it
			return "", refusalError("it has a part ..")
		}
	}
	return clean, nil
}

// unpackEntry creates the file, folder or link of one entry of the archive, and the folders that it is in.
func (p *runningUnpack) unpackEntry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if p.entries++; p.entries > p.MaxEntries {
		return refusalError("the archive has more than %d entries", p.MaxEntries)
	}
	name, err := cleanPath(h.Name)
	if err != nil {
		return err
	}
	if name == "." && h.Typeflag != tar.TypeDir {
		return refusalError("it names no file")
	}
	name = path.Join(p.base, name)
	if dir := path.Dir(name); dir != "." {
		if err := p.createFolders(dir); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		return p.createFile(name, h, content)
	case tar.TypeDir:
		return p.createFolder(name, h)
	case tar.TypeSymlink:
		return p.createSymlink(name, h)
	case tar.TypeLink:
		return p.createHardLink(name, h)
	}
	return refusalError("it is neither a file, a folder nor a link (tar type %q)", h.Typeflag)
}

// createFolders creates the folder dir and its parents. It refuses a link in the place of a folder, because files would be written to another
// folder than their name says.
func (p *runningUnpack) createFolders(dir string) error {
	for i := 0; i <= len(dir); i++ {
		if i < len(dir) && dir[i] != '/' {
			continue
		}
		info, err := p.root.Lstat(dir[:i])
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = p.root.Mkdir(dir[:i], 0o755)
		case err == nil && !info.IsDir():
			err = refusalError("%q is in its way and is not a folder", dir[:i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// createFolder creates the folder name, which stays writable until setFolderModes sets its mode.
func (p *runningUnpack) createFolder(name string, h *tar.Header) error {
	if name != "." {
		if err := p.createFolders(name); err != nil {
			return err
		}
		if err := p.root.Chmod(name, fs.FileMode(h.Mode&0o777)|0o700); err != nil { //nolint:gosec // masked
			return err
		}
		at := *h
		at.Name = name
		p.dirs = append(p.dirs, &at)
	}
	return nil
}

// removeFile removes the file or link in whose place an entry is created. It refuses a folder in that place.
func (p *runningUnpack) removeFile(name string) error {
	info, err := p.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return refusalError("there is a folder of that name")
	}
	delete(p.made, name)
	return p.root.Remove(name)
}

// createFile creates a regular file with its content, mode and modification time.
func (p *runningUnpack) createFile(name string, h *tar.Header, content io.Reader) error {
	if h.Size > p.MaxBytes-p.done.Bytes {
		return refusalError("the archive's files have more than %d bytes", p.MaxBytes)
	}
	if err := p.removeFile(name); err != nil {
		return err
	}
	f, err := p.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, content)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = refusalError("the archive ends in the middle of it")
	}
	if err == nil {
		err = f.Chmod(fs.FileMode(h.Mode & 0o777)) //nolint:gosec // masked
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = p.root.Chtimes(name, time.Time{}, h.ModTime)
	}
	if err != nil {
		return err
	}
	p.made[name] = true
	p.done.Files++
	p.done.Bytes += n
	return nil
}

// createSymlink creates a symbolic link whose target is inside the workspace. It refuses a target with ".." after a name, because the name may be a
// link to another folder.
func (p *runningUnpack) createSymlink(name string, h *tar.Header) error {
	target := h.Linkname
	if target == "" || len(target) > wire.MaxPathLength || strings.IndexByte(target, 0) >= 0 || path.IsAbs(target) {
		return refusalError("its target %q is not relative to it", target)
	}
	up := strings.Count(name, "/")
	named := false
	for part := range strings.SplitSeq(target, "/") {
		switch {
		case part == "" || part == ".":
		case part != "..":
			named = true
		case named || up == 0:
			return refusalError("its target %q leads, or may lead, out of the workspace", target)
		default:
			up--
		}
	}
	if err := p.removeFile(name); err != nil {
		return err
	}
	return p.root.Symlink(target, name)
}

// createHardLink creates a second name for an earlier file of the same archive. It refuses a link to any other file.
func (p *runningUnpack) createHardLink(name string, h *tar.Header) error {
	target, err := cleanPath(h.Linkname)
	if err != nil {
		return err
	}
	target = path.Join(p.base, target)
	if !p.made[target] || target == name {
		return refusalError("it is a hard link to %q, which is not an earlier file of the archive", h.Linkname)
	}
	if err := p.removeFile(name); err != nil {
		return err
	}
	if err := p.root.Link(target, name); err != nil {
		return err
	}
	p.made[name] = true
	p.done.Files++
	return nil
}

// setFolderModes sets the modes and times of the archive's folders, the last first.
func (p *runningUnpack) setFolderModes() error {
	for i := len(p.dirs) - 1; i >= 0; i-- {
		d := p.dirs[i]
		err := p.root.Chtimes(d.Name, time.Time{}, d.ModTime)
		if err == nil {
			err = p.root.Chmod(d.Name, fs.FileMode(d.Mode&0o777)) //nolint:gosec // masked
		}
		if err != nil {
			return fmt.Errorf("entry %q: %w", d.Name, err)
		}
	}
	return nil
}
