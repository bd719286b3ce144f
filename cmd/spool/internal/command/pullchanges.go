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
	changeAdded    = "added"
	changeModified = "modified"
	changeDeleted  = "deleted"
	changeRefused  = "refused" // an entry that is never written locally
)

// change is the change of one path that a pull would apply.
type change struct {
	Path     string `json:"path"`
	Change   string `json:"change"`
	Kind     string `json:"kind"`
	Size     int64  `json:"size,omitempty"` // bytes of the session's file
	Conflict bool   `json:"conflict,omitempty"`
	Reason   string `json:"reason,omitempty"` // of a conflict or a refusal
	Applied  bool   `json:"applied"`

	local, remote *entry
	staged        string // local file with the session's content
	declined      bool   // by the user
}

// applicable reports whether a pull can apply the change at all.
func (c *change) applicable() bool { return c.Change != changeRefused }

// compare fills in the changes: what the session changed since the upload, and whether the local folder changed it
// too.
func (p *pullRun) compare(ctx context.Context) error {
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
		var base, remote *entry
		staged := ""
		if b, ok := p.record.Entries[name]; ok {
			base = &b
		}
		if r := p.remote[name]; r != nil {
			remote, staged = &r.entry, r.staged
		}
		if unchanged(base, remote) || base == nil && ignored.ignores(name, remote.Kind == kindDir) {
			continue
		}
		if why := refusal(name, remote); why != "" {
			p.changes = append(p.changes, &change{Path: name, Change: changeRefused, Kind: remote.Kind, Reason: why})
			continue
		}
		local, err := statEntry(p.root, name)
		if errors.Is(err, fs.ErrPermission) {
			return usageError("dir: no permission to read %q: change its mode and pull again", name)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		if unchanged(local, remote) {
			p.setRecorded(name, remote)
			continue
		}
		p.changes = append(p.changes, decide(name, base, local, remote, staged))
	}
	return nil
}

// ignoreRules are the ignore rules of the local folder. A pull adds no path that they match.
type ignoreRules struct {
	root *os.Root
	tree ignore.Tree
}

// ignores reports whether a path, or a folder that it lies in, is ignored.
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

// unchanged reports whether two entries are the same to a pull: of folders only their presence counts.
func unchanged(a, b *entry) bool {
	if a != nil && b != nil && a.Kind == kindDir && b.Kind == kindDir {
		return true
	}
	return a.same(b)
}

// refusal returns the reason why an entry is never written into the local folder; "" if there is none.
func refusal(name string, remote *entry) string {
	switch {
	case remote == nil:
		return ""
	case strings.ContainsFunc(name, unicode.IsControl):
		return "the name contains a control character"
	case checkPath("path", name, false) != nil:
		return "the name is not a valid path of a workspace"
	case remote.Kind == kindSymlink && !staysInside(name, remote.Target):
		return fmt.Sprintf("it is a link to %q, outside the folder", truncate.Text(remote.Target, 64))
	}
	return ""
}

// decide returns the change of one path, whose session side differs from what was uploaded.
func decide(name string, base, local, remote *entry, staged string) *change {
	c := &change{Path: name, local: local, remote: remote, staged: staged, Change: changeModified}
	switch {
	case remote == nil:
		c.Change, c.Kind = changeDeleted, base.Kind
	case local == nil:
		c.Change = changeAdded
	}
	if remote != nil {
		c.Kind, c.Size = remote.Kind, remote.Size
	}
	if !unchanged(local, base) {
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

// statEntry returns the entry at a path of the local folder; nil if there is none.
func statEntry(root *os.Root, name string) (*entry, error) {
	info, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	e := &entry{Path: name, Mode: uint32(info.Mode().Perm())}
	switch info.Mode().Type() {
	case fs.ModeDir:
		e.Kind = kindDir
	case fs.ModeSymlink:
		e.Kind, e.Mode = kindSymlink, 0
		e.Target, err = root.Readlink(name)
		return e, err
	case 0:
		f, _, err := openRegular(root, name)
		if err != nil {
			return nil, err
		}
		sum := sha256.New()
		e.Kind = kindFile
		e.Size, err = io.Copy(sum, f)
		e.SHA256 = hex.EncodeToString(sum.Sum(nil))
		return e, errors.Join(err, f.Close())
	default:
		e.Kind = special(info.Mode())
	}
	return e, nil
}

// setRecorded records the session's version of a path, with which the next pull compares.
func (p *pullRun) setRecorded(name string, remote *entry) {
	if remote == nil {
		delete(p.record.Entries, name)
		return
	}
	p.record.Entries[name] = *remote
}
