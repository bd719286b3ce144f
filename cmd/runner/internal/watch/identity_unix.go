//go:build unix

package watch

import (
	"io/fs"
	"syscall"
)

// blockSize is what stat counts in, whatever the file system has.
const blockSize = 512

// identity is a file's number and the bytes that it has on disk.
func identity(info fs.FileInfo) (inode uint64, blocks int64) {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino, st.Blocks * blockSize
	}
	return 0, info.Size()
}
