package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// Restorer runs the runner's side of a restore over the protocol of package wire.
type Restorer struct {
	Roots RootPaths
	Log   *slog.Logger
}

// Run creates the files of a snapshot that the host sends. The parent folders of a path must be real folders: a link or file in the place of a
// folder is replaced, and nothing is written through it.
func (a Restorer) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	open, err := a.Roots.open()
	if err != nil {
		return err
	}
	defer open.close()
	p := &runningRestore{ctx: ctx, in: wire.NewReader(in), roots: open, places: map[wire.Hash][]blockPosition{}, index: newIndex()}
	defer p.close()
	if _, err := p.in.ReadHello(); err != nil {
		return fmt.Errorf("greet the host: %w", err)
	}
	if err := p.readTree(); err != nil {
		return err
	}
	if err := p.prepareTree(); err != nil {
		return err
	}
	if err := p.readBlocks(); err != nil {
		return err
	}
	if err := p.finishFolders(); err != nil {
		return err
	}
	if err := p.index.save(open.state); err != nil {
		a.Log.Warn("the index of files was not saved", "err", err)
	}
	w := wire.NewWriter(out)
	return errors.Join(w.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion}), w.WriteJSON(wire.FrameEnd, p.end), w.Flush())
}

// blockPosition is the position of a block in the restored files: the index of the file, and the number of the block in the file.
type blockPosition struct {
	entry int // index of the file in applying.list
	block int // index of the block in the file
}

// runningRestore is the state of a restore that is running.
type runningRestore struct {
	ctx     context.Context
	in      *wire.Reader
	roots   openRoots
	list    []wire.Entry
	left    []int // missing blocks of each entry
	places  map[wire.Hash][]blockPosition
	pending int // number of incomplete files
	index   *index
	end     wire.End

	dir     *os.Root // folder of the last file, at dirPath
	dirPath string
	f       *os.File // the last file, the one of the entry at index at
	at      int
}

// close closes the open file and folders of the restore.
func (p *runningRestore) close() {
	p.index.close()
	if p.f != nil {
		_ = p.f.Close() // only open if the restore failed
	}
	if p.dir != nil {
		_ = p.dir.Close() // nothing is buffered
	}
}

// readTree reads the entries of the snapshot from the host, up to the frame Go.
func (p *runningRestore) readTree() error {
	tree := wire.NewTreeValidator()
	for {
		t, content, err := p.in.Next()
		if err != nil {
			return fmt.Errorf("read the tree: %w", err)
		}
		if t == wire.FrameGo {
			return nil
		}
		if t != wire.FrameEntry {
			return wire.UnexpectedFrameError(t)
		}
		e, err := wire.ParseEntry(content)
		if err != nil {
			return err
		}
		if _, err := tree.Add(&e); err != nil {
			return err
		}
		for b, h := range e.Blocks {
			p.places[h] = append(p.places[h], blockPosition{len(p.list), b})
		}
		p.left = append(p.left, len(e.Blocks))
		p.list = append(p.list, e)
	}
}

// rootOf returns the root folder, workspace or state folder, to which a path of the snapshot belongs, and the path relative to that folder.
func (p *runningRestore) rootOf(path string) (*os.Root, string) {
	if rest, ok := strings.CutPrefix(path, wire.TreeRecords+"/"); ok {
		return p.roots.state, rest
	}
	return p.roots.workspace, strings.TrimPrefix(path, wire.TreeWorkspace+"/")
}

// prepareTree creates the folders, the links and the empty files of the snapshot, and removes what is in the place of its other files.
func (p *runningRestore) prepareTree() error {
	for i := range p.list {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		e := &p.list[i]
		dir, name, err := p.openParent(e.Path)
		if err != nil {
			return err
		}
		switch e.Kind {
		case wire.KindDir:
			err = makeWritableFolder(dir, name)
		case wire.KindSymlink:
			if err = clearPath(dir, name); err == nil {
				err = dir.Symlink(e.Target, name)
			}
		case wire.KindFile:
			p.end.Files++
			p.end.Bytes += uint64(e.Size) //nolint:gosec // checked not to be negative
			p.pending++
			if err = clearPath(dir, name); err == nil && p.left[i] == 0 {
				err = p.writeBlock(i, 0, nil)
			}
		}
		if err != nil {
			return fmt.Errorf("restore %q: %w", e.Path, err)
		}
	}
	return nil
}

// openParent opens the parent folder of a path of the snapshot, and returns it with the last element of the path. The folder is valid until the
// next call.
func (p *runningRestore) openParent(path string) (*os.Root, string, error) {
	cut := strings.LastIndexByte(path, '/')
	if p.dir != nil && p.dirPath == path[:cut] {
		return p.dir, path[cut+1:], nil
	}
	root, rest := p.rootOf(path)
	parent := "."
	if n := strings.LastIndexByte(rest, '/'); n >= 0 {
		parent = rest[:n]
	}
	dir, err := root.OpenRoot(parent)
	if err != nil {
		return nil, "", fmt.Errorf("restore %q: %w", path, err)
	}
	if p.dir != nil {
		_ = p.dir.Close() // nothing is buffered
	}
	p.dir, p.dirPath = dir, path[:cut]
	return dir, path[cut+1:], nil
}

