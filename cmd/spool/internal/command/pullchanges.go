package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"github.com/spoolhq/spool/pkg/ignore"
	"github.com/spoolhq/spool/pkg/truncate"
)

// What a pull does with a path.
const (
	changeKindAdded    = "added"
	changeKindModified = "modified"
	changeKindDeleted  = "deleted"
	changeKindRefused  = "refused" // an entry that is never written locally
)

// pathChange is the change of one path that a pull applies to the local folder.
type pathChange struct {
	Path     string `json:"path"`
	Change   string `json:"change"`
	Kind     string `json:"kind"`
	Size     int64  `json:"size,omitempty"` // bytes of the session's file
	Conflict bool   `json:"conflict,omitempty"`
	Reason   string `json:"reason,omitempty"` // why the change is a conflict or is refused
	Applied  bool   `json:"applied"`

	local, remote *folderEntry
	staged        string // local file with the session's content
	declined      bool   // the user does not want the change
}

// isApplicable reports whether a pull may apply the change. A refused change is never applied.
func (c *pathChange) isApplicable() bool { return c.Change != changeKindRefused }

// findChanges sets p.changes to the paths that the session has changed since the upload. A path that has changed in the
// local folder too is a conflict.
func (p *pullRun) findChanges(ctx context.Context) error {
	tree, err := ignore.ReadTree(p.root.FS())
	if err != nil {
		return usageError("dir: %v", err)
	}
	ignored := ignoreRules{p.root, tree}
	paths := make([]string, 0, len(p.remote))
	for name := range p.remote {
		paths = append(paths, name)
	}
	for name := range p.record.Entries {
		if p.remote[name] == nil {
			paths = append(paths, name)
		}
	}
	slices.Sort(paths)
	for _, name := range paths {
		if err := ctx.Err(); err != nil {
			return err
		}
		var base, remote *folderEntry
		staged := ""
		if b, ok := p.record.Entries[name]; ok {
			base = &b
		}
		if r := p.remote[name]; r != nil {
			remote, staged = &r.folderEntry, r.staged
		}
		if isUnchanged(base, remote) || base == nil && ignored.ignores(name, remote.Kind == entryKindDir) {
			continue
		}
		if why := refusalReason(name, remote); why != "" {
			p.changes = append(p.changes, &pathChange{Path: name, Change: changeKindRefused, Kind: remote.Kind, Reason: why})
			continue
		}
		local, err := statEntry(p.root, name)
		if errors.Is(err, fs.ErrPermission) {
			return usageError("dir: no permission to read %q: change its mode and pull again", name)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		if isUnchanged(local, remote) {
			p.recordEntry(name, remote)
			continue
		}
		p.changes = append(p.changes, classifyChange(name, base, local, remote, staged))
	}
	return nil
}

// ignoreRules are the ignore rules of the local folder. A pull adds no path that the rules match.
type ignoreRules struct {
	root *os.Root
	tree ignore.Tree
}

// ignores reports whether the rules match a path or one of the folders above it.
func (r ignoreRules) ignores(p string, isDir bool) bool {
	tree := r.tree
	for i := range len(p) {
		if p[i] != '/' {
			continue
		}
		dir := p[:i]
		if tree.Ignores(dir, true) {
			return true
		}
		if sub, err := fs.Sub(r.root.FS(), dir); err == nil {
			if below, err := tree.EnterFolder(sub, dir); err == nil {
				tree = below
			}
		}
	}
	return tree.Ignores(p, isDir)
}

// isUnchanged reports whether two entries are equal for a pull. Of two folders only the path matters.
func isUnchanged(a, b *folderEntry) bool {
	if a != nil && b != nil && a.Kind == entryKindDir && b.Kind == entryKindDir {
		return true
	}
	return a.equals(b)
}

// refusalReason returns why an entry of the session must not be written into the local folder, or "" if it may be
// written.
func refusalReason(name string, remote *folderEntry) string {
	switch {
	case remote == nil:
		return ""
	case strings.ContainsFunc(name, unicode.IsControl):
		return "the name contains a control character"
	case checkWorkspacePath("path", name, false) != nil:
		return "the name is not a valid path of a workspace"
	case remote.Kind == entryKindSymlink && !linkStaysInside(name, remote.Target):
		return fmt.Sprintf("it is a link to %q, outside the folder", truncate.Text(remote.Target, 64))
	}
	return ""
}

// classifyChange returns the change of a path that the session has changed since the upload. It marks a conflict if the
// local entry has changed too.
func classifyChange(name string, base, local, remote *folderEntry, staged string) *pathChange {
	c := &pathChange{Path: name, local: local, remote: remote, staged: staged, Change: changeKindModified}
	switch {
	case remote == nil:
		c.Change, c.Kind = changeKindDeleted, base.Kind
	case local == nil:
		c.Change = changeKindAdded
	}
	if remote != nil {
		c.Kind, c.Size = remote.Kind, remote.Size
	}
	if !isUnchanged(local, base) {
		c.Conflict = true
		switch {
		case base == nil:
			c.Reason = "another local entry exists, which was not uploaded"
		case local == nil:
			c.Reason = "changed in the session and deleted locally"
		case remote == nil:
			c.Reason = "deleted in the session and changed locally"
		default:
			c.Reason = "changed in the session and locally"
		}
	}
	return c
}

// statEntry returns the entry at a path of the local folder, or nil if there is none.
func statEntry(root *os.Root, name string) (*folderEntry, error) {
	info, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	e := &folderEntry{Path: name, Mode: uint32(info.Mode().Perm())}
	switch info.Mode().Type() {
	case fs.ModeDir:
		e.Kind = entryKindDir
	case fs.ModeSymlink:
		e.Kind, e.Mode = entryKindSymlink, 0
		e.Target, err = root.Readlink(name)
		return e, err
	case 0:
		f, _, err := openRegularFile(root, name)
		if err != nil {
			return nil, err
		}
		sum := sha256.New()
		e.Kind = entryKindFile
		e.Size, err = io.Copy(sum, f)
		e.SHA256 = hex.EncodeToString(sum.Sum(nil))
		return e, errors.Join(err, f.Close())
	default:
		e.Kind = specialFileType(info.Mode())
	}
	return e, nil
}

// recordEntry stores the session's version of a path in the upload record, with which the next pull compares.
func (p *pullRun) recordEntry(name string, remote *folderEntry) {
	if remote == nil {
		delete(p.record.Entries, name)
		return
	}
	p.record.Entries[name] = *remote
}
