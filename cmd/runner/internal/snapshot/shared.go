package snapshot

import (
	"io/fs"
	"os"
	"strings"

	"github.com/spoolhq/spool/pkg/ignore"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// sharedFolderLimits limits the size of a snapshot of a workspace that is a folder of a person. Files beyond the limits are not in the snapshot;
// they are still in the folder.
var sharedFolderLimits = struct {
	files       int
	bytes, file int64
}{files: 20_000, bytes: 1 << 30, file: 64 << 20}

// sharedFolderFilter applies ignore rules and sharedFolderLimits to the walk of a workspace that is a folder of a person. A nil filter includes
// everything.
type sharedFolderFilter struct {
	rules ignore.Tree
	files int
	bytes int64
	over  bool // a limit was reached and reported
}

// enterFolder adds the ignore rules of a folder until leave is called.
func (s *sharedFolderFilter) enterFolder(dir *os.Root, path string) (leave func(), err error) {
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

// isIgnored reports whether an ignore rule excludes a file or folder.
func (s *sharedFolderFilter) isIgnored(path string, info fs.FileInfo) bool {
	return s != nil && s.rules.Ignores(strings.TrimPrefix(path, wire.TreeWorkspace+"/"), info.IsDir())
}

// admitFile counts a file, and reports whether the file is within sharedFolderLimits together with all files that were admitted before.
func (s *sharedFolderFilter) admitFile(info fs.FileInfo) bool {
	if s == nil {
		return true
	}
	if info.Size() > sharedFolderLimits.file {
		return false
	}
	if s.files++; s.files > sharedFolderLimits.files || s.bytes+info.Size() > sharedFolderLimits.bytes {
		s.over = true
		return false
	}
	s.bytes += info.Size()
	return true
}

// isFull reports whether admitFile has refused a file because of the limits of all files together.
func (s *sharedFolderFilter) isFull() bool { return s != nil && s.over }
