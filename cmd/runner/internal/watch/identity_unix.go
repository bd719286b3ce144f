//go:build unix

package watch

import (
	"io/fs"
	"syscall"
)

// blockSize is the number of bytes in a block of stat's block count, for every file system.
const blockSize = 512

// inodeAndBlocks returns the inode number of a file and the number of bytes that the file takes on disk.
func inodeAndBlocks(info fs.FileInfo) (inode uint64, blocks int64) {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino, st.Blocks * blockSize
	}
	return 0, info.Size()
}
