package snapshot

import (
	"io/fs"
	"syscall"
)

// fileIdentity returns the change time and inode of a file, one of which changes when its content or its path does, and the
// number of its names.
func fileIdentity(info fs.FileInfo) (ctime int64, inode, links uint64) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, 1
	}
	return st.Ctim.Nano(), st.Ino, uint64(st.Nlink) //nolint:unconvert // 32 bits elsewhere
}
