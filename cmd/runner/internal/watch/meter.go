package watch

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
)

// inodeID identifies a file by its device and inode number, which all names (hard links) of the file share.
type inodeID struct{ device, number uint64 }

// fileStat is the metadata of a file from which the disk usage is computed.
type fileStat struct {
	inodeID
	bytes   int64 // on disk
	links   uint64
	folder  bool
	regular bool
}

// usageMeter adds up the disk usage of files. A file with several names counts once.
type usageMeter struct {
	log   *slog.Logger
	seen  map[inodeID]bool // files with several names that were counted
	named map[string]int64 // paths of files whose sizes go into found
	found map[string]int64 // size on disk in bytes of the files of named that exist
	bytes int64            // sum of the sizes on disk
}

// addTree adds the file path, or the folder path with everything below it. It logs folders that it cannot read, and
// leaves them out.
func (m *usageMeter) addTree(path string) {
	st, ok := statFile(path)
	if !ok {
		return // gone meanwhile
	}
	m.addFile(path, st)
	if !st.folder {
		return
	}
	dir, err := os.Open(path)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			m.log.Warn("a folder cannot be measured", "folder", path, "err", err)
		}
		return
	}
	names, err := dir.Readdirnames(-1)
	if err = errors.Join(err, dir.Close()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.log.Warn("a folder cannot be measured", "folder", path, "err", err)
	}
	for _, name := range names {
		m.addTree(filepath.Join(path, name))
	}
}

// addFile adds a file or folder to the disk usage. A file with several names is added once.
func (m *usageMeter) addFile(path string, st fileStat) {
	if st.links > 1 && !st.folder {
		if m.seen[st.inodeID] {
			return
		}
		m.seen[st.inodeID] = true
	}
	m.bytes += st.bytes
	if _, asked := m.named[path]; asked {
		if m.found == nil {
			m.found = map[string]int64{}
		}
		m.found[path] = st.bytes
	}
}
