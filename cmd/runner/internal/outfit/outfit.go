// Package outfit lays down the files that an agent's process finds when it
// starts, and takes away those of the process before it.
package outfit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// list names the file in the state folder that says what was laid down: it
// outlives the runner, as the files do.
const list = "outfit.json"

// Lay makes these files in the state folder, readable by the agent's user alone,
// and removes what an earlier call made and this one does not want.
func Lay(state string, files []agent.File) error {
	if err := os.MkdirAll(state, 0o700); err != nil {
		return fmt.Errorf("make state folder: %w", err)
	}
	root, err := os.OpenRoot(state)
	if err != nil {
		return fmt.Errorf("open state folder: %w", err)
	}
	defer root.Close() //nolint:errcheck // every write was checked
	before, err := read(root)
	if err != nil {
		return err
	}
	wanted := []string{}
	for _, f := range files {
		wanted = append(wanted, f.Path)
	}
	if len(before)+len(wanted) == 0 {
		return nil
	}
	// Whatever happens on the way, what lies there is on the list.
	if err := write(root, union(before, wanted)); err != nil {
		return err
	}
	for _, p := range before {
		if !slices.Contains(wanted, p) {
			if err := root.RemoveAll(p); err != nil {
				return fmt.Errorf("remove the file %s of an earlier agent: %w", p, err)
			}
		}
	}
	for _, f := range files {
		if err := lay(root, f); err != nil {
			return fmt.Errorf("lay down %s for the agent: %w", f.Path, err)
		}
	}
	return write(root, wanted)
}

// lay makes one file in one step; what is there already stays.
func lay(root *os.Root, f agent.File) error {
	if there(root, f) {
		return nil
	}
	if err := root.MkdirAll(path.Dir(f.Path), 0o700); err != nil {
		return err
	}
	tmp := f.Path + ".new"
	if err := root.RemoveAll(tmp); err != nil {
		return err
	}
	var err error
	if f.Link != "" {
		err = root.Symlink(f.Link, tmp)
	} else {
		err = root.WriteFile(tmp, []byte(f.Content), 0o600)
	}
	if err != nil {
		return err
	}
	if info, err := root.Lstat(f.Path); err == nil && info.IsDir() { // the agent's own, under a name that is ours
		if err := root.RemoveAll(f.Path); err != nil {
			return err
		}
	}
	return root.Rename(tmp, f.Path)
}

func there(root *os.Root, f agent.File) bool {
	info, err := root.Lstat(f.Path)
	switch {
	case err != nil:
		return false
	case f.Link != "":
		target, err := root.Readlink(f.Path)
		return err == nil && target == f.Link
	case !info.Mode().IsRegular() || info.Size() != int64(len(f.Content)) || info.Mode().Perm() != 0o600:
		return false
	}
	raw, err := root.ReadFile(f.Path)
	return err == nil && string(raw) == f.Content
}

func read(root *os.Root) ([]string, error) {
	raw, err := root.ReadFile(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var paths []string
	if err == nil {
		err = json.Unmarshal(raw, &paths)
	}
	if err != nil {
		return nil, fmt.Errorf("read what lies in the state folder: %w", err)
	}
	return slices.DeleteFunc(paths, func(p string) bool { return p == "" || p == "." || path.Clean(p) != p }), nil
}

func write(root *os.Root, paths []string) error {
	raw, err := json.Marshal(paths)
	if err == nil {
		if err = root.WriteFile(list+".new", raw, 0o600); err == nil {
			err = root.Rename(list+".new", list)
		}
	}
	if err != nil {
		return fmt.Errorf("remember what lies in the state folder: %w", err)
	}
	return nil
}

func union(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}
