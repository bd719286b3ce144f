//go:build unix

package hostpath

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// fileID returns a text with the device and inode of a file.
func fileID(info fs.FileInfo) (string, error) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", fmt.Errorf("file has no inode: %w", fs.ErrInvalid)
	}
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), nil
}

// readWriteSearch is the mode of access(2) that requests read, write and search permission: R_OK, W_OK and X_OK.
const readWriteSearch = 4 | 2 | 1

// checkAccess returns an error unless this process may read, write and enter the folder.
func checkAccess(dir string) error {
	if err := syscall.Access(dir, readWriteSearch); err != nil {
		return &os.PathError{Op: "access", Path: dir, Err: err}
	}
	return nil
}
