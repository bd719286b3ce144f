package ignore

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
)

// Names of the files that contain rules.
const (
	// SpoolIgnoreFile is the name of the ignore file in the root of a workspace. Its rules override all others.
	SpoolIgnoreFile = ".spoolignore"
	// GitIgnoreFile is the name of the ignore file in any folder. Its rules apply to that folder and below, and override
	// those of the folders above.
	GitIgnoreFile = ".gitignore"
)

// DefaultRules are the ignore rules that apply unless a file overrides them.
const DefaultRules = ".git\nnode_modules\n__pycache__\n.venv\n*.swp\n.spool-put-*\n"

// MaxRulesFileSize is the largest size of an ignore file, in bytes.
const MaxRulesFileSize = 64 << 10

// Tree holds the ignore rules of a folder and of its parents up to the root. It is immutable; the zero value ignores
// nothing.
type Tree struct {
	first  Rules // rules of SpoolIgnoreFile
	levels []folderRules
}

// folderRules holds the ignore rules of one folder of a Tree.
type folderRules struct {
	dir   string // relative to the root; "" is the root
	rules Rules
}

// ReadTree reads the ignore rules of a root folder: DefaultRules, GitIgnoreFile and SpoolIgnoreFile.
func ReadTree(root fs.FS) (Tree, error) {
	own, err := readRules(root, SpoolIgnoreFile, SpoolIgnoreFile)
	if err != nil {
		return Tree{}, err
	}
	base, err := Parse([]byte(DefaultRules))
	if err != nil {
		return Tree{}, fmt.Errorf("the default rules: %w", err)
	}
	return Tree{first: own, levels: []folderRules{{rules: base}}}.EnterFolder(root, "")
}

// EnterFolder returns a Tree that also has the rules of the ignore file in a subfolder. fsys is the subfolder, dir its
// path relative to the root ("" for the root).
func (t Tree) EnterFolder(fsys fs.FS, dir string) (Tree, error) {
	rules, err := readRules(fsys, GitIgnoreFile, path.Join(dir, GitIgnoreFile))
	if err != nil || len(rules) == 0 {
		return t, err
	}
	t.levels = append(t.levels[:len(t.levels):len(t.levels)], folderRules{dir, rules})
	return t, nil
}

// Ignores reports whether the rules ignore a path, which is relative to the root. The path must lie in the folder that
// was entered last.
func (t Tree) Ignores(rel string, folder bool) bool {
	if ignored, decided := t.first.matchLast(rel, folder); decided {
		return ignored
	}
	for i := len(t.levels) - 1; i >= 0; i-- {
		l := t.levels[i]
		if ignored, decided := l.rules.matchLast(strings.TrimPrefix(strings.TrimPrefix(rel, l.dir), "/"), folder); decided {
			return ignored
		}
	}
	return false
}

// readRules reads an ignore file. It returns no rules if the file does not exist. shown is the file's path in errors.
func readRules(fsys fs.FS, name, shown string) (Rules, error) {
	info, err := fs.Stat(fsys, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", shown, err)
	}
	switch {
	case info.IsDir():
		return nil, nil
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file", shown)
	}
	f, err := fsys.Open(name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", shown, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, MaxRulesFileSize+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("%s: %w", shown, err)
	}
	if len(text) > MaxRulesFileSize {
		return nil, fmt.Errorf("%s has more than %d bytes", shown, MaxRulesFileSize)
	}
	// Like git, skip lines that are invalid.
	rules, _ := Parse(text)
	return rules, nil
}
