//go:build !linux

package watch

import (
	"io/fs"
	"os"
)

// statFile returns the metadata of a file without following symbolic links, and false if there is no such file.
func statFile(path string) (fileStat, bool) {
	info, err := os.Lstat(path)
	if err != nil {
		return fileStat{}, false
	}
	number, bytes := inodeAndBlocks(info)
	return fileStat{inodeID: inodeID{number: number}, bytes: bytes, links: 2, folder: info.IsDir(), regular: info.Mode()&fs.ModeType == 0}, true
}

// freeSpace returns nil on this system: only reports of the watcher and the time cause a measurement.
func freeSpace([]string) map[uint64]int64 { return nil }

// addUnnamed does nothing: unnamed files are not found on this system.
func (*usageMeter) addUnnamed([]string, []int) {}
