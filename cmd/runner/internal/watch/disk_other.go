//go:build !linux

package watch

import (
	"io/fs"
	"os"
)

// look returns the metadata of a file without following symbolic links, and false if there is none.
func look(path string) (stat, bool) {
	info, err := os.Lstat(path)
	if err != nil {
		return stat{}, false
	}
	number, bytes := inodeAndBlocks(info)
	return stat{inode: inode{number: number}, bytes: bytes, links: 2, folder: info.IsDir(), regular: info.Mode()&fs.ModeType == 0}, true
}

// freeSpace returns nil: only reports of the watcher and the time cause a measurement.
func freeSpace([]string) map[uint64]int64 { return nil }

// addUnnamed does nothing: unnamed files are not found on this system.
func (*meter) addUnnamed([]string, []int) {}
