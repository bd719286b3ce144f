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

// maxFolderDepth is the maximum depth of nested folders. Each folder on the path is an open file descriptor.
const maxFolderDepth = 256

// errFileGone is returned for a file that was removed or replaced during the walk. The snapshot leaves it out, as a later one would.
var errFileGone = errors.New("the file is gone")

// treeWalk visits the files, folders and links of the two folders of a snapshot in the order of wire.Compare, and calls
// its functions for each.
type treeWalk struct {
	ctx     context.Context
	maxFile int64
	// file reads a regular file's content into the entry. When it returns errFileGone, the file is left out.
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

	sharing *sharedFolderFilter // for a workspace that is a person's folder; nil otherwise
}

// walkTree walks the folder root and everything below it. prefix is the path of root in the snapshot, depth the number
// of folders above it in its tree. An unreadable folder is skipped; it is an error if root itself is the top of a tree.
func (w *treeWalk) walkTree(root *os.Root, prefix string, depth int) error {
	names, err := listNames(root)
	if err != nil && depth == 0 { // an empty snapshot would be wrong
		return fmt.Errorf("read %s: %w", prefix, err)
	}
	if err != nil {
		return errors.Join(w.skip(prefix, wire.SkipUnreadable), w.finishFolder(prefix, false))
	}
	leave, err := w.sharing.enterFolder(root, prefix)
	if err != nil { // without its rules, no file of the folder is included
		return errors.Join(w.skip(prefix, wire.SkipUnreadable), w.finishFolder(prefix, false))
	}
	defer leave()
	if err := w.visitEntries(root, prefix, names, depth); err != nil {
		return err
	}
	return w.finishFolder(prefix, true)
}

// finishFolder calls w.done, if that is set, for a folder that was walked.
func (w *treeWalk) finishFolder(folder string, listed bool) error {
	if w.done == nil {
		return nil
	}
	return w.done(folder, listed)
}

// excludedNames lists the names of files and folders in the state folder that snapshots do not contain.
var excludedNames = []string{indexFileName, indexFileName + ".new", record.NoteFileName, record.NoteFileName + ".new", watch.SocketName, agent.UnsavedFolder}

// visitEntries visits the entries with the given names in a folder.
func (w *treeWalk) visitEntries(root *os.Root, prefix string, names []string, depth int) error {
	for _, name := range names {
		if prefix == wire.TreeRecords && slices.Contains(excludedNames, name) {
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
		if err == nil && w.sharing.isIgnored(path, info) {
			continue
		}
		if w.sharing.isFull() {
			return nil
		}
		switch {
		case err != nil:
			err = w.skip(path, wire.SkipUnreadable)
		case len(path) > wire.MaxPathLength:
			err = w.skip(path, wire.SkipPathTooLong)
		default:
			err = w.visitEntry(root, name, path, info, depth)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// listNames returns the names of the entries of a folder, sorted by bytes.
func listNames(root *os.Root) ([]string, error) {
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

// visitEntry visits one entry of a folder by its type.
func (w *treeWalk) visitEntry(dir *os.Root, name, path string, info fs.FileInfo, depth int) error {
	e := &wire.Entry{Path: path, Mode: uint32(info.Mode().Perm()), ModTime: info.ModTime()}
	switch info.Mode().Type() {
	case 0:
		return w.visitRegularFile(dir, name, e, info)
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
		return w.visitFolder(dir, name, e, info, depth)
	}
	return w.skip(path, wire.SkipSpecial)
}

// visitRegularFile reads a regular file and adds its entry to the snapshot, or skips the file.
func (w *treeWalk) visitRegularFile(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo) error {
	if info.Size() > w.maxFile {
		return w.skip(e.Path, wire.SkipTooLarge)
	}
	if !w.sharing.admitFile(info) {
		return w.skip(e.Path, wire.SkipOverLimit)
	}
	e.Kind = wire.KindFile
	err := w.file(dir, name, e, info)
	switch {
	case errors.Is(err, errFileGone):
		return nil
	case errors.Is(err, errFileUnreadable):
		return w.skip(e.Path, wire.SkipUnreadable)
	case errors.Is(err, errFileTooLarge):
		return w.skip(e.Path, wire.SkipTooLarge)
	case err != nil:
		return err
	}
	return w.add(e, info)
}

// visitFolder adds the entry of a folder to the snapshot, and walks the folder if w.descend allows it.
func (w *treeWalk) visitFolder(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo, depth int) error {
	e.Kind = wire.KindDir
	if depth == maxFolderDepth {
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
		return errors.Join(w.skip(e.Path, wire.SkipUnreadable), w.finishFolder(e.Path, false))
	}
	defer sub.Close() //nolint:errcheck // only read
	// A link may have replaced it meanwhile.
	if now, err := sub.Lstat("."); err != nil || !os.SameFile(now, info) {
		return nil
	}
	return w.walkTree(sub, e.Path, depth+1)
}
