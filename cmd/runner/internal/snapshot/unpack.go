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

// Unpack unpacks tar archives into a folder of a workspace.
type Unpack struct {
	Workspace  string
	Dir        string // relative to the workspace; created if absent
	MaxEntries int
	MaxBytes   int64 // limit for all files together
}

// Unpacked is the number and the total size of the files that were unpacked from one archive.
type Unpacked struct {
	Files uint32 `json:"files"`
	Bytes int64  `json:"bytes"`
}

// ErrRefused is returned for an archive with an entry that must not go into a workspace. The error names the entry.
// Entries before it stay.
var ErrRefused = errors.New("refused")

// Run unpacks a tar. Its files, folders and links replace existing ones of the same name, except folders, which stay
// with their content.
func (u Unpack) Run(ctx context.Context, in io.Reader) (Unpacked, error) {
	root, err := os.OpenRoot(u.Workspace)
	if err != nil {
		return Unpacked{}, fmt.Errorf("workspace: %w", err)
	}
	defer root.Close() //nolint:errcheck // nothing is buffered
	p := &unpacking{Unpack: u, root: root, made: map[string]bool{}}
	if p.base, err = cleanPath(u.Dir); err != nil {
		return Unpacked{}, fmt.Errorf("folder %q: %w", u.Dir, err)
	}
	if p.base != "." {
		if err := p.folders(p.base); err != nil {
			return Unpacked{}, fmt.Errorf("folder %q: %w", u.Dir, err)
		}
	}
	for from := tar.NewReader(in); ; {
		if err := ctx.Err(); err != nil {
			return p.done, err
		}
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return p.done, p.finish()
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
			return p.done, fmt.Errorf("the archive is not a complete tar, after %d entries: %w: %w", p.entries, ErrRefused, err)
		}
		if err != nil {
			return p.done, fmt.Errorf("read the archive after %d entries: %w", p.entries, err)
		}
		if err := p.entry(h, from); err != nil {
			return p.done, fmt.Errorf("entry %q: %w", h.Name, err)
		}
	}
}

type unpacking struct {
	Unpack
	root    *os.Root
	base    string
	entries int
	made    map[string]bool // files of this archive, to which a hard link may point
	dirs    []*tar.Header   // Name is the path below the root
	done    Unpacked
}

// refuse returns an error that wraps ErrRefused.
func refuse(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, ErrRefused)...)
}

// cleanPath returns a relative path in its shortest form, "." for "". The error for a path that leads out of the workspace, or may, wraps
// ErrRefused.
func cleanPath(name string) (string, error) {
	if name == "" {
		return ".", nil
	}
	if strings.IndexByte(name, 0) >= 0 || len(name) > wire.MaxPathLength {
		return "", refuse("a path has at most %d bytes and no NUL", wire.MaxPathLength)
	}
	clean := path.Clean(name)
	if path.IsAbs(clean) || clean == ".." || strings.HasPrefix(clean, "../") {
		return "", refuse("it leads out of the workspace")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." { // where it leads would depend on the part before it
			return "", refuse("it has a part ..")
		}
	}
	return clean, nil
}

// entry unpacks one entry of the archive, and creates the folders that it is in.
func (p *unpacking) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if p.entries++; p.entries > p.MaxEntries {
		return refuse("the archive has more than %d entries", p.MaxEntries)
	}
	name, err := cleanPath(h.Name)
	if err != nil {
		return err
	}
	if name == "." && h.Typeflag != tar.TypeDir {
		return refuse("it names no file")
	}
	name = path.Join(p.base, name)
	if dir := path.Dir(name); dir != "." {
		if err := p.folders(dir); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		return p.file(name, h, content)
	case tar.TypeDir:
		return p.folder(name, h)
	case tar.TypeSymlink:
		return p.link(name, h)
	case tar.TypeLink:
		return p.hardLink(name, h)
	}
	return refuse("it is neither a file, a folder nor a link (tar type %q)", h.Typeflag)
}

// folders creates a folder and its parents. A link in their place is refused: files would be written to another place than their name.
func (p *unpacking) folders(dir string) error {
	for i := 0; i <= len(dir); i++ {
		if i < len(dir) && dir[i] != '/' {
			continue
		}
		info, err := p.root.Lstat(dir[:i])
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = p.root.Mkdir(dir[:i], 0o755)
		case err == nil && !info.IsDir():
			err = refuse("%q is in its way and is not a folder", dir[:i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// folder creates a folder, which stays writable until finish sets its mode.
func (p *unpacking) folder(name string, h *tar.Header) error {
	if name != "." {
		if err := p.folders(name); err != nil {
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

// removeFile removes the file or link in whose place an entry is created. A folder in its place is refused.
func (p *unpacking) removeFile(name string) error {
	info, err := p.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return refuse("there is a folder of that name")
	}
	delete(p.made, name)
	return p.root.Remove(name)
}

// file creates a regular file with its content, mode and modification time.
func (p *unpacking) file(name string, h *tar.Header, content io.Reader) error {
	if h.Size > p.MaxBytes-p.done.Bytes {
		return refuse("the archive's files have more than %d bytes", p.MaxBytes)
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
		err = refuse("the archive ends in the middle of it")
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

// link creates a symbolic link whose target is inside the workspace. A ".." after a name in the target is refused, because the name may be a
// link to another folder.
func (p *unpacking) link(name string, h *tar.Header) error {
	target := h.Linkname
	if target == "" || len(target) > wire.MaxPathLength || strings.IndexByte(target, 0) >= 0 || path.IsAbs(target) {
		return refuse("its target %q is not relative to it", target)
	}
	up := strings.Count(name, "/")
	named := false
	for part := range strings.SplitSeq(target, "/") {
		switch {
		case part == "" || part == ".":
		case part != "..":
			named = true
		case named || up == 0:
			return refuse("its target %q leads, or may lead, out of the workspace", target)
		default:
			up--
		}
	}
	if err := p.removeFile(name); err != nil {
		return err
	}
	return p.root.Symlink(target, name)
}

// hardLink creates a second name for an earlier file of this archive. A link to another file is refused.
func (p *unpacking) hardLink(name string, h *tar.Header) error {
	target, err := cleanPath(h.Linkname)
	if err != nil {
		return err
	}
	target = path.Join(p.base, target)
	if !p.made[target] || target == name {
		return refuse("it is a hard link to %q, which is not an earlier file of the archive", h.Linkname)
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

// finish sets the modes and times of the archive's folders, the last first.
func (p *unpacking) finish() error {
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
