package snapshot

import (
	"maps"
	"slices"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/watch"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

const (
	// fullWalkEvery and fullWalkAfter limit the number of snapshots, and the time, between two full walks.
	fullWalkEvery = 20
	fullWalkAfter = 10 * time.Minute
)

// walkPlan is the set of folders that a snapshot with edits walks.
type walkPlan struct {
	base    string          // the snapshot that the edits change; "" for the whole tree
	full    bool            // all folders are walked; otherwise the state folder, and those of the workspace in folders
	folders map[string]bool // folders of the workspace in which something may have changed; true: or in any folder below
	usable  bool            // folders has all changes that the watcher knows
	mapped  map[string]bool // files that a process can change without a change of their times
	doubt   bool            // a folder of the plan does not exist any more: the next snapshot has to be a full walk
}

// addFolder adds a folder to the plan, without the folders below it.
func (p *walkPlan) addFolder(folder string) {
	if _, ok := p.folders[folder]; !ok {
		p.folders[folder] = false
	}
}

// coversFolder reports whether the plan contains a folder, by itself or because it contains a folder above it with everything
// below.
func (p *walkPlan) coversFolder(folder string) bool {
	if _, ok := p.folders[folder]; ok {
		return true
	}
	for i := range len(folder) {
		if folder[i] == '/' && p.folders[folder[:i]] {
			return true
		}
	}
	return false
}

// makePlan sets s.plan to the folders that the snapshot walks: all folders, or those in which something may have
// changed according to the watcher. Without an answer of the watcher all folders are walked.
func (s *runningSnapshot) makePlan(hello wire.Hello) error {
	p := &s.plan
	if hello.Base != "" && hello.Base == s.before.ID {
		p.base = hello.Base
	}
	p.full = true
	if s.Shared { // the host's processes may change the files, and the limits are those of the whole tree
		return nil
	}
	var err error
	if s.query, err = watch.QueryChanges(s.ctx, s.Roots.State, s.before.Token); err != nil {
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		s.Log.Debug("no watcher reports changes: all files are looked at", "err", err)
		return nil
	}
	p.mapped = map[string]bool{}
	for _, rel := range s.query.Mapped {
		p.mapped[workspacePath(rel)] = true
	}
	if p.base == "" || s.query.All {
		s.Log.Debug("all files are looked at", "base", p.base, "reason", s.query.Reason)
		return nil
	}
	p.usable = true
	age := time.Since(s.before.FullAt)
	p.full = hello.Full || s.before.Since >= fullWalkEvery || age > fullWalkAfter || age < 0
	p.folders = map[string]bool{}
	for _, f := range s.query.Folders {
		p.folders[workspacePath(f.Path)] = f.Deep
	}
	for path := range p.mapped {
		folder, _ := wire.SplitPath(path)
		p.addFolder(folder)
	}
	for path, sec := range s.before.folders {
		if sec.always && wire.IsBelow(path, wire.TreeWorkspace) {
			p.addFolder(path)
		}
	}
	return nil
}

// workspacePath converts rel, a path relative to the workspace, to a path in a snapshot.
func workspacePath(rel string) string {
	if rel == "" {
		return wire.TreeWorkspace
	}
	return wire.TreeWorkspace + "/" + rel
}

// plannedFolders returns the folders of the plan, sorted. In place of a folder that the index does not have, it returns
// the nearest parent that the index has: a walk of that parent finds the new folder.
func (s *runningSnapshot) plannedFolders() []string {
	out := map[string]bool{}
	for path := range s.plan.folders {
		for path != wire.TreeWorkspace {
			if k, ok := s.before.entryAt(path); ok && k.kind == wire.KindDir {
				break
			}
			path, _ = wire.SplitPath(path)
		}
		out[path] = true
	}
	return slices.SortedFunc(maps.Keys(out), wire.ComparePaths)
}
