package snapshot

import (
	"io/fs"
	"syscall"
)

// fileIdentity returns the change time and the inode of a file, one of which changes when the content or the path does,
// and the number of names of the file.
func fileIdentity(info fs.FileInfo) (ctime int64, inode, links uint64) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, 1
	}
	return st.Ctim.Nano(), st.Ino, uint64(st.Nlink) //nolint:unconvert // 32 bits elsewhere
}
