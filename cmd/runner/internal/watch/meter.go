package watch

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
)

// inode names a file whatever it is called.
type inode struct{ device, number uint64 }

// stat is what counts of a file.
type stat struct {
	inode
	bytes   int64 // on disk
	links   uint64
	folder  bool
	regular bool
}

// meter adds up what files take on disk, those with several names once.
type meter struct {
	log   *slog.Logger
	seen  map[inode]bool   // files with several names
	named map[string]int64 // of which it is to be told what they have
	found map[string]int64
	bytes int64
}

func (m *meter) walk(path string) {
	st, ok := look(path)
	if !ok {
		return // gone meanwhile
	}
	m.add(path, st)
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
		m.walk(filepath.Join(path, name))
	}
}

func (m *meter) add(path string, st stat) {
	if st.links > 1 && !st.folder {
		if m.seen[st.inode] {
			return
		}
		m.seen[st.inode] = true
	}
	m.bytes += st.bytes
	if _, asked := m.named[path]; asked {
		if m.found == nil {
			m.found = map[string]int64{}
		}
		m.found[path] = st.bytes
	}
}
