package snapshot

import (
	"io/fs"
	"os"
	"strings"

	"github.com/spoolhq/spool/pkg/ignore"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// sharedLimits limits the size of a snapshot of a workspace that is a folder of the host. Files that exceed the limits
// are left out; they are still in the folder.
var sharedLimits = struct {
	files       int
	bytes, file int64
}{files: 20_000, bytes: 1 << 30, file: 64 << 20}

// sharing applies ignore rules and sharedLimits to the walk of a workspace that is a folder of the host. A nil sharing
// includes everything.
type sharing struct {
	rules ignore.Tree
	files int
	bytes int64
	over  bool // a limit was reached and reported
}

// enter adds the ignore rules of a folder until leave is called.
func (s *sharing) enter(dir *os.Root, path string) (leave func(), err error) {
	if s == nil {
		return func() {}, nil
	}
	before := s.rules
	if path == wire.TreeWorkspace {
		s.rules, err = ignore.ReadTree(dir.FS())
	} else {
		s.rules, err = s.rules.EnterFolder(dir.FS(), strings.TrimPrefix(path, wire.TreeWorkspace+"/"))
	}
	return func() { s.rules = before }, err
}

// ignores reports whether an ignore rule excludes a file or folder.
func (s *sharing) ignores(path string, info fs.FileInfo) bool {
	return s != nil && s.rules.Ignores(strings.TrimPrefix(path, wire.TreeWorkspace+"/"), info.IsDir())
}

// admit counts a file, and reports whether it is within sharedLimits together with all files that were admitted before.
func (s *sharing) admit(info fs.FileInfo) bool {
	if s == nil {
		return true
	}
	if info.Size() > sharedLimits.file {
		return false
	}
	if s.files++; s.files > sharedLimits.files || s.bytes+info.Size() > sharedLimits.bytes {
		s.over = true
		return false
	}
	s.bytes += info.Size()
	return true
}

// full reports whether admit has refused a file because of the limits of all files together.
func (s *sharing) full() bool { return s != nil && s.over }
