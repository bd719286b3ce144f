// Package launchfiles writes the files that an agent's process needs when it starts, and removes those of the process
// before it.
package launchfiles

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

// listFileName is the name of the file in the state folder that lists the files that Write has written. Like these
// files, it outlives the runner.
const listFileName = "outfit.json"

// Write creates the files in the state folder, readable by the agent's user alone, and removes files that an earlier call
// created and that are not in files.
func Write(state string, files []agent.LaunchFile) error {
	if err := os.MkdirAll(state, 0o700); err != nil {
		return fmt.Errorf("make state folder: %w", err)
	}
	root, err := os.OpenRoot(state)
	if err != nil {
		return fmt.Errorf("open state folder: %w", err)
	}
	defer root.Close() //nolint:errcheck // every write was checked
	before, err := readFileList(root)
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
	// The list has every file that exists, also if a later step fails.
	if err := writeFileList(root, sortedUnion(before, wanted)); err != nil {
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
		if err := writeFile(root, f); err != nil {
			return fmt.Errorf("write %s for the agent: %w", f.Path, err)
		}
	}
	return writeFileList(root, wanted)
}

// writeFile creates one file or symbolic link atomically. It does nothing if the file exists with the wanted content.
func writeFile(root *os.Root, f agent.LaunchFile) error {
	if hasLaunchFile(root, f) {
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
	if info, err := root.Lstat(f.Path); err == nil && info.IsDir() { // a folder of the agent under the file's name
		if err := root.RemoveAll(f.Path); err != nil {
			return err
		}
	}
	return root.Rename(tmp, f.Path)
}

// hasLaunchFile reports whether the file f exists with the content or link of f.
func hasLaunchFile(root *os.Root, f agent.LaunchFile) bool {
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

// readFileList returns the paths of the files that an earlier call of Write has written.
func readFileList(root *os.Root) ([]string, error) {
	raw, err := root.ReadFile(listFileName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var paths []string
	if err == nil {
		err = json.Unmarshal(raw, &paths)
	}
	if err != nil {
		return nil, fmt.Errorf("read the list of launch files: %w", err)
	}
	return slices.DeleteFunc(paths, func(p string) bool { return p == "" || p == "." || path.Clean(p) != p }), nil
}

// writeFileList replaces the list of the files that Write has written.
func writeFileList(root *os.Root, paths []string) error {
	raw, err := json.Marshal(paths)
	if err == nil {
		if err = root.WriteFile(listFileName+".new", raw, 0o600); err == nil {
			err = root.Rename(listFileName+".new", listFileName)
		}
	}
	if err != nil {
		return fmt.Errorf("write the list of launch files: %w", err)
	}
	return nil
}

// sortedUnion returns the elements of both lists, sorted and without duplicates.
func sortedUnion(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}
