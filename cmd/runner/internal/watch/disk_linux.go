package watch

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// statFile returns the metadata of a file without following symbolic links, and false if there is no such file.
func statFile(path string) (fileStat, bool) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fileStat{}, false
	}
	return newFileStat(st), true
}

// newFileStat converts the result of the system call stat to a fileStat.
func newFileStat(st unix.Stat_t) fileStat {
	kind := st.Mode & unix.S_IFMT
	return fileStat{
		inodeID: inodeID{st.Dev, st.Ino}, bytes: st.Blocks * blockSize, links: uint64(st.Nlink), //nolint:unconvert // 32 bits elsewhere
		folder: kind == unix.S_IFDIR, regular: kind == unix.S_IFREG,
	}
}

// freeSpace returns the number of free bytes in the file systems of the folders dirs, by device number.
func freeSpace(dirs []string) map[uint64]int64 {
	out := map[uint64]int64{}
	for _, dir := range dirs {
		st, ok := statFile(dir)
		if _, known := out[st.device]; !ok || known {
			continue
		}
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err == nil {
			out[st.device] = int64(fs.Bfree) * fs.Bsize //nolint:gosec // what a disk has
		}
	}
	return out
}

// addUnnamed adds the files below the folders dirs that the processes pids have open and that have no name any more:
// they still take space.
func (m *usageMeter) addUnnamed(dirs []string, pids []int) {
	for _, pid := range pids {
		fds, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/fd/*")
		if err != nil {
			continue
		}
		for _, fd := range fds {
			target, err := os.Readlink(fd)
			if err != nil || !strings.HasSuffix(target, " (deleted)") || !isBelowAny(dirs, target) {
				continue
			}
			var st unix.Stat_t
			if err := unix.Stat(fd, &st); err != nil || st.Nlink != 0 {
				continue
			}
			if s := newFileStat(st); s.regular && !m.seen[s.inodeID] {
				m.seen[s.inodeID] = true
				m.bytes += s.bytes
			}
		}
	}
}
