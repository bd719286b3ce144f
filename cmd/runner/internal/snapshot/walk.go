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
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// maxDepth is the largest number of nested folders. Each is an open file descriptor.
const maxDepth = 256

// errGone is returned for a file that was removed or replaced meanwhile: a later snapshot would not have it.
var errGone = errors.New("the file is gone")

// walk visits all entries of both trees in the order of wire.Compare.
type walk struct {
	ctx     context.Context
	maxFile int64
	// file reads a regular file's content into the entry. When it returns errGone, the file is left out.
	file func(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo) error
	add  func(e *wire.Entry) error
	skip func(path string, why wire.Reason) error

	sharing *sharing // for a workspace that is a person's folder; nil otherwise
}

// tree walks below root. The paths of its entries begin with prefix.
func (w *walk) tree(root *os.Root, prefix string, depth int) error {
	names, err := list(root)
	if err != nil && depth == 0 { // an empty snapshot would be wrong
		return fmt.Errorf("read %s: %w", prefix, err)
	}
	if err != nil {
		return w.skip(prefix, wire.Unreadable)
	}
	leave, err := w.sharing.enter(root, prefix)
	if err != nil { // without its rules, no file of the folder is included
		return w.skip(prefix, wire.Unreadable)
	}
	defer leave()
	for _, name := range names {
		if prefix == wire.State && (name == indexName || name == indexName+".new" || name == record.Name || name == record.Name+".new" || name == agent.Unkept) {
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
			err = w.skip(path, wire.Unreadable)
		case len(path) > wire.MaxPath:
			err = w.skip(path, wire.PathTooLong)
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
			return w.skip(path, wire.Unreadable)
		case len(target) > wire.MaxPath:
			return w.skip(path, wire.PathTooLong)
		}
		return w.add(&wire.Entry{Path: path, Kind: wire.Symlink, Target: target})
	case fs.ModeDir:
		return w.folder(dir, name, e, info, depth)
	}
	return w.skip(path, wire.Special)
}

func (w *walk) regular(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo) error {
	if info.Size() > w.maxFile {
		return w.skip(e.Path, wire.TooLarge)
	}
	if !w.sharing.admit(info) {
		return w.skip(e.Path, wire.OverLimit)
	}
	e.Kind = wire.File
	err := w.file(dir, name, e, info)
	switch {
	case errors.Is(err, errGone):
		return nil
	case errors.Is(err, errUnreadable):
		return w.skip(e.Path, wire.Unreadable)
	case errors.Is(err, errGrown):
		return w.skip(e.Path, wire.TooLarge)
	case err != nil:
		return err
	}
	return w.add(e)
}

func (w *walk) folder(dir *os.Root, name string, e *wire.Entry, info fs.FileInfo, depth int) error {
	e.Kind = wire.Dir
	if depth == maxDepth {
		return w.skip(e.Path, wire.TooDeep)
	}
	if err := w.add(e); err != nil {
		return err
	}
	sub, err := dir.OpenRoot(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return w.skip(e.Path, wire.Unreadable)
	}
	defer sub.Close() //nolint:errcheck // only read
	// A link may have replaced it meanwhile.
	if now, err := sub.Lstat("."); err != nil || !os.SameFile(now, info) {
		return nil
	}
	return w.tree(sub, e.Path, depth+1)
}
