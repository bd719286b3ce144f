package snapshot

import (
	"io/fs"
	"syscall"
)

// identity is what of a file changes when its content or its place does, beside size and time.
func identity(info fs.FileInfo) (ctime int64, inode uint64) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0
	}
	return st.Ctim.Nano(), st.Ino
}