// makeWritableFolder creates the folder name in dir, or makes an existing one writable until finishFolders sets its mode. It replaces a file or
// link of that name.
func makeWritableFolder(dir *os.Root, name string) error {
	info, err := dir.Lstat(name)
	if err == nil && info.IsDir() {
		return dir.Chmod(name, info.Mode().Perm()|0o700)
	}
	if err == nil {
		err = dir.Remove(name)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return dir.Mkdir(name, 0o700)
}

// clearPath removes what has the name in dir: a file, a link, or a folder with everything below it.
func clearPath(dir *os.Root, name string) error {
	err := dir.Remove(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return dir.RemoveAll(name)
}

// readBlocks reads blocks of files from the host and writes them into the files, up to the frame End. It returns an error if a file is not complete
// then.
func (p *runningRestore) readBlocks() error {
	for {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		t, content, err := p.in.Next()
		if err != nil {
			return fmt.Errorf("read content: %w", err)
		}
		switch t {
		case wire.FrameBlock:
			h := wire.HashOf(content)
			spots, ok := p.places[h]
			if !ok {
				return fmt.Errorf("block %s belongs to no file", h)
			}
			delete(p.places, h) // each block comes once
			for _, s := range spots {
				if err := p.writeBlock(s.entry, s.block, content); err != nil {
					return fmt.Errorf("restore %q: %w", p.list[s.entry].Path, err)
				}
			}
		case wire.FrameEnd:
			if p.pending > 0 {
				return fmt.Errorf("%d files are incomplete", p.pending)
			}
			return nil
		default:
			return wire.UnexpectedFrameError(t)
		}
	}
}

// writeBlock writes the content of a block into the file with index i. It creates the file with the first block that arrives, and finishes the file
// with the last.
func (p *runningRestore) writeBlock(i, block int, content []byte) (err error) {
	e := &p.list[i]
	if len(e.Blocks) > 0 && len(content) != e.BlockLength(block) {
		return fmt.Errorf("block %d has %d bytes, want %d", block, len(content), e.BlockLength(block))
	}
	dir, name, err := p.openParent(e.Path)
	if err != nil {
		return err
	}
	if err := p.openFile(i, dir, name); err != nil {
		return err
	}
	// A block of zeros stays a hole.
	if !isAllZero(content) {
		if _, err := p.f.WriteAt(content, int64(block)*wire.BlockSize); err != nil {
			return err
		}
	}
	if len(content) > 0 {
		p.left[i]--
	}
	if p.left[i] > 0 {
		return nil
	}
	return p.finishFile(e, dir, name)
}

// openFile sets p.f to the file with index i, which it creates if no block of the file has arrived yet.
func (p *runningRestore) openFile(i int, dir *os.Root, name string) (err error) {
	if p.f != nil && p.at == i {
		return nil
	}
	if p.f != nil {
		f := p.f
		p.f = nil
		if err := f.Close(); err != nil {
			return err
		}
	}
	e := &p.list[i]
	if p.left[i] < len(e.Blocks) {
		p.f, err = dir.OpenFile(name, os.O_WRONLY, 0)
		p.at = i
		return err
	}
	if p.f, err = dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	p.at = i
	return p.f.Truncate(e.Size)
}

// finishFile closes a file, sets its mode and modification time, and records the file in the index, so that the next snapshot need not read it.
func (p *runningRestore) finishFile(e *wire.Entry, dir *os.Root, name string) error {
	err := p.f.Chmod(fs.FileMode(e.Mode))
	err = errors.Join(err, p.f.Close())
	p.f = nil
	if err == nil {
		err = dir.Chtimes(name, e.ModTime, e.ModTime)
	}
	if err != nil {
		return err
	}
	p.pending--
	info, err := dir.Lstat(name)
	if err != nil {
		return err
	}
	// The file system may store times with less precision than the snapshot.
	if s := fileStatOf(info); s.mtime == e.ModTime.UnixNano() && !e.Unsettled {
		p.index.addEntry(e.Path, indexEntry{kind: wire.KindFile, mode: e.Mode, size: e.Size, stat: s, trusted: true, blocks: e.Blocks})
	}
	return nil
}

// finishFolders sets the modes and times of folders, the deepest first, because writing into a folder changes its time and may need a wider mode.
func (p *runningRestore) finishFolders() error {
	for i := len(p.list) - 1; i >= 0; i-- {
		e := &p.list[i]
		if e.Kind != wire.KindDir {
			continue
		}
		dir, name, err := p.openParent(e.Path)
		if err == nil {
			err = dir.Chtimes(name, e.ModTime, e.ModTime)
		}
		if err == nil {
			err = dir.Chmod(name, fs.FileMode(e.Mode))
		}
		if err != nil {
			return fmt.Errorf("restore %q: %w", e.Path, err)
		}
	}
	return nil
}

// isAllZero reports whether all bytes are zero.
func isAllZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
