package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/record"
	"github.com/spoolhq/spool/cmd/runner/internal/watch"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// maxDepth is the largest number of nested folders. Each is an open file descriptor.
const maxDepth = 256

// errGone is returned for a file that was removed or replaced during the walk. The snapshot leaves it out, as a later one would.
var errGone = errors.New("the file is gone")

// walk visits the files, folders and links of the two folders of a snapshot in the order of wire.ComparePaths.
type walk struct {
	ctx     context.Context
	maxFile int64
	// file reads a regular file's content into the entry. When it returns errGone, the file is left out.
	file func(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo) error
	// add is called with each entry; a file's content was read before.
	add func(e *wire.Entry, info fs.FileInfo) error
	// skip is called for each file or folder that the snapshot cannot contain.
	skip func(path string, why wire.SkipReason) error
	// descend reports whether the walk enters a folder. nil means always.
	descend func(path string, info fs.FileInfo) bool
	// done is called after all entries of a folder, and of the folders below it that the walk entered. listed is false if
	// the folder cannot be read. It may be nil.
	done func(folder string, listed bool) error
	// refresh is called before a folder is walked whose parent is not, with the folder's own properties. It may be nil.
	refresh func(path string, info fs.FileInfo) error

	sharing *sharing // for a workspace that is a person's folder; nil otherwise
}

// tree walks the folder root and everything below it. prefix is the path of root in the snapshot, depth the number of folders above it in its tree.
// An unreadable folder is skipped, unless it is the root of a tree, which is an error.
func (w *walk) tree(root *os.Root, prefix string, depth int) error {
	names, err := list(root)
	if err != nil && depth == 0 { // an empty snapshot would be wrong
		return fmt.Errorf("read %s: %w", prefix, err)
	}
	if err != nil {
		return errors.Join(w.skip(prefix, wire.SkipUnreadable), w.end(prefix, false))
	}
	leave, err := w.sharing.enter(root, prefix)
	if err != nil { // without its rules, no file of the folder is included
		return errors.Join(w.skip(prefix, wire.SkipUnreadable), w.end(prefix, false))
	}
	defer leave()
	if err := w.entries(root, prefix, names, depth); err != nil {
		return err
	}
	return w.end(prefix, true)
}

// end calls w.done, if that is set, for a folder that was walked.
func (w *walk) end(folder string, listed bool) error {
	if w.done == nil {
		return nil
	}
	return w.done(folder, listed)
}

// unkeptNames lists the files and folders in the state folder that snapshots do not contain.
var unkeptNames = []string{indexName, indexName + ".new", record.NoteName, record.NoteName + ".new", watch.SocketName, agent.Unkept}

// entries visits the entries of a folder.
func (w *walk) entries(root *os.Root, prefix string, names []string, depth int) error {
	for _, name := range names {
		if prefix == wire.TreeRecords && slices.Contains(unkeptNames, name) {
			continue
		}
		if err := w.ctx.Err(); err != nil {
			return err
		}
		info, err := root.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		path := prefix + "/" + name
		if err == nil && w.sharing.ignores(path, info) {
			continue
		}
		if w.sharing.full() {
			return nil
		}
		switch {
		case err != nil:
			err = w.skip(path, wire.SkipUnreadable)
		case len(path) > wire.MaxPathLength:
			err = w.skip(path, wire.SkipPathTooLong)
		default:
			err = w.entry(root, name, path, info, depth)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// list returns the names in a folder, sorted by bytes.
func list(root *os.Root) ([]string, error) {
	f, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(-1)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	slices.SortFunc(names, strings.Compare)
	return names, nil
}

// entry visits one entry of a folder by its type.
func (w *walk) entry(dir *os.Root, name, path string, info fs.FileInfo, depth int) error {
	e := &wire.Entry{Path: path, Mode: uint32(info.Mode().Perm()), ModTime: info.ModTime()}
	switch info.Mode().Type() {
	case 0:
		return w.regular(dir, name, e, info)
	case fs.ModeSymlink:
		target, err := dir.Readlink(name)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid):
			return nil
		case err != nil:
			return w.skip(path, wire.SkipUnreadable)
		case len(target) > wire.MaxPathLength:
			return w.skip(path, wire.SkipPathTooLong)
		}
		return w.add(&wire.Entry{Path: path, Kind: wire.KindSymlink, Target: target}, info)
	case fs.ModeDir:
		return w.folder(dir, name, e, info, depth)
	}
	return w.skip(path, wire.SkipSpecial)
}

// regular reads a regular file and adds its entry, or skips it.
func (w *walk) regular(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo) error {
	if info.Size() > w.maxFile {
		return w.skip(e.Path, wire.SkipTooLarge)
	}
	if !w.sharing.admit(info) {
		return w.skip(e.Path, wire.SkipOverLimit)
	}
	e.Kind = wire.KindFile
	err := w.file(dir, name, e, info)
	switch {
	case errors.Is(err, errGone):
		return nil
	case errors.Is(err, errUnreadable):
		return w.skip(e.Path, wire.SkipUnreadable)
	case errors.Is(err, errGrown):
		return w.skip(e.Path, wire.SkipTooLarge)
	case err != nil:
		return err
	}
	return w.add(e, info)
}

// folder adds the entry of a folder, and walks the folder if descend allows it.
func (w *walk) folder(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo, depth int) error {
	e.Kind = wire.KindDir
	if depth == maxDepth {
		return w.skip(e.Path, wire.SkipTooDeep)
	}
	if err := w.add(e, info); err != nil {
		return err
	}
	if w.descend != nil && !w.descend(e.Path, info) {
		return nil
	}
	sub, err := dir.OpenRoot(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errors.Join(w.skip(e.Path, wire.SkipUnreadable), w.end(e.Path, false))
	}
	defer sub.Close() //nolint:errcheck // only read
	// A link may have replaced it meanwhile.
	if now, err := sub.Lstat("."); err != nil || !os.SameFile(now, info) {
		return nil
	}
	return w.tree(sub, e.Path, depth+1)
}
