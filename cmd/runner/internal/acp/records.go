package acp

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
)

// maxHomeEntries is the maximum number of files and folders of the agent's home in which relocateRecords looks for records.
const maxHomeEntries = 100_000

// relocateRecords moves the files of the session to resume into the folder for the launch's workspace. Claude Code, Qwen Code and others keep them
// in a folder that is named after the workspace, and a fork in a local sandbox has its workspace elsewhere. Qwen Code also compares the field cwd of
// the lines with the workspace, so relocateRecords changes it. Files that the folder already has stay.
func relocateRecords(l agent.Launch) error {
	workspace, err := filepath.EvalSymlinks(l.Workspace)
	if err != nil {
		return fmt.Errorf("workspace: %w", err)
	}
	home, err := os.OpenRoot(homeDir(l))
	if err != nil {
		return fmt.Errorf("open the agent's home: %w", err)
	}
	defer home.Close() //nolint:errcheck // nothing is buffered
	moves, err := findRecords(home.FS(), l.Resume, transcript.FolderName(workspace))
	if err != nil {
		return fmt.Errorf("find the records of session %.100s: %w", l.Resume, err)
	}
	for from, to := range moves {
		if _, err := home.Lstat(to); err == nil {
			continue
		}
		err := home.MkdirAll(path.Dir(to), 0o700)
		switch {
		case err != nil:
		case path.Ext(from) == ".jsonl":
			err = transcript.Copy(filepath.Join(home.Name(), from), filepath.Join(home.Name(), to), "", func(line transcript.Line) (transcript.Line, transcript.LineAction) {
				return withWorkspace(line, workspace), transcript.KeepLine
			})
			if err == nil {
				err = home.Remove(from)
			}
		default:
			err = home.Rename(from, to)
		}
		if err != nil {
			return fmt.Errorf("move the record %s: %w", from, err)
		}
	}
	return nil
}

// withWorkspace returns a line of a record with another workspace in the field cwd, if it has that field.
func withWorkspace(line transcript.Line, workspace string) transcript.Line {
	var fields map[string]json.RawMessage
	if json.Unmarshal(line, &fields) != nil || fields["cwd"] == nil {
		return line
	}
	raw, err := json.Marshal(workspace)
	if err != nil {
		return line // strings always marshal
	}
	fields["cwd"] = raw
	if raw, err = json.Marshal(fields); err != nil {
		return line // parsed JSON always marshals
	}
	return raw
}

// findRecords returns the files and folders of a session that are in a folder for another workspace, and the paths in the folder own, which they
// should have. The name of a record begins with the session's id, and the name of a folder for a workspace with "-", for the root folder.
func findRecords(home fs.FS, session, own string) (map[string]string, error) {
	moves, seen := map[string]string{}, 0
	err := fs.WalkDir(home, ".", func(name string, e fs.DirEntry, err error) error {
		if seen++; err != nil || seen > maxHomeEntries {
			return fs.SkipDir // of what cannot be read, the agent finds no records either
		}
		if !strings.HasPrefix(e.Name(), session) {
			return nil
		}
		parts := strings.Split(name, "/")
		i := slices.IndexFunc(parts[:len(parts)-1], func(part string) bool { return strings.HasPrefix(part, "-") })
		if i >= 0 && parts[i] != own {
			parts[i] = own
			moves[name] = strings.Join(parts, "/")
		}
		if e.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
	return moves, err
}
