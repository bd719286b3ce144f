package command

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

// applyChanges applies the changes that the user has not declined: first deletions, deepest paths first, and then all
// others. It continues after a change that fails.
func (p *pullRun) applyChanges() error {
	var failed error
	ordered := slices.Clone(p.changes)
	slices.SortStableFunc(ordered, func(a, b *pathChange) int {
		switch del := a.Change == changeKindDeleted; {
		case del != (b.Change == changeKindDeleted):
			if del {
				return -1
			}
			return 1
		case del:
			return strings.Compare(b.Path, a.Path)
		}
		return strings.Compare(a.Path, b.Path)
	})
	for _, c := range ordered {
		if !c.isApplicable() || c.declined || c.Conflict && !p.cmd.Force {
			continue
		}
		if err := p.applyChange(c); err != nil {
			failed = errors.Join(failed, explainApplyError(c.Path, err))
			continue
		}
		c.Applied = true
		p.recordEntry(c.Path, c.remote)
		if c.Conflict {
			terminal.Fprintf(p.app.Err, "spool: %s: the session's version replaced a local change\n", c.Path)
		}
	}
	return failed
}

// explainApplyError adds a remedy to the error of a change that could not be applied.
func explainApplyError(name string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s: no permission to write to the folder %s: change its mode and pull again", name, path.Dir(name))
	}
	return fmt.Errorf("%s: %w", name, err)
}

// errLocalChange is returned for a path that has changed locally since the comparison.
var errLocalChange = errors.New("changed locally meanwhile: pull again")

// applyChange applies one change, unless the local entry has changed since the comparison.
func (p *pullRun) applyChange(c *pathChange) error {
	now, err := statEntry(p.root, c.Path)
	if err != nil {
		return err
	}
	if !isUnchanged(now, c.local) {
		return errLocalChange
	}
	if c.remote == nil {
		return p.root.Remove(c.Path)
	}
	if dir := path.Dir(c.Path); dir != "." {
		if err := p.root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if now != nil && now.Kind == entryKindDir && c.Kind != entryKindDir {
		if err := p.root.Remove(c.Path); err != nil { // an empty folder is replaced
			return err
		}
	}
	if c.Kind == entryKindDir {
		if now != nil {
			if err := p.root.Remove(c.Path); err != nil {
				return err
			}
		}
		return p.root.Mkdir(c.Path, fs.FileMode(c.remote.Mode)|0o700)
	}
	return p.replaceEntry(c)
}

// replaceEntry writes a file or a link under a temporary name and renames it, so that a partial file is never visible.
func (p *pullRun) replaceEntry(c *pathChange) error {
	tmp := path.Join(path.Dir(c.Path), ".spool-put-"+rand.Text())
	var err error
	switch {
	case c.Kind == entryKindSymlink:
		err = p.root.Symlink(c.remote.Target, tmp)
	case c.staged == "": // the content equals the uploaded one
		return fmt.Errorf("the content was not downloaded: %w", fs.ErrInvalid)
	default:
		err = p.copyStagedFile(c, tmp)
	}
	if err == nil {
		err = p.root.Rename(tmp, c.Path)
	}
	if err != nil {
		if rerr := p.root.Remove(tmp); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

// copyStagedFile copies the staged content of a file to a new file in the local folder. It returns an error if the
// content is not the one that was downloaded, and shown to the user.
func (p *pullRun) copyStagedFile(c *pathChange, tmp string) error {
	from, err := os.Open(c.staged)
	if err != nil {
		return err
	}
	defer from.Close() //nolint:errcheck // it is only read
	to, err := p.root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(to, sum), from)
	if err == nil && hex.EncodeToString(sum.Sum(nil)) != c.remote.SHA256 {
		err = fmt.Errorf("the downloaded content has %w: pull again", errContentChanged)
	}
	return errors.Join(err, to.Chmod(fs.FileMode(c.remote.Mode)), to.Close())
}
